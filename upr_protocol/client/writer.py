"""Tokens: what makes a batch that is sent twice have one effect."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Final

from upr_protocol.ids import PartitionId

WRITER_BYTES: Final = 16
"""So many random bytes that no two publishers ever have the same."""


class Writer:
    """A publisher's identity towards the server, and its count of batches in each partition.

    The server remembers the answers to the last batches of a writer in a partition; the same
    counter again is the same batch again.

    Args:
        random_bytes: Gives so many random bytes.
    """

    __slots__ = ("_counters", "id")

    def __init__(self, random_bytes: Callable[[int], bytes] = os.urandom) -> None:
        self.id: Final = random_bytes(WRITER_BYTES)
        self._counters: Counter[PartitionId] = Counter()

    def next_counter(self, partition: PartitionId) -> int:
        """The number of the next batch to `partition`, from 1."""
        self._counters[partition] += 1
        return self._counters[partition]
