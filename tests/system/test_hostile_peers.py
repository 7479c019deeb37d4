"""Hostile peers of every kind, all at once, beside ten good clients.

Real processes: the server, and the peers (`tests/kit/hostile_peers.py`), who share two processors
with whoever else is at work. The good clients keep a pace that is modest on purpose. Each publishes
a batch every second, waits until it is acknowledged, and until its own consumer has seen it; all
within its second. Alone they need no more than a quarter of it; where they do, the machine is slow,
and their pace twice as slow. Of what they did alone they must do nine tenths while the peers do
their worst. So what fails is that peers hold others up, and not that a machine has other work.

Memory is what the server and its processes for the disk have for themselves, or share, looked at
every 20 ms.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import pytest
import trio

from tests.kit.effort import effort
from tests.kit.hostile_peers import (
    ANNOUNCERS,
    FLOODERS,
    PARTIAL_SENDERS,
    SILENT_CONSUMERS,
    SLOW_GREETERS,
)
from tests.kit.json_lines import JsonLines
from tests.kit.mirror import Mirror, assert_same, server_contents
from tests.kit.process import (
    ROOT,
    ServerProcess,
    environment,
    eventually,
    many_descriptors,
    server_process,
)
from tests.kit.watch import Watch
from upr_protocol.client import Consumer, Publisher, connect, consume, publisher

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")

BUCKET: Final = "common"
PARTITIONS: Final = 4
QUOTA_BYTES: Final = 64 * 1024 * 1024
CLIENTS: Final = 10
BATCH: Final = 200
KEYS: Final = 1000
PACE_S: Final = 1.0
PACE_MAX_S: Final = 8.0
MARGIN: Final = 4
ALONE: Final = 5
BESIDE: Final = effort(10, 20)
SHARE: Final = 0.9
"""Of all batches. When the machine pauses, one batch of each of the ten clients is late; that may
happen in two rounds of the twenty."""

IDLE_MAX: Final = 2000
DESCRIPTORS_BESIDE: Final = 700
"""Those of all the other peers, the good clients, and the processes themselves."""

MIB: Final = 1024 * 1024
IDLE_BYTES: Final = 48 * 1024
"""What an idle connection may take; see `test_bad_peers.py`."""

BOUND_BYTES: Final = 64 * MIB
"""What all others may take, on top of the empty server and the idle connections: for eight frames
of 30 MiB at a time there is room, and 2 MiB come of each; the bucket is small."""

LATE_S: Final = 60.0


class GoodClient:
    """Publishes and consumes, at its pace.

    Attributes:
        written: What it wrote.
    """

    def __init__(self, index: int, sink: Publisher, consumer: Consumer) -> None:
        self.written: dict[bytes, bytes] = {}
        self.mirror = Mirror()
        self._number = index
        self._batches = 0
        self._sink = sink
        self._consumer = consumer

    async def follow(self) -> None:
        """Keeps a copy, for ever."""
        async for event in self._consumer:
            self.mirror.apply(event)

    async def _round(self) -> None:
        self._batches += 1
        for index in range(BATCH):
            key = b"%d-%d" % (self._number, (self._batches * BATCH + index) % KEYS)
            value = b"value %d" % self._batches
            await self._sink.set(key, value)
            self.written[key] = value
        await self._sink.flush()
        await self._consumer.barrier()

    async def keep_pace(self, rounds: int, pace_s: float) -> list[float]:
        """How long each batch took from the moment when it was due."""
        took = []
        began_at = trio.current_time()
        for index in range(rounds):
            due_at = began_at + index * pace_s
            await trio.sleep_until(due_at)
            await self._round()
            took.append(trio.current_time() - due_at)
        return took

    def check(self) -> None:
        """It was never disconnected."""
        assert self._sink.statistics().connections == 1
        assert self._consumer.statistics().connections == 1


@asynccontextmanager
async def good_clients(server: ServerProcess) -> AsyncIterator[list[GoodClient]]:
    """Ten of them; in the end they have what the server has."""
    url = server.url(BUCKET)
    async with AsyncExitStack() as stack:
        clients = []
        for index in range(CLIENTS):
            sink = await stack.enter_async_context(publisher(url))
            consumer = await stack.enter_async_context(consume(url))
            clients.append(GoodClient(index, sink, consumer))
        async with trio.open_nursery() as nursery:
            for client in clients:
                nursery.start_soon(client.follow)
            yield clients
            written_items = {
                key: value for client in clients for key, value in client.written.items()
            }
            for client in clients:
                await client._consumer.barrier()
                client.check()
                assert_same(client.mirror.contents, written_items, PARTITIONS)
            async with connect(url) as asking:
                assert_same(written_items, await server_contents(asking, written_items), PARTITIONS)
            nursery.cancel_scope.cancel()


async def keep_pace(clients: list[GoodClient], rounds: int, pace_s: float) -> list[float]:
    """How long their batches took, the longest last."""
    took: list[float] = []

    async def one(client: GoodClient) -> None:
        took.extend(await client.keep_pace(rounds, pace_s))

    async with trio.open_nursery() as nursery:
        for client in clients:
            nursery.start_soon(one, client)
    took.sort()
    print(f"a batch took {took[len(took) // 2]:.3f} s, at most {took[-1]:.3f} s")  # noqa: T201
    return took


async def pace_of(clients: list[GoodClient]) -> float:
    """The pace that they keep alone, by a wide margin."""
    pace_s = PACE_S
    while (await keep_pace(clients, ALONE, pace_s))[-1] > pace_s / MARGIN:
        pace_s *= 2
        assert pace_s <= PACE_MAX_S, "the machine is too busy for this test"
    return pace_s


class HostilePeersProcess:
    """The hostile peers' process.

    Attributes:
        done: What they said last that they have done.
    """

    def __init__(self, process: trio.Process) -> None:
        self.done: dict[str, Any] = {}
        self._process = process
        self._lines = JsonLines(process, "the hostile peers", LATE_S)

    async def hear(self) -> dict[str, Any]:
        """The next thing that they say."""
        return await self._lines.next()

    async def listen(self) -> None:
        """Hears what they do, for ever."""
        while True:
            self.done = await self.hear()


@asynccontextmanager
async def hostile_peers(server: ServerProcess, idlers: int) -> AsyncIterator[HostilePeersProcess]:
    """All of them, at it."""
    process = await trio.lowlevel.open_process(
        (
            *(sys.executable, "-m", "tests.kit.hostile_peers"),
            *(server.host, str(server.port), BUCKET, str(idlers)),
        ),
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=environment(),
    )
    try:
        peers = HostilePeersProcess(process)
        assert await peers.hear() == {"ready": True}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peers.listen)
            yield peers
            nursery.cancel_scope.cancel()
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            assert process.stdout is not None
            await process.stdout.aclose()


@pytest.mark.timeout(400)
async def test_ten_good_clients_beside_all_kinds_of_hostile_peers() -> None:
    with many_descriptors() as limit:
        idlers = max(0, min(IDLE_MAX, limit - DESCRIPTORS_BESIDE))
        async with server_process("--log-level", "error") as server:
            async with connect(server.url()) as client:
                await client.create_bucket(BUCKET, PARTITIONS, QUOTA_BYTES)
            watch = Watch(lambda: server.anonymous_bytes + server.shared_bytes)
            async with good_clients(server) as clients, trio.open_nursery() as nursery:
                nursery.start_soon(watch.run)
                pace_s = await pace_of(clients)
                async with hostile_peers(server, idlers) as peers:
                    before = dict(peers.done)
                    took = await keep_pace(clients, BESIDE, pace_s)
                    disconnected = before.get("disconnected", 0) + SLOW_GREETERS
                    await eventually(
                        lambda: peers.done.get("disconnected", 0) >= disconnected,
                        "greetings that take too long are not waited for",
                        LATE_S,
                    )
                    counts = peers.done
                print(f"{counts}; {watch.more_bytes / MIB:.0f} MiB more than empty")  # noqa: T201
                nursery.cancel_scope.cancel()
            check_load(before, counts, idlers)
            assert sum(seconds <= pace_s for seconds in took) >= SHARE * len(took)
            assert watch.more_bytes < BOUND_BYTES + idlers * IDLE_BYTES


def check_load(before: dict[str, int], after: dict[str, int], idlers: int) -> None:
    """They did their worst, or all this shows nothing."""

    def more(name: str) -> int:
        return after.get(name, 0) - before.get(name, 0)

    assert after["idle"] == idlers, "an idle connection was closed"
    assert after["unacknowledged"] == SILENT_CONSUMERS
    assert more("greeting bytes") > 5 * SLOW_GREETERS
    assert more("streams") > 100 * FLOODERS
    assert "flooders disconnected" not in after, "to ask for many streams is allowed"
    assert more("announced frames") > 2 * ANNOUNCERS
    assert after["partial frames"] >= PARTIAL_SENDERS
