"""One session over one plain socket, without a thread: the caller that waits also reads."""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import attrs

from upr_protocol.address import Address
from upr_protocol.chunk import Buffer
from upr_protocol.client.core.handshake import Handshake
from upr_protocol.client.core.results import status_of
from upr_protocol.client.options import ConnectionOptions
from upr_protocol.errors import (
    BrokenError,
    ClosedError,
    RemoteProtocolError,
    ServerError,
    UprError,
)
from upr_protocol.ids import PartitionId
from upr_protocol.limits import SEND_TIMEOUT_S
from upr_protocol.session import SessionState
from upr_protocol.transport import (
    SocketDial,
    dial_socket,
    new_scratch,
    read_available,
    write_available,
)
from upr_protocol.wire import Close, Error, Message

BLOCKING_IDLE_INTERVAL_S: Final = 300
"""A program that blocks says nothing while it is busy with something else: the server takes it for
dead only after twice this."""

_CLOSE_TIMEOUT_S: Final = 2.0
"""How long a peer that does not read may delay closing."""


@attrs.frozen
class SocketOptions(ConnectionOptions):
    """How to connect with plain sockets.

    Attributes:
        dial: Connects to an address, where plain TCP will not do.
        clock: Tells the time in seconds.
    """

    dial: SocketDial = dial_socket
    clock: Callable[[], float] = time.monotonic


