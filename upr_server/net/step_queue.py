"""Work for many connections that one task does, some of it in each turn of the loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Generic, TypeVar

import trio

from upr_protocol.concurrency import Notifier

T = TypeVar("T")


class StepQueue(ABC, Generic[T]):
    """What waits for its turn, the oldest first."""

    __slots__ = ("_has_items", "_is_running", "_items")

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._has_items = Notifier()
        self._is_running = False

    def add(self, item: T) -> None:
        """Has the work for `item` done in one of the next turns. Before `run` begins, and after it
        has ended, all of it is done at once."""
        self._items.append(item)
        if self._is_running:
            self._has_items.notify()
        else:
            self._do_all()

    async def run(self) -> None:
        """Does the work, until cancelled."""
        self._is_running = True
        try:
            while True:
                while not self._items:
                    await self._has_items.wait()
                self._step(self._items)
                await trio.lowlevel.checkpoint()
        finally:
            self._is_running = False
            self._do_all()

    def _do_all(self) -> None:
        while self._items:
            self._step(self._items)

    @abstractmethod
    def _step(self, items: deque[T]) -> None:
        """Does what one turn has time for, and takes what is done out of `items`."""
