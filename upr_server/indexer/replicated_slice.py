"""A slice of which several nodes have copies: the first that can answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

import attrs
import msgspec
import trio

from upr_protocol.concurrency import background_nursery
from upr_protocol.errors import UprError
from upr_protocol.ids import PartitionId, SeqNo
from upr_server.indexer.definitions import NoIndexError
from upr_server.indexer.freshness import WriteLostError
from upr_server.indexer.moments import MomentGoneError, moment_gone_error
from upr_server.indexer.pool import OverloadedError
from upr_server.indexer.pure.definition import IndexDefinition, IndexName
from upr_server.indexer.query import QueryError
from upr_server.indexer.slice_scanner import BuildingError, IndexFailedError, NotFreshError
from upr_server.indexer.slices import (
    CatalogReport,
    IndexState,
    ReplicaStatus,
    SliceAnswer,
    SliceHolder,
    SliceId,
    SliceMissingError,
    SliceObserver,
    SliceScan,
    SliceStatus,
)

T = TypeVar("T")

SILENT_S: Final = 2.0
"""A copy that has not answered for so long is not waited for. Each answers twice a second."""

GRACE_S: Final = 0.5
"""A silent copy may answer within so long, if it is asked because no other is left."""

_FINAL: Final = (WriteLostError, NotFreshError, QueryError, MomentGoneError)
"""Errors that another copy would answer, too; or that have taken the query's time."""

_TOKEN_SEPARATOR: Final = "-"

_BEST_FIRST: Final[tuple[IndexState, ...]] = ("ready", "building", "failed", "missing")


@attrs.define(eq=False)
class _Copy:
    """A copy of the slice.

    Attributes:
        place: The node's place in the list.
        url: The node's URL.
        holder: Has the copy.
        report: What it last reported of its design documents.
    """

    place: int
    url: str
    holder: SliceHolder
    report: CatalogReport | None = None

    @property
    def silent_at(self) -> float:
        """When it will not have answered for too long, unless it answers before."""
        return self.holder.heard_at + SILENT_S

    @property
    def is_silent(self) -> bool:
        """Whether it has not answered for too long."""
        return self.silent_at <= trio.current_time()


@attrs.frozen
class _CopyListener:
    """Hears of a copy.

    Attributes:
        on_began: Called when it has begun to run.
        on_report: Called with its reports.
    """

    on_began: Callable[[], None]
    on_report: Callable[[CatalogReport], None]

    def slice_restarted(self, _index: int) -> None:
        self.on_began()

    def catalog_read(self, _index: int, report: CatalogReport) -> None:
        self.on_report(report)


