"""Rows from a thread of their own, so that waiting for a slow source stops nothing else."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Final, Generic, TypeVar

import trio

ITEMS_MAX: Final = 4_000
"""How far the thread may be ahead: milliseconds of work, so that neither waits for the other."""

LINGER_S: Final = 0.005
"""How long what has come waits for more: a hop between threads costs as much as reading a hundred
rows, and nobody notices five milliseconds."""

T = TypeVar("T")


class Pump(Generic[T]):
    """Goes through `source` in a thread; what a slow source gives comes almost at once, and what a
    fast one gives comes in long lists.

    There is no lock, as one would cost as much as reading a row. The thread only appends, and then
    looks whether it must wake the other side; the other side first says that it wants to be woken,
    and then takes what there is. So nothing is taken twice, and nothing waits unseen.
    """

    def __init__(self, source: Iterator[T]) -> None:
        self._source = source
        self._items: list[T] = []
        self._room = threading.Event()
        self._arrived = trio.Event()
        self._awake = False
        self._token = trio.lowlevel.current_trio_token()
        self._finished = False
        self._stopped = False

    async def batches(self) -> AsyncIterator[list[T]]:
        """What the source gives, in order, until it ends."""
        finished = False
        while not finished:
            await self._arrived.wait()
            await trio.sleep(LINGER_S)
            self._arrived = trio.Event()
            self._awake = False
            finished = self._finished
            count = len(self._items)
            items = self._items[:count]
            del self._items[:count]
            self._room.set()
            if items:
                yield items

    async def run(self) -> None:
        """Reads the source to its end; what that raises comes out here. Cancelled while the source
        makes it wait, it leaves the thread behind."""
        try:
            await trio.to_thread.run_sync(self._read, abandon_on_cancel=True)
        finally:
            self._stopped = True
            self._room.set()

    def _read(self) -> None:
        items = self._items
        append = items.append
        for item in self._source:
            append(item)
            if not self._awake:
                self._wake()
            if len(items) >= ITEMS_MAX:
                self._room.clear()
                if len(items) >= ITEMS_MAX and not self._stopped:
                    self._room.wait()
                if self._stopped:
                    return
        self._finished = True
        self._wake()

    def _wake(self) -> None:
        self._awake = True
        self._token.run_sync_soon(self._note_arrival)

    def _note_arrival(self) -> None:
        self._arrived.set()


@asynccontextmanager
async def pumped(source: Iterator[T]) -> AsyncIterator[AsyncIterator[list[T]]]:
    """The batches of a `Pump` over `source`, for as long as the context."""
    pump = Pump(source)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pump.run)
        yield pump.batches()
        nursery.cancel_scope.cancel()
