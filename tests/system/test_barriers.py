"""A thousand barriers under load, and some behind a slow consumer: each comes back once, in order,
and then the consumer's contents hold every mutation that was acknowledged before it was sent.

More than that: at a barrier the contents of each partition are exactly what they were at the number
that the barrier names, as a model computes it from every answer that the publishers got.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Final

import attrs
import trio

from tests.kit.mirror import Mirror, assert_same
from tests.kit.process import server_process
from upr_protocol.chunk import Chunk, ChunkBuilder
from upr_protocol.client import (
    BarrierReached,
    ChunkReceived,
    Consumer,
    Publisher,
    connect,
    consume,
    publisher,
)
from upr_protocol.hashing import partition_of
from upr_protocol.ids import Operation, PartitionId, SeqNo
from upr_protocol.limits import WINDOW_BYTES_DEFAULT, WINDOW_BYTES_MIN

BUCKET: Final = "barriers"
PARTITIONS: Final = 8
KEYS: Final = 400
BARRIERS: Final = 1000
SLOW_BARRIERS: Final = 100
SLOW_PAUSE_S: Final = 0.002
OPEN_AT_ONCE: Final = 16

Contents = dict[bytes, bytes]


class Model:
    """Everything that was acknowledged: for each partition number → key and value, None for a
    deletion."""

    def __init__(self) -> None:
        self.log: list[dict[int, tuple[bytes, bytes | None]]] = [{} for _ in range(PARTITIONS)]
        self.high = [0] * PARTITIONS

    def acknowledged(self, partition: PartitionId, chunk: Chunk, first: SeqNo) -> None:
        """The server gave the mutations of `chunk` the numbers from `first`."""
        log = self.log[partition]
        for seq, row in enumerate(chunk, first):
            assert seq not in log, f"the number {seq} was given twice"
            log[seq] = (row.key, row.value if row.op is Operation.SET else None)
            self.high[partition] = max(self.high[partition], seq)

    def at(self, partition: int, through: int, since: tuple[int, Contents]) -> Contents:
        """The contents of `partition` at `through`, going on from those at an earlier number."""
        reached, contents = since
        contents = dict(contents)
        for seq in range(reached + 1, through + 1):
            key, value = self.log[partition][seq]
            if value is None:
                contents.pop(key, None)
            else:
                contents[key] = value
        return contents


@attrs.frozen
class Sent:
    """A barrier on its way: its cookie, and by partition what was acknowledged when it was sent."""

    cookie: bytes
    acknowledged: tuple[int, ...]


@attrs.frozen
class Back:
    """A barrier that came back: its ends, and by partition the consumer's contents then."""

    ends: dict[PartitionId, SeqNo]
    contents: tuple[Contents, ...]


class Load:
    """Publishers at work.

    Attributes:
        model: What was acknowledged.
    """

    def __init__(self, draw: random.Random) -> None:
        self.model = Model()
        self.acknowledged = trio.Event()
        """Set, and made anew, with each answer."""
        self._draw = draw
        self._ends = False
        self._keys: list[list[bytes]] = [[] for _ in range(PARTITIONS)]
        for index in range(KEYS):
            key = b"key-%d" % index
            self._keys[partition_of(key, PARTITIONS)].append(key)

    async def publish(self, sink: Publisher) -> None:
        """Sends batches as fast as they are answered."""
        while not self._ends:
            partition = PartitionId(self._draw.randrange(PARTITIONS))
            chunk = self._batch(partition)
            reply = await sink.publish_and_wait(partition, chunk)
            assert reply.failures == ()
            assert reply.last_seq - reply.first_seq + 1 == chunk.count
            self.model.acknowledged(partition, chunk, reply.first_seq)
            before, self.acknowledged = self.acknowledged, trio.Event()
            before.set()

    def _batch(self, partition: PartitionId) -> Chunk:
        # What is deleted was set just before, so that nothing fails.
        draw, builder = self._draw, ChunkBuilder()
        for _ in range(draw.choice((1, 10, 300))):
            key = draw.choice(self._keys[partition])
            builder.append(Operation.SET, key, draw.randbytes(draw.randrange(100)))
            if draw.random() < 0.1:
                builder.append(Operation.DELETE, key)
        return builder.build()

    def end(self) -> None:
        """No more batches; what is on its way is still answered."""
        self._ends = True


