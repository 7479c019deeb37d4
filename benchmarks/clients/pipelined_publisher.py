"""B1p's publisher: one mutation a frame, and so many unanswered frames on each connection.

Like `redis-benchmark` it builds its requests beforehand and looks at no more of an answer than it
must: the row measures the server.
"""

from __future__ import annotations

import os
import random
import selectors
import time
from struct import Struct
from typing import Final

from benchmarks.kit.commands import Commands
from benchmarks.kit.raw import RECEIVE_BYTES, RawConnection
from benchmarks.kit.work import KEYS, key_of, values
from upr_protocol.chunk import Bundle, chunk_of_plain_sets
from upr_protocol.client import WriterIdentity
from upr_protocol.hashing import partition_of
from upr_protocol.wire import HEADER_BYTES, Credit, Mutate, MutateReply

_OPCODE_AND_LENGTH: Final = Struct("<3xB8xI")

_STATUS_AT: Final = HEADER_BYTES + 20
"""Where the status of a reply's only run lies."""


class _Pipeline:
    """One connection, and the frames that it is to send."""

    def __init__(self, connection: RawConnection, depth: int, seed: int) -> None:
        self.connection = connection
        self._depth = depth
        self._draw = random.Random(seed)
        self._writer = WriterIdentity(os.urandom(16))
        self._frames: list[bytes] = []
        self._received = b""
        self.sent = 0
        self.answered = 0

    def prepare(self, count: int) -> None:
        """Builds `count` frames, each of a random key."""
        self._frames = [
            self._frame(opaque, value) for opaque, value in enumerate(values(self._draw, count), 1)
        ]
        self.sent = self.answered = 0

    def _frame(self, opaque: int, value: bytes) -> bytes:
        key = key_of(self._draw.randrange(KEYS))
        partition = partition_of(key, self.connection.partition_count)
        counter = self._writer.next_counter(partition)
        bundle = Bundle.of_one_run(partition, chunk_of_plain_sets([key], [value]), counter)
        return b"".join(Mutate(bundle, self._writer.id, opaque=opaque).frame_buffers())

    @property
    def is_done(self) -> bool:
        """Whether every frame was answered."""
        return self.answered == len(self._frames)

    def send(self) -> None:
        """Sends the next frames, once all those before are answered; `redis-benchmark` too fills
        its pipeline and then empties it."""
        if self.answered == self.sent:
            frames = self._frames[self.sent : self.sent + self._depth]
            self.sent += len(frames)
            self.connection.socket.sendall(b"".join(frames))

    def receive(self) -> None:
        """Counts the answers that have come."""
        data = self._received + self.connection.socket.recv(RECEIVE_BYTES)
        offset = 0
        while offset + HEADER_BYTES <= len(data):
            opcode, length = _OPCODE_AND_LENGTH.unpack_from(data, offset)
            end = offset + HEADER_BYTES + length
            if end > len(data):
                break
            if opcode == MutateReply.opcode and not data[offset + _STATUS_AT]:
                self.answered += 1
            elif opcode != Credit.opcode:
                raise ConnectionError(f"message {opcode:#04x} instead of an answer")
            offset = end
        self._received = data[offset:]


def serve(commands: Commands) -> None:
    """Each command publishes so many `mutations`. The arguments say over how many `connections`,
    and how many frames of each are unanswered: `pipeline`."""
    arguments = commands.arguments
    pipelines = [
        _Pipeline(
            RawConnection(arguments["port"], arguments["bucket"]), arguments["pipeline"], seed
        )
        for seed in range(arguments["connections"])
    ]
    selector = selectors.DefaultSelector()
    for pipeline in pipelines:
        selector.register(pipeline.connection.socket, selectors.EVENT_READ, pipeline)
    commands.answer(ready=True)
    for command in commands:
        for pipeline in pipelines:
            pipeline.prepare(command["mutations"] // len(pipelines))
        processor_s, started_at = time.process_time(), time.monotonic()
        for pipeline in pipelines:
            pipeline.send()
        while not all(pipeline.is_done for pipeline in pipelines):
            for key, _ in selector.select():
                key.data.receive()
                key.data.send()
        commands.answer(
            mutations=sum(pipeline.answered for pipeline in pipelines),
            seconds=time.monotonic() - started_at,
            processor_s=time.process_time() - processor_s,
        )
