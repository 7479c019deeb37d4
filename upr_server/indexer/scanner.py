"""Scans of indexes, and what can be told of an index."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Literal

import attrs
import trio

from upr_protocol.errors import UprError
from upr_protocol.ids import SeqNo
from upr_server.indexer.answer import ScanAnswer
from upr_server.indexer.definitions import Definitions, Index, NoIndexError
from upr_server.indexer.entry_reader import Selection
from upr_server.indexer.explanation import Explanation, FreshnessLog
from upr_server.indexer.freshness import (
    Barriers,
    RequiredWrites,
    WriteLostError,
    check_histories,
    has_writes,
    knows_histories,
)
from upr_server.indexer.index_file import NotSettledError, ScanResult, Summary, View
from upr_server.indexer.moments import Moment, Moments
from upr_server.indexer.pipeline import Pipeline
from upr_server.indexer.pool import ANSWER_BYTES_MAX, SCAN_OVERHEAD_BYTES, MemoryPool
from upr_server.indexer.pure.definition import IndexName
from upr_server.indexer.query import LIMIT_DEFAULT, Query
from upr_server.indexer.server_progress import ServerProgress
from upr_server.indexer.stream import IndexerStream


class BuildingError(UprError):
    """The index is being built: it would answer with a part of what there is.

    Attributes:
        retry_after_s: When to ask again.
    """

    def __init__(self, name: IndexName) -> None:
        self.retry_after_s = 1.0
        super().__init__(f"the index {name} is being built; its status tells how far it is")


class IndexFailedError(UprError):
    """The index was left out, as its expressions cost too much: documents are missing in it."""


class NotFreshError(UprError):
    """The index was not as fresh as the scan asked for within its timeout."""


@attrs.frozen
class IndexStatus:
    """What can be told of an index.

    Attributes:
        name: `DESIGN/INDEX`.
        state: `building`; `ready` when it can be scanned; `failed` when it was left out.
        key: Its key expressions.
        filter: Its filter; empty for none.
        each: The expression whose arrays make an entry for each element; empty for none.
        include: The expressions of its included values.
        entries: How many entries it has.
        disk_bytes: What it takes on disk.
        too_long: Documents left out since the start, as their keys are too long.
        too_costly: Documents left out since the start, as the expressions cost too much for them.
        failure: Why it was left out; empty unless it was.
        behind: How many of the server's sequence numbers it lacks, by the server's last answer.
    """

    name: str
    state: Literal["building", "ready", "failed"]
    key: tuple[str, ...]
    filter: str
    each: str
    include: tuple[str, ...]
    entries: int
    disk_bytes: int
    too_long: int
    too_costly: int
    behind: int
    failure: str = ""


class Scanner:
    """Answers questions to indexes.

    Args:
        definitions: The indexes.
        pool: Scans reserve their memory from it.
        pipeline: The running indexes' pipeline.
        stream: The running indexes' stream.
        barriers: Barriers of that stream.
        moments: The moments that are held for further pages.
        server_progress: How far the server is.
    """

    def __init__(
        self,
        definitions: Definitions,
        pool: MemoryPool,
        pipeline: Pipeline,
        stream: IndexerStream,
        barriers: Barriers,
        moments: Moments,
        server_progress: ServerProgress,
    ) -> None:
        self._definitions = definitions
        self._pool = pool
        self._pipeline = pipeline
        self._stream = stream
        self._barriers = barriers
        self._moments = moments
        self._server_progress = server_progress

    async def status(self, name: IndexName) -> IndexStatus:
        """What can be told of an index.

        Raises:
            NoIndexError: No index has this name.
        """
        index = self._definitions.find(name)
        file = index.file
        with index.reading():
            entries, disk_bytes = await trio.to_thread.run_sync(
                lambda: (file.entry_count(), file.disk_bytes())
            )
        newest_seqs = dict(await self._server_progress.seqs())
        for partition, mark in self._stream.marks.items():
            newest_seqs[partition] = max(mark.seq, newest_seqs.get(partition, SeqNo(0)))
        behind = sum(
            max(0, seq - file.mark(partition).seq) for partition, seq in newest_seqs.items()
        )
        return IndexStatus(
            str(name),
            "failed" if file.failure else "ready" if file.is_built else "building",
            index.definition.key,
            index.definition.filter,
            index.definition.each,
            index.definition.include,
            entries,
            disk_bytes,
            index.extractor.too_long,
            index.extractor.too_costly,
            behind,
            file.failure,
        )

    @asynccontextmanager
    async def scan(self, name: IndexName, query: Query) -> AsyncIterator[ScanAnswer]:
        """Answers a query. The answer counts in the pool for as long as the context: leave it when
        the answer is sent. If the query asks for it, the moment of the answer is held from then on.

        Raises:
            NoIndexError: No index has this name, or it was dropped meanwhile.
            BuildingError: The index is not complete yet.
            IndexFailedError: The index was left out.
            OverloadedError: The pool has no memory for the scan just now, or too many moments are
                held.
            QueryError: The query is wrong.
            WriteLostError: It requires a change that a failover has undone.
            NotFreshError: The index was not as fresh as asked within the timeout.
            MomentGoneError: It asks for a moment that is not held.
        """
        index = self._definitions.find(name)
        query.check()
        selection = query.selection(len(index.definition.key))
        writes = query.required_writes()
        moment = self._moments.find(query.moment, index.file) if query.moment else None
        with self._pool.reserve_for_scan() as reservation, ExitStack() as stack:
            if moment is None:
                answer, view = await self._answer(index, query, selection, writes)
                if query.hold_s:
                    moment = self._moments.hold(index.file, view)
                    stack.enter_context(moment.in_use(query.hold_s))
            else:
                stack.enter_context(moment.in_use(query.hold_s))
                answer = await self._answer_of(moment, index, query, selection)
                if not query.hold_s:
                    self._moments.release(moment)
            if moment is not None and query.hold_s:
                answer.moment = moment.token
            reservation.reduce_to(answer.nbytes + SCAN_OVERHEAD_BYTES)
            yield answer

    def release(self, token: str) -> None:
        """Lets a moment go.

        Raises:
            MomentGoneError: It is not held.
        """
        self._moments.release(self._moments.find(token))

    async def _answer_of(
        self, moment: Moment, index: Index, query: Query, selection: Selection
    ) -> ScanAnswer:
        log = FreshnessLog()
        log.freshness = "moment"
        with trio.move_on_after(query.timeout_s), index.reading():
            async with moment.reading() as view:
                return await trio.to_thread.run_sync(
                    partial(read, view, index, query, selection, log)
                )
        raise NotFreshError(
            f"others have read the moment {moment.token} for {query.timeout_s:g} s; ask again"
        )

    async def _answer(
        self, index: Index, query: Query, selection: Selection, writes: RequiredWrites
    ) -> tuple[ScanAnswer, View]:
        """The answer to a query, of now, and the index at that moment. The view is closed unless it
        is to be held."""
        log = FreshnessLog()
        with trio.move_on_after(query.timeout_s) as scope:
            if index.file.failure:
                raise IndexFailedError(f"the index {index.name} was left out: {index.file.failure}")
            if not index.file.is_built:
                raise BuildingError(index.name)
            if query.consistency == "now":
                # Not while the index is read: a stream that stands still brings no barrier, and the
                # index could not be dropped.
                await self._wait_for_barrier(log)
            elif not knows_histories(index.file, writes):
                # A failover that the index has yet to hear of, or a history that is gone: without
                # the barrier a scan for a lost change would wait for its whole timeout.
                await self._wait_for_barrier(log)
                check_histories(index.file, writes)
            with index.reading():
                return await self._scan(index, query, selection, writes, log)
        assert scope.cancelled_caught
        raise NotFreshError(
            f"the index {index.name} has not caught up after {query.timeout_s:g} s; ask again, or "
            "with a higher timeout_s"
        )

    async def _wait_for_barrier(self, log: FreshnessLog) -> None:
        log.freshness = "barrier"
        with log.waiting("barrier"):
            counts = await self._barriers.returned()
        if not self._pipeline.has_applied(counts):
            with log.waiting("queued_changes"):
                await self._pipeline.wait_until(lambda: self._pipeline.has_applied(counts))

    async def _scan(
        self,
        index: Index,
        query: Query,
        selection: Selection,
        writes: RequiredWrites,
        log: FreshnessLog,
    ) -> tuple[ScanAnswer, View]:
        if writes:
            log.freshness = "had_written"
        if not has_writes(index.file, writes):
            log.freshness = "waited_for_written"
            with log.waiting("written"):
                await self._wait(index, partial(has_writes, index.file, writes))
        while index.is_defined:
            rounds = self._pipeline.rounds
            # Not settled: a snapshot is half applied. The next round may bring the rest.
            with suppress(NotSettledError):
                answer, view = await trio.to_thread.run_sync(
                    partial(_read_now, index, query, selection, log)
                )
                try:
                    # A failover may have undone a required change meanwhile.
                    has_writes(index.file, writes)
                except WriteLostError:
                    view.close()
                    raise
                return answer, view
            with log.waiting("whole_snapshots"):
                await self._wait(index, partial(self._has_applied_after, rounds))
        raise NoIndexError(f"the index {index.name} was dropped during the scan")

    def _has_applied_after(self, rounds: int) -> bool:
        return self._pipeline.rounds > rounds

    async def _wait(self, index: Index, condition: Callable[[], bool]) -> None:
        """Waits for rounds until `condition` holds, or the index is dropped."""
        await self._pipeline.wait_until(lambda: not index.is_defined or condition())


def _read_now(
    index: Index, query: Query, selection: Selection, log: FreshnessLog
) -> tuple[ScanAnswer, View]:
    """Reads an index as it is now; see `read`. The view is closed unless it is to be held.

    Raises:
        NotSettledError: The query asks for a state that the server had, and the index is between
            two of them.
        IndexFileError: The index cannot be read.
    """
    view = index.file.view(settled=query.consistency != "any")
    with ExitStack() as stack:
        stack.push(view)
        answer = read(view, index, query, selection, log)
        if query.hold_s:
            stack.pop_all()
    return answer, view


def read(
    view: View, index: Index, query: Query, selection: Selection, log: FreshnessLog
) -> ScanAnswer:
    """What an index has for a query at some moment. Blocks.

    Args:
        view: The moment.
        index: The index.
        query: The query.
        selection: Its entries.
        log: How the view is as fresh as asked.

    Raises:
        IndexFileError: The index cannot be read.
    """
    began = time.perf_counter()
    part_count = len(index.definition.key)
    result = _result(view, index, query, selection)
    explanation = None
    if query.explain:
        explanation = Explanation(
            index=str(index.name),
            expressions=index.definition.key,
            index_entries=view.entry_count(),
            ranges=query.read_ranges(part_count),
            descending=query.descending,
            searches=result.reading.searches,
            entries_read=result.reading.entries_read,
            included_read=result.reading.included_read,
            entries_given=0 if isinstance(result, Summary) else len(result.entries),
            ended_by="ranges" if isinstance(result, Summary) else result.ended_by,
            freshness=log.freshness,
            waits=tuple(log.waits),
            read_seconds=time.perf_counter() - began,
        )
    return ScanAnswer(
        result,
        selection.distinct_parts or part_count,
        view.timestamps() if query.timestamps else {},
        explanation,
    )


def _result(view: View, index: Index, query: Query, selection: Selection) -> ScanResult | Summary:
    if query.is_summary:
        return view.summarize(selection, count=query.count, lowest=query.min, highest=query.max)
    return view.scan(
        selection,
        query.limit or LIMIT_DEFAULT,
        bytes_max=ANSWER_BYTES_MAX,
        with_payloads=bool(index.definition.include) and not selection.distinct_parts,
    )
