"""Servers killed fourteen times under load, or a hundred: what was acknowledged as persisted is
there, nothing was invented, and whoever follows ends with the server's contents.

Real processes on one data directory and one port. A life of the server ends with SIGKILL at a drawn
moment: under load, with its processes for the disk or without, or while it starts; now and then it
ends with SIGTERM. Two publishers go on all the while over whatever connection there is, one at
level memory and one at level persisted, on keys of their own; and two consumers follow, one of them
slowly.

A value is computed from its key and the key's count of writes, so that each says when it was
written. Counters are only incremented at level persisted: every answer, however often its batch was
sent, must name exactly the sum of what was sent before.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import attrs
import pytest
import trio

from tests.kit.effort import THOROUGH, effort
from tests.kit.mirror import Mirror, assert_same, server_contents
from tests.kit.process import (
    ROOT,
    UPR_SERVER,
    ServerProcess,
    children_of,
    environment,
    run,
    server_process,
)
from upr_protocol.chunk import Chunk, ChunkBuilder, CounterDelta
from upr_protocol.client import (
    Address,
    Batch,
    ChunkReceived,
    Client,
    Consumer,
    RolledBack,
    connect,
    consume,
    publisher,
)
from upr_protocol.errors import UprError
from upr_protocol.hashing import partition_of
from upr_protocol.ids import Durability, Operation, PartitionId
from upr_protocol.limits import WINDOW_BYTES_DEFAULT, WINDOW_BYTES_MIN
from upr_protocol.transport import Dial, dial_tcp

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")

BUCKET: Final = "killed"
PARTITIONS: Final = 4
KEYS: Final = 600
COUNTERS: Final = 40
LARGE_BYTES: Final = 70_000
PUBLISHER_BYTES: Final = 256 * 1024
"""What a publisher has under way at most."""

PATIENCE_S: Final = 600.0
CHECK_EVERY: Final = 8
"""Lives between looks at everything that was acknowledged."""

AHEAD: Final = 20
"""Batches that are answered while the server's writer is stopped: more than were under way."""

LATE_S: Final = 60.0
WATCH_S: Final = 0.03
PUBLISHER_PAUSE_S: Final = 0.002
STARTS_S: Final = (0.2, 1.0)
"""When a server that starts is killed: before it has looked at the directory, or when it is
nearly done, or just after."""

Ending = Literal["killed", "killed with its processes", "stopped", "killed while it starts"]
ENDINGS: Final[dict[Ending, int]] = {
    "killed": effort(2, 28),
    "killed with its processes": effort(1, 10),
    "stopped": effort(1, 8),
    "killed while it starts": effort(1, 14),
}
"""How many lives end so in each of the two tests: of both together, 8 are killed, or 104. Their
order is drawn, their number is not: how often lots are drawn depends on how fast the machine is."""


# What is written.


def is_deletion(count: int) -> bool:
    """Whether a key's write of this count is a deletion."""
    return count % 11 == 7


