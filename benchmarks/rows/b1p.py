"""B1p: one mutation a request, 64 requests in flight, against `SET`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from benchmarks.kit.figures import Figure
from benchmarks.kit.ingest import CONNECTIONS, Published, figure, publish_and_rest
from benchmarks.kit.processes import RedisServer, UprServer, Worker
from benchmarks.kit.redis_benchmark import Added, set_keys
from benchmarks.kit.work import PARTITIONS

PIPELINE: Final = 16
"""Unanswered requests on each connection."""

COUNT: Final = 200_000
REDIS_COUNT: Final = 2_000_000


def measure(runs: int, say: Callable[[str], None]) -> list[Figure]:
    """B1p."""
    say(f"B1p: one mutation a request, {CONNECTIONS} connections, {PIPELINE} unanswered on each")
    with (
        UprServer(partitions=PARTITIONS) as server,
        RedisServer() as redis,
        Worker(
            "pipelined-publish",
            port=server.port,
            bucket=server.BUCKET,
            connections=CONNECTIONS,
            pipeline=PIPELINE,
        ) as client,
    ):
        client.answer()
        publish_and_rest(server, client, COUNT // 10)
        set_keys(redis, connections=CONNECTIONS, pipeline=PIPELINE, count=REDIS_COUNT)
        ours: list[Published] = []
        peer: list[Added] = []
        for index in range(runs):
            ours.append(publish_and_rest(server, client, COUNT))
            peer.append(
                set_keys(redis, connections=CONNECTIONS, pipeline=PIPELINE, count=REDIS_COUNT)
            )
            say(
                f"  run {index + 1}: {ours[-1].rate:,.0f} mutations/s "
                f"({ours[-1].server_ns / 1e3:,.1f} µs of the server's processor each); "
                f"SET {peer[-1].rate:,.0f}"
            )
    return [
        figure(
            ours,
            {PIPELINE: peer},
            row="B1p",
            text=f"One mutation a request, {CONNECTIONS} connections, {PIPELINE} unanswered "
            "on each.",
            peer="Redis SET",
            first_bar=0.35,
            aim=1.0,
        )
    ]