class BlockingConnection:
    """A connection on which the handshake is done.

    No task runs in the background: `step` writes what is queued, reads what has arrived and keeps
    the connection alive. While nobody calls it, nobody reads.

    Args:
        address: Where to connect to.
        options: How to connect.
        partitions: The partitions whose histories the caller needs; empty for all.

    Attributes:
        session: The session.
        handshake: The server's first answers.
        failure: Why the connection is over; None while it is not.
        socket: The connection's socket.
        clock: Tells the time in seconds.

    Raises:
        BrokenError: It could not connect, or the connection broke during the handshake.
        ServerError: The server refused the bucket.
        RemoteProtocolError: The peer does not speak the protocol.
    """

    def __init__(
        self, address: Address, options: SocketOptions, partitions: tuple[PartitionId, ...] = ()
    ) -> None:
        self.clock = options.clock
        deadline = self.clock() + options.connect_timeout_s
        try:
            self.socket = options.dial(address, options.connect_timeout_s)
        except OSError as error:
            raise BrokenError(f"cannot connect to {address}: {error}") from error
        self.socket.setblocking(False)
        self._scratch = new_scratch()
        self._writing: Sequence[Buffer] = ()
        self._written_at = self.clock()
        self._silent_s = 0.0
        """How long callers have read since the last bytes arrived."""
        self._inbox: deque[Message] = deque()
        self.failure: UprError | None = None
        self.session = options.session(self.clock())
        self.handshake = Handshake(self.session, address.bucket, partitions)
        try:
            while not self.handshake.done:
                if self.clock() >= deadline:
                    self._fail(BrokenError(f"{address} did not answer in time"))
                self.step(deadline)
        except BaseException:
            self.socket.close()
            raise

    # Messages.

    def receive(self, deadline: float) -> Message | None:
        """The next message; None when none has arrived by the deadline. With a deadline in the past
        it reads once.

        Raises:
            BrokenError, ServerError, RemoteProtocolError: The connection is over.
        """
        while not self._inbox:
            is_last = self.clock() >= deadline
            self.step(deadline)
            if is_last and not self._inbox:
                return None
        return self._inbox.popleft()

    def take(self) -> Message | None:
        """The next message that was read already; None without one."""
        return self._inbox.popleft() if self._inbox else None

    @property
    def has_messages(self) -> bool:
        """Whether `take` would give a message."""
        return bool(self._inbox)

    def put_back(self, messages: Sequence[Message]) -> None:
        """Gives back messages that are for another caller."""
        self._inbox.extendleft(reversed(messages))

    def step(self, deadline: float) -> None:
        """Writes and reads what is possible now. Waits for either until the deadline, which may be
        in the past.

        Raises:
            BrokenError, ServerError, RemoteProtocolError: The connection is over.
        """
        if self.failure is None:
            step_any([self], deadline)
        if self.failure is not None:
            raise self.failure

    # For `step_any`. An error ends the connection, and is kept in `failure`.

    def resume_reading(self) -> None:
        """A caller is back. Without a caller nothing was read: for the idle timeout, only silence
        during a read counts."""
        self.session.keep_alive.received(self.clock() - self._silent_s)

    def prepare(self, now: float) -> tuple[int, float]:
        """Writes what is queued.

        Returns:
            The events to poll for, and until when at most.
        """
        events, until = 0, now
        with self._keep_failure():
            if not self.session.tick(now):
                self._fail(BrokenError("idle timeout: the server was silent for too long"))
            self._write()
            events, until = select.POLLIN, max(self.session.keep_alive.next_check(), now + 0.001)
            if self._writing:
                events |= select.POLLOUT
                until = min(until, self._written_at + SEND_TIMEOUT_S)
        return events, until

    def handle(self, events: int, waited_s: float) -> bool:
        """Reads if the socket is readable; whether anything was read."""
        if not events & ~select.POLLOUT:
            self._silent_s += waited_s
            is_late = self._writing and self.clock() >= self._written_at + SEND_TIMEOUT_S
            if is_late and not events:
                with self._keep_failure():
                    self._fail(BrokenError("send timeout: the server stopped reading"))
            return False
        self._silent_s = 0.0
        with self._keep_failure():
            self._read()
            return True
        return False

    @contextmanager
    def _keep_failure(self) -> Iterator[None]:
        try:
            yield
        except RemoteProtocolError as error:
            with suppress(OSError):
                self._write()  # the session has queued an `Error`: send what goes of it
            with suppress(UprError):
                self._fail(error)
        except UprError:
            assert self.failure is not None
        except OSError as error:
            with suppress(UprError):
                self._fail(BrokenError(f"the connection was lost: {error}"))

    def _read(self) -> None:
        try:
            count = read_available(self.socket.fileno(), self.session, self._scratch, self.clock())
        except BlockingIOError:
            return
        if not count:
            self._fail(BrokenError("the server closed the connection"))
        for message in self.session.events():
            if isinstance(message, Error):
                self._fail(ServerError(status_of(message.status), message.sentence))
            elif self.handshake.done:
                self._inbox.append(message)
            else:
                try:
                    self.handshake.receive(message)
                except ServerError as error:
                    self._fail(error)
        self._write()

    def _write(self) -> None:
        """Writes as much as the socket takes at once."""
        now = self.clock()
        while True:
            if not self._writing:
                self._writing = self.session.take_outgoing(now)
                self._written_at = now
                if not self._writing:
                    return
            before = sum(map(len, self._writing))
            self._writing = write_available(self.socket.fileno(), self._writing)
            left = sum(map(len, self._writing))
            if left < before:
                self._written_at = now
            if left:
                return

    def _fail(self, error: UprError) -> None:
        if self.failure is None:
            self.failure = error
            self.socket.close()
        raise error

    def close(self) -> None:
        """Sends a `Close`, within a short deadline, and closes the socket. Closing again does
        nothing."""
        if self.failure is not None:
            return
        deadline = self.clock() + _CLOSE_TIMEOUT_S
        with suppress(OSError, UprError):
            if self.session.state is not SessionState.CLOSED:
                self.session.send(Close())
            while True:
                self._write()
                left_s = deadline - self.clock()
                if not self._writing or left_s <= 0:
                    break
                poll = select.poll()
                poll.register(self.socket, select.POLLOUT)
                poll.poll(left_s * 1000)
        with suppress(ClosedError):
            self._fail(ClosedError("the connection was closed here"))


def step_any(connections: Sequence[BlockingConnection], deadline: float) -> None:
    """Does for several connections what `BlockingConnection.step` does for one: waits until a
    message has arrived on any of them, or one of them is over, or the deadline. Each one's
    `failure` says whether it is over."""
    if any(connection.has_messages for connection in connections):
        deadline = 0.0
    live = [connection for connection in connections if connection.failure is None]
    for connection in live:
        connection.resume_reading()
    while live and all(connection.failure is None for connection in live):
        if not _poll_once(live, deadline):
            return


def _poll_once(connections: Sequence[BlockingConnection], deadline: float) -> bool:
    """Waits once; whether nothing was read and there is time to wait again."""
    now = connections[0].clock()
    poll, until = select.poll(), deadline
    for connection in connections:
        events, connection_until = connection.prepare(now)
        until = min(until, connection_until)
        if connection.failure is None:
            poll.register(connection.socket, events)
    ready = dict(poll.poll(max(0.0, until - now) * 1000))
    after = connections[0].clock()
    was_read = False
    for connection in connections:
        if connection.failure is None:
            events = ready.get(connection.socket.fileno(), 0)
            was_read |= connection.handle(events, after - now)
    return not was_read and after < deadline
