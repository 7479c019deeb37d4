"""Merging what the slices of an index answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Final, get_args

import msgspec

from upr_protocol.ids import HistoryId, PartitionId, SeqNo
from upr_server.indexer.answer import ScanAnswer, continuation_after
from upr_server.indexer.explanation import Explanation, Freshness, Wait
from upr_server.indexer.index_file import EndedBy, EntrySummary, ReadCounts, ScanResult
from upr_server.indexer.pure.definition import IndexDefinition, IndexName
from upr_server.indexer.query import LIMIT_DEFAULT, LIMIT_MAX, Query
from upr_server.indexer.slices import SliceAnswer

COUNT_HOLD_S: Final = 10.0
"""The longest time between two pages of beginnings that are counted."""

TOKEN_SEPARATOR: Final = "."

_FRESHNESS_ORDER = get_args(Freshness)


def merged_entries(
    answers: Sequence[SliceAnswer], limit: int, *, descending: bool, distinct: bool
) -> ScanResult:
    """The entries of all slices in order. O(n log slices).

    A slice that has more entries than it answered has them behind its last one. So the merged
    entries end there: what other slices have behind that may not be what comes next.

    Args:
        answers: The slices' answers.
        limit: How many entries at most.
        descending: Whether the highest entry comes first.
        distinct: Whether the entries are beginnings of keys, which several slices may have.
    """
    bound, ended_by = _first_end(answers, descending=descending)
    entries: list[bytes]
    payloads: list[bytes] = []
    if any(answer.payloads for answer in answers):
        pairs = sorted(
            chain.from_iterable(
                zip(answer.entries, answer.payloads, strict=True) for answer in answers
            ),
            reverse=descending,
        )
        entries = [entry for entry, _ in pairs]
        payloads = [payload for _, payload in pairs]
    else:
        # Each answer is in order, so that sorting is merging.
        all_entries = chain.from_iterable(answer.entries for answer in answers)
        entries = sorted(set(all_entries) if distinct else all_entries, reverse=descending)
    end = min(len(entries), limit)
    if bound is not None:
        # A binary search would need another one for the other direction.
        end = min(end, entries.index(bound) + 1)
        if end == limit:
            ended_by = "limit"
    elif end < len(entries):
        ended_by = "limit"
    return ScanResult(entries[:end], payloads[:end], ended_by, _total_read_counts(answers))


def _first_end(answers: Sequence[SliceAnswer], *, descending: bool) -> tuple[bytes | None, EndedBy]:
    """The last entry of the answer that ends first among those behind which a slice may have more,
    and why it ends there; None if every slice has answered all."""
    bound: bytes | None = None
    ended_by: EndedBy = "ranges"
    for answer in answers:
        if answer.ended_by == "ranges":
            continue
        last_entry = answer.entries[-1]
        if bound is None or (last_entry > bound if descending else last_entry < bound):
            bound, ended_by = last_entry, answer.ended_by
    return bound, ended_by


def merged_summary(answers: Sequence[SliceAnswer], *, counts: bool) -> EntrySummary:
    """The summary of all slices' entries. Beginnings of keys are not to be counted so: several
    slices may have the same."""
    return EntrySummary(
        sum(answer.count or 0 for answer in answers) if counts else None,
        min(_without_none(answer.lowest for answer in answers), default=None),
        max(_without_none(answer.highest for answer in answers), default=None),
        _total_read_counts(answers),
    )


def _without_none(entries: Iterable[bytes | None]) -> Iterable[bytes]:
    return (entry for entry in entries if entry is not None)


def _total_read_counts(answers: Iterable[SliceAnswer]) -> ReadCounts:
    return sum(
        (
            ReadCounts(answer.searches, answer.entries_read, answer.included_read)
            for answer in answers
        ),
        ReadCounts(),
    )


def merged_explanation(
    name: IndexName,
    definition: IndexDefinition,
    query: Query,
    answers: Sequence[SliceAnswer],
    result: ScanResult | EntrySummary,
    read_seconds: float,
) -> Explanation:
    """How a scan was carried out: sums over the slices, and what took longest of what they did at
    the same time. Of several pages, `answers` are those of the first, which chose the moment."""
    waits: dict[str, Wait] = {}
    for wait in chain.from_iterable(answer.waits for answer in answers):
        if wait.reason not in waits or waits[wait.reason].seconds < wait.seconds:
            waits[wait.reason] = wait
    return Explanation(
        index=str(name),
        expressions=definition.key,
        slices=len(answers),
        index_entries=sum(answer.index_entries for answer in answers),
        ranges=query.read_ranges(len(definition.key)),
        descending=query.descending,
        searches=result.reading.searches,
        entries_read=result.reading.entries_read,
        included_read=result.reading.included_read,
        entries_given=0 if isinstance(result, EntrySummary) else len(result.entries),
        ended_by="ranges" if isinstance(result, EntrySummary) else result.ended_by,
        freshness=max((answer.freshness for answer in answers), key=_FRESHNESS_ORDER.index),
        waits=tuple(waits.values()),
        read_seconds=read_seconds,
    )


def joined_moment(answers: Iterable[SliceAnswer]) -> str:
    """The name of the moment that all these answers are of."""
    return TOKEN_SEPARATOR.join(answer.moment for answer in answers)


class MergedScan:
    """A scan of all slices: what to ask them, and the answer that their answers make.

    Mostly they are asked once. Several slices may have the same beginnings of keys. So to count
    these, they are asked for them page by page, of one moment.

    Args:
        name: The index.
        definition: Its definition.
        query: The query.
        slice_count: How many slices there are.

    Attributes:
        query: What to ask every slice next, if `is_complete` is False.
        is_complete: Whether `answer` has all that it needs.
    """

    def __init__(
        self, name: IndexName, definition: IndexDefinition, query: Query, slice_count: int
    ) -> None:
        self._name = name
        self._definition = definition
        self._query = query
        self._counts_beginnings = bool(query.count and query.distinct) and slice_count > 1
        self._answers: Sequence[SliceAnswer] = ()
        self._first_answers: Sequence[SliceAnswer] = ()
        self._read_seconds = 0.0
        self._result: ScanResult | EntrySummary = EntrySummary(0, None, None, ReadCounts())
        self.is_complete = False
        self.query = query
        if self._counts_beginnings:
            self.query = msgspec.structs.replace(
                query,
                count=False,
                min=False,
                max=False,
                descending=False,
                limit=LIMIT_MAX,
                hold_s=max(query.hold_s, COUNT_HOLD_S),
            )

    def add(self, answers: Sequence[SliceAnswer]) -> None:
        """Takes what the slices have answered, by their numbers."""
        self._answers = answers
        self._first_answers = self._first_answers or answers
        self._read_seconds += max(answer.read_seconds for answer in answers)
        if self._counts_beginnings:
            self._add_page(_entries(answers, self.query))
            return
        self.is_complete = True
        if self._query.is_summary:
            self._result = merged_summary(answers, counts=self._query.count)
        else:
            self._result = _entries(answers, self._query)

    def _add_page(self, page: ScanResult) -> None:
        assert isinstance(self._result, EntrySummary)
        count, lowest, highest = self._result.count or 0, self._result.lowest, self._result.highest
        if page.entries:
            lowest = page.entries[0] if lowest is None else lowest
            highest = page.entries[-1]
        reading = self._result.reading + page.reading
        self._result = EntrySummary(count + len(page.entries), lowest, highest, reading)
        self.is_complete = not page.has_more
        # The next page is of this one's moment, however that was chosen.
        self.query = msgspec.structs.replace(
            self.query,
            consistency="any",
            written=(),
            moment=joined_moment(self._answers),
            continuation=continuation_after(page.entries[-1]) if page.has_more else "",
        )

    @property
    def view_token_to_release(self) -> str:
        """The token of the read view (`Moments`) that was held for this scan alone; empty if none
        was."""
        return self.query.moment if self._counts_beginnings and not self._query.hold_s else ""

    def answer(self) -> ScanAnswer:
        """The answer."""
        query, result = self._query, self._result
        if self._counts_beginnings and isinstance(result, EntrySummary):
            lowest = result.lowest if query.min else None
            highest = result.highest if query.max else None
            result = EntrySummary(result.count, lowest, highest, result.reading)
        return ScanAnswer(
            result,
            query.distinct or len(self._definition.key),
            {
                PartitionId(partition): (HistoryId(history_id), SeqNo(seq))
                for answer in self._answers
                for partition, (history_id, seq) in answer.timestamps.items()
            },
            self._explanation(result) if query.explain else None,
            joined_moment(self._answers) if query.hold_s else "",
        )

    def _explanation(self, result: ScanResult | EntrySummary) -> Explanation:
        return merged_explanation(
            self._name,
            self._definition,
            self._query,
            self._first_answers,
            result,
            self._read_seconds,
        )


def _entries(answers: Sequence[SliceAnswer], query: Query) -> ScanResult:
    return merged_entries(
        answers,
        query.limit or LIMIT_DEFAULT,
        descending=query.descending,
        distinct=bool(query.distinct),
    )
