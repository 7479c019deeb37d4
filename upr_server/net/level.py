"""How durable a change is to be before it is answered for."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from upr_protocol.ids import Durability, SeqNo
from upr_server.engine import Partition

MAX_WAIT_S: Final = 1e9
"""Longer than anybody waits."""


class Level(msgspec.Struct, frozen=True):
    """A durability level.

    Attributes:
        durability: The level.
        copies: How many replicas beside the active, for the replicated levels; else 0.
        deadline: When replicas are waited for no more.
    """

    durability: Durability
    copies: int = 0
    deadline: float = math.inf

    @property
    def persists(self) -> bool:
        """Whether it is about the disk."""
        return self.durability in (Durability.PERSISTED, Durability.REPLICATED_AND_PERSISTED)

    def reached(self, partition: Partition) -> SeqNo:
        """The number up to which a partition has reached this level."""
        found = partition.manager.persistence.committed if self.persists else partition.high_seq
        if self.copies:
            found = min(found, partition.replicas.reached(self.copies, persisted=self.persists))
        return found
