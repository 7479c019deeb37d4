"""An indexer process that crawls, while far more is written than its pool holds.

Its pool is filled behind an index whose expression takes some 17 ms a document. Then it is let run
for 2 % of the time, as on a machine that has other things to do. Its memory must be bounded, and
the server's; another consumer must not notice; and in the end, at full speed and without that
index, it must catch up.

`UPR_INDEXER_CRAWL_MB` says how much is written each time. What was measured is printed, to be seen
with `-s`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import pytest
import trio

from tests.indexer.kit import by_brute_force
from tests.indexer.processes import DEADLINE_S, IndexerProcess, indexer_process
from tests.kit.process import ServerProcess, server_process
from upr_protocol.client import ChunkReceived, IndexClient, connect, consume, publisher
from upr_protocol.limits import WINDOW_BYTES_DEFAULT
from upr_server.indexer.pool import STREAM_SHARE
from upr_server.indexer.pure.definition import IndexDefinition

T = TypeVar("T")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")

MIB: Final = 1024 * 1024
WRITTEN_MB: Final = int(os.environ.get("UPR_INDEXER_CRAWL_MB", "100"))
VALUE_BYTES: Final = 20_000
COUNT: Final = WRITTEN_MB * 1_000_000 // VALUE_BYTES
PARTITIONS: Final = 8

POOL_BYTES: Final = 64 * MIB
INDEXER_BYTES: Final = POOL_BYTES + WINDOW_BYTES_DEFAULT + 48 * MIB
"""What may come on top of the idle indexer: beside the pool and the window there are the batch at
work, its documents as JSON, the received keys, and what `malloc` does not give back."""

QUOTA_BYTES: Final = 128 * MIB
SERVER_BYTES: Final = QUOTA_BYTES + QUOTA_BYTES // 4 + 2 * WINDOW_BYTES_DEFAULT
"""What may come on top of the empty server: as with any consumer that is slow, and what is on its
way to the two."""

PERIOD_S: Final = 0.1
SHARE: Final = 0.02
WATCH_S: Final = 0.02

BY_N: Final = IndexDefinition(("n",))
BY_COST: Final = IndexDefinition((" | ".join(["x", *["[?@ > `1`]"] * 30, "length(@)"]),))
TAIL: Final = json.dumps({"x": list(range(100, 400)), "y": "y" * VALUE_BYTES})[1:]


def document(index: int) -> bytes:
    return f'{{"n": {index * 7919 % 1009}, {TAIL}'.encode()


class Watch:
    """How much memory a process takes, files that it maps left out.

    Attributes:
        start_bytes: What it took at first.
        peak_bytes: The most that was seen.
    """

    def __init__(self, process: ServerProcess | IndexerProcess) -> None:
        self._process = process
        self.start_bytes = self.peak_bytes = process.anonymous_bytes

    async def run(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, self._process.anonymous_bytes)
            await trio.sleep(WATCH_S)

    @property
    def more_bytes(self) -> int:
        return self.peak_bytes - self.start_bytes


class Other:
    """Another consumer, which follows all the time."""

    def __init__(self) -> None:
        self._wanted: set[bytes] = set()
        self._done = trio.Event()

    async def run(self, url: str) -> None:
        async with consume(url) as consumer:
            async for event in consumer:
                if isinstance(event, ChunkReceived):
                    self._wanted.difference_update(event.chunk.keys())
                if not self._wanted:
                    self._done.set()

    async def follow(self, url: str, first: int) -> float:
        """Writes documents; gives how long it took until it had all of them."""
        self._wanted = {b"%d" % index for index in range(first, first + COUNT)}
        self._done = trio.Event()
        began = trio.current_time()
        async with publisher(url) as writer:
            for index in range(first, first + COUNT):
                await writer.set(b"%d" % index, document(index))
        await self._done.wait()
        return trio.current_time() - began


@asynccontextmanager
async def crawling(process: subprocess.Popen[str]) -> AsyncIterator[None]:
    """A process runs for a small part of the time."""

    async def crawl() -> None:
        while True:
            process.send_signal(signal.SIGSTOP)
            await trio.sleep(PERIOD_S * (1 - SHARE))
            process.send_signal(signal.SIGCONT)
            await trio.sleep(PERIOD_S * SHARE)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(crawl)
        try:
            yield
        finally:
            nursery.cancel_scope.cancel()
            process.send_signal(signal.SIGCONT)


async def ask(function: Callable[..., T], *args: object, **options: object) -> T:
    """Asks the indexer, in a thread."""
    return await trio.to_thread.run_sync(partial(function, *args, **options))


async def until(condition: Callable[[], bool]) -> None:
    """Waits until the indexer answers so."""
    with trio.fail_after(DEADLINE_S):
        while not await ask(condition):  # noqa: ASYNC110  it is another process
            await trio.sleep(WATCH_S)


@asynccontextmanager
async def a_bucket_server() -> AsyncIterator[tuple[ServerProcess, str]]:
    """A server with a bucket, and the bucket's URL."""
    async with server_process("--quota-bytes", str(QUOTA_BYTES)) as server:
        async with connect(server.url()) as client:
            await client.create_bucket("b", PARTITIONS)
        yield server, server.url("b")


