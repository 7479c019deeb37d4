"""What an operation or a read needs from disk before it can go on."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from upr_protocol.chunk import Mutation

Found = Mapping[bytes, Mutation | None]
"""What was read from disk, by key: the newest mutation, or None for a key that is missing. Where
only existence was asked for, the mutation has its number and expiry time and no CAS."""


class Want(msgspec.Struct, frozen=True):
    """A key whose item is to be read from disk.

    Attributes:
        key: The key.
        number: The number of its newest mutation, where that is known; else 0.
        value: Whether more is needed than that it exists and when it expires.
    """

    key: bytes
    number: int
    value: bool


class FetchNeeded(LookupError):  # noqa: N818  # it is an answer, not a fault
    """Nothing was done: these items are on disk. Ask again with them.

    Between asking the disk and asking again, the partition must be pinned: see `Partition.pin`.

    Attributes:
        wants: What to read.
    """

    def __init__(self, wants: list[Want]) -> None:
        super().__init__(f"{len(wants)} items are on disk")
        self.wants = wants
