"""Those who wait for barriers."""

from __future__ import annotations

from itertools import count

import trio

from upr_protocol.client.events import BarrierReached
from upr_protocol.client.feeds import Feeds
from upr_protocol.errors import UprError
from upr_protocol.limits import OPEN_BARRIERS_MAX


class _Waiter:
    """Who waits for one barrier."""

    __slots__ = ("error", "event", "reached")

    def __init__(self) -> None:
        self.event = trio.Event()
        self.reached: BarrierReached | None = None
        self.error: UprError | None = None


class Barriers:
    """Sends barriers and brings each back to the one who waits for it.

    Args:
        feeds: What sends them.
    """

    __slots__ = ("_back", "_cookies", "_error", "_feeds", "_waiters")

    def __init__(self, feeds: Feeds) -> None:
        self._feeds = feeds
        self._cookies = count(1)
        # None for a barrier that is not waited for any more.
        self._waiters: dict[bytes, _Waiter | None] = {}
        self._back = trio.Event()
        self._error: UprError | None = None

    def new_cookie(self) -> bytes:
        """A cookie of no other barrier."""
        return b"upr-%d" % next(self._cookies)

    async def wait(self) -> BarrierReached:
        """Sends a barrier, when fewer than 64 are open, and waits until `returned` has it.

        Cancelled while it waits, the barrier still comes back, unseen.

        Raises:
            UprError: What `end` was given.
        """
        rounds = self._feeds.course.rounds
        while self._error is None and len(rounds) >= OPEN_BARRIERS_MAX:
            await self._back.wait()
        if self._error is not None:
            raise self._error
        cookie = self.new_cookie()
        self._feeds.barrier(cookie)
        waiter = self._waiters[cookie] = _Waiter()
        try:
            await waiter.event.wait()
        finally:
            if cookie in self._waiters:
                self._waiters[cookie] = None
        if waiter.error is not None:
            raise waiter.error
        assert waiter.reached is not None
        return waiter.reached

    def returned(self, event: BarrierReached) -> bool:
        """A barrier came back, and all before it was dealt with.

        Returns:
            Whether it is one that was sent by `wait`.
        """
        back, self._back = self._back, trio.Event()
        back.set()
        if event.cookie not in self._waiters:
            return False
        waiter = self._waiters.pop(event.cookie)
        if waiter is not None:
            waiter.reached = event
            waiter.event.set()
        return True

    def end(self, error: UprError) -> None:
        """No barrier comes back any more."""
        if self._error is None:
            self._error = error
        self._back.set()
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters.values():
            if waiter is not None:
                waiter.error = error
                waiter.event.set()
