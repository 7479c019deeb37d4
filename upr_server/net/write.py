"""Writing buffers to a stream with a deadline that progress moves on."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from upr_protocol.chunk import Buffer

_BUFFERS_MAX = 512
"""Buffers in one call; the system takes 1,024 at most."""


async def write_all(
    stream: trio.abc.SendStream, buffers: Sequence[Buffer], timeout_s: float
) -> None:
    """Writes `buffers`, one behind the other, without joining them where the stream is a socket.

    On cancellation some of it may have been written; the stream is good for nothing then.

    Raises:
        trio.TooSlowError: The peer took not one byte for `timeout_s`.
        trio.BrokenResourceError: The connection is gone.
    """
    if isinstance(stream, trio.SocketStream):
        await _write_socket(stream, buffers, timeout_s)
        return
    with trio.fail_after(timeout_s):
        await stream.send_all(b"".join(buffers))


async def _write_socket(
    stream: trio.SocketStream, buffers: Sequence[Buffer], timeout_s: float
) -> None:
    for at in range(0, len(buffers), _BUFFERS_MAX):
        views = [memoryview(buffer) for buffer in buffers[at : at + _BUFFERS_MAX]]
        first = 0
        while first < len(views):
            with trio.fail_after(timeout_s):
                try:
                    sent = await stream.socket.sendmsg(views[first:])
                except OSError as error:
                    raise trio.BrokenResourceError(str(error)) from error
            while first < len(views) and sent >= len(views[first]):
                sent -= len(views[first])
                first += 1
            if sent:
                views[first] = views[first][sent:]
