"""Consumers that are stopped while a million keys or more are loaded: memory stays within its
bounds, and when they wake they end with everything.

Real processes. The consumers stand still as a machine does that swaps or a debugger holds: their
connections live, nobody reads. What is bounded is the anonymous memory, on top of what an empty
server takes: that of the server by the bucket's quota and a quarter more, and that of its processes
for the disk by what commits take.

How fast the publisher was beside each is printed, to be seen with `-s`; it is no test.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import attrs
import pytest
import trio

from tests.kit.counting_consumer import key_of, value_of
from tests.kit.effort import effort, thorough
from tests.kit.json_lines import JsonLines
from tests.kit.process import ROOT, environment, server_process
from tests.kit.watch import Watch
from upr_protocol.chunk import chunk_of_plain_sets
from upr_protocol.client import Publisher, connect, publisher
from upr_protocol.hashing import partition_of
from upr_protocol.ids import PartitionId

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")

BUCKET: Final = "slow"
COUNT: Final = effort(1_216_000, 7_500_000)
PARTITIONS: Final = 64
ROUND_MUTATIONS: Final = 64_000
"""Published together: some 1,000 a partition."""
QUOTA_BYTES: Final = effort(160, 256) * 1024 * 1024
"""Less than what comes while the consumers are stopped takes."""
BOUND_BYTES: Final = QUOTA_BYTES + QUOTA_BYTES // 4
"""What the server may take on top of the empty one."""
STORAGE_BYTES: Final = 32 * 1024 * 1024
"""What its processes for the disk may take on top of that, whatever the quota is."""

ON_THEIR_WAY_BYTES: Final = 256 * 1024
"""And this for each consumer: a chunk on its way to it, which the quota does not count."""

BEFORE: Final = effort(384_000, 640_000)
"""Mutations that consumers are sent before they are stopped, or while they stop."""

LATE_S: Final = 400.0


class Consumers:
    """The process that the consumers are in."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._lines = JsonLines(process, "the consumers", LATE_S)

    async def said(self) -> dict[str, Any]:
        """The next thing it says."""
        return await self._lines.next()

    def stop(self) -> None:
        """They stand still."""
        self._process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        """They go on."""
        self._process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def consumers(url: str, count: int, how: str = "-") -> AsyncIterator[Consumers]:
    """A process with so many consumers."""
    numbers = map(str, (COUNT, PARTITIONS, count))
    process = await trio.lowlevel.open_process(
        (sys.executable, "-m", "tests.kit.counting_consumer", url, *numbers, how),
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=environment(),
    )
    try:
        yield Consumers(process)
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            assert process.stdout is not None
            await process.stdout.aclose()


async def load(sink: Publisher, first: int, end: int) -> None:
    """Publishes some of the mutations; returns when they are acknowledged."""
    for start in range(first, end, ROUND_MUTATIONS):
        keys: list[list[bytes]] = [[] for _ in range(PARTITIONS)]
        for index in range(start, min(start + ROUND_MUTATIONS, end)):
            key = key_of(index)
            keys[partition_of(key, PARTITIONS)].append(key)
        for partition, some_keys in enumerate(keys):
            chunk = chunk_of_plain_sets(some_keys, [value_of(key) for key in some_keys])
            await sink.publish(PartitionId(partition), chunk)
    await sink.flush()


