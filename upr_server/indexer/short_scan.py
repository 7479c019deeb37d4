"""What of a scan is so little that it is done in the event loop, and not in a thread.

To go through a thread and back takes longer than to read a hundred entries, and far longer where
another thread writes: the loop then waits for the interpreter twice.
"""

from __future__ import annotations

from typing import Final

import trio

from upr_server.indexer.entry_reader import EntrySelection
from upr_server.indexer.query import LIMIT_DEFAULT, Query
from upr_server.indexer.slices import SliceScan

ENTRIES_MAX: Final = 500
"""The longest such scan: some 1 ms of the loop."""

RANGES_MAX: Final = 16
"""The most ranges of such a scan: each is a search."""

VALUES_MAX: Final = 500
"""The most values in the bounds of such a scan: some 1 ms."""

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


def has_many_values(query: Query) -> bool:
    """Whether it takes long to turn the bounds of a query into bytes. So many ranges have as many
    values, mostly: to count those of a thousand ranges takes 2.5 ms."""
    return len(query.ranges or ()) > VALUES_MAX or query.has_more_values_than(VALUES_MAX)


async def check_query(query: Query) -> None:
    """Checks a query; in a thread if it has many values, as to count all of them takes up to 15 ms.
    Does not pass a checkpoint otherwise.

    Raises:
        QueryError: See `Query.check`.
    """
    if has_many_values(query):
        await trio.to_thread.run_sync(query.check)
    else:
        query.check()


def is_short(scan: SliceScan) -> bool:
    """Whether a scan reads little, waits for nothing, and holds nothing. O(1)."""
    query = scan.query
    waits = query.consistency != "any" or query.written
    return reads_little(scan) and not (
        waits or query.moment or query.hold_s or has_many_values(query)
    )


async def selection_of(query: Query, part_count: int) -> EntrySelection:
    """The entries that a query asks for. A thousand ranges take tens of milliseconds: that is done
    in a thread. Does not pass a checkpoint otherwise.

    Args:
        query: The query.
        part_count: How many parts the index's keys have.

    Raises:
        QueryError: See `Query.selection`.
    """
    if not has_many_values(query):
        return query.selection(part_count)
    return await trio.to_thread.run_sync(query.selection, part_count)
