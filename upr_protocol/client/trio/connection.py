"""One session over one Trio stream: a task that reads, one that writes, one that keeps alive."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final, TypedDict

import attrs
import trio

from upr_protocol.address import Address
from upr_protocol.client.core.handshake import Handshake
from upr_protocol.client.core.log_in import ClientLogIn
from upr_protocol.client.core.node_batches import OUTGOING_BYTES_MAX
from upr_protocol.client.core.results import status_of
from upr_protocol.client.core.retry import RETRY_TIMEOUT_S_DEFAULT, RetryState
from upr_protocol.client.credentials import resolve_credentials
from upr_protocol.client.options import DriverOptions, new_nonce
from upr_protocol.concurrency import Notifier, background_nursery, without_traceback
from upr_protocol.errors import (
    BrokenError,
    ClosedError,
    LocalProtocolError,
    ServerError,
    TlsError,
    UprError,
)
from upr_protocol.ids import PartitionId
from upr_protocol.security import TlsSettings
from upr_protocol.session import ClientSession, SessionState
from upr_protocol.transport import (
    Dial,
    TlsStream,
    dial_tcp,
    encrypted_to_server,
    new_scratch,
    read_rest,
    read_some,
    write_now,
    write_rest,
)
from upr_protocol.wire import Close, Error, Message

_READ_BYTES_AT_ONCE: Final = 512 * 1024
"""How much of what has arrived is read before other tasks get a turn."""

_CLOSE_TIMEOUT_S: Final = 2.0
"""How long a peer that does not read may delay closing."""

_READ_REST_TIMEOUT_S: Final = 1.0
"""Once the connection takes nothing more: how long the reader may take to come to its end."""


class ConnectOptions(TypedDict, total=False):
    """How to connect: options that `connect`, `consume`, `publisher` and others have in common.

    Attributes:
        identity: `what:who`, for the server's logs and statistics.
        idle_interval_s: After so much silence, each side tells the other that it is alive.
        connect_timeout_s: How long a connection and its handshake may take. Where the URL names
            several hosts, the first attempt at each but the last takes 2 s at most.
        dial: Connects to an address, where plain TCP will not do.
        draw: Gives numbers in [0, 1), for the waits between attempts.
    """

    identity: str
    idle_interval_s: int
    connect_timeout_s: float
    dial: Dial
    draw: Callable[[], float]


@attrs.frozen
class TrioOptions(DriverOptions):
    """How to connect with Trio, to one node or to the nodes of a bucket.

    Attributes:
        retry_timeout_s: How long to go on without a node for a partition that is waited for.
        follow_map: Whether to follow the partition map; otherwise everything goes to the user's
            address.
    """

    dial: Dial = dial_tcp
    draw: Callable[[], float] = random.random
    retry_timeout_s: float = RETRY_TIMEOUT_S_DEFAULT
    follow_map: bool = True

    def new_retry_state(self) -> RetryState:
        """The retry state of one more node."""
        return RetryState(self.retry_timeout_s, self.draw)


class ConnectionHandler:
    """Handles what arrives on a connection. Only `wait_for_room` waits. Here nothing is done: a
    handler has the methods that concern it."""

    def connection_made(self, connection: TrioConnection) -> None:
        """The handshake is done; called before any message is handed on."""

    def message_received(self, message: Message) -> None:
        """A message has arrived."""

    def ready_to_write(self) -> float | None:
        """The writer has taken what was queued, and takes what is queued now next.

        Returns:
            When to be called again at the latest, in seconds of Trio's clock; None if only
            `request_write` says so.
        """
        return None

    async def wait_for_room(self) -> None:
        """Called between reads: waits while too much is queued for the application."""

    def connection_lost(self, error: UprError) -> None:
        """The connection is over; called once."""


class TrioConnection:
    """A connection on which the handshake is done. `open_connection` makes one.

    Attributes:
        session: The session. After `session.send`, call `flush`.
        failure: Why the connection is over; None while it is not.
        ready: Set when the handshake is done, or the connection is over before.
        ended: Set when the connection is over, or nothing is left to do on it; whoever has opened
            it then closes it.
        certificate_name: The name in the server's certificate; empty if it showed none.
    """

    def __init__(
        self,
        address: Address,
        stream: trio.abc.Stream,
        session: ClientSession,
        handshake: Handshake,
        handler: ConnectionHandler,
    ) -> None:
        self.address = address
        self.session = session
        self.handshake = handshake
        self.failure: UprError | None = None
        self.ended = trio.Event()
        self.ready = trio.Event()
        self.certificate_name = stream.link.peer_name if isinstance(stream, TlsStream) else ""
        self._stream = stream
        self._handler = handler
        self._wake = Notifier()
        self._is_paused = False
        self._flushed = trio.Event()

    def send(self, message: Message) -> None:
        """Queues a message and wakes the writer.

        Raises:
            LocalProtocolError: The session does not allow this message now.
            BrokenError, ClosedError, ServerError: The connection is over.
        """
        if self.failure is not None:
            raise self.failure
        self.session.send(message)
        self._wake.notify()

    def flush(self) -> None:
        """Wakes the writer, if messages are queued."""
        if self.session.outgoing_bytes:
            self._wake.notify()

    def request_write(self) -> None:
        """Wakes the writer, which calls `ConnectionHandler.ready_to_write` once the tasks that run
        now have had their turn."""
        self._wake.notify()

    @property
    def is_congested(self) -> bool:
        """Whether so much is queued that senders should wait for `ready_to_write`."""
        return self.session.outgoing_bytes >= OUTGOING_BYTES_MAX

    def request_close(self) -> None:
        """Nothing is left to do on this connection. The task that waits for `ended` closes it."""
        self.ended.set()

    def fail(self, error: UprError) -> None:
        """Ends the connection. Only the first reason counts."""
        if self.failure is None:
            self.failure = error
            self.ended.set()
            self.ready.set()
            self._wake.notify()
            self._handler.connection_lost(error)

    async def run_reader(self) -> None:
        """Reads until the connection is over."""
        session, stream = self.session, self._stream
        scratch = new_scratch()
        try:
            while self.failure is None:
                count = await read_some(stream, session, scratch)
                if not count:
                    self.fail(BrokenError("the server closed the connection"))
                    return
                bytes_left = _READ_BYTES_AT_ONCE
                while count:
                    for message in session.messages():
                        self._received(message)
                    bytes_left -= count
                    count = read_rest(stream, session, scratch) if bytes_left > 0 else 0
                self.flush()
                self._is_paused = True
                await self._handler.wait_for_room()
                self._is_paused = False
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.fail(BrokenError(f"the connection was lost: {error.__cause__ or error!r}"))
        except UprError as error:
            # If the server broke a rule, the session has queued an `Error` that says so. The writer
            # still sends it before the stream is closed.
            self.fail(error)

    def _received(self, message: Message) -> None:
        if isinstance(message, Error):
            self.fail(ServerError(status_of(message.status), message.sentence))
        elif self.handshake.is_done:
            self._handler.message_received(message)
        else:
            self.handshake.receive(message)
            if self.handshake.is_done:
                self._handler.connection_made(self)
                self.ready.set()

    async def run_writer(self) -> None:
        """Writes until the connection is over, and then the rest of the queue."""
        session = self.session
        try:
            while (buffers := session.take_outgoing(trio.current_time())) or self.failure is None:
                again_at = self._handler.ready_to_write() if self.failure is None else None
                if buffers:
                    if unsent := write_now(self._stream, buffers):
                        await write_rest(self._stream, unsent)
                elif not session.outgoing_bytes and self.failure is None:
                    await self._sleep(again_at)
        except trio.TooSlowError:
            self.fail(BrokenError("send timeout: the server stopped reading"))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            # Before the server closed the connection, it may have answered, or have said why.
            with trio.move_on_after(_READ_REST_TIMEOUT_S):
                await self.ended.wait()
            self.fail(BrokenError(f"the connection was lost: {error}"))
        finally:
            self._flushed.set()

    async def _sleep(self, until: float | None) -> None:
        """Waits until the writer is woken, or until a time."""
        if until is None:
            # A timeout costs as much as the wait.
            await self._wake.wait()
        else:
            with trio.move_on_at(until):
                await self._wake.wait()

    async def run_keep_alive(self) -> None:
        """Sends `Noop` when it is due, and ends the connection when the server is silent for too
        long."""
        session = self.session
        await self.ready.wait()
        was_silent = False
        while self.failure is None:
            now = trio.current_time()
            if self._is_paused:
                # Nobody reads: the silence is ours, not the server's.
                session.keep_alive.note_received(now)
            if session.tick(now):
                was_silent = False
            elif was_silent:
                self.fail(BrokenError("idle timeout: the server was silent for too long"))
                return
            else:
                # Perhaps this process was suspended: first read what has arrived meanwhile.
                was_silent = True
            self._wake.notify()
            assert self.handshake.hello_reply is not None
            pause_s = self.handshake.hello_reply.idle_interval_s / 4
            await trio.sleep_until(max(session.keep_alive.next_check(), now + pause_s))

    async def close_gracefully(self) -> None:
        """Ends the connection, with a `Close` if the session allows one, and waits until the queue
        is written. If the peer does not read, that may never happen: wait with a deadline."""
        if self.failure is None and self.session.state is not SessionState.CLOSED:
            # Before the handshake is done, no `Close` may be sent.
            with suppress(LocalProtocolError):
                self.session.send(Close())
        self.fail(ClosedError("the connection was closed here"))
        await self._flushed.wait()

    def detach(self) -> None:
        """Call it when the tasks of the connection have ended: refers to its handler no longer, and
        its session forgets what has arrived of a frame. So neither is in a reference cycle."""
        self._handler = ConnectionHandler()
        self.session.forget_received()
        if self.failure is not None:
            self.failure = without_traceback(self.failure)


@asynccontextmanager
async def open_connection(
    address: Address,
    options: TrioOptions,
    handler: ConnectionHandler,
    partitions: tuple[PartitionId, ...] = (),
) -> AsyncIterator[TrioConnection]:
    """A connection to `address`, its bucket opened when the address names one.

    Cancelled while it connects, it leaves nothing behind. Leaving the context closes it.

    Raises:
        BrokenError: It could not connect, or the connection broke during the handshake.
        CredentialsError: The password is not to be had.
        ServerError: The server refused the user or the bucket.
        RemoteProtocolError: The peer does not speak the protocol, or does not know the user.
    """
    credentials = resolve_credentials(address.security.credentials)
    deadline = trio.current_time() + options.connect_timeout_s
    stream = await _dial(address, options, deadline)
    session = options.session(trio.current_time())
    binding = stream.link.channel_binding if isinstance(stream, TlsStream) else None
    log_in = ClientLogIn(credentials, new_nonce(), binding)
    handshake = Handshake(session, address.bucket, partitions, log_in)
    connection = TrioConnection(address, stream, session, handshake, handler)
    try:
        async with background_nursery() as nursery:
            nursery.start_soon(connection.run_reader)
            nursery.start_soon(connection.run_writer)
            nursery.start_soon(connection.run_keep_alive)
            try:
                with trio.CancelScope(deadline=deadline):
                    await connection.ready.wait()
                if not connection.ready.is_set():
                    connection.fail(BrokenError(f"{address} did not answer in time"))
                if connection.failure is not None:
                    raise connection.failure
                yield connection
            finally:
                deadline = trio.current_time() + _CLOSE_TIMEOUT_S
                with trio.CancelScope(shield=True, deadline=deadline):
                    await connection.close_gracefully()
                await trio.aclose_forcefully(stream)
    finally:
        connection.detach()
        del connection  # or an error that is raised here would refer to it


async def _dial(address: Address, options: TrioOptions, deadline: float) -> trio.abc.Stream:
    with trio.CancelScope(deadline=deadline):
        try:
            stream = await options.dial(address)
            tls = address.security.tls
            return stream if tls is None else await _encrypted(stream, tls, address.host)
        except (OSError, trio.BrokenResourceError) as error:
            raise BrokenError(f"cannot connect to {address}: {_reason(error)}") from error
        except TlsError as error:
            raise TlsError(f"cannot connect to {address}: {error}") from error
    raise BrokenError(f"cannot connect to {address}: it did not answer in time")


def _reason(error: Exception) -> str:
    """Why there is no connection. Trio's own sentence has no more than the address."""
    cause = error.__cause__
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    if isinstance(cause, OSError) and cause.errno:
        return os.strerror(cause.errno)
    # The text of an error of the system begins with a number in brackets.
    return getattr(error, "strerror", None) or str(error)


async def _encrypted(stream: trio.abc.Stream, tls: TlsSettings, server_name: str) -> TlsStream:
    try:
        return await encrypted_to_server(stream, tls, server_name)
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