class ReplicatedSlice:
    """Holds a slice of which several nodes have copies; see `SliceHolder`.

    The copy in this process, or its worker, is asked first, then those of other nodes in the order
    of the list. A copy that does not answer, or cannot, is passed over. One that has not answered
    for `SILENT_S` is asked last.

    The design documents are those of one copy at a time, `_source`. When another becomes it, that
    counts as a slice that has begun to run: no index is dropped until that copy has confirmed that
    it lacks none.

    Args:
        slice_id: The slice.
        copies: By the place of each node in the list: its URL, and what has its copy. In the order
            of the list.
        own_index: The place of this node.

    Attributes:
        slice_id: The slice.
        own_copy: The copy of this node; None if it has none.
    """

    def __init__(
        self, slice_id: SliceId, copies: Mapping[int, tuple[str, SliceHolder]], own_index: int
    ) -> None:
        self.slice_id = slice_id
        all_copies = [_Copy(place, url, holder) for place, (url, holder) in copies.items()]
        self._copies = sorted(all_copies, key=lambda copy: copy.place != own_index)
        self.own_copy = copies[own_index][1] if own_index in copies else None
        self._source: _Copy | None = None
        self._observer: SliceObserver | None = None
        self._other_nodes: set[SliceObserver] = set()

    @property
    def title(self) -> str:
        """The slice, and the nodes that have copies."""
        return f"{self.slice_id}, at {' and '.join(copy.url for copy in self._copies)},"

    @property
    def heard_at(self) -> float:
        """When a copy last answered."""
        return max(copy.holder.heard_at for copy in self._copies)

    def silent_nodes(self) -> set[str]:
        """The nodes whose copies do not answer just now, as URLs."""
        return {copy.url for copy in self._copies if copy.is_silent}

    def nodes(self) -> set[str]:
        """The nodes that have copies, as URLs."""
        return {copy.url for copy in self._copies}

    async def run(self, observer: SliceObserver) -> None:
        """Keeps the own copy up to date, and links to the others open."""
        self._observer = observer
        async with trio.open_nursery() as nursery:
            for copy in self._copies:
                on_began = partial(self._copy_began, copy)
                on_report = partial(self._copy_reported, copy)
                nursery.start_soon(copy.holder.run, _CopyListener(on_began, on_report))
            nursery.start_soon(self._keep_source)

    async def stop(self) -> None:
        """Applies what was read."""
        await trio.lowlevel.checkpoint()
        if self.own_copy is not None:
            await self.own_copy.stop()

    def close(self) -> None:
        """Closes the files."""
        for copy in self._copies:
            copy.holder.close()

    def define(self, definitions: Mapping[IndexName, IndexDefinition]) -> None:
        """Says which indexes there shall be in the own copy. The other nodes find that out."""
        if self.own_copy is not None:
            self.own_copy.define(definitions)

    # Design documents.

    @contextmanager
    def observed_by(self, observer: SliceObserver) -> Iterator[None]:
        """Reports the own copy to another node for as long as the context."""
        self._other_nodes.add(observer)
        try:
            for copy in self._copies:
                if copy.holder is self.own_copy and copy.report is not None:
                    observer.catalog_read(self.slice_id.index, copy.report)
            yield
        finally:
            self._other_nodes.remove(observer)

    def _observers_of(self, copy: _Copy) -> Iterator[SliceObserver]:
        if copy.holder is self.own_copy:
            yield from self._other_nodes

    def _copy_began(self, copy: _Copy) -> None:
        assert self._observer is not None
        if copy.holder is self.own_copy or copy is self._source:
            self._observer.slice_restarted(self.slice_id.index)
        for observer in self._observers_of(copy):
            observer.slice_restarted(self.slice_id.index)

    def _copy_reported(self, copy: _Copy, report: CatalogReport) -> None:
        assert self._observer is not None
        copy.report = report
        for observer in self._observers_of(copy):
            observer.catalog_read(self.slice_id.index, report)
        if not self._replace_silent_source() and copy is self._source:
            self._observer.catalog_read(self.slice_id.index, report)

    def _replace_silent_source(self) -> bool:
        """Makes another copy the source if the source does not answer.

        Returns:
            Whether it did.
        """
        source = self._source
        if source is not None and not source.is_silent:
            return False
        copies_with_report = [copy for copy in self._copies if copy.report is not None]
        answering_copies = [copy for copy in copies_with_report if not copy.is_silent]
        chosen_copy = next(
            iter([*answering_copies, *([source] if source else []), *copies_with_report]), None
        )
        if chosen_copy is None or chosen_copy is source:
            return False
        assert self._observer is not None
        assert chosen_copy.report is not None
        self._source = chosen_copy
        self._observer.slice_restarted(self.slice_id.index)
        self._observer.catalog_read(self.slice_id.index, chosen_copy.report)
        return True

    async def _keep_source(self) -> None:
        """Takes another source when that falls silent, for ever: what the others have reported
        before was not passed on."""
        while True:
            await trio.sleep(SILENT_S)
            self._replace_silent_source()

    async def confirm(self) -> int:
        """Waits until the source's catalog has all that was acknowledged before the call. Returns
        the count of rollbacks; `SliceHolder.confirm` says what it is for.

        Raises:
            SliceMissingError: No copy answers; or another copy has become the source meanwhile.
        """
        self._replace_silent_source()
        source = self._source
        if source is None:
            await trio.lowlevel.checkpoint()
            raise SliceMissingError(self.title, "has yet to say which indexes there are")
        try:
            rollbacks = await self._answer_of(source, source.holder.confirm)
        except UprError as error:
            raise SliceMissingError(self.slice_id, f"at {source.url}: {error}") from error
        if source is not self._source:
            raise SliceMissingError(self.slice_id, "is asked at another node now")
        return rollbacks

    # Questions.

    def _copies_in_order(self) -> list[_Copy]:
        """The copies, in the order in which they are asked."""
        return sorted(self._copies, key=lambda copy: copy.is_silent)

    async def _answer_of(self, copy: _Copy, ask: Callable[[], Awaitable[T]]) -> T:
        """What a copy answers.

        Raises:
            SliceMissingError: It is silent.
            UprError: What it raises.
        """
        with trio.CancelScope() as scope:
            async with background_nursery() as nursery:
                nursery.start_soon(self._cancel_when_silent, copy, scope)
                return await ask()
        raise SliceMissingError(self.slice_id, "does not answer")

    async def _cancel_when_silent(self, copy: _Copy, scope: trio.CancelScope) -> None:
        await trio.sleep(GRACE_S)
        while not copy.is_silent:  # noqa: ASYNC110  until it answers no more
            await trio.sleep_until(copy.silent_at)
        scope.cancel()

    async def scan(self, scan: SliceScan) -> SliceAnswer:
        """Answers a query; see `SliceHolder.scan`.

        Raises:
            SliceMissingError: No copy answers; it names the slice and the nodes.
            MomentGoneError: The moment is held by a node that does not answer.
            UprError: See `Scanner.scan`.
        """
        if scan.query.moment:
            copy, token = self._copy_of(scan.query.moment)
            query = msgspec.structs.replace(scan.query, moment=token)
            scan = msgspec.structs.replace(scan, query=query)
            return await self._answer_for_moment(copy, partial(self._scan, copy, scan))
        deadline = trio.current_time() + scan.query.timeout_s
        failures: list[tuple[_Copy, UprError]] = []
        for copy in self._copies_in_order():
            left_s = max(0.0, deadline - trio.current_time()) if failures else scan.query.timeout_s
            query = msgspec.structs.replace(scan.query, timeout_s=left_s)
            own_scan = msgspec.structs.replace(scan, query=query)
            try:
                return await self._answer_of(copy, partial(self._scan, copy, own_scan))
            except _FINAL:
                raise
            except UprError as error:
                failures.append((copy, error))
        raise self._failure(failures)

    async def _scan(self, copy: _Copy, scan: SliceScan) -> SliceAnswer:
        answer = await copy.holder.scan(scan)
        if not answer.moment:
            return answer
        token = f"{copy.place}{_TOKEN_SEPARATOR}{answer.moment}"
        return msgspec.structs.replace(answer, moment=token)

    def _failure(self, failures: Sequence[tuple[_Copy, UprError]]) -> UprError:
        """The error if no copy can answer."""
        errors = [error for _, error in failures]
        for kind in (IndexFailedError, OverloadedError):
            for error in errors:
                if isinstance(error, kind):
                    return error
        kinds = {type(error) for error in errors}
        if kinds <= {BuildingError, NoIndexError}:
            return next((e for e in errors if isinstance(e, BuildingError)), errors[0])
        reasons = "; ".join(f"at {copy.url}: {error}" for copy, error in failures)
        return SliceMissingError(self.slice_id, f"is missing ({reasons})")

    def _copy_of(self, moment: str) -> tuple[_Copy, str]:
        """The copy that holds a moment, and the moment's name there."""
        place, _, token = moment.partition(_TOKEN_SEPARATOR)
        for copy in self._copies:
            if str(copy.place) == place and token:
                return copy, token
        raise moment_gone_error(moment)

    async def _answer_for_moment(self, copy: _Copy, ask: Callable[[], Awaitable[T]]) -> T:
        try:
            return await self._answer_of(copy, ask)
        except SliceMissingError as error:
            raise MomentGoneError(
                f"the moment of {self.slice_id} is held at {copy.url}, which does not answer, and "
                f"at no other node ({error}); scan again from the beginning"
            ) from error

    async def release(self, token: str) -> None:
        """Lets a moment go.

        Raises:
            MomentGoneError: It is not held.
        """
        await trio.lowlevel.checkpoint()
        copy, own_token = self._copy_of(token)
        await self._answer_for_moment(copy, partial(copy.holder.release, own_token))

    async def status(
        self, name: IndexName, definition: IndexDefinition, newest_seqs: Mapping[PartitionId, SeqNo]
    ) -> SliceStatus:
        """What can be told of an index: of its best copy, and of each of them."""
        statuses: dict[_Copy, SliceStatus] = {}

        async def ask(copy: _Copy) -> None:
            try:
                statuses[copy] = await self._answer_of(
                    copy, partial(copy.holder.status, name, definition, newest_seqs)
                )
            except UprError as error:
                statuses[copy] = SliceStatus(
                    slice=self.slice_id.index, state="missing", failure=str(error)
                )

        async with trio.open_nursery() as nursery:
            for copy in self._copies:
                nursery.start_soon(ask, copy)
        ordered_statuses = [statuses[copy] for copy in self._copies]
        best_status = min(
            ordered_statuses, key=lambda status: (_BEST_FIRST.index(status.state), status.behind)
        )
        replicas = [
            ReplicaStatus(
                node=copy.url,
                state=statuses[copy].state,
                entries=statuses[copy].entries,
                behind=statuses[copy].behind,
                failure=statuses[copy].failure,
            )
            for copy in sorted(self._copies, key=lambda copy: copy.place)
        ]
        return msgspec.structs.replace(best_status, replicas=replicas)

    async def ping(self) -> None:
        """Waits until a copy answers."""
        await self._first_answer(lambda holder: holder.ping())

    async def statistics(self) -> dict[str, Any]:
        """Figures of the first copy that answers, and its `node`."""
        return await self._first_answer(self._statistics_of)

    async def _statistics_of(self, holder: SliceHolder) -> dict[str, Any]:
        url = next(copy.url for copy in self._copies if copy.holder is holder)
        return {"node": url, **await holder.statistics()}

    async def _first_answer(self, ask: Callable[[SliceHolder], Awaitable[T]]) -> T:
        failures: list[tuple[_Copy, UprError]] = []
        for copy in self._copies_in_order():
            try:
                return await self._answer_of(copy, partial(ask, copy.holder))
            except UprError as error:
                failures.append((copy, error))
        raise self._failure(failures)
