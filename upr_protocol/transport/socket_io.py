"""Reading and writing a socket without waiting, with as few copies and system calls as can be."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Final

from upr_protocol.address import Address
from upr_protocol.chunk import Buffer
from upr_protocol.limits import SEND_TIMEOUT_S
from upr_protocol.session import Session

SCRATCH_BYTES: Final = 64 * 1024
"""What one read may take beside the rest of a body that is under way. It bounds how long one peer's
small requests hold the loop, to about a millisecond."""

BODY_READ_BYTES: Final = 1024 * 1024
"""What one read may take of a body that is under way. A socket may hold 32 MiB, and to copy so much
into new memory takes 20 ms, in which others wait."""

WRITE_BYTES: Final = 1536 * 1024
"""What one call writes at most: a batch of streams (`BATCH_BYTES` of the server's streamer, and the
chunk that exceeds it). While its peer reads on another processor, a socket takes any amount, and
20 MiB in one call may hold the loop for tens of milliseconds."""

_BEHIND_BYTES: Final = 4 * 1024
"""How much one read may take after a large body: the small messages that follow it."""

_BUFFERS_MAX: Final = 512
"""Buffers in one call; the system takes 1,024 at most."""

_JOIN_BYTES: Final = 32 * 1024
"""Up to this, joining the buffers costs less than handing them over one by one."""

SocketDial = Callable[[Address, float], socket.socket]
"""Connects to an address within so many seconds; raises OSError when it cannot."""


def dial_socket(address: Address, timeout_s: float) -> socket.socket:
    """A TCP connection to `address`."""
    try:
        connection = socket.create_connection((address.host, address.port), timeout_s)
    except UnicodeError as error:
        # As in `dial_tcp`.
        raise OSError(f"{address.host!r} is not a valid host name") from error
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A machine that lost its power says nothing. A program that blocks notices no silence while it
    # is busy with something else, and the system would send a request again for a quarter of an
    # hour.
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None:
        connection.setsockopt(socket.IPPROTO_TCP, option, int(SEND_TIMEOUT_S * 1000))
    return connection


def new_scratch() -> memoryview:
    """A buffer for `read_available`. All connections of one loop may share it."""
    return memoryview(bytearray(SCRATCH_BYTES))


def read_available(descriptor: int, session: Session, scratch: memoryview, now: float) -> int:
    """Reads what a socket has, once, and gives it to the session.

    The rest of a body that is under way is received right where it will stay.

    Returns:
        How many bytes came; 0 when the peer has closed its end.

    Raises:
        BlockingIOError: Nothing has come.
        OSError: The connection is gone.
    """
    room, scratch = read_spaces(session, scratch)
    if not room:
        # Mostly messages that are small come, each whole.
        count = os.readv(descriptor, (scratch,))
        session.receive(bytes(scratch[:count]), now)
        return count
    count = os.readv(descriptor, (room, scratch))
    filled = min(count, len(room))
    session.receive(bytes(scratch[: count - filled]), now, filled)
    return count


def receive_available(descriptor: int, space: memoryview) -> memoryview:
    """What a socket has, read once into `space`; nothing if the peer has closed its end.

    Raises:
        BlockingIOError: Nothing has come.
        OSError: The connection is gone.
    """
    return space[: os.readv(descriptor, (space,))]


def read_spaces(session: Session, scratch: memoryview) -> tuple[memoryview, memoryview]:
    """Where one read puts what comes: the rest of a body that is under way, and what follows it."""
    room = session.receive_buffer()
    if not room:
        return room, scratch
    if len(room) > BODY_READ_BYTES:
        return room[:BODY_READ_BYTES], scratch[:0]
    if session.unfinished_body_bytes >= len(scratch):
        # Mostly another large body follows. What was read of it here would have to be copied, and
        # that twice; the next read puts it where it will stay.
        return room, scratch[:_BEHIND_BYTES]
    return room, scratch


def write_available(descriptor: int, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
    """Writes as much of `buffers` as a socket takes now, and `WRITE_BYTES` at most.

    Returns:
        What is left; empty when everything was written.

    Raises:
        OSError: The connection is gone.
    """
    nbytes = sum(map(len, buffers))
    if nbytes > WRITE_BYTES:
        unsent_part = _write(descriptor, first_bytes(buffers, WRITE_BYTES), WRITE_BYTES)
        return unsent(buffers, WRITE_BYTES - sum(map(len, unsent_part)))
    if len(buffers) > 1 and nbytes <= _JOIN_BYTES:
        buffers = (b"".join(buffers),)
    return _write(descriptor, buffers, nbytes)


def _write(descriptor: int, buffers: Sequence[Buffer], nbytes: int) -> Sequence[Buffer]:
    """Writes as much of `buffers`, which have so many bytes, as a socket takes now; returns what is
    left."""
    while buffers:
        batch, batch_bytes = buffers, nbytes
        if len(buffers) > _BUFFERS_MAX:
            batch = buffers[:_BUFFERS_MAX]
            batch_bytes = sum(map(len, batch))
        try:
            sent_bytes = os.writev(descriptor, batch)
        except BlockingIOError:
            break
        if sent_bytes < batch_bytes:
            # The socket is full: a further call would only say so.
            return unsent(buffers, sent_bytes)
        buffers = buffers[_BUFFERS_MAX:]
        nbytes -= batch_bytes
    return buffers


def first_bytes(buffers: Sequence[Buffer], bytes_max: int) -> list[Buffer]:
    """The first `bytes_max` bytes of `buffers`, or all if there are not so many. No copy."""
    head: list[Buffer] = []
    for buffer in buffers:
        if len(buffer) >= bytes_max:
            head.append(memoryview(buffer)[:bytes_max])
            break
        head.append(buffer)
        bytes_max -= len(buffer)
    return head


def unsent(buffers: Sequence[Buffer], sent_bytes: int) -> list[Buffer]:
    """What is left of `buffers` once `sent_bytes` bytes of them were written."""
    for index, buffer in enumerate(buffers):
        if sent_bytes < len(buffer):
            later_buffers = buffers[index + 1 :]
            return (
                [memoryview(buffer)[sent_bytes:], *later_buffers]
                if sent_bytes
                else [buffer, *later_buffers]
            )
        sent_bytes -= len(buffer)
    return []
