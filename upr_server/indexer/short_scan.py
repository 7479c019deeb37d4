"""Which scans read so little that they are read in the event loop, and not in a thread.

To go through a thread and back takes longer than to read a hundred entries, and far longer where
another thread writes: the loop then waits for the interpreter twice.
"""

from __future__ import annotations

from typing import Final

from upr_server.indexer.query import LIMIT_DEFAULT
from upr_server.indexer.slices import SliceScan

ENTRIES_MAX: Final = 500
"""The longest such scan: some 1 ms of the loop."""

RANGES_MAX: Final = 16
"""The most ranges of such a scan: each is a search."""

INCLUDED_MAX: Final = 50
"""The longest such scan if entries include values: each may have a page of its own."""


def reads_little(scan: SliceScan) -> bool:
    """Whether a scan reads few entries, by its limit. O(1)."""
    query = scan.query
    entries_max = INCLUDED_MAX if scan.definition.include else ENTRIES_MAX
    return (
        not (query.is_summary or query.distinct)
        and (query.limit or LIMIT_DEFAULT) <= entries_max
        and len(query.ranges or ()) <= RANGES_MAX
    )


def is_short(scan: SliceScan) -> bool:
    """Whether a scan reads little, waits for nothing, and holds nothing. O(1)."""
    query = scan.query
    waits = query.consistency != "any" or query.written
    return reads_little(scan) and not (waits or query.moment or query.hold_s)
