"""Requests over one connection, any number at a time."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import trio

from upr_protocol.address import Address
from upr_protocol.client.core.calls import Call, checked, over_quota
from upr_protocol.client.trio.connection import Connection
from upr_protocol.concurrency import Notifier
from upr_protocol.errors import UprError
from upr_protocol.limits import REQUESTS_OPEN_MAX
from upr_protocol.wire import Credit, Message, Mutate

T = TypeVar("T")


class PendingReply(Generic[T]):
    """An answer that is still to arrive.

    Args:
        call: The request.
    """

    __slots__ = ("_call", "_error", "_event", "_message")

    def __init__(self, call: Call[T]) -> None:
        self._call = call
        self._message: Message | None = None
        self._error: UprError | None = None
        self._event = trio.Event()

    def resolve(self, message: Message) -> None:
        """The answer has arrived."""
        self._message = message
        self._event.set()

    def fail(self, error: UprError) -> None:
        """No answer will arrive."""
        self._error = error
        self._event.set()

    async def wait(self) -> T:
        """Waits for the answer, and gives what it means. Cancelled, the request may still be
        carried out; its answer is dropped.

        Raises:
            ServerError: The server refused.
            BrokenError, ClosedError: No answer will arrive.
        """
        await self._event.wait()
        if self._error is not None:
            raise self._error
        assert self._message is not None
        return self._call.result(checked(self._message))


class RequestChannel:
    """Sends requests, and brings each answer to its caller; the handler of a connection.

    Args:
        address: Where the connection leads, for messages.
        credit_timeout_s: How long a change waits for a server that grants no credit.

    Attributes:
        requests: How many requests were sent.
    """

    def __init__(self, address: Address, credit_timeout_s: float) -> None:
        self.requests = 0
        self._address = address
        self._credit_timeout_s = credit_timeout_s
        self._connection: Connection | None = None
        self._replies: dict[int, PendingReply[Any]] = {}
        self._sending = 0
        self._changed = Notifier()

    def __len__(self) -> int:
        """How many requests have no answer yet."""
        return len(self._replies)

    @property
    def connection(self) -> Connection:
        """The connection; the last one when it is lost."""
        assert self._connection is not None
        return self._connection

    @property
    def is_up(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None and self._connection.failure is None

    # For the connection.

    def connected(self, connection: Connection) -> None:
        self._connection = connection

    def received(self, message: Message) -> None:
        reply = self._replies.pop(message.opaque, None)
        if reply is not None:
            reply.resolve(message)
            self._changed.notify()
        elif isinstance(message, Credit):
            self._changed.notify()

    def writable(self) -> None:
        self._changed.notify()

    async def wait_for_room(self) -> None:
        """Reads on: the open requests bound the answers."""

    def lost(self, error: UprError) -> None:
        replies, self._replies = self._replies, {}
        for reply in replies.values():
            reply.fail(error)
        self._changed.notify()

    # For callers.

    async def ask(self, call: Call[T]) -> T:
        """Sends a request and waits for its answer.

        Raises:
            ServerError: The server refused, or granted no credit in time.
            BrokenError: The connection was lost; the request may have been carried out or not.
            ClosedError: The connection was closed here.
        """
        reply = await self.send(call)
        return await reply.wait()

    async def send(self, call: Call[T]) -> PendingReply[T]:
        """Sends a request. Waits for room and, with a change, for credit; cancelled meanwhile,
        nothing was sent.

        Raises:
            ServerError: The server granted no credit in time.
            BrokenError, ClosedError: The connection is over.
        """
        self._sending += 1
        try:
            return await self._send(self.connection, call)
        finally:
            self._sending -= 1
            self._changed.notify()

    async def _send(self, connection: Connection, call: Call[T]) -> PendingReply[T]:
        await self._await_room(connection)
        opaque = connection.session.new_opaque()
        request = call.request(opaque)
        while isinstance(request, Mutate) and self._is_starved(connection):
            await self._await_credit(connection)
            # Other tasks that waited for credit may have taken the room.
            await self._await_room(connection)
        connection.send(request)
        reply = PendingReply(call)
        self._replies[opaque] = reply
        self.requests += 1
        return reply

    async def drain(self) -> None:
        """Waits until every request that was sent here has its answer or its error. Tasks that
        still wait for room or credit count, too: their requests will be refused here, and are then
        sent to the next node."""
        await self._changed.wait_until(lambda: not self._sending and not self._replies)

    async def _await_room(self, connection: Connection) -> None:
        await self._changed.wait_until(
            lambda: (
                connection.failure is not None
                or (len(self._replies) < REQUESTS_OPEN_MAX - 1 and not connection.is_congested)
            )
        )

    def _is_starved(self, connection: Connection) -> bool:
        return connection.failure is None and not connection.session.credit.open

    async def _await_credit(self, connection: Connection) -> None:
        with trio.move_on_after(self._credit_timeout_s) as scope:
            await self._changed.wait_until(lambda: not self._is_starved(connection))
        if scope.cancelled_caught:
            raise over_quota(self._address, self._credit_timeout_s)