def value_of(key: bytes, count: int, bytes_max: int) -> bytes:
    """What a key holds after so many writes, the last of them no deletion."""
    head = b"%d:%s:" % (count, key)
    length = LARGE_BYTES if count % 97 == 50 else (count * 7919 + len(key)) % bytes_max
    return head + (b"%d." % count) * (length // 4)


class Written:
    """What was written to some keys, and what of it must be there.

    Attributes:
        sent: By key its writes.
        floor: By key the last write that may not be lost.
    """

    def __init__(self, prefix: str, draw: random.Random, bytes_max: int) -> None:
        self.sent: Counter[bytes] = Counter()
        self.floor: dict[bytes, int] = {}
        self._draw = draw
        self._bytes_max = bytes_max
        self._keys: list[list[bytes]] = [[] for _ in range(PARTITIONS)]
        for index in range(KEYS):
            key = b"%s-%d" % (prefix.encode(), index)
            self._keys[partition_of(key, PARTITIONS)].append(key)

    @property
    def keys(self) -> list[bytes]:
        """Every key that may be there."""
        return [key for keys in self._keys for key in keys]

    def write(self, partition: int, builder: ChunkBuilder) -> int:
        """Adds a write to a batch; gives the key's count of writes with it."""
        key = self._draw.choice(self._keys[partition])
        self.sent[key] += 1
        if is_deletion(self.sent[key]):
            builder.append(Operation.DELETE, key)
        else:
            value = self._value(key, self.sent[key])
            builder.append(Operation.SET, key, value)
        return self.sent[key]

    def is_answered(self, key: bytes, count: int) -> None:
        """A write was acknowledged."""
        assert count > self.floor.get(key, 0), "acknowledged out of order"
        self.floor[key] = count

    def _value(self, key: bytes, count: int) -> bytes:
        return value_of(key, count, self._bytes_max)

    def wrong(self, key: bytes, value: bytes | None, floor: int) -> str:
        """What is wrong with what the server has at a key; empty for nothing."""
        sent_values = self.sent[key]
        counts = range(max(floor, 1), sent_values + 1)
        if value is None:
            may_be_missing = floor == 0 or any(map(is_deletion, counts))
            return (
                ""
                if may_be_missing
                else f"{key!r} is lost: {floor} of {sent_values} writes were acknowledged"
            )
        count = int(value.partition(b":")[0])
        if is_deletion(count) or value != self._value(key, count) or count > sent_values:
            return f"{key!r} has a value that nobody wrote: {value!r:.100}"
        if count < floor:
            return f"{key!r} is at write {count} of {sent_values}, and {floor} were acknowledged"
        return ""


class Sums:
    """Counters that are incremented.

    Attributes:
        sent: By counter everything that was added.
        answered: By counter the last value that was acknowledged.
        increments: How many were acknowledged.
    """

    def __init__(self, draw: random.Random) -> None:
        self.sent: Counter[bytes] = Counter()
        self.answered: Counter[bytes] = Counter()
        self.increments = 0
        self._draw = draw
        self._keys: list[list[bytes]] = [[] for _ in range(PARTITIONS)]
        for index in range(COUNTERS):
            key = b"sum-%d" % index
            self._keys[partition_of(key, PARTITIONS)].append(key)

    def increment(self, partition: int, builder: ChunkBuilder) -> int:
        """Adds an increment to a batch; gives the value that it must come to."""
        key = self._draw.choice(self._keys[partition])
        delta = self._draw.randrange(1, 10)
        self.sent[key] += delta
        builder.append(Operation.INCREMENT, key, CounterDelta(delta, delta).encode())
        return self.sent[key]

    def is_answered(self, key: bytes, expected: int, value: int) -> None:
        """An increment was acknowledged."""
        assert value == expected, f"{key!r} is {value} instead of {expected}"
        self.answered[key] = value
        self.increments += 1


# Who writes.


class Load:
    """A publisher at work.

    Attributes:
        written: Its keys.
        sums: Its counters; None for one that has none.
        operations: How many were answered.
        batches: How many batches.
        resent: How many batches were sent again.
        done: Set when everything is answered after `end`.
    """

    def __init__(self, written_items: Written, sums: Sums | None, draw: random.Random) -> None:
        self.written = written_items
        self.sums = sums
        self.operations = self.batches = self.resent = 0
        self.done = trio.Event()
        self._answer = trio.Event()
        self._draw = draw
        self._ends = False

    async def publish(self, url: str, dial: Dial, durability: Durability) -> None:
        """Hands batches over as fast as there is room, until `end`; returns when all are
        answered."""
        async with publisher(
            url,
            durability=durability,
            buffer_bytes=PUBLISHER_BYTES,
            retry_timeout_s=PATIENCE_S,
            credit_timeout_s=PATIENCE_S,
            # Deletions of what a crash lost find nothing; `_answered` looks at each.
            on_failure=lambda _failure: None,
            dial=dial,
        ) as sink:
            while not self._ends:
                partition = PartitionId(self._draw.randrange(PARTITIONS))
                chunk, expected = self._batch(partition)
                await sink.publish(partition, chunk, partial(self._answered, expected))
                await trio.sleep(PUBLISHER_PAUSE_S)
            await sink.flush()
            self.resent = sink.statistics().resent_batches
            self.done.set()

    def end(self) -> None:
        """No more batches."""
        self._ends = True

    async def until_answered(self, batches: int) -> None:
        """Waits until so many batches more are answered."""
        goal = self.batches + batches
        while self.batches < goal:
            await self._answer.wait()

    def _batch(self, partition: PartitionId) -> tuple[Chunk, list[int]]:
        """A batch, and of each operation the key's count of writes or the value of the counter."""
        builder, expected = ChunkBuilder(), []
        for _ in range(self._draw.choice((1, 5, 30))):
            if self.sums is not None and self._draw.random() < 0.2:
                expected.append(self.sums.increment(partition, builder))
            else:
                expected.append(self.written.write(partition, builder))
        return builder.build(), expected

    def _answered(self, expected: list[int], batch: Batch) -> None:
        assert batch.refusal is None, batch.refusal
        assert batch.result is not None
        for index, status in batch.result.failures:
            assert batch.chunk.operations[index] == Operation.DELETE, status
        counters = dict(batch.result.counters)
        for index, row in enumerate(batch.chunk):
            if row.op is Operation.INCREMENT:
                assert self.sums is not None
                self.sums.is_answered(row.key, expected[index], counters[index])
            else:
                self.written.is_answered(row.key, expected[index])
        self.batches += 1
        self.operations += batch.chunk.count
        before, self._answer = self._answer, trio.Event()
        before.set()


# Who follows.


class Copy:
    """A consumer, and its copy of the bucket.

    Attributes:
        mirror: The copy.
        consumer: The consumer.
        pause_s: How long it takes over each chunk.
        rollbacks: How many times a partition went back.
    """

    def __init__(self, pause_s: float) -> None:
        self.mirror = Mirror()
        self.consumer: Consumer | None = None
        self.pause_s = pause_s
        self.rollbacks = 0

    async def follow(self, url: str, dial: Dial, window_bytes: int) -> None:
        """Follows, for ever."""
        async with consume(
            url, window_bytes=window_bytes, retry_timeout_s=PATIENCE_S, dial=dial
        ) as self.consumer:
            async for event in self.consumer:
                self.mirror.apply(event)
                self.rollbacks += isinstance(event, RolledBack)
                if isinstance(event, ChunkReceived) and self.pause_s:
                    await trio.sleep(self.pause_s)

    async def catch_up(self) -> None:
        """Waits until it has everything."""
        self.pause_s = 0.0
        assert self.consumer is not None
        with trio.fail_after(LATE_S):
            await self.consumer.barrier()


# The servers.


@attrs.frozen
class Plan:
    """How a test goes.

    Attributes:
        seed: What its moments are drawn from.
        quota_bytes: The bucket's memory.
        has_room: Whether all that is written has room there. If not, cursors of consumers are
            dropped, and these then wait for the disk.
        value_bytes: How long values are, at most, but for a few large ones.
        lasts_s: By how often a drawn life lasts so long, at most, after it was seen at work.
        slow_pause_s: How long the slow consumer takes over each chunk.
    """

    seed: int
    quota_bytes: int
    has_room: bool
    value_bytes: int
    lasts_s: tuple[float, ...]
    slow_pause_s: float


class KilledServers:
    """A data directory and a port, and the servers that live there one after the other.

    Attributes:
        seen: What happened, counted.
    """

    def __init__(self, plan: Plan, data_dir: Path) -> None:
        self.seen: Counter[str] = Counter()
        self._plan = plan
        self._data_dir = data_dir
        self._draw = draw = random.Random(plan.seed)
        self._listen = f"127.0.0.1:{free_port(draw)}"
        self._url = f"upr://{self._listen}/{BUCKET}"
        self._is_up = trio.Event()
        self._figures: Counter[str] = Counter()
        self.memory = Load(Written("memory", draw, plan.value_bytes), None, draw)
        self.persisted = Load(Written("persisted", draw, plan.value_bytes), Sums(draw), draw)
        self.fast = Copy(0.0)
        self.slow = Copy(plan.slow_pause_s)

    async def run(self) -> None:
        """All of it."""
        async with self._server() as server, connect(server.url()) as client:
            await client.create_bucket(BUCKET, PARTITIONS, self._plan.quota_bytes)
        async with trio.open_nursery() as followers:
            async with trio.open_nursery() as publishers:
                async with self._server():
                    followers.start_soon(
                        self.fast.follow, self._url, self._dial, WINDOW_BYTES_DEFAULT
                    )
                    followers.start_soon(self.slow.follow, self._url, self._dial, WINDOW_BYTES_MIN)
                    for load, level in (
                        (self.memory, Durability.MEMORY),
                        (self.persisted, Durability.PERSISTED),
                    ):
                        publishers.start_soon(load.publish, self._url, self._dial, level)
                    await self.persisted.until_answered(1)
                endings = [ending for ending, lives in ENDINGS.items() for _ in range(lives)]
                self._draw.shuffle(endings)
                for index, ending in enumerate(endings):
                    await self._life(index, ending)
                publishers.start_soon(self._end)
            followers.cancel_scope.cancel()

    # A life.

    async def _life(self, life: int, ending: Ending) -> None:
        self.seen[ending] += 1
        if ending == "killed while it starts":
            await self._killed_while_it_starts()
            return
        async with self._server() as server, trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            if life % CHECK_EVERY == 0:
                await self._look()
            if self._draw.random() < 0.8:
                with trio.fail_after(LATE_S):
                    await self.persisted.until_answered(1)
                    await self.memory.until_answered(1)
            await trio.sleep(self._draw.uniform(0, self._draw.choice(self._plan.lasts_s)))
            if self._plan.has_room and ending == "killed with its processes":
                await self._get_ahead_of_the_disk(server.process)
            self._is_up = trio.Event()
            if ending == "stopped":
                assert await server.stop() == 0
            else:
                await kill(server.process, also_its_own=ending != "killed")
            nursery.cancel_scope.cancel()
        self._count()
        if ending != "stopped":
            self.memory.written.floor.clear()

    async def _get_ahead_of_the_disk(self, process: trio.Process) -> None:
        """Stops the server's writer until the fast consumer has what is only in memory: with the
        server's death it must roll back. Left to chance, a quick disk may leave nothing to lose."""
        assert self.fast.consumer is not None
        with trio.fail_after(LATE_S):
            await self._until_indexed()
            # From here on it reads from memory.
            await self.fast.consumer.barrier()
            os.kill(writer_of(process.pid), signal.SIGSTOP)
            await self.memory.until_answered(AHEAD)
            await self.fast.consumer.barrier()

    async def _until_indexed(self) -> None:
        """Waits until each partition can look up keys on disk. After a start the writer has to
        index the log's end first; changes of keys that are not in memory wait for that."""
        keys = [b"never written %d" % index for index in range(16 * PARTITIONS)]
        assert len({partition_of(key, PARTITIONS) for key in keys}) == PARTITIONS
        async with connect(self._url) as client:
            assert not any(await client.get_many(keys))

    async def _killed_while_it_starts(self) -> None:
        process = await trio.lowlevel.open_process(
            (*UPR_SERVER, "serve", "--listen", self._listen, "--data-dir", str(self._data_dir)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env=environment(),
        )
        try:
            await trio.sleep(self._draw.uniform(*STARTS_S))
            assert process.returncode is None, "it ended by itself"
        finally:
            with trio.CancelScope(shield=True):
                await kill(process, also_its_own=self._draw.random() < 0.5)
        # Perhaps it had come as far as being written to.
        self.memory.written.floor.clear()

    @asynccontextmanager
    async def _server(self) -> AsyncIterator[ServerProcess]:
        async with server_process(
            "--log-level", "warning", listen=self._listen, data_dir=self._data_dir
        ) as server:
            self._is_up.set()
            yield server
            self._is_up = trio.Event()

    async def _dial(self, address: Address) -> trio.abc.Stream:
        """Mostly waits for the next server, so that lives need not be long."""
        if self._draw.random() < 0.9:
            with trio.move_on_after(LATE_S):
                await self._is_up.wait()
        return await dial_tcp(address)

    # What is looked at meanwhile.

    async def _watch(self) -> None:
        """Asks the server for its figures, again and again: those of one that is killed are gone
        with it."""
        with suppress(UprError):
            async with connect(self._url) as client:
                while True:
                    self._take(await client.stats(BUCKET))
                    await trio.sleep(WATCH_S)

    def _take(self, statistics: dict[str, Any]) -> None:
        figures = self._figures
        figures["cursors dropped"] = statistics["cursors_dropped"]
        figures["backfills"] = statistics["backfill"]["begun"]
        figures["fetched"] = statistics["fetch"]["items"]
        figures["commits"] = statistics["flusher"]["commits"]
        evicted = statistics["items"] - statistics["keys"]
        figures["evicted"] = max(figures["evicted"], evicted)

    def _count(self) -> None:
        self.seen += self._figures
        self._figures.clear()

    async def _look(self) -> None:
        """Whether everything that was acknowledged is there."""
        self.seen["looks"] += 1
        async with connect(self._url) as client:
            await self._compare(client, self.persisted.written)
            await self._compare(client, self.memory.written)
            sums = self.persisted.sums
            assert sums is not None
            answered = dict(sums.answered)
            for key, value in (await server_contents(client, answered)).items():
                assert answered[key] <= int(value) <= sums.sent[key], key

    async def _compare(self, client: Client, written_items: Written) -> None:
        floor = dict(written_items.floor)
        there = await server_contents(client, written_items.keys)
        sentences = (
            written_items.wrong(key, there.get(key), floor.get(key, 0))
            for key in written_items.keys
        )
        wrong = [sentence for sentence in sentences if sentence]
        assert not wrong, f"{len(wrong)} keys are wrong: " + "; ".join(wrong[:10])

    # The end.

    async def _end(self) -> None:
        """A last life in which everything is answered, and one more after a clean stop."""
        async with self._server(), trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            for load in (self.memory, self.persisted):
                load.end()
            for load in (self.memory, self.persisted):
                await load.done.wait()
            await self.fast.catch_up()
            await self.slow.catch_up()
            before = await self._is_whole()
            nursery.cancel_scope.cancel()
        self._count()
        rollbacks = self.fast.rollbacks, self.slow.rollbacks
        async with self._server():
            await self.fast.catch_up()
            await self.slow.catch_up()
            assert await self._is_whole() == before, "a clean stop changes nothing"
            assert (self.fast.rollbacks, self.slow.rollbacks) == rollbacks
        result = await run((*UPR_SERVER, "check", "--data-dir", str(self._data_dir)))
        assert result.code == 0, result

    async def _is_whole(self) -> dict[bytes, bytes]:
        """Compares everything with everything; gives what there is."""
        memory, persisted = self.memory.written, self.persisted.written
        sums = self.persisted.sums
        assert sums is not None
        async with connect(self._url) as client:
            for written_items in (memory, persisted):
                await self._compare(client, written_items)
            assert persisted.floor == persisted.sent
            server_items = await server_contents(
                client, [*memory.keys, *persisted.keys, *sums.sent]
            )
        assert sums.answered == sums.sent
        assert {key: int(server_items[key]) for key in sums.sent} == sums.sent
        fresh = Mirror()
        async with consume(self._url, end="now") as consumer:
            async for event in consumer:
                fresh.apply(event)
        assert_same(fresh.contents, server_items, PARTITIONS)
        for copy in (self.fast, self.slow):
            assert_same(copy.mirror.contents, server_items, PARTITIONS)
            assert copy.mirror.items == fresh.items, "the numbers are the same, too"
        return server_items


def free_port(draw: random.Random) -> int:
    """A port below those that the system hands out, so that nobody takes it between two lives."""
    for _ in range(1000):
        port = draw.randrange(20_000, 30_000)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def writer_of(pid: int) -> int:
    """The process that writes a server's files."""
    (writer,) = (
        child
        for child in children_of(pid)
        if b"writer" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
    )
    return writer


async def kill(process: trio.Process, *, also_its_own: bool) -> None:
    """Ends a process as a crash would, and perhaps those that it started, at the same moment."""
    own = children_of(process.pid) if also_its_own else []
    process.kill()
    for pid in own:
        # They end by themselves when the server has; nobody else can have got their numbers yet.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await process.wait()


async def lived(plan: Plan, data_dir: Path) -> Counter[str]:
    """Carries a plan out; gives what happened, counted."""
    servers = KilledServers(plan, data_dir)
    try:
        await servers.run()
    except BaseException as error:
        error.add_note(f"This was {plan}, and until then there were {dict(servers.seen)}")
        raise
    sums = servers.persisted.sums
    assert sums is not None
    events = servers.seen
    events["operations"] = servers.memory.operations + servers.persisted.operations
    events["persisted operations"] = servers.persisted.operations
    events["increments"] = sums.increments
    events["resent"] = servers.memory.resent + servers.persisted.resent
    events["rollbacks"] = servers.fast.rollbacks + servers.slow.rollbacks
    events["mutations followed"] = servers.fast.mirror.mutations + servers.slow.mirror.mutations
    print(dict(events))  # noqa: T201  # shown with -s
    # Otherwise the test would show nothing.
    lives = sum(ENDINGS.values())
    assert {ending: events[ending] for ending in ENDINGS} == ENDINGS
    assert events["operations"] > 100 * lives, events
    assert events["increments"] > 10 * lives, events
    assert events["resent"] > lives, events
    assert events["rollbacks"] >= ENDINGS["killed with its processes"] * plan.has_room, events
    assert events["backfills"] > lives / 4, events
    return events


@pytest.mark.timeout(600)
async def test_killed_with_memory_enough(tmp_path: Path) -> None:
    plan = Plan(1, 256 * 1024 * 1024, True, 400, (0.05, 0.05, 0.3), 0.005)
    await lived(plan, tmp_path / "data")


@pytest.mark.timeout(600)
async def test_killed_with_little_memory(tmp_path: Path) -> None:
    """Keys are evicted, readers are dropped and read from disk, all the while."""
    plan = Plan(2, 1024 * 1024, False, 4000, (0.05, 0.3, 0.6), 0.03)
    events = await lived(plan, tmp_path / "data")
    # In a few lives no reader may be slow for long enough; test_slow_consumers has one that is.
    assert events["cursors dropped"] > 0 or not THOROUGH, events
    assert events["evicted"] > 0, events
    assert events["fetched"] > 0, events
