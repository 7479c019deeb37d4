"""B6's and B6c's peer: a blocking `XREAD`, whose answers are parsed as a Python client would."""

from __future__ import annotations

import socket
import time
from struct import Struct
from typing import IO, Any

from benchmarks.kit.commands import Commands
from benchmarks.kit.pacing import percentiles_us
from benchmarks.kit.processes import HOST

_STAMP = Struct("<q")


def _reply(stream: IO[bytes]) -> Any:
    """One reply of the Redis protocol."""
    line = stream.readline()
    kind, text = line[:1], line[1:-2]
    if kind == b"*":
        return [_reply(stream) for _ in range(int(text))]
    if kind == b"$":
        return stream.read(int(text) + 2)[:-2]
    raise ConnectionError(f"redis-server said {line!r}")


def _consume(connection: socket.socket, stream: IO[bytes], last: bytes, count: int) -> Any:
    """Waits for `count` entries after `last`; returns their latencies and the last one's ID."""
    latencies: list[int] = []
    while len(latencies) < count:
        connection.sendall(
            b"*8\r\n$5\r\nXREAD\r\n$5\r\nBLOCK\r\n$1\r\n0\r\n$5\r\nCOUNT\r\n$4\r\n1000\r\n"
            b"$7\r\nSTREAMS\r\n$1\r\ns\r\n$%d\r\n%b\r\n" % (len(last), last)
        )
        ((_, entries),) = _reply(stream)
        now = time.monotonic_ns()
        latencies += [now - _STAMP.unpack_from(fields[1])[0] for _, fields in entries]
        last = entries[-1][0]
    return latencies, last


def serve(commands: Commands) -> None:
    """Each command waits for `count` entries; those of the first `skip` are not counted."""
    with socket.create_connection((HOST, commands.arguments["port"])) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        last = b"0"
        with connection.makefile("rb") as stream:
            commands.answer(ready=True)
            for command in commands:
                processor_s = time.process_time()
                latencies, last = _consume(connection, stream, last, command["count"])
                commands.answer(
                    latency=percentiles_us(latencies[command["skip"] :]),
                    processor_s=time.process_time() - processor_s,
                )