@pytest.mark.timeout(600)
async def test_a_slow_indexer_stays_within_its_memory_and_catches_up(tmp_path: Path) -> None:
    async with a_bucket_server() as (server, url), trio.open_nursery() as nursery:
        other_consumer = Other()
        nursery.start_soon(other_consumer.run, url)
        alone_s = await other_consumer.follow(url, 0)
        nursery.cancel_scope.cancel()
    async with a_bucket_server() as (server, url):
        options = ("--pool-bytes", str(POOL_BYTES))
        with (
            indexer_process(url, tmp_path, *options) as indexer,
            IndexClient(indexer.url) as asking,
        ):
            for name, definition in (("d", BY_N), ("costly", BY_COST)):
                await ask(asking.create, name, {"indexes": {"i": {"key": definition.key}}})
            await until(lambda: [status["state"] for status in asking.indexes()] == ["ready"] * 2)
            watches = Watch(server), Watch(indexer)
            async with trio.open_nursery() as nursery:
                for watch in watches:
                    nursery.start_soon(watch.run)
                other_consumer = Other()
                nursery.start_soon(other_consumer.run, url)
                costly_s = await other_consumer.follow(url, 0)
                # Was full, not is: where the writer is slow, much was applied since.
                await until(lambda: asking.status()["pool_peak"] >= POOL_BYTES * STREAM_SHARE)
                async with crawling(indexer.process):
                    crawling_s = await other_consumer.follow(url, COUNT)
                status = await ask(asking.status)
                full_bytes = watches[1].more_bytes
                began = trio.current_time()
                # The event bus tells of it; the stream could not, as the pool is full.
                await ask(asking.drop, "costly")
                entries = await ask(
                    lambda: list(
                        asking.scan_all(
                            "d/i", limit=10_000, consistency="now", timeout_s=DEADLINE_S
                        )
                    )
                )
                caught_up_s = trio.current_time() - began
                peak_bytes = (await ask(asking.status))["pool_peak"]
                nursery.cancel_scope.cancel()
    of_server, of_indexer = watches
    print(  # noqa: T201  figures for who asks for them
        f"\n{WRITTEN_MB} MB at a time; another consumer had them after {alone_s:.1f} s alone, "
        f"{costly_s:.1f} s while the pool was filled, {crawling_s:.1f} s while the indexer "
        f"crawled;\nreceived then: {status['received']} of {2 * COUNT}; caught up after "
        f"{caught_up_s:.1f} s\npool: {peak_bytes / MIB:.1f} MiB at most; indexer: "
        f"{of_indexer.start_bytes / MIB:.0f} MiB, {full_bytes / MIB:+.0f} at most while it "
        f"crawled, {of_indexer.more_bytes / MIB:+.0f} in the end; server: "
        f"{of_server.start_bytes / MIB:.0f} MiB, {of_server.more_bytes / MIB:+.0f} at most"
    )
    contents = {b"%d" % n: b'{"n": %d}' % (n * 7919 % 1009) for n in range(2 * COUNT)}
    assert [(entry.key, entry.id) for entry in entries] == by_brute_force(BY_N, contents)
    # It did stop taking, with most of the documents still to come.
    assert status["received"] < COUNT * 1.5
    assert POOL_BYTES * STREAM_SHARE <= peak_bytes <= POOL_BYTES
    assert of_indexer.more_bytes <= INDEXER_BYTES
    assert of_server.more_bytes <= SERVER_BYTES
    # On a machine that others use, too, no more can be said.
    assert crawling_s < 3 * alone_s + 5
