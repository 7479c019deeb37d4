"""A process that follows a bucket of numbered keys and checks each value: `python -m
tests.kit.counting_consumer URL COUNT PARTITIONS CONSUMERS STOP`.

Mutation `n` of `COUNT` sets `key_of(n)` to `value_of(key)`, in the partition of the key.
One consumer follows all partitions; several consumers follow one each. With `STOP` the window is
the smallest possible, and the process stops itself inside a snapshot. It writes lines of JSON:
`{"ready": true}` when all consumers are connected and up to date, `{"inside": true}` before it
stops itself, and at the end what it has received.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import cache
from typing import Final

import trio

from upr_protocol.client import (
    ChunkReceived,
    Consumer,
    CycleCompleted,
    Event,
    SnapshotEnd,
    SnapshotStart,
    consume,
)
from upr_protocol.hashing import partition_of
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.limits import WINDOW_BYTES_DEFAULT, WINDOW_BYTES_MIN

SILENCE_S: Final = 3600
"""It is stopped for long, and wants to find its streams again afterwards."""


def key_of(key_number: int) -> bytes:
    """The key that a mutation sets."""
    return b"%012d" % key_number


def value_of(key: bytes) -> bytes:
    """The value that the mutation sets."""
    return key * 8


@cache
def keys_by_partition(count: int, partitions: int) -> tuple[int, ...]:
    """How many of the first `count` keys belong to each partition."""
    keys = [0] * partitions
    for index in range(count):
        keys[partition_of(key_of(index), partitions)] += 1
    return tuple(keys)


def say(**fields: object) -> None:
    """Writes a line to the test."""
    print(json.dumps(fields), flush=True)  # noqa: T201  # it is how they speak


class Counted:
    """Counts what one consumer has received.

    Args:
        numbers: The numbers of the mutations that it should receive.
        count: How many mutations there are.
        partitions: How many partitions they go to.

    Attributes:
        mutations: Mutations received.
        keys: Their keys.
        wrong: Mutations that were never sent.
        snapshots: By kind, how many snapshots began.
    """

    def __init__(self, numbers: frozenset[PartitionId], count: int, partitions: int) -> None:
        self._seen = bytearray(count)
        self._partitions = partitions
        self._ends: dict[PartitionId, SeqNo] = {}
        keys = keys_by_partition(count, partitions)
        self._goal = sum(keys[partition_id] for partition_id in numbers)
        self.mutations = self.keys = self.wrong = 0
        self.snapshots: dict[str, int] = {}
        self.ready = trio.Event()

    @property
    def is_complete(self) -> bool:
        """Whether it has every key and is inside no snapshot."""
        return self.keys == self._goal and not self._ends

    def is_inside(self, event: Event) -> bool:
        """Whether more of its snapshot follows this chunk."""
        return isinstance(event, ChunkReceived) and event.chunk.end < self._ends[event.partition]

    def apply(self, event: Event) -> None:
        """Counts an event."""
        if isinstance(event, SnapshotStart):
            self._ends[event.partition] = event.end
            kind = event.kind.name.lower()
            self.snapshots[kind] = self.snapshots.get(kind, 0) + 1
        elif isinstance(event, SnapshotEnd):
            del self._ends[event.partition]
        elif isinstance(event, CycleCompleted):
            self.ready.set()
        elif isinstance(event, ChunkReceived):
            keys = event.chunk.keys()
            self.mutations += len(keys)
            if event.chunk.values() != [value_of(key) for key in keys]:
                self.wrong += 1
            for key in keys:
                if partition_of(key, self._partitions) != event.partition:
                    self.wrong += 1
                key_number = int(key)
                self.keys += not self._seen[key_number]
                self._seen[key_number] = 1


async def follow(consumer: Consumer, counted: Counted, stops: bool) -> None:
    """Follows until everything was seen, and was said to be complete.

    One that has everything may not have been told so yet: it was slow, and what it had missed was
    all of it in the first cycle.
    """
    async for event in consumer:
        counted.apply(event)
        if stops and counted.is_inside(event):
            say(inside=True)
            os.kill(os.getpid(), signal.SIGSTOP)
            stops = False
        if counted.is_complete and counted.ready.is_set():
            return


async def main(url: str, count: int, partitions: int, consumers: int, stops: bool) -> None:
    """Runs all consumers; writes when they are ready, and what they received."""
    every = [PartitionId(partition) for partition in range(partitions)]
    wishes = [every] if consumers == 1 else [[every[n % partitions]] for n in range(consumers)]
    counts = [Counted(frozenset(partition_ids), count, partitions) for partition_ids in wishes]

    async def follow_some(index: int, partition_ids: list[PartitionId], counted: Counted) -> None:
        async with consume(
            url,
            partitions=partition_ids,
            window_bytes=WINDOW_BYTES_MIN if stops else WINDOW_BYTES_DEFAULT,
            idle_interval_s=SILENCE_S,
            identity=f"counting:{index}",
        ) as consumer:
            await follow(consumer, counted, stops)

    async with trio.open_nursery() as nursery:
        for index, (partition_ids, counted) in enumerate(zip(wishes, counts, strict=True)):
            nursery.start_soon(follow_some, index, partition_ids, counted)
        for counted in counts:
            await counted.ready.wait()
        say(ready=True)
    kinds: dict[str, int] = {}
    for counted in counts:
        for kind, snapshots in counted.snapshots.items():
            kinds[kind] = kinds.get(kind, 0) + snapshots
    say(
        complete=sum(counted.is_complete for counted in counts),
        mutations=sum(counted.mutations for counted in counts),
        wrong=sum(counted.wrong for counted in counts),
        snapshots=kinds,
    )


if __name__ == "__main__":
    _, _url, _count, _partitions, _consumers, _how = sys.argv
    trio.run(main, _url, int(_count), int(_partitions), int(_consumers), _how == "stop")
