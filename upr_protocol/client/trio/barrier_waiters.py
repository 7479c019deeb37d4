"""The tasks that wait for barriers."""

from __future__ import annotations

from itertools import count

import trio

from upr_protocol.client.core.events import BarrierReached
from upr_protocol.client.trio.request_channel import PendingReply
from upr_protocol.client.trio.streams import ConsumerStreams
from upr_protocol.concurrency import without_traceback
from upr_protocol.errors import ClosedError, UprError
from upr_protocol.limits import OPEN_BARRIERS_MAX


class BarrierWaiters:
    """Sends barriers, and brings each back to the task that waits for it."""

    __slots__ = ("_application_cookies", "_cookies", "_error", "_room", "_streams", "_waiters")

    def __init__(self, streams: ConsumerStreams) -> None:
        self._streams = streams
        self._cookies = count(1)
        self._application_cookies: set[bytes] = set()
        """Of the barriers that the application sent, and has not seen come back."""
        self._waiters: dict[bytes, PendingReply[BarrierReached] | None] = {}
        """By cookie the waiter; None after it was cancelled."""
        self._room = trio.lowlevel.ParkingLot()
        """The tasks that wait until fewer barriers are open. Each that comes back wakes one task:
        to wake all of them would be quadratic work."""
        self._error: UprError | None = None

    def send(self, cookie: bytes | None) -> bytes:
        """Sends a barrier that the application is to see. Returns its cookie: `cookie`, or a new
        one.

        Raises:
            LocalProtocolError: Too many barriers are open, this one is, or the cookie is too long.
        """
        if cookie is None:
            cookie = self._new_cookie()
        self._streams.send_barrier(cookie)
        self._application_cookies.add(cookie)
        return cookie

    def _new_cookie(self) -> bytes:
        """A cookie that no other barrier has."""
        while (cookie := b"upr-%d" % next(self._cookies)) in self._application_cookies:
            pass
        return cookie

    async def send_and_wait(self) -> BarrierReached:
        """Sends a barrier once fewer than 64 are open, and waits until it comes back.

        Cancelled while it waits, the barrier still comes back, unseen.

        Raises:
            UprError: The reason why no barrier comes back any more.
        """
        barriers = self._streams.state.barriers
        while self._error is None and len(barriers) >= OPEN_BARRIERS_MAX:
            await self._room.park()
        if self._error is not None:
            raise without_traceback(self._error)
        cookie = self._new_cookie()
        try:
            self._streams.send_barrier(cookie)
        except UprError:
            self._room.unpark()  # it makes no use of its turn
            raise
        waiter = self._waiters[cookie] = PendingReply()
        try:
            return await waiter.wait()
        finally:
            if cookie in self._waiters:
                self._waiters[cookie] = None

    def take_returned(self, event: BarrierReached) -> bool:
        """A barrier came back, and everything before it is processed.

        Returns:
            Whether `send_and_wait` sent it, so that nobody else is to see it.
        """
        self._room.unpark()
        if event.cookie not in self._waiters:
            self._application_cookies.discard(event.cookie)
            return False
        waiter = self._waiters.pop(event.cookie)
        if waiter is not None:
            waiter.resolve(event)
        return True

    def fail_all(self, error: UprError) -> None:
        """No barrier comes back any more."""
        if self._error is None:
            self._error = error
        self._room.unpark_all()
        for cookie, waiter in self._waiters.items():
            if waiter is not None:
                waiter.resolve(without_traceback(error))
                # It may have come back already, behind events that are yet to be processed. Then
                # the application is still not to see it.
                self._waiters[cookie] = None

    def close(self) -> None:
        """No barrier comes back any more, and no task waits for one."""
        self._error = without_traceback(self._error or ClosedError("the consumer was closed"))