@attrs.frozen
class WatchedServer:
    """A server with an empty bucket, somebody who watches it and its processes for the disk, and a
    publisher."""

    url: str
    watch: Watch
    storage_watch: Watch
    sink: Publisher

    async def load(self, first: int, end: int, beside: str) -> None:
        """Publishes, and says how fast that went."""
        began = trio.current_time()
        await load(self.sink, first, end)
        rate = (end - first) / (trio.current_time() - began)
        print(f"\n{beside}: {rate:,.0f} mutations/s; {self.memory}")  # noqa: T201

    @property
    def memory(self) -> str:
        """How much memory was taken at most."""
        server, storage = self.watch.more_bytes >> 20, self.storage_watch.more_bytes >> 20
        return f"server {server} and storage processes {storage} MiB more than empty"

    async def statistics(self) -> dict[str, Any]:
        """The bucket's figures."""
        async with connect(self.url) as client:
            return await client.stats(BUCKET)

    async def mutations(self) -> int:
        """How many the server has taken."""
        async with connect(self.url) as client:
            return sum(row.high_seq for row in await client.seqnos())

    async def end(self, following: Consumers, count: int) -> None:
        """The consumers are awake: they end with what the server has."""
        statistics = await self.statistics()
        # How many depends on how soon the disk has what memory is to be rid of.
        assert statistics["cursors_dropped"] > 0, "otherwise nobody was slow"
        figures = await following.said()
        assert figures["wrong"] == 0
        assert figures["complete"] == count
        # They were dropped, and read from disk what memory had no room for.
        assert figures["snapshots"]["disk"] > 0
        assert await self.mutations() == COUNT
        print(f"awake: {figures}; {self.memory}")  # noqa: T201


@asynccontextmanager
async def watched_server(tmp_path: Path, consumer_count: int = 0) -> AsyncIterator[WatchedServer]:
    """See `WatchedServer`."""
    async with server_process("--log-level", "warning", data_dir=tmp_path / "data") as server:
        async with connect(server.url()) as client:
            await client.create_bucket(BUCKET, PARTITIONS, QUOTA_BYTES)
        url = server.url(BUCKET)
        watch = Watch(lambda: server.own_anonymous_bytes)
        storage_watch = Watch(lambda: server.storage_anonymous_bytes)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch.run)
            nursery.start_soon(storage_watch.run)
            async with publisher(url) as sink:
                yield WatchedServer(url, watch, storage_watch, sink)
            nursery.cancel_scope.cancel()
        assert storage_watch.more_bytes < STORAGE_BYTES
        assert watch.more_bytes < BOUND_BYTES + consumer_count * ON_THEIR_WAY_BYTES


@thorough
@pytest.mark.timeout(600)
async def test_memory_stays_within_its_bounds_though_nobody_follows(tmp_path: Path) -> None:
    async with watched_server(tmp_path) as watched:
        await watched.load(0, BEFORE, "alone, at first")
        await watched.load(BEFORE, COUNT, "alone")
        assert await watched.mutations() == COUNT


@thorough
@pytest.mark.timeout(600)
async def test_a_consumer_that_is_stopped(tmp_path: Path) -> None:
    async with watched_server(tmp_path) as watched, consumers(watched.url, 1) as following:
        assert await following.said() == {"ready": True}
        await watched.load(0, BEFORE, "with a consumer that follows")
        following.stop()
        await watched.load(BEFORE, COUNT, "with a consumer that is stopped")
        following.wake()
        await watched.end(following, 1)


@pytest.mark.timeout(600)
async def test_a_consumer_that_is_stopped_inside_a_snapshot(tmp_path: Path) -> None:
    async with watched_server(tmp_path) as watched:
        await watched.load(0, BEFORE, "alone")
        async with consumers(watched.url, 1, "stop") as following:
            assert await following.said() == {"inside": True}
            await watched.load(BEFORE, COUNT, "with a consumer that is stopped inside a snapshot")
            following.wake()
            assert await following.said() == {"ready": True}
            await watched.end(following, 1)


@thorough
@pytest.mark.timeout(600)
async def test_many_consumers_that_are_stopped(tmp_path: Path) -> None:
    many = effort(50, 500)
    _, descriptors_max = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors_max < 4 * many:
        pytest.skip(f"it needs {4 * many} descriptors, and there are {descriptors_max}")
    async with watched_server(tmp_path, many) as watched, consumers(watched.url, many) as following:
        assert await following.said() == {"ready": True}
        following.stop()
        await watched.load(0, COUNT, f"with {many} consumers that are stopped")
        following.wake()
        await watched.end(following, many)
