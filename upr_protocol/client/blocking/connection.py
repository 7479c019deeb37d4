"""One session over one plain socket, without a thread: the caller that waits also reads."""

from __future__ import annotations

import math
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import attrs

from upr_protocol.address import Address
from upr_protocol.chunk import Buffer
from upr_protocol.client.core.handshake import Handshake
from upr_protocol.client.core.log_in import ClientLogIn
from upr_protocol.client.core.results import status_of
from upr_protocol.client.credentials import resolve_credentials
from upr_protocol.client.options import DriverOptions, new_nonce
from upr_protocol.concurrency import without_traceback
from upr_protocol.errors import (
    BrokenError,
    ClosedError,
    LocalProtocolError,
    RemoteProtocolError,
    ServerError,
    Status,
    TlsError,
    UprError,
)
from upr_protocol.limits import SEND_TIMEOUT_S
from upr_protocol.session import SessionState
from upr_protocol.transport import (
    SocketDial,
    TlsSocket,
    dial_socket,
    new_scratch,
    read_available,
    write_available,
)
from upr_protocol.wire import Close, Error, Message

BLOCKING_IDLE_INTERVAL_S: Final = 300
"""A program that blocks says nothing while it is busy with something else: the server takes it for
dead only after twice this."""

_READ_BYTES_AT_ONCE: Final = 512 * 1024
"""How much is read before what has come is handed out."""

_UNREAD_S: Final = 1.0
"""Between two requests nobody reads. After so long it is worth a call to the system to look whether
the server has ended the connection meanwhile."""

_CLOSE_TIMEOUT_S: Final = 2.0
"""How long a peer that does not read may delay closing."""


@attrs.frozen
class SocketOptions(DriverOptions):
    """How to connect with plain sockets."""

    dial: SocketDial = dial_socket
    clock: Callable[[], float] = time.monotonic


