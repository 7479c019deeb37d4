"""B6's and B6c's peer: `XADD` at a steady rate, the time each was due in its value."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Sequence
from itertools import cycle

from benchmarks.kit.commands import Commands
from benchmarks.kit.pacing import paced, percentiles_us, sharpen_timers
from benchmarks.kit.processes import HOST
from benchmarks.kit.work import VALUE_BYTES, key_of

_FILLER = bytes(VALUE_BYTES - 8)


class _Publisher:
    def __init__(self, connection: socket.socket, keys: int) -> None:
        self._connection = connection
        shuffled = [key_of(index) for index in range(keys)]
        random.Random(1).shuffle(shuffled)
        self._keys = cycle(shuffled)
        self._sent = 0
        self.answered = 0

    def send(self, dues_ns: Sequence[int]) -> None:
        self._sent += len(dues_ns)
        self._connection.sendall(
            b"".join(
                [
                    b"*5\r\n$4\r\nXADD\r\n$1\r\ns\r\n$1\r\n*\r\n$12\r\n%b\r\n$100\r\n%b%b\r\n"
                    % (next(self._keys), due_ns.to_bytes(8, "little"), _FILLER)
                    for due_ns in dues_ns
                ]
            )
        )

    def receive(self) -> None:
        # An answer is one bulk string: its length and its bytes, a line each.
        data = self._connection.recv(1 << 16)
        if not data or b"-ERR" in data:
            raise ConnectionError(f"redis-server said {data!r}")
        self.answered += data.count(b"$")

    def finish(self) -> None:
        while self.answered < self._sent:
            self.receive()


def serve(commands: Commands) -> None:
    """Each command adds `count` entries at `rate` a second, up to `together` in one write. The
    arguments say how many keys there are."""
    sharpen_timers()
    arguments = commands.arguments
    with socket.create_connection((HOST, arguments["port"])) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        publisher = _Publisher(connection, arguments["keys"])
        commands.answer(ready=True)
        for command in commands:
            processor_s, started_at = time.process_time(), time.monotonic()
            late = paced(
                command["rate"],
                command["count"],
                connection,
                publisher.send,
                publisher.receive,
                together=command["together"],
            )
            publisher.finish()
            commands.answer(
                seconds=time.monotonic() - started_at,
                late=percentiles_us(late),
                processor_s=time.process_time() - processor_s,
            )
