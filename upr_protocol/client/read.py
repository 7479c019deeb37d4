"""Reading from a stream into a session, with as few copies and system calls as can be."""

from __future__ import annotations

import os
from typing import Final

import trio

from upr_protocol.session import Session

SCRATCH_BYTES: Final = 64 * 1024
"""What is read beside the rest of a body that is under way. It bounds how long one peer's small
requests hold the loop, to about a millisecond."""

_BEHIND_BYTES: Final = 4 * 1024
"""What is read behind a large rest of a body: the small messages that follow it."""


def new_scratch() -> memoryview:
    """A buffer for `read_some`. All who read in one loop may share it."""
    return memoryview(bytearray(SCRATCH_BYTES))


async def read_some(stream: trio.abc.ReceiveStream, session: Session, scratch: memoryview) -> int:
    """Waits until something comes, and gives it to the session. The server reads with this too.

    From a socket the rest of a body that is under way is received right where it will stay.

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
        # Nothing is tried before: mostly there is nothing yet.
        await trio.lowlevel.wait_readable(socket)
        try:
            return read_now(socket.fileno(), session, scratch, trio.current_time())
        except BlockingIOError:
            continue
        except OSError as error:
            raise trio.BrokenResourceError(str(error)) from error


def read_rest(stream: trio.abc.ReceiveStream, session: Session, scratch: memoryview) -> int:
    """Like `read_some` without waiting, for the rest of a body that is under way.

    Returns:
        How many bytes came; 0 when there are none just now, whatever the reason.
    """
    if not (session.under_way and isinstance(stream, trio.SocketStream)):
        return 0
    try:
        return read_now(stream.socket.fileno(), session, scratch, trio.current_time())
    except OSError:
        return 0  # `read_some` will say so, if it is more than that


def read_now(descriptor: int, session: Session, scratch: memoryview, now: float) -> int:
    """Gives the session what a socket has; see `read_some`.

    Raises:
        BlockingIOError: There is nothing now.
        OSError: The connection is gone.
    """
    room = session.room()
    if len(room) >= len(scratch):
        # What follows the body would have to be copied; the next read puts it where it will stay.
        scratch = scratch[:_BEHIND_BYTES]
    count = os.readv(descriptor, (room, scratch) if room else (scratch,))
    filled = min(count, len(room))
    session.receive(bytes(scratch[: count - filled]), now, filled)
    return count
