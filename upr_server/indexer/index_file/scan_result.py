"""What reading an index gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import attrs

from upr_protocol.ids import HistoryId, PartitionId, SeqNo

ENTRY_OVERHEAD_BYTES: Final = 48
"""What an entry that was read takes in memory beside its own bytes."""

Timestamps = Mapping[PartitionId, tuple[HistoryId, SeqNo]]
"""By partition, the history and the highest sequence number that an index had."""

EndedBy = Literal["ranges", "limit", "bytes"]
"""Why a scan has ended: its ranges have, its limit was reached, or its answer was full."""


@attrs.frozen
class ReadCounts:
    """What it took to read.

    Attributes:
        searches: How often the tree of entries was searched for a place.
        entries_read: How many entries were looked at; among them the one behind the end of a range,
            which says that the range has ended.
        included_read: For how many of them the included values were read.
    """

    searches: int = 0
    entries_read: int = 0
    included_read: int = 0

    def __add__(self, other: ReadCounts) -> ReadCounts:
        return ReadCounts(
            self.searches + other.searches,
            self.entries_read + other.entries_read,
            self.included_read + other.included_read,
        )


@attrs.frozen
class ScanResult:
    """What a scan has read, all of one moment.

    Attributes:
        entries: The entries, or the distinct beginnings of their keys, in order.
        payloads: The entries' payloads; empty if not asked for.
        ended_by: Why there are no more of them here.
        reading: What it took.
    """

    entries: list[bytes]
    payloads: list[bytes]
    ended_by: EndedBy
    reading: ReadCounts

    @property
    def has_more(self) -> bool:
        """Whether there are more."""
        return self.ended_by != "ranges"


@attrs.frozen
class EntrySummary:
    """What a scan has found out about its entries, all of one moment.

    Attributes:
        count: How many there are; None if not asked for.
        lowest: The lowest one; None if not asked for, or if there are none.
        highest: The highest one, likewise.
        reading: What it took.
    """

    count: int | None
    lowest: bytes | None
    highest: bytes | None
    reading: ReadCounts


def entries_bytes(entries: Sequence[bytes]) -> int:
    """What entries take in memory. O(entries)."""
    return sum(map(len, entries)) + ENTRY_OVERHEAD_BYTES * len(entries)
