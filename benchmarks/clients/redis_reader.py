"""B3's peer: `XRANGE` in pages of 1,000, read raw.

Entries get IDs of one length, so that a page's length is known and nothing of it need be parsed:
the bytes are received into one buffer and that is all. It is the least that a Python process can
do.
"""

from __future__ import annotations

import random
import socket
import time
from typing import Final

from benchmarks.kit.commands import Commands
from benchmarks.kit.processes import HOST
from benchmarks.kit.work import KEY_BYTES, VALUE_BYTES, key_of

PAGE: Final = 1_000
_FIRST_ID: Final = 1_000_000_000_001
_ENTRY_BYTES: Final = len(b"*2\r\n$15\r\n1000000000000-0\r\n*2\r\n$12\r\n\r\n$100\r\n\r\n") + (
    KEY_BYTES + VALUE_BYTES
)
_ADDED_BYTES: Final = len(b"$15\r\n1000000000000-0\r\n")


def _load(connection: socket.socket, count: int) -> None:
    draw = random.Random(1)
    for low in range(0, count, PAGE):
        page = bytearray()
        for index in range(low, min(low + PAGE, count)):
            page += b"*5\r\n$4\r\nXADD\r\n$1\r\ns\r\n$15\r\n%d-0\r\n$12\r\n%b\r\n$100\r\n%b\r\n" % (
                _FIRST_ID + index,
                key_of(index),
                draw.randbytes(VALUE_BYTES),
            )
        connection.sendall(page)
        _receive(connection, _ADDED_BYTES * (min(low + PAGE, count) - low), bytearray(1 << 20))


def _receive(connection: socket.socket, nbytes: int, into: bytearray) -> None:
    """Receives just `nbytes`; what comes before them in `into` is overwritten."""
    while nbytes:
        received_bytes = connection.recv_into(into, min(nbytes, len(into)))
        if not received_bytes:
            raise ConnectionError("redis-server closed the connection")
        nbytes -= received_bytes


def _request(after: int) -> bytes:
    return (
        b"*6\r\n$6\r\nXRANGE\r\n$1\r\ns\r\n$16\r\n(%d-0\r\n$1\r\n+\r\n"
        b"$5\r\nCOUNT\r\n$4\r\n%d\r\n" % (after, PAGE)
    )


def _read(connection: socket.socket, count: int, ahead: int) -> int:
    """Reads the stream from its beginning, `ahead` pages asked for at a time; its bytes."""
    buffer = bytearray(1 << 20)
    page_bytes = len(b"*%d\r\n" % PAGE) + PAGE * _ENTRY_BYTES
    requests = [_request(_FIRST_ID + low - 1) for low in range(0, count, PAGE)]
    for request in requests[:ahead]:
        connection.sendall(request)
    for request in (*requests[ahead:], *[b""] * min(ahead, len(requests))):
        _receive(connection, page_bytes, buffer)
        if request:
            connection.sendall(request)
    return page_bytes * len(requests)


def serve(commands: Commands) -> None:
    """`load` entries once; then each `read` goes through them all."""
    with socket.create_connection((HOST, commands.arguments["port"])) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        count = commands.arguments["load"]
        assert count % PAGE == 0
        _load(connection, count)
        commands.answer(ready=True)
        for command in commands:
            started_at, processor_s = time.monotonic(), time.process_time()
            nbytes = _read(connection, count, command["ahead"])
            commands.answer(
                seconds=time.monotonic() - started_at,
                processor_s=time.process_time() - processor_s,
                mutations=count,
                bytes=nbytes,
            )
