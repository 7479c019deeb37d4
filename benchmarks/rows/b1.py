"""B1: ingest acknowledged in memory, against `XADD`. B1s: the same, 16 mutations a chunk."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.kit.figures import Figure
from benchmarks.kit.ingest import (
    CONNECTIONS,
    PIPELINES,
    REDIS_COUNT,
    Published,
    figure,
    publish_and_rest,
    publishers,
)
from benchmarks.kit.processes import RedisServer, UprServer
from benchmarks.kit.redis_benchmark import Added, xadd
from benchmarks.kit.work import CHUNK_MUTATIONS, PARTITIONS, SMALL_CHUNK


def measure(runs: int, say: Callable[[str], None]) -> list[Figure]:
    """B1 and B1s; Redis is measured once, beside both."""
    say(f"B1: building the chunks; {CONNECTIONS} connections, {PARTITIONS} partitions")
    with (
        UprServer(partitions=PARTITIONS) as large,
        UprServer(partitions=PARTITIONS) as small,
        RedisServer() as redis,
        publishers(large, CHUNK_MUTATIONS) as large_client,
        publishers(small, SMALL_CHUNK) as small_client,
    ):
        large_client.answer()
        small_client.answer()
        publish_and_rest(large, large_client, 1_000_000)
        publish_and_rest(small, small_client, 200_000)
        xadd(redis, connections=CONNECTIONS, pipeline=PIPELINES[0], count=REDIS_COUNT)
        b1: list[Published] = []
        b1s: list[Published] = []
        peers: dict[int, list[Added]] = {pipeline: [] for pipeline in PIPELINES}
        for index in range(runs):
            b1.append(publish_and_rest(large, large_client, 4_000_000))
            b1s.append(publish_and_rest(small, small_client, 800_000))
            for pipeline, added in peers.items():
                added.append(
                    xadd(redis, connections=CONNECTIONS, pipeline=pipeline, count=REDIS_COUNT)
                )
            say(
                f"  run {index + 1}: {b1[-1].rate:,.0f} mutations/s "
                f"({b1[-1].server_ns:,.0f} ns of the server's processor each), "
                f"{b1s[-1].rate:,.0f} in small chunks ({b1s[-1].server_ns:,.0f} ns); XADD "
                + ", ".join(f"{a[-1].rate:,.0f} (-P {p})" for p, a in peers.items())
            )
    return [
        figure(
            ran,
            peers,
            row=row,
            text=f"Ingest acknowledged in memory with the disk behind it, {chunk:,} a chunk, "
            f"{CONNECTIONS} connections.",
            peer="Redis XADD",
            first_bar=1.2,
            aim=2.0,
        )
        for row, chunk, ran in (("B1", CHUNK_MUTATIONS, b1), ("B1s", SMALL_CHUNK, b1s))
    ]
