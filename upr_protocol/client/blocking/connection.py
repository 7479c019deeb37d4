"""One session over one plain socket, without a thread: whoever waits does the reading."""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

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

T = TypeVar("T")

BLOCKING_IDLE_INTERVAL_S: Final = 300
"""A program that blocks says nothing while it is busy with something else: the server takes it for
dead only after twice this."""

_GOODBYE_S: Final = 2.0


@attrs.frozen
class SocketOptions(ConnectionOptions):
    """How to connect with plain sockets.

    Attributes:
        dial: How to reach an address, where that is not plain TCP.
        clock: Tells the time in seconds.
    """

    dial: SocketDial = dial_socket
    clock: Callable[[], float] = time.monotonic


class BlockingConnection:
    """A connection on which the handshake is done.

    Nothing happens by itself: `step` writes what was said, reads what came and keeps the connection
    alive. While nobody calls it, nobody listens.

    Args:
        address: Where to.
        options: How.
        partitions: Those whose histories are of interest; none for all.

    Attributes:
        session: The session.
        handshake: What was learnt in the beginning.
        failure: Why the connection is over; None while it is not.
        socket: The connection.
        clock: Tells the time in seconds.

    Raises:
        BrokenError: There is no connection to be had, or it broke before the handshake was done.
        ServerError: The server refused the bucket.
        RemoteProtocolError: What answered does not speak the protocol.
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
        """How long it was listened in vain since something came."""
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

    def receive(self, deadline: float) -> Message | None:
        """The next message; None when there was none by the deadline, or just now when that is
        past.

        Raises:
            BrokenError, ServerError, RemoteProtocolError: The connection is over.
        """
        while not self._inbox:
            if self.failure is not None:
                raise self.failure
            late = self.clock() >= deadline
            self.step(deadline)
            if late and not self._inbox:
                return None
        return self._inbox.popleft()

    def take(self) -> Message | None:
        """A message that came already; None when there is none."""
        return self._inbox.popleft() if self._inbox else None

    @property
    def has_messages(self) -> bool:
        """Whether there is something to `take`."""
        return bool(self._inbox)

    def put_back(self, messages: Sequence[Message]) -> None:
        """These were received and are for somebody else."""
        self._inbox.extendleft(reversed(messages))

    def step(self, deadline: float) -> None:
        """Writes what may be written and reads what there is; waits for either until the deadline,
        which may be past.

        Raises:
            BrokenError, ServerError, RemoteProtocolError: The connection is over.
        """
        if self.failure is not None:
            raise self.failure
        step_any([self], deadline)
        if self.failure is not None:
            raise self.failure

    # What `step_any` does with each connection; what fails is kept in `failure`.

    def resume_listening(self) -> None:
        """Somebody is here again. While nobody was, nobody listened: only silence that was listened
        to counts."""
        self.session.keep_alive.received(self.clock() - self._silent_s)

    def prepare(self, now: float) -> tuple[int, float]:
        """Writes what goes; what to wait for, and until when at most."""
        if not self.session.tick(now):
            self._fail(BrokenError("idle timeout: the server was silent for too long"))
        self._write()
        wanted, until = select.POLLIN, max(self.session.keep_alive.next_check(), now + 0.001)
        if self._writing:
            wanted |= select.POLLOUT
            until = min(until, self._written_at + SEND_TIMEOUT_S)
        return wanted, until

    def settle(self, happened: int, waited_s: float) -> bool:
        """Sees to what was waited for; whether something came."""
        if happened & ~select.POLLOUT:
            self._silent_s = 0.0
            self._read()
            return True
        self._silent_s += waited_s
        if not happened and self._writing and self.clock() >= self._written_at + SEND_TIMEOUT_S:
            self._fail(BrokenError("send timeout: the server stopped reading"))
        return False

    def guarded(self, do: Callable[[], T], instead: T) -> T:
        """What `do` gives; `instead` when the connection fails over it."""
        try:
            return do()
        except RemoteProtocolError as error:
            with suppress(OSError):
                self._write()  # the last word, as far as it goes
            with suppress(UprError):
                self._fail(error)
        except UprError:
            assert self.failure is not None
        except OSError as error:
            with suppress(UprError):
                self._fail(BrokenError(f"the connection was lost: {error}"))
        return instead

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
                    self.handshake.take(message)
                except ServerError as error:
                    self._fail(error)
        self._write()

    def _write(self) -> None:
        """Writes what goes without waiting."""
        now = self.clock()
        while True:
            if not self._writing:
                self._writing = self.session.take(now)
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
        """Says goodbye, within a short deadline, and closes the socket. Closing again does
        nothing."""
        if self.failure is not None:
            return
        deadline = self.clock() + _GOODBYE_S
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
    """Does for several connections what `BlockingConnection.step` does for one: waits until
    something came on any of them, or one of them is over, or the deadline. `failure` tells which
    are over."""
    if any(connection.has_messages for connection in connections):
        deadline = 0.0
    live = [connection for connection in connections if connection.failure is None]
    for connection in live:
        connection.resume_listening()
    while live and all(connection.failure is None for connection in live):
        if not _attend(live, deadline):
            return


def _attend(connections: Sequence[BlockingConnection], deadline: float) -> bool:
    """Waits once; whether nothing came and there is time to wait again."""
    now = connections[0].clock()
    poll, until = select.poll(), deadline
    for connection in connections:
        wanted, at = connection.guarded(partial(connection.prepare, now), (0, now))
        until = min(until, at)
        if connection.failure is None:
            poll.register(connection.socket, wanted)
    ready = dict(poll.poll(max(0.0, until - now) * 1000))
    after = connections[0].clock()
    came = False
    for connection in connections:
        if connection.failure is None:
            happened = ready.get(connection.socket.fileno(), 0)
            came |= connection.guarded(partial(connection.settle, happened, after - now), False)
    return not came and after < deadline
