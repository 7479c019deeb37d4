"""Reading from a Trio stream into a session, and writing to it with a deadline for each progress.

A Trio socket is read and written by its descriptor, which spares copies and calls. A `TlsStream`
does the same beneath its encryption. Any other stream, a test's pair in memory, is used by its own
methods.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, Protocol

import trio

from upr_protocol.address import Address
from upr_protocol.chunk import Buffer
from upr_protocol.errors import BrokenError, UprError
from upr_protocol.limits import SEND_TIMEOUT_S
from upr_protocol.security import TlsSettings
from upr_protocol.session import Session
from upr_protocol.transport.socket_io import read_available, receive_available, write_available
from upr_protocol.transport.tls_context import client_context
from upr_protocol.transport.tls_link import (
    STRANGER_READ_BYTES,
    NotTlsError,
    TlsLink,
    new_tls_scratch,
)
from upr_protocol.wire import BEFORE_READY

_SEND_BYTES: Final = 1024 * 1024
"""How much is written at a time where the stream is not a socket, so that progress shows."""

UNSENT_BYTES: Final = 256 * 1024
"""What a socket may hold beside what is on its way to the peer. Trio allows 16 KiB. A writer then
waits for the peer after every 300 KB, and to wake it costs as much as 50 KB do."""

_LAST_WORD_TIMEOUT_S: Final = 2.0
"""How long a peer may take to hear why its handshake failed."""

Dial = Callable[[Address], Awaitable[trio.abc.Stream]]
"""Connects to an address; raises OSError when it cannot."""


class WorkTurns(Protocol):
    """The turns of long work, as this module sees them."""

    @property
    def may_begin(self) -> bool:
        """Whether a piece may begin now."""

    async def next_turn(self) -> None:
        """Waits until one may."""

    def note_used(self, amount: float) -> None:
        """Counts a piece, once it is done: the bytes of a large write, or the seconds of a step of
        a handshake."""


async def dial_tcp(address: Address) -> trio.abc.Stream:
    """A TCP connection to `address`."""
    try:
        return await trio.open_tcp_stream(address.host, address.port)
    except UnicodeError as error:
        # The codec for host names raises its own error for labels too long or empty.
        raise OSError(f"{address.host!r} is not a valid host name") from error


def allow_unsent_bytes(stream: trio.abc.Stream) -> None:
    """Lets a TCP socket hold `UNSENT_BYTES`. With a stream of another kind, and where the system
    has no such limit, nothing happens."""
    option = getattr(trio.socket, "TCP_NOTSENT_LOWAT", None)
    if option is not None and isinstance(stream, trio.SocketStream):
        # A socket that was closed, or that is not one of TCP.
        with suppress(OSError):
            stream.setsockopt(trio.socket.IPPROTO_TCP, option, UNSENT_BYTES)


async def read_some(
    stream: trio.abc.ReceiveStream,
    session: Session,
    scratch: memoryview,
    wait_for_turn: Callable[[], Awaitable[None]] | None = None,
) -> int:
    """Waits until something comes, and gives it to the session.

    Args:
        stream: The stream.
        session: The session.
        scratch: What is read into beside a body that is under way.
        wait_for_turn: Called when something has come on a socket, before more than `scratch` takes
            is read; None where nobody else is held up by that.

    Returns:
        How many bytes came; 0 at the stream's end.

    Raises:
        trio.BrokenResourceError: The connection is gone.
        trio.ClosedResourceError: It was closed here.
    """
    # This is checked first, as mostly it is a socket: no class is asked for its subclasses then.
    if not isinstance(stream, trio.SocketStream):
        if isinstance(stream, TlsStream):
            return await stream.read_into(session, scratch)
        data = await stream.receive_some(len(scratch))
        session.receive(bytes(data), trio.current_time())
        return len(data)
    socket = stream.socket
    descriptor = _descriptor(socket)
    while True:
        # Waiting comes before the first read: mostly nothing has come yet.
        await trio.lowlevel.wait_readable(descriptor)
        if (
            wait_for_turn is not None
            and session.unfinished_body_bytes
            and len(session.receive_buffer()) > len(scratch)
        ):
            await wait_for_turn()
        # Another task may have closed it since something has come.
        descriptor = _descriptor(socket)
        try:
            return read_available(descriptor, session, scratch, trio.current_time())
        except BlockingIOError:
            continue
        except OSError as error:
            raise trio.BrokenResourceError(str(error)) from error


def _descriptor(socket: trio.socket.SocketType) -> int:
    """The descriptor of a socket; raises `trio.ClosedResourceError` if it was closed here."""
    descriptor = socket.fileno()
    if descriptor < 0:
        raise trio.ClosedResourceError("the connection was closed here")
    return descriptor


async def _receive(stream: trio.abc.ReceiveStream, scratch: memoryview) -> Buffer:
    """Waits until something comes, and gives it; it may be in `scratch`. Raises what `read_some`
    does."""
    if not isinstance(stream, trio.SocketStream):
        return await stream.receive_some(len(scratch))
    socket = stream.socket
    while True:
        if socket.fileno() < 0:
            raise trio.ClosedResourceError("the connection was closed here")
        await trio.lowlevel.wait_readable(socket)
        try:
            return receive_available(socket.fileno(), scratch)
        except BlockingIOError:
            continue
        except OSError as error:
            raise trio.BrokenResourceError(str(error)) from error


def read_rest(stream: trio.abc.ReceiveStream, session: Session, scratch: memoryview) -> int:
    """Like `read_some` without waiting, for the rest of a body that is under way.

    Returns:
        How many bytes came; 0 when nothing can be read just now, for whatever reason.
    """
    if not session.unfinished_body_bytes:
        return 0
    if isinstance(stream, TlsStream):
        return stream.read_rest(session, scratch)
    if not isinstance(stream, trio.SocketStream):
        return 0
    try:
        return read_available(stream.socket.fileno(), session, scratch, trio.current_time())
    except OSError:
        return 0  # if the connection is gone, the next `read_some` raises it


async def encrypted_to_server(
    stream: trio.abc.Stream, tls: TlsSettings, server_name: str
) -> TlsStream:
    """A TLS connection over `stream` to a server, its handshake done. If it fails, `stream` stays
    open. After a cancellation, close `stream`.

    Args:
        stream: What carries it.
        tls: How to encrypt.
        server_name: Whom the server's certificate must name.

    Raises:
        TlsError: A file cannot be used, the two sides do not agree, or one does not trust the
            other.
        trio.BrokenResourceError: The connection is gone.
    """
    link = TlsLink(client_context(tls), server_name)
    encrypted = TlsStream(stream, link, new_tls_scratch())
    await encrypted.handshake()
    return encrypted


async def write_all(
    stream: trio.abc.SendStream, buffers: Sequence[Buffer], timeout_s: float = SEND_TIMEOUT_S
) -> None:
    """Writes `buffers`, one after the other.

    After a cancellation part of it may have been written: close the stream then.

    Raises:
        trio.TooSlowError: The peer took not one byte for `timeout_s`.
        trio.BrokenResourceError: The connection is gone.
        trio.ClosedResourceError: It was closed here.
    """
    await trio.lowlevel.checkpoint()
    await write_rest(stream, write_now(stream, buffers), timeout_s)


def write_now(stream: trio.abc.SendStream, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
    """Writes what a socket takes at once, in the clear or encrypted; a stream that is not a socket
    takes nothing here.

    Returns:
        What is left, for `write_rest`.

    Raises:
        trio.BrokenResourceError: The connection is gone.
        trio.ClosedResourceError: It was closed here.
    """
    if not isinstance(stream, trio.SocketStream):
        return stream.write_now(buffers) if isinstance(stream, TlsStream) else buffers
    descriptor = _descriptor(stream.socket)
    try:
        return write_available(descriptor, buffers)
    except OSError as error:
        raise trio.BrokenResourceError(str(error)) from error


async def write_rest(
    stream: trio.abc.SendStream,
    buffers: Sequence[Buffer],
    timeout_s: float = SEND_TIMEOUT_S,
    turns: WorkTurns | None = None,
) -> None:
    """Writes what `write_now` has left; raises what `write_all` does.

    Args:
        stream: The stream.
        buffers: What is left.
        timeout_s: How long the peer may take nothing.
        turns: The turns of all who write much to sockets; None where nobody else is held up.
    """
    if isinstance(stream, TlsStream):
        await stream.write_rest(buffers, timeout_s)
        return
    if isinstance(stream, trio.SocketStream):
        while buffers:
            # Waiting comes first: the socket was full a moment ago.
            with trio.fail_after(timeout_s):
                await trio.lowlevel.wait_writable(stream.socket)
            if turns is None:
                buffers = write_now(stream, buffers)
                continue
            if not turns.may_begin:
                await turns.next_turn()
            length = sum(map(len, buffers))
            buffers = write_now(stream, buffers)
            turns.note_used(length - sum(map(len, buffers)))
        return
    data = memoryview(b"".join(buffers))
    for start in range(0, len(data), _SEND_BYTES):
        with trio.fail_after(timeout_s):
            await stream.send_all(data[start : start + _SEND_BYTES])


class TlsStream(trio.abc.HalfCloseableStream):
    """A TLS connection. One task may read while another one writes.

    A server makes the handshake within the first read; before it nothing can be written. A client
    calls `handshake` first.

    Args:
        transport: What carries it. It is closed with it.
        link: Encrypts and decrypts.
        scratch: For what comes encrypted; all connections of one loop may share it.
        turns: The turns of all whose handshake goes on; None where nobody else is held up.

    Attributes:
        link: See above.
        transport: See above.
    """

    def __init__(
        self,
        transport: trio.abc.Stream,
        link: TlsLink,
        scratch: memoryview,
        turns: WorkTurns | None = None,
    ) -> None:
        self.link = link
        self.transport = transport
        self._scratch = scratch
        self._turns = turns
        self._has_ended = False
        """Whether this side has said that it sends nothing more."""

    async def handshake(self) -> None:
        """Waits until the handshake is done. After a cancellation, close the stream.

        Raises:
            NotTlsError: The other side does not speak TLS, and could be answered without it.
            TlsError: The two sides do not agree, or one does not trust the other.
            trio.BrokenResourceError: The connection is gone.
            trio.ClosedResourceError: It was closed here.
        """
        try:
            while not await self._go_on():
                await self._send_outgoing()
                self.link.feed(await _receive(self.transport, self._scratch[:STRANGER_READ_BYTES]))
            await self._send_outgoing()
            return
        except NotTlsError:
            raise
        except UprError as error:
            failure = error
        try:
            await self._say_why()
            raise _as_broken(failure) from failure
        finally:
            del failure  # or it would refer to itself through its traceback's frame

    async def _go_on(self) -> bool:
        """Makes the next step of the handshake; whether that was the last one. A step takes
        0.3 to 0.6 ms, and thousands of strangers may greet in the same moment."""
        turns = self._turns
        if turns is None or not self.link.has_first_record:
            return self.link.handshake()
        if not turns.may_begin:
            await turns.next_turn()
        began = trio.current_time()
        try:
            return self.link.handshake()
        finally:
            turns.note_used(trio.current_time() - began)

    async def _send_outgoing(self) -> None:
        await trio.lowlevel.checkpoint()
        if outgoing := self.link.take_outgoing():
            await write_all(self.transport, [outgoing])

    async def _say_why(self) -> None:
        """Lets the other side hear why the handshake failed. What it has sent is read first: a
        connection that is closed while bytes lie in it unread is reset, and the reset may overtake
        the reason."""
        with (
            suppress(trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError),
            trio.move_on_after(_LAST_WORD_TIMEOUT_S),
        ):
            await self._send_outgoing()
            await self._end_transport()
            while await _receive(self.transport, self._scratch):
                pass

    # Reading.

    async def read_into(self, session: Session, scratch: memoryview) -> int:
        """As `read_some`; raises `TlsError` too, if the other side refuses this side's
        certificate."""
        if not self.link.is_established:
            await self.handshake()
        while True:
            if self.link.has_undecrypted:
                await trio.lowlevel.checkpoint()
            else:
                space = self._scratch
                if session.state in BEFORE_READY:
                    space = space[:STRANGER_READ_BYTES]
                self.link.feed(await _receive(self.transport, space))
            count = self._decrypt(session, scratch)
            if count or self.link.is_ended:
                return count

    def read_rest(self, session: Session, scratch: memoryview) -> int:
        """As the function `read_rest`; but it raises what `read_into` does."""
        if not self.link.has_undecrypted:
            if not isinstance(self.transport, trio.SocketStream):
                return 0
            try:
                data = receive_available(self.transport.socket.fileno(), self._scratch)
            except OSError:
                return 0  # if the connection is gone, the next `read_into` raises it
            self.link.feed(data)
        return self._decrypt(session, scratch)

    def _decrypt(self, session: Session, scratch: memoryview) -> int:
        try:
            return self.link.read(session, scratch, trio.current_time())
        except UprError as error:
            raise _as_broken(error) from error

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Bytes that were sent, at least one; none if the other side has ended."""
        if not self.link.is_established:
            await self.handshake()
        while True:
            try:
                data = self.link.read_bytes(max_bytes or STRANGER_READ_BYTES)
            except UprError as error:
                raise _as_broken(error) from error
            if data or self.link.is_ended:
                await trio.lowlevel.checkpoint()
                return data
            self.link.feed(await _receive(self.transport, self._scratch))

    # Writing.

    def write_now(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """As the function `write_now`."""
        self._check_writable()
        try:
            return self.link.write(buffers, lambda data: write_now(self.transport, data))
        except ssl.SSLError as error:
            raise _not_encrypted(error) from error

    async def write_rest(self, buffers: Sequence[Buffer], timeout_s: float) -> None:
        """As the function `write_rest`."""
        self._check_writable()
        while buffers:
            try:
                ciphertext = self.link.encrypt(buffers)
            except ssl.SSLError as error:
                raise _not_encrypted(error) from error
            await write_rest(self.transport, ciphertext, timeout_s)
            buffers = self.link.note_sent(buffers)

    def _check_writable(self) -> None:
        if self._has_ended:
            raise trio.ClosedResourceError("this side has ended the connection")
        if not self.link.is_established:
            raise trio.BrokenResourceError("the TLS handshake was not finished")

    async def send_all(self, data: Buffer) -> None:
        """Sends bytes."""
        await write_all(self, [data])

    async def wait_send_all_might_not_block(self) -> None:
        """Waits until the transport takes something."""
        await self.transport.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """Says that this side sends nothing more."""
        await trio.lowlevel.checkpoint()
        if not self._has_ended:
            self._has_ended = True
            if self.link.is_established:
                await write_all(self.transport, [self.link.close_notify()])
            await self._end_transport()

    async def _end_transport(self) -> None:
        if isinstance(self.transport, trio.abc.HalfCloseableStream):
            await self.transport.send_eof()

    async def aclose(self) -> None:
        """Says that this side sends nothing more, if the transport takes that at once, and closes
        the transport."""
        if not self._has_ended and self.link.is_established and not self.link.has_unsent:
            self._has_ended = True
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                write_now(self.transport, [self.link.close_notify()])
        await self.transport.aclose()


def _as_broken(error: UprError) -> BaseException:
    """How an error of the link is raised by a stream."""
    return trio.BrokenResourceError(str(error)) if isinstance(error, BrokenError) else error


def _not_encrypted(error: ssl.SSLError) -> trio.BrokenResourceError:
    """What is raised where OpenSSL encrypts nothing more. The reader has met the cause: a cut, or
    bytes that the other side did not send. It and the writer may have their turn together."""
    return trio.BrokenResourceError(f"TLS had failed: {error}")
