"""How a scan was carried out, as its answer says it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
import trio

from upr_server.indexer.index_file import EndedBy

Freshness = Literal["as_it_was", "had_written", "waited_for_written", "barrier", "moment"]
"""How a scan was as fresh as asked: the index was taken as it was, had the changes already, or had
them after a wait; a barrier came back; or the scan is of a moment that an earlier one took."""

WaitedFor = Literal["barrier", "queued_changes", "written", "whole_snapshots"]
"""What a scan may wait for: its barrier, what was received before that and is not applied yet, the
changes in `written`, or the rest of snapshots that were half applied."""


class RangeEnd(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a range begins or ends.

    Attributes:
        key: The first parts of a key, or all of them.
        inclusive: Whether keys that begin so are in the range.
        id: The document's key, where a page begins behind an entry.
        id_encoding: `base64` if the document's key is not UTF-8; otherwise empty.
    """

    key: list[Any]
    inclusive: bool
    id: str = ""
    id_encoding: str = ""


class ReadRange(msgspec.Struct, frozen=True):
    """A range that a scan reads.

    Attributes:
        low: Where it begins; null for the index's beginning.
        high: Where it ends; null for the index's end.
    """

    low: RangeEnd | None
    high: RangeEnd | None


class Wait(msgspec.Struct, frozen=True):
    """A wait of a scan.

    Attributes:
        reason: What it waited for.
        seconds: How long.
    """

    reason: WaitedFor
    seconds: float


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """How a scan was carried out.

    Attributes:
        index: `DESIGN/INDEX`.
        expressions: The expressions of its key.
        slices: How many slices of the index were read. The counts are sums over them.
        index_entries: How many entries the whole index had.
        ranges: The ranges that were read, the lowest first: those of the query, without what came
            before its continuation, and joined where they overlap.
        descending: Whether they were read from the highest entry down.
        searches: How often the index was searched for a place. A search takes O(log entries).
        entries_read: How many entries were looked at. A range costs one more than it has if there
            is an entry behind it, which says that it has ended; a page that is not the last one
            too.
        included_read: For how many entries the included values were read.
        entries_given: How many entries, or distinct beginnings of keys, the answer has.
        ended_by: Why it has no more: the `ranges` have ended, the `limit` was reached, or the
            answer was full (`bytes`). Summaries read to the end of their ranges.
        freshness: How the index was as fresh as asked.
        waits: What the scan waited for, in order. Slices wait at the same time: the longest wait of
            each kind.
        read_seconds: How long the index was read; by the slice that took longest.
    """

    index: str
    expressions: tuple[str, ...]
    slices: int
    index_entries: int
    ranges: tuple[ReadRange, ...]
    descending: bool
    searches: int
    entries_read: int
    included_read: int
    entries_given: int
    ended_by: EndedBy
    freshness: Freshness
    waits: tuple[Wait, ...]
    read_seconds: float


class FreshnessLog:
    """Records how one scan came to be as fresh as asked.

    Attributes:
        freshness: How.
        waits: What it has waited for.
    """

    def __init__(self) -> None:
        self.freshness: Freshness = "as_it_was"
        self.waits: list[Wait] = []

    @contextmanager
    def recorded_wait(self, reason: WaitedFor) -> Iterator[None]:
        """Records a wait, which is the context."""
        began = trio.current_time()
        yield
        self.waits.append(Wait(reason, trio.current_time() - began))
