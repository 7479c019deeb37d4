"""A full disk that takes small commits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from upr_server.storage.errors import DiskFullError
from upr_server.storage.simulated_disk import SimulatedDisk


class FullDisk(SimulatedDisk):
    """A disk with room for small commits only. In a copy-on-write tree each change needs free
    pages, also a deletion; the pages that it frees can only be used by later commits.

    Attributes:
        changes_max: How many records a commit may change.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changes_max = 1 << 62

    @contextmanager
    def write(self, *, reserve_bytes: int = 0) -> Iterator[Any]:
        with super().write(reserve_bytes=reserve_bytes) as transaction:
            yield transaction
            if len(transaction._values_before) > self.changes_max:
                raise DiskFullError("no room for the pages of this commit")
