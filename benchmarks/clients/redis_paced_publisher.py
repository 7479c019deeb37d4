"""B6's peer: `XADD`, one at a time at a steady rate, the time it was due in its value."""

from __future__ import annotations

import random
import socket
import time

from benchmarks.kit.commands import Commands
from benchmarks.kit.pacing import paced, percentiles_us, sharpen_timers
from benchmarks.kit.processes import HOST
from benchmarks.kit.work import KEYS, VALUE_BYTES, key_of

_FILLER = bytes(VALUE_BYTES - 8)


class _Publisher:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._keys = [key_of(number) for number in range(KEYS)]
        random.Random(1).shuffle(self._keys)
        self._sent = 0
        self.answered = 0

    def send(self, _index: int, due_ns: int) -> None:
        key = self._keys[self._sent % KEYS]
        self._sent += 1
        self._connection.sendall(
            b"*5\r\n$4\r\nXADD\r\n$1\r\ns\r\n$1\r\n*\r\n$12\r\n%b\r\n$100\r\n%b%b\r\n"
            % (key, due_ns.to_bytes(8, "little"), _FILLER)
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
    """Each command adds `count` entries at `rate` a second."""
    sharpen_timers()
    with socket.create_connection((HOST, commands.arguments["port"])) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        publisher = _Publisher(connection)
        commands.answer(ready=True)
        for command in commands:
            used, begun = time.process_time(), time.monotonic()
            late = paced(
                command["rate"], command["count"], connection, publisher.send, publisher.receive
            )
            publisher.finish()
            commands.answer(
                seconds=time.monotonic() - begun,
                late=percentiles_us(late),
                processor_s=time.process_time() - used,
            )
