"""Writing buffers to a stream, with a deadline that progress moves on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

import trio

from upr_protocol.chunk import Buffer
from upr_protocol.limits import SEND_TIMEOUT_S

BUFFERS_MAX: Final = 512
"""Buffers in one call; the system takes 1,024 at most."""

_JOIN_BYTES: Final = 32 * 1024
"""Up to this, joining the buffers costs less than handing them over one by one."""

_PIECE_BYTES: Final = 1024 * 1024
"""What is written at a time where the stream is no socket, so that progress shows."""


async def write_all(
    stream: trio.abc.SendStream, buffers: Sequence[Buffer], timeout_s: float = SEND_TIMEOUT_S
) -> None:
    """Writes `buffers`, one behind the other; large ones are not joined where the stream is a
    socket. The server writes with this too.

    On cancellation some of it may have been written: the stream is good for nothing then.

    Raises:
        trio.TooSlowError: The peer took not one byte for `timeout_s`.
        trio.BrokenResourceError: The connection is gone.
        trio.ClosedResourceError: It was closed here.
    """
    await trio.lowlevel.checkpoint()
    await write_rest(stream, write_now(stream, buffers), timeout_s)


async def write_rest(
    stream: trio.abc.SendStream, buffers: Sequence[Buffer], timeout_s: float = SEND_TIMEOUT_S
) -> None:
    """Writes what `write_now` has left; raises what `write_all` does.

    A socket is not tried first: it would only say once more that it is full.
    """
    if isinstance(stream, trio.SocketStream):
        while buffers:
            with trio.fail_after(timeout_s):
                await trio.lowlevel.wait_writable(stream.socket)
            buffers = write_now(stream, buffers)
        return
    data = memoryview(b"".join(buffers))
    for at in range(0, len(data), _PIECE_BYTES):
        with trio.fail_after(timeout_s):
            await stream.send_all(data[at : at + _PIECE_BYTES])


def write_now(stream: trio.abc.SendStream, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
    """Writes what a socket takes at once; from any other stream everything comes back.

    Returns:
        What is left, for `write_rest`.

    Raises:
        trio.BrokenResourceError: The connection is gone.
        trio.ClosedResourceError: It was closed here.
    """
    if not isinstance(stream, trio.SocketStream):
        return buffers
    if len(buffers) > 1 and sum(map(len, buffers)) <= _JOIN_BYTES:
        buffers = (b"".join(buffers),)
    descriptor = stream.socket.fileno()
    if descriptor < 0:
        raise trio.ClosedResourceError("the connection was closed here")
    while buffers:
        some = buffers[:BUFFERS_MAX]
        try:
            sent = os.writev(descriptor, some)
        except BlockingIOError:
            break
        except OSError as error:
            raise trio.BrokenResourceError(str(error)) from error
        if sent == sum(map(len, some)):
            buffers = buffers[BUFFERS_MAX:]
        else:
            # The socket has taken all that it can now: it would only say so.
            return unsent(buffers, sent)
    return buffers


def unsent(buffers: Sequence[Buffer], sent: int) -> list[Buffer]:
    """What is left of `buffers` once `sent` bytes of them were written."""
    for index, buffer in enumerate(buffers):
        if sent < len(buffer):
            rest = buffers[index + 1 :]
            return [memoryview(buffer)[sent:], *rest] if sent else [buffer, *rest]
        sent -= len(buffer)
    return []
