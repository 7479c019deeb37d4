"""B2: ingest acknowledged when it is on disk, against `XADD` with `appendfsync always`."""

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
    publish,
    publishers,
)
from benchmarks.kit.machine import check_disk
from benchmarks.kit.processes import RedisServer, UprServer
from benchmarks.kit.redis_benchmark import Added, xadd
from benchmarks.kit.work import CHUNK_MUTATIONS, PARTITIONS

RUN: Final = 4_000_000


def measure(runs: int, say: Callable[[str], None]) -> list[Figure]:
    """B2: both keep their data on the same disk."""
    check_disk()
    say(f"B2: building the chunks; {CONNECTIONS} connections, {PARTITIONS} partitions")
    with (
        UprServer(partitions=PARTITIONS) as server,
        RedisServer(is_durable=True) as redis,
        publishers(server, CHUNK_MUTATIONS, "PERSISTED") as client,
    ):
        client.answer()
        publish(server, client, RUN // 4)
        xadd(redis, connections=CONNECTIONS, pipeline=PIPELINES[0], count=REDIS_COUNT // 4)
        ours: list[Published] = []
        peers: dict[int, list[Added]] = {pipeline: [] for pipeline in PIPELINES}
        for number in range(runs):
            ours.append(publish(server, client, RUN))
            for pipeline, added in peers.items():
                added.append(
                    xadd(redis, connections=CONNECTIONS, pipeline=pipeline, count=REDIS_COUNT)
                )
            say(
                f"  run {number + 1}: {ours[-1].rate:,.0f} mutations/s; XADD "
                + ", ".join(f"{a[-1].rate:,.0f} (-P {p})" for p, a in peers.items())
            )
    return [
        figure(
            ours,
            peers,
            row="B2",
            text=f"Ingest acknowledged after fsync, {CHUNK_MUTATIONS:,} a chunk, "
            f"{CONNECTIONS} connections.",
            peer="Redis XADD, appendfsync always",
            first_bar=2.0,
            aim=4.0,
        )
    ]
