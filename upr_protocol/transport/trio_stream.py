"""Reading from a Trio stream into a session, and writing to it with a deadline for each progress.

A Trio socket is read and written by its descriptor, which spares copies and calls; any other stream
(TLS, a test's pair in memory) by its own methods.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio

from upr_protocol.address import Address
from upr_protocol.chunk import Buffer
from upr_protocol.limits import SEND_TIMEOUT_S
from upr_protocol.session import Session
from upr_protocol.transport.socket_io import read_available, write_available

_SEND_BYTES: Final = 1024 * 1024
"""How much is written at a time where the stream is not a socket, so that progress shows."""

Dial = Callable[[Address], Awaitable[trio.abc.Stream]]
"""Connects to an address; raises OSError when it cannot."""


async def dial_tcp(address: Address) -> trio.abc.Stream:
    """A TCP connection to `address`."""
    try:
        return await trio.open_tcp_stream(address.host, address.port)
    except UnicodeError as error:
        # The codec for host names raises its own error for labels too long or empty.
        raise OSError(f"{address.host!r} is not a valid host name") from error


async def read_some(stream: trio.abc.ReceiveStream, session: Session, scratch: memoryview) -> int:
    """Waits until something comes, and gives it to the session.

    Returns:
        How many bytes came; 0 at the stream's end.

    Raises:
        trio.BrokenResourceError: The connection is gone.
        trio.ClosedResourceError: It was closed here.
    """
    if not isinstance(stream, trio.SocketStream):
        data = await stream.receive_some(len(scratch))
        session.receive(bytes(data), trio.current_time())
        return len(data)
    socket = stream.socket
    while True:
        if socket.fileno() < 0:
            raise trio.ClosedResourceError("the connection was closed here")
        # Waiting comes before the first read: mostly nothing has come yet.
        await trio.lowlevel.wait_readable(socket)
        try:
            return read_available(socket.fileno(), session, scratch, trio.current_time())
        except BlockingIOError:
            continue
        except OSError as error:
            raise trio.BrokenResourceError(str(error)) from error


def read_rest(stream: trio.abc.ReceiveStream, session: Session, scratch: memoryview) -> int:
    """Like `read_some` without waiting, for the rest of a body that is under way.

    Returns:
        How many bytes came; 0 when nothing can be read just now, for whatever reason.
    """
    if not (session.unfinished_body_bytes and isinstance(stream, trio.SocketStream)):
        return 0
    try:
        return read_available(stream.socket.fileno(), session, scratch, trio.current_time())
    except OSError:
        return 0  # if the connection is gone, the next `read_some` raises it


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
    """Writes what a socket takes at once; a stream that is not a socket takes nothing here.

    Returns:
        What is left, for `write_rest`.

    Raises:
        trio.BrokenResourceError: The connection is gone.
        trio.ClosedResourceError: It was closed here.
    """
    if not isinstance(stream, trio.SocketStream):
        return buffers
    descriptor = stream.socket.fileno()
    if descriptor < 0:
        raise trio.ClosedResourceError("the connection was closed here")
    try:
        return write_available(descriptor, buffers)
    except OSError as error:
        raise trio.BrokenResourceError(str(error)) from error


async def write_rest(
    stream: trio.abc.SendStream, buffers: Sequence[Buffer], timeout_s: float = SEND_TIMEOUT_S
) -> None:
    """Writes what `write_now` has left; raises what `write_all` does."""
    if isinstance(stream, trio.SocketStream):
        while buffers:
            # Waiting comes first: the socket was full a moment ago.
            with trio.fail_after(timeout_s):
                await trio.lowlevel.wait_writable(stream.socket)
            buffers = write_now(stream, buffers)
        return
    data = memoryview(b"".join(buffers))
    for start in range(0, len(data), _SEND_BYTES):
        with trio.fail_after(timeout_s):
            await stream.send_all(data[start : start + _SEND_BYTES])
