"""Reading rows in a thread, so that a slow source blocks nothing else."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Final, Generic, TypeVar

import trio

from upr_protocol.concurrency import Notifier

ITEMS_MAX: Final = 4_000
"""How many rows the thread may be ahead: milliseconds of work, so that neither side waits."""

BYTES_MAX: Final = 64 * 1024 * 1024
"""How many bytes the thread may be ahead: as many as a publisher holds."""

LINGER_S: Final = 0.005
"""How long rows wait for more to follow. A switch between threads costs as much as reading a
hundred rows, and five milliseconds go unnoticed."""

T = TypeVar("T")


class RowReader(Generic[T]):
    """Iterates over `source` in a thread. Items of a slow source come almost at once, those of a
    fast one in long lists.

    A lock would cost as much as reading a row, so there is none. The thread appends an item, and
    then checks whether it must wake the reader; the reader clears `_awake` first, and then takes
    the items. In this order no item is taken twice, and none is left behind unnoticed.
    """

    def __init__(self, source: Iterator[T], size_of: Callable[[T], int]) -> None:
        self._source = source
        self._size_of = size_of
        self._items: list[T] = []
        self._room = threading.Event()
        self._arrival = Notifier()
        self._awake = False
        self._token = trio.lowlevel.current_trio_token()
        self._finished = False
        self._stopped = False

    async def batches(self) -> AsyncIterator[list[T]]:
        """The source's items in order, until it ends."""
        finished = False
        while not finished:
            await self._arrival.wait_until(lambda: self._awake)
            await trio.sleep(LINGER_S)
            self._awake = False
            finished = self._finished
            count = len(self._items)
            items = self._items[:count]
            del self._items[:count]
            self._room.set()
            if items:
                yield items

    async def run(self) -> None:
        """Reads the source to its end, and raises what the source raises. Cancelled while the
        source blocks, it abandons the thread."""
        try:
            await trio.to_thread.run_sync(self._read, abandon_on_cancel=True)
        finally:
            self._stopped = True
            self._room.set()

    def _read(self) -> None:
        items, size_of = self._items, self._size_of
        append = items.append
        nbytes = 0
        for item in self._source:
            append(item)
            nbytes += size_of(item)
            if not self._awake:
                self._wake()
            if len(items) >= ITEMS_MAX or nbytes >= BYTES_MAX:
                nbytes = 0
                self._room.clear()
                if items and not self._stopped:
                    self._room.wait()
                if self._stopped:
                    return
        self._finished = True
        self._wake()

    def _wake(self) -> None:
        self._awake = True
        self._token.run_sync_soon(self._arrival.notify)


@asynccontextmanager
async def read_in_thread(
    source: Iterator[T], size_of: Callable[[T], int]
) -> AsyncIterator[AsyncIterator[list[T]]]:
    """The items of `source` in batches, read in a thread for as long as the context lasts.
    `size_of` gives the bytes of an item."""
    reader = RowReader(source, size_of)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader.run)
        yield reader.batches()
        nursery.cancel_scope.cancel()