class Follower:
    """A consumer that sends barriers, one by one and in bursts, after something more was
    acknowledged each time."""

    def __init__(self, load: Load, barriers: int, draw: random.Random, pause_s: float) -> None:
        self.back: list[Back] = []
        self._load = load
        self._barriers = barriers
        self._draw = draw
        self._pause_s = pause_s
        self._mirror = Mirror()
        self._on_their_way: deque[Sent] = deque()

    async def run(self, url: str, window_bytes: int) -> None:
        """Until all barriers came back."""
        async with (
            consume(url, window_bytes=window_bytes) as consumer,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(self._send_barriers, consumer)
            async for event in consumer:
                self._mirror.apply(event)
                if isinstance(event, BarrierReached):
                    self._came_back(event)
                    if len(self.back) == self._barriers:
                        break
                elif self._pause_s and isinstance(event, ChunkReceived):
                    await trio.sleep(self._pause_s)
            assert consumer.statistics().connections == 1

    async def _send_barriers(self, consumer: Consumer) -> None:
        barrier_count = 0
        while barrier_count < self._barriers:
            burst = min(self._draw.choice((1, 1, 1, 4)), self._barriers - barrier_count)
            if len(self._on_their_way) + burst <= OPEN_AT_ONCE:
                for _ in range(burst):
                    barrier_count += 1
                    cookie = b"barrier-%d" % barrier_count
                    self._on_their_way.append(Sent(cookie, tuple(self._load.model.high)))
                    consumer.send_barrier(cookie)
            await self._load.acknowledged.wait()
            await trio.sleep(self._draw.choice((0, 0.002)))

    def _came_back(self, event: BarrierReached) -> None:
        sent_barrier = self._on_their_way.popleft()
        assert event.cookie == sent_barrier.cookie, "out of order, or a second time"
        for partition, acknowledged in enumerate(sent_barrier.acknowledged):
            assert event.ends[PartitionId(partition)] >= acknowledged
        contents = tuple(
            {key: value for key, (_, value) in self._mirror.items.get(partition, {}).items()}
            for partition in range(PARTITIONS)
        )
        self.back.append(Back(event.ends, contents))

    def check(self) -> None:
        """At each barrier the contents were what the model says they were."""
        assert not self._on_their_way
        assert len(self.back) == self._barriers
        moments = {tuple(back.ends.items()) for back in self.back}
        assert len(moments) > self._barriers / 20, "that was no load"
        for partition in range(PARTITIONS):
            since: tuple[int, Contents] = (0, {})
            for back in self.back:
                end = back.ends[PartitionId(partition)]
                since = (end, self._load.model.at(partition, end, since))
                assert_same(back.contents[partition], since[1], PARTITIONS)


async def test_a_thousand_barriers_under_load() -> None:
    load = Load(random.Random(1))
    fast = Follower(load, BARRIERS, random.Random(2), 0)
    # It lags behind, among snapshots that the fast one closed.
    slow = Follower(load, SLOW_BARRIERS, random.Random(3), SLOW_PAUSE_S)
    async with server_process() as server:
        async with connect(server.url()) as client:
            await client.create_bucket(BUCKET, PARTITIONS)
        url = server.url(BUCKET)
        async with (
            publisher(url) as first_publisher,
            publisher(url) as two,
            publisher(url) as three,
            trio.open_nursery() as publishers,
        ):
            for sink in (first_publisher, two, three):
                publishers.start_soon(load.publish, sink)
            async with trio.open_nursery() as followers:
                followers.start_soon(fast.run, url, WINDOW_BYTES_DEFAULT)
                followers.start_soon(slow.run, url, WINDOW_BYTES_MIN)
            load.end()
    assert sum(load.model.high) > 20_000, "that was no load"
    fast.check()
    slow.check()
