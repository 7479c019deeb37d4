"""The consumer of the long run: follows a bucket as it changes, touches all, and keeps the time at
which it got what."""

from __future__ import annotations

import time
from array import array

import numpy as np
import trio

from benchmarks.clients.consumer import Touch
from benchmarks.kit.commands import Commands
from benchmarks.kit.stamps import stamps
from upr_protocol.client import ChunkReceived, Consumer, consume
from upr_protocol.ids import PartitionId, SeqNo


class _Seen:
    """What came, and when."""

    def __init__(self) -> None:
        self.touch = Touch()
        self.ends: dict[PartitionId, SeqNo] = {}
        self._due = array("q")
        self._came = array("q")

    async def follow(self, consumer: Consumer) -> None:
        async for event in consumer:
            if isinstance(event, ChunkReceived):
                chunk = event.chunk
                self.touch.chunk(chunk)
                now, due = time.monotonic_ns(), stamps(chunk)
                self._due.frombytes(due.tobytes())
                self._came.frombytes(np.full(len(due), now).tobytes())
                self.ends[event.partition] = chunk.end

    def save(self, path: str) -> None:
        np.save(path, np.array([self._due, self._came], dtype=np.int64))
        del self._due[:], self._came[:]


async def _serve(commands: Commands) -> None:
    samples = _Seen()
    async with (
        consume(commands.arguments["url"], identity="bench:live") as consumer,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(samples.follow, consumer)
        commands.answer(ready=True)
        while (command := await trio.to_thread.run_sync(commands.next)) is not None:
            if "save" in command:
                samples.save(command["save"])
            commands.answer(
                reached=sum(samples.ends.values()),
                chunks=samples.touch.chunks,
                mutations=samples.touch.mutations,
                bytes=samples.touch.nbytes,
                processor_s=time.process_time(),
            )
        nursery.cancel_scope.cancel()


def serve(commands: Commands) -> None:
    """`save` writes to that file when what came was due and when it came, and forgets it. Each
    answer says how far it has got: the partitions' numbers added up."""
    trio.run(_serve, commands)
