"""The publisher of B6, B6c and R1s: a steady rate of single mutations, the time each was due in its
value.

B6 sends each in a frame of its own. In the others those that are due go in one bundle, and wait
while a `BundleWindow` is closed, as the client library sends single operations of many tasks. R1s
wants them on replicas.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import cycle

from benchmarks.kit.commands import Commands
from benchmarks.kit.pacing import paced, percentiles_us, readable, sharpen_timers
from benchmarks.kit.raw import RawConnection
from benchmarks.kit.work import VALUE_BYTES, key_of
from upr_protocol.chunk import Bundle, BundleRun, chunk_of_plain_sets
from upr_protocol.client import WriterIdentity
from upr_protocol.client.core.bundle_window import BundleWindow
from upr_protocol.hashing import partition_of
from upr_protocol.ids import Durability, PartitionId
from upr_protocol.wire import Mutate, MutateReply, Refusal

_FILLER = bytes(VALUE_BYTES - 8)

_Row = tuple[PartitionId, bytes, int]
"""A mutation: its partition, its key, and when it was due."""

_UNANSWERED_MAX = 4_000
"""A session may have 4,096 requests open."""


class _Publisher:
    def __init__(self, connection: RawConnection, keys: int, copies: int) -> None:
        self._connection = connection
        self._copies = copies
        self._writer = WriterIdentity(os.urandom(16))
        # Every key once in a round: deduplication then leaves every mutation to be seen.
        shuffled = [key_of(index) for index in range(keys)]
        random.Random(1).shuffle(shuffled)
        self._keys = cycle(
            [(partition_of(key, connection.partition_count), key) for key in shuffled]
        )
        self._sent = 0
        self._dues_of: dict[int, Sequence[int]] = {}
        self.answered = 0
        self._window = BundleWindow()
        self.latencies: list[int] = []
        """How long after it was due each mutation was answered, ns."""

    def wait_until_open(self) -> None:
        """Waits until the window is open, and receives meanwhile."""
        while (wait_s := self._window.opens_at(now := time.monotonic()) - now) > 0:
            if readable(self._connection.socket, wait_s):
                self.receive()

    def send(self, dues_ns: Sequence[int]) -> None:
        connection, session = self._connection, self._connection.session
        # A server that is behind makes these late, and late counts as latency.
        while not session.credit.is_open or self._sent - self.answered > _UNANSWERED_MAX:
            self.receive()
        self._sent += 1
        rows = sorted((*next(self._keys), due_ns) for due_ns in dues_ns)
        chunk = chunk_of_plain_sets(
            [key for _, key, _ in rows],
            [due_ns.to_bytes(8, "little") + _FILLER for _, _, due_ns in rows],
        )
        bundle = Bundle(chunk, self._runs(rows))
        durability = Durability.REPLICATED if self._copies else Durability.MEMORY
        opaque = session.new_opaque()
        self._dues_of[opaque] = dues_ns
        self._window.note_sent(opaque, time.monotonic())
        session.send(
            Mutate(
                bundle,
                self._writer.id,
                durability=durability,
                copies=self._copies,
                opaque=opaque,
            )
        )
        connection.flush()

    def _runs(self, rows: Sequence[_Row]) -> Iterator[BundleRun]:
        for partition, row_count in Counter(partition for partition, _, _ in rows).items():
            yield BundleRun(partition, row_count, self._writer.next_counter(partition))

    def receive(self) -> None:
        for message in self._connection.messages():
            if isinstance(message, Refusal):
                raise ConnectionError(f"the server refused a bundle: {message.sentence}")
            if isinstance(message, MutateReply):
                if any(run.status for run in message.runs):
                    raise ConnectionError("the server refused a run, or replicas took too long")
                now = time.monotonic_ns()
                self.answered += 1
                self._window.note_answered(message.opaque)
                self.latencies += [now - due for due in self._dues_of.pop(message.opaque)]

    def finish(self) -> None:
        while self.answered < self._sent:
            self.receive()


def serve(commands: Commands) -> None:
    """Each command publishes `count` mutations at `rate` a second, up to `together` in a frame. The
    arguments say how many keys there are, and how many replicas must have each mutation."""
    sharpen_timers()
    arguments = commands.arguments
    target = arguments["port"], arguments["bucket"], arguments.get("certificate", "")
    with RawConnection(*target) as connection:
        publisher = _Publisher(connection, arguments["keys"], arguments.get("copies", 0))
        commands.answer(ready=True)
        for command in commands:
            publisher.latencies.clear()
            processor_s, started_at = time.process_time(), time.monotonic()
            late = paced(
                command["rate"],
                command["count"],
                connection.socket,
                publisher.send,
                publisher.receive,
                together=command["together"],
                before_send=publisher.wait_until_open if command["together"] > 1 else None,
            )
            publisher.finish()
            commands.answer(
                seconds=time.monotonic() - started_at,
                late=percentiles_us(late),
                answered=percentiles_us(publisher.latencies),
                processor_s=time.process_time() - processor_s,
            )
