"""Bugs planted in an indexer of several nodes, one at a time. Each is named after what the broken
code does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import msgspec
import trio

from tests.simulation.bugs.patch import replaced
from upr_server.indexer.moments import MomentGoneError
from upr_server.indexer.replicated_slice import ReplicatedSlice
from upr_server.indexer.slice_scanner import SliceScanner
from upr_server.indexer.slices import SliceAnswer, SliceMissingError, SliceScan


@contextmanager
def answer_from_building_copy() -> Iterator[None]:
    """A copy answers whose index is not complete yet."""
    answer: Any = SliceScanner._answer

    class Built:
        """A part of an index that says that it is built."""

        is_built = True

        def __init__(self, part: Any) -> None:
            self._part = part

        def __getattr__(self, name: str) -> Any:
            part = getattr(self._part, name)
            return Built(part) if name == "file" else part

    async def answer_always(self: Any, index: Any, *arguments: Any) -> Any:
        return await answer(self, Built(index), *arguments)

    with replaced(SliceScanner, "_answer", answer_always):
        yield


@contextmanager
def leave_missing_slice_out() -> Iterator[None]:
    """A scan is answered without the entries of a slice of which no copy answers."""
    scan: Any = ReplicatedSlice.scan

    async def scan_what_is_there(self: ReplicatedSlice, query: SliceScan) -> SliceAnswer:
        try:
            return await scan(self, query)  # type: ignore[no-any-return]
        except SliceMissingError:
            return SliceAnswer(
                searches=0,
                entries_read=0,
                index_entries=0,
                freshness="as_it_was",
                waits=[],
                read_seconds=0,
            )

    with replaced(ReplicatedSlice, "scan", scan_what_is_there):
        yield


@contextmanager
def move_moment_to_other_copy() -> Iterator[None]:
    """The next page is of another copy if the one that held its moment is gone."""
    scan: Any = ReplicatedSlice.scan

    async def scan_any(self: ReplicatedSlice, query: SliceScan) -> SliceAnswer:
        try:
            return await scan(self, query)  # type: ignore[no-any-return]
        except MomentGoneError:
            own_query = msgspec.structs.replace(query.query, moment="")
            return await scan(self, msgspec.structs.replace(query, query=own_query))  # type: ignore[no-any-return]

    with replaced(ReplicatedSlice, "scan", scan_any):
        yield


@contextmanager
def answer_now_without_barrier() -> Iterator[None]:
    """A scan at `now` does not wait for what the server has acknowledged."""

    async def wait(_self: SliceScanner, _index: Any, _log: Any) -> None:
        await trio.lowlevel.checkpoint()

    with replaced(SliceScanner, "_wait_for_barrier", wait):
        yield


BUGS: Final[dict[str, Callable[[], AbstractContextManager[None]]]] = {
    bug.__name__: bug
    for bug in (
        answer_from_building_copy,
        leave_missing_slice_out,
        move_moment_to_other_copy,
        answer_now_without_barrier,
    )
}
