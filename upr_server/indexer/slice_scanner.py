"""Scans of one slice, and what can be told of its indexes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from math import inf
from typing import Any, Final, TypeVar

import msgspec
import trio

from upr_protocol.errors import UprError
from upr_protocol.ids import PartitionId, SeqNo
from upr_server.indexer.definitions import Definitions, Index, NoIndexError
from upr_server.indexer.entry_reader import EntrySelection
from upr_server.indexer.explanation import FreshnessLog
from upr_server.indexer.freshness import (
    RequiredWrites,
    ScanBarriers,
    check_histories,
    has_writes,
    knows_histories,
)
from upr_server.indexer.index_file import EntrySummary, IndexView, NotSettledError, ScanResult
from upr_server.indexer.mark import NO_MARK
from upr_server.indexer.moments import Moment, Moments
from upr_server.indexer.pipeline import Pipeline, check_cancelled
from upr_server.indexer.pure.definition import IndexDefinition, IndexName
from upr_server.indexer.query import LIMIT_DEFAULT
from upr_server.indexer.short_scan import reads_little, selection_of
from upr_server.indexer.slices import (
    SliceAnswer,
    SliceId,
    SliceMissingError,
    SliceScan,
    SliceStatus,
)
from upr_server.indexer.stream import IndexerStream

T = TypeVar("T")

READS_AT_ONCE: Final = 32
"""How many scans that read much are in threads at once. A count may take minutes. A process has 40
threads, and some must be left for what keeps the slice going."""


class BuildingError(UprError):
    """The index is being built: it would answer with a part of what there is.

    Attributes:
        retry_after_s: When to ask again.
    """

    def __init__(self, name: IndexName) -> None:
        self.retry_after_s = 1.0
        super().__init__(f"the index {name} is being built; its status tells how far it is")


class IndexFailedError(UprError):
    """The index was left out, as its expressions cost too much: documents are missing in it.

    Args:
        name: The index.
        failure: Why.
    """

    def __init__(self, name: IndexName, failure: str) -> None:
        super().__init__(f"the index {name} was left out: {failure}")


class NotFreshError(UprError):
    """The index was not as fresh as the scan asked for within its timeout."""


class SliceScanner:
    """Answers questions to the indexes of a slice.

    Args:
        slice_id: The slice.
        definitions: The indexes.
        pipeline: The running indexes' pipeline.
        stream: The running indexes' stream.
        barriers: Barriers of that stream.
        moments: The moments that are held for further pages.
    """

    def __init__(
        self,
        slice_id: SliceId,
        definitions: Definitions,
        pipeline: Pipeline,
        stream: IndexerStream,
        barriers: ScanBarriers,
        moments: Moments,
    ) -> None:
        self._slice_id = slice_id
        self._definitions = definitions
        self._pipeline = pipeline
        self._stream = stream
        self._barriers = barriers
        self._moments = moments
        self._read_turns = trio.Semaphore(READS_AT_ONCE)

    async def status(
        self, name: IndexName, definition: IndexDefinition, newest_seqs: Mapping[PartitionId, SeqNo]
    ) -> SliceStatus:
        """What can be told of an index. One that the slice does not know yet is `building`.

        Args:
            name: The index.
            definition: What it must be.
            newest_seqs: How far the server is in each partition.

        Raises:
            SliceMissingError: The slice is being opened.
        """
        seqs = {
            partition: seq
            for partition, seq in newest_seqs.items()
            if self._slice_id.has(partition)
        }
        for partition, mark in self._stream.marks.items():
            seqs[partition] = max(mark.seq, seqs.get(partition, SeqNo(0)))
        try:
            index = self._find(name, definition)
        except (NoIndexError, BuildingError):
            return SliceStatus(
                slice=self._slice_id.index,
                state="building",
                behind=sum(seqs.values()),
                failure=self._pipeline.disk.full_reason,
            )
        file = index.file
        with index.reading():
            entries, disk_bytes = await trio.to_thread.run_sync(
                lambda: (file.entry_count(), file.disk_bytes())
            )
        behind = sum(max(0, seq - file.mark(partition).seq) for partition, seq in seqs.items())
        trouble = self._pipeline.disk.full_reason or self._definitions.building_trouble(index)
        return SliceStatus(
            slice=self._slice_id.index,
            state="failed" if file.failure else "ready" if file.is_built else "building",
            entries=entries,
            disk_bytes=disk_bytes,
            too_long=index.extractor.too_long,
            too_costly=index.extractor.too_costly,
            behind=behind,
            failure=file.failure or trouble,
        )

    def _find(self, name: IndexName, definition: IndexDefinition) -> Index:
        if not self._definitions.is_open:
            full_reason = self._pipeline.disk.full_reason
            reason = f"is being opened: {full_reason}" if full_reason else "is being opened"
            raise SliceMissingError(self._slice_id, reason)
        index = self._definitions.find(name)
        if index.definition != definition:
            raise BuildingError(name)
        return index

    async def scan(self, scan: SliceScan) -> SliceAnswer:
        """Answers a query. If the query asks for it, the moment of the answer is held from then on.

        Raises:
            SliceMissingError: The slice is being opened.
            NoIndexError: No index has this name, or it was dropped meanwhile.
            BuildingError: The index is not complete yet.
            IndexFailedError: The index was left out.
            OverloadedError: Too many moments are held.
            WriteLostError: It requires a change that a failover has undone.
            NotFreshError: The index was not as fresh as asked within the timeout.
            MomentGoneError: It asks for a moment that is not held.
        """
        query = scan.query
        selection = await selection_of(query, len(scan.definition.key))
        index = self._find(scan.name, scan.definition)
        if query.moment:
            moment = self._moments.find(query.moment, index.file)
            with moment.in_use(query.hold_s):
                answer = await self._answer_of(moment, index, scan, selection)
            if not query.hold_s:
                self._moments.release(moment)
                return answer
        else:
            writes = {
                partition: seqs
                for partition, seqs in query.required_writes().items()
                if self._slice_id.has(partition)
            }
            answer, view = await self._answer(index, scan, selection, writes)
            if not query.hold_s:
                return answer
            moment = self._moments.hold(index.file, view)
            moment.expire_in(query.hold_s)
        return msgspec.structs.replace(answer, moment=moment.token)

    def release(self, token: str) -> None:
        """Lets a moment go.

        Raises:
            MomentGoneError: It is not held.
        """
        self._moments.release(self._moments.find(token))

    async def _answer_of(
        self, moment: Moment, index: Index, scan: SliceScan, selection: EntrySelection
    ) -> SliceAnswer:
        log = FreshnessLog()
        log.freshness = "moment"
        timeout_s = scan.query.timeout_s
        with trio.CancelScope() as scope, index.reading():
            scope.deadline = trio.current_time() + timeout_s
            async with moment.reading() as view:
                read = partial(
                    read_answer, view, scan, selection, log, partial(_check_wanted, index)
                )
                return await self._read_in_thread(read, scope)
        raise NotFreshError(
            f"others have read the moment {moment.token} for {timeout_s:g} s; ask again"
        )

    async def _answer(
        self, index: Index, scan: SliceScan, selection: EntrySelection, writes: RequiredWrites
    ) -> tuple[SliceAnswer, IndexView]:
        """The answer to a query, of now, and the index at that moment. The view is closed unless it
        is to be held."""
        log, query = FreshnessLog(), scan.query
        with trio.CancelScope() as scope:
            # `move_on_after` would end a scan of 0 s though there is nothing to wait for.
            scope.deadline = trio.current_time() + query.timeout_s
            if index.file.failure:
                raise IndexFailedError(index.name, index.file.failure)
            if not index.file.is_built:
                raise BuildingError(index.name)
            if query.consistency == "now" or not knows_histories(index.file, writes):
                # A history that the index does not know is of a failover that it has yet to hear
                # of, or is gone: a scan for a lost change would wait for its whole timeout.
                # Not while the index is read: a stream that stands still brings no barrier, and the
                # index could not be dropped.
                await self._wait_for_barrier(index, log)
                check_histories(index.file, writes)
            with index.reading():
                return await self._scan(index, scan, selection, writes, log, scope)
        assert scope.cancelled_caught
        cause = self._pipeline.disk.full_reason or "or others had all turns to read"
        raise NotFreshError(
            f"the index {index.name} has not caught up after {query.timeout_s:g} s, {cause}; ask "
            "again, or with a higher timeout_s"
        )

    async def _wait_for_barrier(self, index: Index, log: FreshnessLog) -> None:
        log.freshness = "barrier"
        with log.recorded_wait("barrier"):
            put_count = await self._barriers.wait_until_received()
        if not self._pipeline.has_applied(put_count, index.file):
            with log.recorded_wait("queued_changes"):
                await self._pipeline.wait_until_applied(put_count, index.file)

    async def _scan(
        self,
        index: Index,
        scan: SliceScan,
        selection: EntrySelection,
        writes: RequiredWrites,
        log: FreshnessLog,
        waits_scope: trio.CancelScope,
    ) -> tuple[SliceAnswer, IndexView]:
        if writes:
            log.freshness = "had_written"
        if not has_writes(index.file.marks, writes):
            log.freshness = "waited_for_written"
            with log.recorded_wait("written"):
                await self._wait(index, lambda: has_writes(index.file.marks, writes), writes)
        while index.is_defined:
            rounds = self._pipeline.round_count(index.file)
            # Not settled: a snapshot is half applied, or a failover has undone a required change
            # meanwhile. The next round may bring the rest.
            with suppress(NotSettledError):
                read = partial(_read_now, index, scan, selection, writes, log)
                if not reads_little(scan):
                    return await self._read_in_thread(read, waits_scope)
                with _without_deadline(waits_scope):
                    await trio.lowlevel.checkpoint()
                    return read()
            with log.recorded_wait("whole_snapshots"):
                await self._wait(index, partial(self._has_applied_after, rounds, index))
        raise NoIndexError(f"the index {index.name} was dropped during the scan")

    async def _read_in_thread(self, read: Callable[[], T], waits_scope: trio.CancelScope) -> T:
        """What `read` gives. To wait for its turn counts as waiting, to read does not. A turn that
        is free is taken without a checkpoint."""
        try:
            self._read_turns.acquire_nowait()
        except trio.WouldBlock:
            await self._read_turns.acquire()
        try:
            with _without_deadline(waits_scope):
                return await trio.to_thread.run_sync(read)
        finally:
            self._read_turns.release()

    def _has_applied_after(self, rounds: int, index: Index) -> bool:
        return self._pipeline.round_count(index.file) > rounds

    async def _wait(
        self,
        index: Index,
        condition: Callable[[], bool],
        partitions: Collection[PartitionId] = (),
    ) -> None:
        """Waits for rounds until `condition` holds, or the index is dropped or left out. Rounds
        take the batches of `partitions` first."""
        await self._pipeline.wait_until(
            lambda: not index.is_defined or bool(index.file.failure) or condition(),
            list(partitions),
            index.file,
        )


@contextmanager
def _without_deadline(scope: trio.CancelScope) -> Iterator[None]:
    """Suspends the deadline of waits for as long as the context: reading may take longer. If the
    scan is cancelled otherwise, the reading ends."""
    deadline, scope.deadline = scope.deadline, inf
    try:
        yield
    finally:
        scope.deadline = deadline


def _read_now(
    index: Index,
    scan: SliceScan,
    selection: EntrySelection,
    writes: RequiredWrites,
    log: FreshnessLog,
) -> tuple[SliceAnswer, IndexView]:
    """Reads an index as it is now; see `read_answer`. The view is closed unless it is to be held.

    Raises:
        NotSettledError: The query asks for a state that the server had, and the index is between
            two of them; or it lacks a required change again.
        WriteLostError: A failover has undone a required change meanwhile.
        IndexFailedError: The index was left out, perhaps while the scan waited.
        IndexFileError: The index cannot be read.
    """
    failure = index.file.failure
    if failure:
        # It is brought up to date no more: it may never be settled.
        raise IndexFailedError(index.name, failure)
    view = index.file.open_view(settled=scan.query.consistency != "any")
    with ExitStack() as stack:
        stack.push(view)
        failure = view.failure()
        if failure:
            raise IndexFailedError(index.name, failure)
        _check_writes(index, view, writes)
        answer = read_answer(view, scan, selection, log, partial(_check_wanted, index))
        if scan.query.hold_s:
            stack.pop_all()
    return answer, view


def _check_wanted(index: Index) -> None:
    """For a thread that reads an index: raises if nobody waits for it any more, or if the index was
    dropped. What is defined meanwhile is built only once the file is removed."""
    check_cancelled()
    if not index.is_defined:
        raise NoIndexError(f"the index {index.name} was dropped during the scan")


def _check_writes(index: Index, view: IndexView, writes: RequiredWrites) -> None:
    """Makes sure that required changes are in a view that was opened just now. O(changes).

    Raises:
        NotSettledError: One is not, or that cannot be told yet: a commit is there before its marks.
        WriteLostError: One never will be.
    """
    marks = index.file.marks
    has_all = has_writes(marks, writes)
    for partition in writes:
        mark = marks.get(partition, NO_MARK)
        has_all = has_all and view.timestamp(partition) == (mark.history_id, mark.seq)
    if not has_all:
        raise NotSettledError


def read_answer(
    view: IndexView,
    scan: SliceScan,
    selection: EntrySelection,
    log: FreshnessLog,
    check_cancelled: Callable[[], None] = lambda: None,
) -> SliceAnswer:
    """What an index has for a query at some moment. Blocks.

    Args:
        view: The moment.
        scan: The query.
        selection: Its entries.
        log: How the view is as fresh as asked.
        check_cancelled: Called now and then where much is read; raises if nobody waits for it.

    Raises:
        IndexFileError: The index cannot be read.
    """
    began = time.perf_counter()
    query = scan.query
    fields: dict[str, Any] = {}
    result: ScanResult | EntrySummary
    if query.is_summary:
        result = view.summarize(
            selection,
            count=query.count,
            lowest=query.min,
            highest=query.max,
            check_cancelled=check_cancelled,
        )
        fields = {"count": result.count, "lowest": result.lowest, "highest": result.highest}
    else:
        result = view.scan(
            selection,
            query.limit or LIMIT_DEFAULT,
            bytes_max=scan.bytes_max,
            with_payloads=bool(scan.definition.include) and not selection.distinct_parts,
        )
        fields = {
            "entries": result.entries,
            "payloads": result.payloads,
            "ended_by": result.ended_by,
        }
    return SliceAnswer(
        **fields,
        searches=result.reading.searches,
        entries_read=result.reading.entries_read,
        included_read=result.reading.included_read,
        index_entries=view.entry_count(),
        timestamps=_timestamps(view) if query.timestamps else {},
        freshness=log.freshness,
        waits=log.waits,
        read_seconds=time.perf_counter() - began,
        opening=view.opening(),
    )


def _timestamps(view: IndexView) -> dict[int, tuple[int, int]]:
    return {int(partition): mark for partition, mark in view.timestamps().items()}
