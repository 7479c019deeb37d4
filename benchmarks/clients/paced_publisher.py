"""B6's publisher: one mutation a batch, at a steady rate, the time it was due in its value."""

from __future__ import annotations

import os
import random
import time

from benchmarks.kit.commands import Commands
from benchmarks.kit.pacing import paced, percentiles_us, sharpen_timers
from benchmarks.kit.raw import RawConnection
from benchmarks.kit.work import KEYS, VALUE_BYTES, key_of
from upr_protocol.chunk import Bundle, plain_chunk
from upr_protocol.client import WriterIdentity
from upr_protocol.hashing import partition_of
from upr_protocol.wire import Mutate, MutateReply

_FILLER = bytes(VALUE_BYTES - 8)

_UNANSWERED_MAX = 4_000
"""A session may have 4,096 requests open."""


class _Publisher:
    def __init__(self, connection: RawConnection) -> None:
        self._connection = connection
        self._writer = WriterIdentity(os.urandom(16))
        # Every key once in 20 seconds: deduplication then leaves every mutation to be seen.
        self._keys = [key_of(number) for number in range(KEYS)]
        random.Random(1).shuffle(self._keys)
        self._sent = 0
        self.answered = 0

    def send(self, _index: int, due_ns: int) -> None:
        connection, session = self._connection, self._connection.session
        key = self._keys[self._sent % KEYS]
        self._sent += 1
        partition = partition_of(key, connection.partition_count)
        # A server that is behind makes this late, and late counts as latency.
        while not session.credit.open or self._sent - self.answered > _UNANSWERED_MAX:
            self.receive()
        session.send(
            Mutate(
                Bundle.of_one(
                    partition,
                    plain_chunk([key], [due_ns.to_bytes(8, "little") + _FILLER]),
                    self._writer.next_counter(partition),
                ),
                self._writer.id,
                opaque=session.new_opaque(),
            )
        )
        connection.flush()

    def receive(self) -> None:
        for message in self._connection.messages():
            self.answered += isinstance(message, MutateReply)

    def finish(self) -> None:
        while self.answered < self._sent:
            self.receive()


def serve(commands: Commands) -> None:
    """Each command publishes `count` mutations at `rate` a second."""
    sharpen_timers()
    arguments = commands.arguments
    with RawConnection(arguments["port"], arguments["bucket"]) as connection:
        publisher = _Publisher(connection)
        commands.answer(ready=True)
        for command in commands:
            used, begun = time.process_time(), time.monotonic()
            late = paced(
                command["rate"],
                command["count"],
                connection.socket,
                publisher.send,
                publisher.receive,
            )
            publisher.finish()
            commands.answer(
                seconds=time.monotonic() - begun,
                late=percentiles_us(late),
                processor_s=time.process_time() - used,
            )
