"""Requests over one connection, any number at a time."""

from __future__ import annotations

from typing import Any, Final, Generic, TypeVar

import trio

from upr_protocol.address import Address
from upr_protocol.client.core import calls
from upr_protocol.client.core.calls import Call
from upr_protocol.client.trio.connection import Connection
from upr_protocol.errors import ServerError, Status, UprError
from upr_protocol.limits import REQUESTS_OPEN_MAX
from upr_protocol.wire import Credit, Message, Mutate

T = TypeVar("T")

CREDIT_TIMEOUT_S_DEFAULT: Final = 30.0
"""How long a server that grants no credit is waited for."""


class PendingReply(Generic[T]):
    """The place an answer comes to.

    Args:
        call: What was asked.
    """

    __slots__ = ("_call", "_error", "_event", "_message")

    def __init__(self, call: Call[T]) -> None:
        self._call = call
        self._message: Message | None = None
        self._error: UprError | None = None
        self._event = trio.Event()

    def put(self, message: Message | None, error: UprError | None = None) -> None:
        """The answer came, or none will."""
        self._message, self._error = message, error
        self._event.set()

    async def wait(self) -> T:
        """What the answer means. Cancelled, it is waited for no more; what was asked may be done
        all the same.

        Raises:
            ServerError: It was refused.
            BrokenError, ClosedError: None will come.
        """
        await self._event.wait()
        if self._error is not None:
            raise self._error
        assert self._message is not None
        return self._call.result(calls.checked(self._message))


class RequestChannel:
    """Sends requests and brings each answer to the one who asked; a connection's handler.

    Args:
        credit_timeout_s: How long a change waits for a server that grants no credit.
        address: Where the connection leads, for messages.
    """

    def __init__(self, address: Address, credit_timeout_s: float) -> None:
        self.requests = 0
        self._address = address
        self._credit_timeout_s = credit_timeout_s
        self._connection: Connection | None = None
        self._replies: dict[int, PendingReply[Any]] = {}
        self._sending = 0
        self._changed = trio.Event()

    def __len__(self) -> int:
        """How many requests wait for their answers."""
        return len(self._replies)

    @property
    def connection(self) -> Connection:
        """The connection."""
        assert self._connection is not None
        return self._connection

    # The connection's side.

    def connected(self, connection: Connection) -> None:
        """See `ConnectionHandler`."""
        self._connection = connection

    def received(self, message: Message) -> None:
        """See `ConnectionHandler`."""
        reply = self._replies.pop(message.opaque, None)
        if reply is not None:
            reply.put(message)
            self._notify()
        elif isinstance(message, Credit):
            self._notify()

    def writable(self) -> None:
        """See `ConnectionHandler`."""
        self._notify()

    async def breathe(self) -> None:
        """See `ConnectionHandler`. Answers are bounded by the questions."""

    def lost(self, error: UprError) -> None:
        """See `ConnectionHandler`."""
        replies, self._replies = self._replies, {}
        for reply in replies.values():
            reply.put(None, error)
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    # Asking.

    async def ask(self, call: Call[T]) -> T:
        """Makes a request and waits for its answer.

        Raises:
            ServerError: It was refused.
            BrokenError: The connection was lost; it may have been done or not.
            ClosedError: The connection was closed here.
        """
        reply = await self.send(call)
        return await reply.wait()

    async def send(self, call: Call[T]) -> PendingReply[T]:
        """Makes a request; the answer comes to what this returns. Waits for room and, with a
        change, for credit; cancelled while it does, nothing was sent.

        Raises:
            ServerError: The server granted no credit in time.
            BrokenError, ClosedError: The connection is over.
        """
        self._sending += 1
        try:
            return await self._send(self.connection, call)
        finally:
            self._sending -= 1
            self._notify()

    async def _send(self, connection: Connection, call: Call[T]) -> PendingReply[T]:
        await self._await_room(connection)
        opaque = connection.session.new_opaque()
        request = call.request(opaque)
        while (
            isinstance(request, Mutate)
            and connection.failure is None
            and not connection.session.credit.open
        ):
            await self._await_credit(connection)
            # Others who waited for it too may have taken the room.
            await self._await_room(connection)
        connection.send(request)
        reply = PendingReply(call)
        self._replies[opaque] = reply
        self.requests += 1
        return reply

    async def drain(self) -> None:
        """Waits until everything that was asked here has its answer, or its error. Those who wait
        for room or credit count: what they ask is refused, and they go to the next node."""
        while self._sending or self._replies:
            await self._changed.wait()

    async def _await_room(self, connection: Connection) -> None:
        while connection.failure is None and (
            len(self._replies) >= REQUESTS_OPEN_MAX - 1 or connection.crowded
        ):
            await self._changed.wait()

    async def _await_credit(self, connection: Connection) -> None:
        deadline = trio.current_time() + self._credit_timeout_s
        while connection.failure is None and not connection.session.credit.open:
            with trio.move_on_at(deadline) as scope:
                await self._changed.wait()
            if scope.cancelled_caught:
                raise over_quota(self._address, self._credit_timeout_s)


def over_quota(address: Address, timeout_s: float) -> ServerError:
    """What is raised when a server grants no credit for too long."""
    return ServerError(
        Status.TEMPORARY_FAILURE,
        f"the bucket {address.bucket!r} gives no credit for {timeout_s:g} s: it is over its memory "
        "quota, or its disk is full",
    )
