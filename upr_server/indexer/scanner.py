"""Scans of whole indexes: every slice is asked, and their answers are merged."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from math import inf
from typing import Final, TypeVar

import msgspec
import trio

from upr_protocol.errors import UprError
from upr_server.indexer.answer import ScanAnswer
from upr_server.indexer.definitions import NoIndexError
from upr_server.indexer.designs import Designs
from upr_server.indexer.merge import TOKEN_SEPARATOR, MergedScan
from upr_server.indexer.moments import MomentGoneError, moment_gone_error
from upr_server.indexer.pool import ANSWER_BYTES_MAX, SCAN_OVERHEAD_BYTES, MemoryPool
from upr_server.indexer.pure.definition import IndexDefinition, IndexName
from upr_server.indexer.query import Query
from upr_server.indexer.server_progress import ServerProgress
from upr_server.indexer.short_scan import check_query, has_many_values, selection_of
from upr_server.indexer.slice_scanner import BuildingError
from upr_server.indexer.slices import (
    IndexState,
    SliceAnswer,
    SliceHolder,
    SliceMissingError,
    SliceScan,
    SliceStatus,
)

T = TypeVar("T")

UNDO_S: Final = 1.0
"""How long to let moments go after an error. What is not let go expires."""

LATE_S: Final = 2.0
"""How long after a scan's timeout a slice that has not answered counts as missing."""

STATUSES_AT_ONCE: Final = 16
"""Of how many indexes a list of all asks the slices at once. Each slice reads its file in a thread,
of which a process has 40."""

_GONE: Final = (MomentGoneError, SliceMissingError)

_STATES: Final[tuple[IndexState, ...]] = ("failed", "missing", "building", "ready")
"""The first of these that a slice is in is the index's."""


class IndexStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What can be told of an index; numbers are sums over its slices.

    Attributes:
        name: `DESIGN/INDEX`.
        state: `building`; `ready` when it can be scanned; `failed` when it was left out; `missing`
            while a slice does not run, so that scans are refused.
        key: Its key expressions.
        filter: Its filter; empty for none.
        each: The expression whose arrays make an entry for each element; empty for none.
        include: The expressions of its included values.
        entries: How many entries it has.
        disk_bytes: What it takes on disk.
        too_long: Documents left out since the start, as their keys are too long.
        too_costly: Documents left out since the start, as the expressions cost too much for them.
        behind: How many of the server's sequence numbers it lacks, by the server's last answer.
        failure: Why it was left out, lacks a slice, or stays behind; empty otherwise.
        slices: Each slice.
    """

    name: str
    state: IndexState
    key: tuple[str, ...]
    filter: str
    each: str
    include: tuple[str, ...]
    entries: int
    disk_bytes: int
    too_long: int
    too_costly: int
    behind: int
    failure: str
    slices: list[SliceStatus]


class Scanner:
    """Answers questions to indexes.

    Args:
        designs: Which indexes there are.
        holders: The slices, by their numbers.
        pool: Scans reserve their memory from it.
        server_progress: How far the server is.
    """

    def __init__(
        self,
        designs: Designs,
        holders: Sequence[SliceHolder],
        pool: MemoryPool,
        server_progress: ServerProgress,
    ) -> None:
        self._designs = designs
        self._holders = holders
        self._pool = pool
        self._server_progress = server_progress

    async def status(self, name: IndexName) -> IndexStatus:
        """What can be told of an index.

        Raises:
            NoIndexError: No index has this name.
            SliceMissingError: The indexer starts, and does not know yet.
        """
        definition = self._designs.find(name)
        newest_seqs = await self._server_progress.seqs()

        async def ask(holder: SliceHolder) -> SliceStatus:
            try:
                return await holder.status(name, definition, newest_seqs)
            except SliceMissingError as error:
                return SliceStatus(slice=holder.slice_id.index, state="missing", failure=str(error))

        slices = await _call_all([partial(ask, holder) for holder in self._holders])
        return IndexStatus(
            name=str(name),
            state=min((status.state for status in slices), key=_STATES.index),
            key=definition.key,
            filter=definition.filter,
            each=definition.each,
            include=definition.include,
            entries=sum(status.entries for status in slices),
            disk_bytes=sum(status.disk_bytes for status in slices),
            too_long=sum(status.too_long for status in slices),
            too_costly=sum(status.too_costly for status in slices),
            behind=sum(status.behind for status in slices),
            failure=next((status.failure for status in slices if status.failure), ""),
            slices=slices,
        )

    async def statuses(self) -> list[IndexStatus]:
        """What can be told of each index, in the order of their names; `STATUSES_AT_ONCE` are asked
        at once."""
        turns = trio.CapacityLimiter(STATUSES_AT_ONCE)

        async def ask(name: IndexName) -> IndexStatus | None:
            async with turns:
                # It may have been dropped while others were asked.
                with suppress(NoIndexError):
                    return await self.status(name)
            return None

        statuses = await _call_all([partial(ask, name) for name in self._designs.names()])
        return [status for status in statuses if status is not None]

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
            SliceMissingError: A slice does not answer.
        """
        definition = self._designs.find(name)
        await check_query(query)
        await selection_of(query, len(definition.key))
        with self._pool.reserve_for_scan() as reservation:
            answer = await self._answer(name, definition, query)
            reservation.reduce_to(answer.nbytes + SCAN_OVERHEAD_BYTES)
            try:
                yield answer
            except BaseException:
                # The client does not know of the moment.
                if answer.moment and not query.moment:
                    with trio.move_on_after(UNDO_S, shield=True), suppress(UprError):
                        await self.release(answer.moment)
                raise

    async def release(self, token: str) -> None:
        """Lets a moment go.

        Raises:
            MomentGoneError: It is not held, not by every slice.
            SliceMissingError: A slice does not answer.
        """

        async def release(holder: SliceHolder, part: str) -> UprError | None:
            # Where it is gone from one slice, the others let it go all the same.
            try:
                await holder.release(part)
            except _GONE as error:
                return error
            return None

        errors = await _call_all(
            [
                partial(release, holder, part)
                for holder, part in zip(self._holders, self._tokens(token), strict=True)
            ]
        )
        for error in errors:
            if error is not None:
                raise error

    def _tokens(self, token: str) -> list[str]:
        """The names of a moment in each slice; empty ones for no moment."""
        tokens = token.split(TOKEN_SEPARATOR) if token else [""] * len(self._holders)
        if len(tokens) != len(self._holders):
            raise moment_gone_error(token)
        return tokens

    async def _answer(
        self, name: IndexName, definition: IndexDefinition, query: Query
    ) -> ScanAnswer:
        merged_scan = MergedScan(name, definition, query, len(self._holders))
        try:
            while not merged_scan.is_complete:
                merged_scan.add(await self._ask(name, definition, merged_scan.query))
        finally:
            if merged_scan.view_token_to_release:
                # A moment that is not released expires.
                with trio.move_on_after(UNDO_S, shield=True), suppress(UprError):
                    await self.release(merged_scan.view_token_to_release)
        if query.explain and has_many_values(query):
            return await trio.to_thread.run_sync(merged_scan.answer)
        return merged_scan.answer()

    async def _ask(
        self, name: IndexName, definition: IndexDefinition, query: Query
    ) -> list[SliceAnswer]:
        """What each slice answers."""
        moments_to_release: list[tuple[SliceHolder, str]] = []
        moments = self._tokens(query.moment)
        # Together they take no more memory than one answer may.
        bytes_max = ANSWER_BYTES_MAX // len(self._holders)

        async def ask(holder: SliceHolder, moment: str) -> SliceAnswer:
            own_query = msgspec.structs.replace(query, moment=moment)
            # One in this process always answers. A count may take minutes, and a link to a slice
            # that hangs is given up.
            is_patient = holder.heard_at == inf or query.is_summary
            limit_s = inf if is_patient else query.timeout_s + LATE_S
            with trio.move_on_after(limit_s):
                answer = await holder.scan(SliceScan(name, definition, own_query, bytes_max))
                if answer.moment and not moment:
                    moments_to_release.append((holder, answer.moment))
                return answer
            raise SliceMissingError(holder.slice_id, "does not answer")

        is_answered = False
        try:
            answers = await _call_all(
                [
                    partial(ask, holder, moment)
                    for holder, moment in zip(self._holders, moments, strict=True)
                ]
            )
            is_answered = True
        except NoIndexError as error:
            if self._designs.is_defined(name):
                # A slice that has yet to hear of it, or has heard of another definition meanwhile.
                raise BuildingError(name) from error
            raise
        finally:
            if moments_to_release and not is_answered:
                # At once: one after the other, slices that hang would take `UNDO_S` each.
                with trio.move_on_after(UNDO_S, shield=True):
                    await _call_all([partial(_release, *moment) for moment in moments_to_release])
        return answers


async def _release(holder: SliceHolder, moment: str) -> None:
    """Releases a moment. If it cannot, the moment expires."""
    with suppress(UprError):
        await holder.release(moment)


async def _call_all(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """What each call gives, all made at once.

    Raises:
        UprError: The first that one of them raised; the others are cancelled.
    """
    results: dict[int, T] = {}
    errors: list[UprError] = []

    async def run(position: int, call: Callable[[], Awaitable[T]]) -> None:
        try:
            results[position] = await call()
        except UprError as error:
            errors.append(error)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for position, call in enumerate(calls):
            nursery.start_soon(run, position, call)
    if errors:
        raise errors[0]
    return [results[position] for position in range(len(calls))]
