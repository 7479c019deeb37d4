"""Barriers under load: each comes back once, in order, and means what it says."""

from __future__ import annotations

from collections import deque
from typing import Final

import attrs
import trio

from tests.kit.mirror import Mirror
from tests.kit.process import ServerProcess, server_process
from upr_protocol.client import BarrierReached, ChunkReceived, connect, consume, publisher
from upr_protocol.limits import WINDOW_BYTES_MIN

BUCKET: Final = "barriers"
PARTITIONS: Final = 16
WRITERS: Final = 3
KEYS_A_WRITER: Final = 100
SETS_A_ROUND: Final = 20
FILLER: Final = b"x" * 200

BARRIERS: Final = 1000
SLOW_BARRIERS: Final = 50
OPEN: Final = 8
"""Barriers that a consumer has on their way at a time."""

SLOW_PAUSE_S: Final = 0.002


@attrs.define
class Acknowledged:
    """By key the newest version that its publisher knows the server has."""

    versions: dict[bytes, int] = attrs.field(factory=dict)


async def write(server: ServerProcess, writer: int, acknowledged: Acknowledged) -> None:
    """Writes for ever, each key's versions rising; a version is noted once it is acknowledged."""
    version = 0
    keys = [b"writer-%d-key-%d" % (writer, number) for number in range(KEYS_A_WRITER)]
    async with publisher(server.url(BUCKET)) as sink:
        while True:
            written = {}
            for _ in range(SETS_A_ROUND):
                version += 1
                key = keys[version % KEYS_A_WRITER]
                await sink.set(key, b"%d %b" % (version, FILLER))
                written[key] = version
            await sink.flush()
            acknowledged.versions.update(written)


async def follow(
    server: ServerProcess,
    acknowledged: Acknowledged,
    barriers: int,
    *,
    pause_s: float = 0.0,
    window_bytes: int = 16 * 1024 * 1024,
) -> int:
    """Streams, and sends barriers all the time; checks each as it comes back.

    Returns:
        How many mutations came.
    """
    mirror = Mirror()
    under_way: deque[tuple[bytes, dict[bytes, int]]] = deque()
    sent = returned = 0
    async with consume(server.url(BUCKET), window_bytes=window_bytes) as consumer:
        async for event in consumer:
            mirror.apply(event)
            if isinstance(event, BarrierReached):
                cookie, known = under_way.popleft()
                assert event.cookie == cookie, "out of order, or a second time"
                returned += 1
                contents = mirror.contents
                for key, version in known.items():
                    held = int(contents[key].partition(b" ")[0])
                    assert held >= version, f"{key!r}: {held} here, {version} acknowledged before"
                if returned == barriers:
                    break
            elif isinstance(event, ChunkReceived) and pause_s:
                await trio.sleep(pause_s)
            while len(under_way) < OPEN and sent < barriers:
                cookie = b"barrier-%d" % sent
                sent += 1
                under_way.append((cookie, dict(acknowledged.versions)))
                consumer.send_barrier(cookie)
        assert consumer.statistics().connections == 1
    assert sent == returned == barriers
    return mirror.mutations


async def test_a_thousand_barriers_under_load() -> None:
    acknowledged = Acknowledged()
    mutations: dict[str, int] = {}
    async with server_process() as server:
        async with connect(server.url()) as client:
            await client.create_bucket(BUCKET, PARTITIONS)
        async with trio.open_nursery() as writers:
            for writer in range(WRITERS):
                writers.start_soon(write, server, writer, acknowledged)

            async def fast() -> None:
                mutations["fast"] = await follow(server, acknowledged, BARRIERS)

            async def slow() -> None:
                # It lags behind snapshots that the fast one closed.
                mutations["slow"] = await follow(
                    server,
                    acknowledged,
                    SLOW_BARRIERS,
                    pause_s=SLOW_PAUSE_S,
                    window_bytes=WINDOW_BYTES_MIN,
                )

            async with trio.open_nursery() as consumers:
                consumers.start_soon(fast)
                consumers.start_soon(slow)
            writers.cancel_scope.cancel()
    assert mutations["fast"] > BARRIERS, "there was no load"
    assert mutations["slow"] > SLOW_BARRIERS, "there was no load"
