"""A queue between the task that reads a connection and the one that uses what comes."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import trio

from upr_protocol.errors import UprError

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Takes without waiting; its owner asks `full` and waits for `drained` between reads.

    Args:
        bound: How many items are too many.
    """

    __slots__ = ("_arrived", "_bound", "_drained", "_items", "error")

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._items: deque[T] = deque()
        self.error: UprError | None = None
        """What `end` was given."""
        self._arrived = trio.Event()
        self._drained = trio.Event()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        """Adds an item."""
        self._items.append(item)
        self._arrived.set()

    def end(self, error: UprError) -> None:
        """Nothing more will come; `get` raises `error` once it is empty."""
        if self.error is None:
            self.error = error
        self._arrived.set()

    @property
    def full(self) -> bool:
        """Whether whoever fills it should wait for `drained`."""
        return len(self._items) >= self._bound

    async def drained(self) -> None:
        """Waits until it is at most half full."""
        while len(self._items) > self._bound // 2:
            # Several may wait for the same.
            if self._drained.is_set():
                self._drained = trio.Event()
            await self._drained.wait()

    def get_nowait(self) -> T | None:
        """The oldest item, or None when there is none just now."""
        if not self._items:
            return None
        item = self._items.popleft()
        if len(self._items) <= self._bound // 2:
            self._drained.set()
        return item

    async def wait(self) -> None:
        """Waits until there is an item, or nothing more will come. Cancelled, nothing is lost.

        Raises:
            UprError: What `end` was given, when there is no item any more.
        """
        while not self._items:
            if self.error is not None:
                raise self.error
            self._arrived = trio.Event()
            await self._arrived.wait()
