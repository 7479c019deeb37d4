"""B2: ingest acknowledged when it is on disk, against `XADD` with `appendfsync always`. B2s: the
same, 16 mutations a chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

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
from benchmarks.kit.machine import check_disk
from benchmarks.kit.processes import RedisServer, UprServer
from benchmarks.kit.redis_benchmark import Added, xadd
from benchmarks.kit.work import CHUNK_MUTATIONS, PARTITIONS, SMALL_CHUNK

RUN: Final = 4_000_000
SMALL_RUN: Final = 800_000


def measure(runs: int, say: Callable[[str], None]) -> list[Figure]:
    """B2 and B2s: all servers keep their data on the same disk. Redis is measured once, beside
    both."""
    check_disk()
    say(f"B2: building the chunks; {CONNECTIONS} connections, {PARTITIONS} partitions")
    with (
        UprServer(partitions=PARTITIONS) as large,
        UprServer(partitions=PARTITIONS) as small,
        RedisServer(is_durable=True) as redis,
        publishers(large, CHUNK_MUTATIONS, "PERSISTED") as large_client,
        publishers(small, SMALL_CHUNK, "PERSISTED") as small_client,
    ):
        large_client.answer()
        small_client.answer()
        publish_and_rest(large, large_client, RUN // 4)
        publish_and_rest(small, small_client, SMALL_RUN // 4)
        xadd(redis, connections=CONNECTIONS, pipeline=PIPELINES[0], count=REDIS_COUNT // 4)
        b2: list[Published] = []
        b2s: list[Published] = []
        peers: dict[int, list[Added]] = {pipeline: [] for pipeline in PIPELINES}
        for index in range(runs):
            b2.append(publish_and_rest(large, large_client, RUN))
            b2s.append(publish_and_rest(small, small_client, SMALL_RUN))
            for pipeline, added in peers.items():
                added.append(
                    xadd(redis, connections=CONNECTIONS, pipeline=pipeline, count=REDIS_COUNT)
                )
            say(
                f"  run {index + 1}: {b2[-1].rate:,.0f} mutations/s, {b2s[-1].rate:,.0f} in small "
                "chunks; XADD " + ", ".join(f"{a[-1].rate:,.0f} (-P {p})" for p, a in peers.items())
            )
    return [
        figure(
            ran,
            peers,
            row=row,
            text=f"Ingest acknowledged after fsync, {chunk:,} a chunk, {CONNECTIONS} connections.",
            peer="Redis XADD, appendfsync always",
            first_bar=2.0,
            aim=4.0,
        )
        for row, chunk, ran in (("B2", CHUNK_MUTATIONS, b2), ("B2s", SMALL_CHUNK, b2s))
    ]