class BlockingConnection:
    """A connection on which the handshake is done; the errors are those of `open_connection`.

    No task runs in the background: `receive` writes what is queued, reads what has arrived and
    keeps the connection alive. While nobody calls it, nobody reads. Once it is over, `failure` says
    why. `address` is that of the node. Another thread may call `close`; then a call that waits
    raises `ClosedError`.

    Attributes:
        is_in_use: Whether a call waits for answers: it would miss those that another one reads. To
            be set by the caller without a function, which Ctrl-C could interrupt.
    """

    def __init__(self, address: Address, options: SocketOptions) -> None:
        credentials = resolve_credentials(address.security.credentials)
        self.address = address
        self._clock = options.clock
        deadline = self._clock() + options.connect_timeout_s
        try:
            self.socket = options.dial(address, options.connect_timeout_s)
        except OSError as error:
            raise BrokenError(f"cannot connect to {address}: {error.strerror or error}") from error
        self.socket.setblocking(False)
        self._tls = self._encrypted(address, deadline)
        self._scratch = new_scratch()
        self._writing: Sequence[Buffer] = ()
        self._is_waiting = False
        """Whether a step waits, and has read and written nothing since the wait began."""
        self._written_at = self._stepped_at = self._clock()
        self._silent_s = 0.0
        """How long callers have read since the last bytes arrived."""
        self._inbox: deque[Message] = deque()
        self.failure: UprError | None = None
        self.is_in_use = False
        self.session = options.session(self._clock())
        binding = None if self._tls is None else self._tls.link.channel_binding
        log_in = ClientLogIn(credentials, new_nonce(), binding)
        self.handshake = Handshake(self.session, address.bucket, log_in=log_in)
        try:
            while not self.handshake.is_done:
                if self._clock() >= deadline:
                    self._fail(BrokenError(f"{address} did not answer in time"))
                self._step(deadline)
        except BaseException:
            self.socket.close()
            raise

    def _encrypted(self, address: Address, deadline: float) -> TlsSocket | None:
        """The encryption of the connection, its handshake done; None if the address wants none."""
        if address.security.tls is None:
            return None
        is_done = False
        try:
            tls = TlsSocket(self.socket, address.security.tls, address.host)
            tls.handshake(deadline, self._clock)
            is_done = True
        except (OSError, BrokenError) as error:
            raise BrokenError(f"cannot connect to {address}: {error}") from error
        except TlsError as error:
            raise TlsError(f"cannot connect to {address}: {error}") from error
        finally:
            if not is_done:
                self.socket.close()
        return tls

    # Messages.

    def is_over(self) -> bool:
        """Whether the connection is over, as far as can be told now. A request that is sent over
        one that the server has ended would be in doubt, though it was not carried out."""
        is_unread = self._clock() >= self._stepped_at + _UNREAD_S
        if self.failure is None and is_unread and not self.is_in_use:
            poll = select.poll()
            poll.register(self.socket, select.POLLIN)
            with suppress(UprError):  # `failure` has it
                while poll.poll(0):
                    self._step(-math.inf)
        return self.failure is not None

    def receive(self, deadline: float) -> Message | None:
        """The next message; None when none has arrived by the deadline. With a deadline in the past
        it reads once. Messages that came whole before the end of the connection come first.

        Raises:
            BrokenError, ServerError, RemoteProtocolError: The connection is over.
        """
        while not self._inbox:
            is_last = self._clock() >= deadline
            try:
                self._step(deadline)
            except UprError:
                # The next step raises it again.
                if not self._inbox:
                    raise
            if is_last and not self._inbox:
                return None
        return self._inbox.popleft()

    def _step(self, deadline: float) -> None:
        """Writes and reads what is possible now. Waits for either until the deadline, which may be
        in the past."""
        if self.failure is not None:
            raise without_traceback(self.failure)
        self._is_waiting = False
        # A caller is back. Without a caller nothing was read: for the idle timeout, only silence
        # during a read counts.
        self.session.keep_alive.note_received(self._clock() - self._silent_s)
        try:
            while not self._poll_once(deadline):
                pass
            self._stepped_at = self._clock()
        except RemoteProtocolError as error:
            with suppress(OSError):
                self._write()  # the session has queued an `Error`: send what goes of it
            self._fail(error)
        except OSError as error:
            self._fail(BrokenError(f"the connection was lost: {error}"))
        except (BrokenError, TlsError) as error:
            self._fail(error)
        except BaseException:
            # Ctrl-C. Perhaps nobody knows of what was read or written just now: what came would be
            # missing, and what was sent would be sent again.
            if not self._is_waiting:
                self._end(BrokenError("a call was interrupted while it read or wrote"))
            raise

    def _poll_once(self, deadline: float) -> bool:
        """Writes, waits once, and reads; whether something was read or the deadline is over."""
        now = self._clock()
        if not self.session.tick(now):
            self._fail(BrokenError("idle timeout: the server was silent for too long"))
        self._write_or_read_rest()
        if self._tls is not None and self._tls.link.has_undecrypted:
            self._read()
            return True
        events = select.POLLIN
        until = min(deadline, max(self.session.keep_alive.next_check(), now + 0.001))
        if self._writing:
            events |= select.POLLOUT
            until = min(until, self._written_at + SEND_TIMEOUT_S)
        poll = select.poll()
        poll.register(self.socket, events)
        self._is_waiting = True
        ready = dict(poll.poll(max(0.0, until - now) * 1000)).get(self.socket.fileno(), 0)
        polled_at = self._clock()
        self._is_waiting = False
        if self.failure is not None:
            raise without_traceback(self.failure)  # another thread has closed the connection
        # An error and the peer's end count as readable: reading tells which it is.
        if ready & ~select.POLLOUT:
            self._silent_s = 0.0
            self._read()
            return True
        self._silent_s += polled_at - now
        if self._writing and not ready and polled_at >= self._written_at + SEND_TIMEOUT_S:
            self._fail(BrokenError("send timeout: the server stopped reading"))
        return polled_at >= deadline

    def _read(self) -> None:
        """Reads what has come; of a body that is under way also what comes meanwhile."""
        bytes_left = _READ_BYTES_AT_ONCE
        while bytes_left > 0:
            try:
                count = self._read_once()
            except BlockingIOError:
                break
            if not count:
                self._fail(BrokenError("the server closed the connection"))
            if self._tls is not None or not self.session.unfinished_body_bytes:
                break
            bytes_left -= count
        self._write_or_read_rest()

    def _read_once(self) -> int:
        count = self._read_available()
        for message in self.session.messages():
            self._received(message)
        return count

    def _read_rest(self) -> None:
        """Reads all that has come."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        has_ended = False
        while not has_ended:
            try:
                has_ended = not self._read_once()
            except BlockingIOError:
                # Of an encrypted message, perhaps a part was read.
                has_ended = not poll.poll(0)

    def _received(self, message: Message) -> None:
        if isinstance(message, Error):
            self._fail(ServerError(status_of(message.status), message.sentence))
        elif self.handshake.is_done:
            self._inbox.append(message)
        else:
            try:
                self.handshake.receive(message)
            except ServerError as error:
                self._fail(error)

    def _read_available(self) -> int:
        if self._tls is not None:
            return self._tls.read_available(self.session, self._scratch, self._clock())
        return read_available(self.socket.fileno(), self.session, self._scratch, self._clock())

    def _write_or_read_rest(self) -> None:
        """Writes as much as the socket takes at once. If the server has closed the connection, it
        may have answered before, or have said why: that is read first."""
        try:
            self._write()
        except OSError:
            self._read_rest()
            raise

    def _write(self) -> None:
        """Writes as much as the socket takes at once."""
        now = self._clock()
        while True:
            if not self._writing:
                self._writing = self.session.take_outgoing(now)
                self._written_at = now
                if not self._writing:
                    return
            if self._write_available():
                self._written_at = now
            if self._writing:
                return

    def _write_available(self) -> bool:
        """Writes as much as the socket takes at once; whether it took anything."""
        if self._tls is not None:
            sent_bytes = self._tls.sent_bytes
            self._writing = self._tls.write_available(self._writing)
            return self._tls.sent_bytes > sent_bytes
        bytes_before = sum(map(len, self._writing))
        self._writing = write_available(self.socket.fileno(), self._writing)
        return sum(map(len, self._writing)) < bytes_before

    def _end(self, error: UprError) -> None:
        if self.failure is None:
            # The error itself would keep the frames of whoever catches it, with all their values.
            self.failure = without_traceback(error)
            self.socket.close()

    def _fail(self, error: UprError) -> None:
        if self.failure is not None:
            raise without_traceback(self.failure) from error
        self._end(error)
        raise error

    def check_not_in_use(self) -> None:
        """Call it before `is_in_use` is set.

        Raises:
            LocalProtocolError: Another call waits for answers.
        """
        if self.is_in_use:
            raise LocalProtocolError(
                "the client waits for the answer to another request, of another thread or of what "
                "a signal has interrupted: make a client for each thread",
                Status.BAD_ARGUMENT,
            )

    def finish_close(self) -> None:
        """Closes the socket if the connection was ended while it was in use. Call it when
        `is_in_use` is no longer set."""
        if self.failure is not None:
            self.socket.close()

    def abandon(self) -> None:
        """Closes the socket here, and sends nothing: another process goes on with it."""
        self._end(BrokenError("the connection is that of the parent process"))

    def close(self) -> None:
        """Sends a `Close`, within a short deadline, and closes the socket. Closing again does
        nothing."""
        if self.failure is not None:
            return
        self.failure = ClosedError("the connection was closed here")
        if self.is_in_use:
            # Another thread reads and writes. It learns of the end, and closes the socket: here,
            # its number could become that of another file, which the thread would read.
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
            return
        try:
            self._send_close(self._clock() + _CLOSE_TIMEOUT_S)
        finally:
            self.socket.close()

    def _send_close(self, deadline: float) -> None:
        with suppress(OSError, UprError):
            if self.session.state is not SessionState.CLOSED:
                self.session.send(Close())
            while True:
                self._write()
                left_s = deadline - self._clock()
                if not self._writing or left_s <= 0:
                    break
                poll = select.poll()
                poll.register(self.socket, select.POLLOUT)
                poll.poll(left_s * 1000)
        if self._tls is not None:
            self._tls.send_close_notify()
