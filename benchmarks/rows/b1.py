"""B1: ingest acknowledged in memory, against `XADD`. B1s: the same, 16 mutations a chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import attrs

from benchmarks.kit.figures import Figure, Spread
from benchmarks.kit.processes import RedisServer, UprServer, Worker
from benchmarks.kit.redis_benchmark import Added, xadd
from benchmarks.kit.work import CHUNK_MUTATIONS, KEYS, PARTITIONS

CONNECTIONS: Final = 4
PIPELINES: Final = (1_000, 100)
REDIS_COUNT: Final = 2_000_000
SMALL_CHUNK: Final = 16

_BUSY: Final = 0.9
"""From this share of the time on, a process is taken to have been the limit."""


@attrs.frozen
class _Ours:
    """One run of this server."""

    rate: float
    server_s: float
    client_s: float
    seconds: float
    mutations: int


def measure(runs: int, say: Callable[[str], None]) -> list[Figure]:
    """B1 and B1s; Redis is measured once, beside both."""
    say(f"B1: building the chunks; {CONNECTIONS} connections, {PARTITIONS} partitions")
    with (
        UprServer(partitions=PARTITIONS) as large,
        UprServer(partitions=PARTITIONS) as small,
        RedisServer() as redis,
        _publisher(large, CHUNK_MUTATIONS) as large_client,
        _publisher(small, SMALL_CHUNK) as small_client,
    ):
        large_client.answer()
        small_client.answer()
        _run(large, large_client, 1_000_000)
        _run(small, small_client, 200_000)
        xadd(redis, connections=CONNECTIONS, pipeline=PIPELINES[0], count=REDIS_COUNT)
        b1: list[_Ours] = []
        b1s: list[_Ours] = []
        peers: dict[int, list[Added]] = {pipeline: [] for pipeline in PIPELINES}
        for number in range(runs):
            b1.append(_run(large, large_client, 4_000_000))
            b1s.append(_run(small, small_client, 800_000))
            for pipeline, added in peers.items():
                added.append(
                    xadd(redis, connections=CONNECTIONS, pipeline=pipeline, count=REDIS_COUNT)
                )
            say(
                f"  run {number + 1}: {b1[-1].rate:,.0f} mutations/s, "
                f"{b1s[-1].rate:,.0f} in small chunks; XADD "
                + ", ".join(f"{a[-1].rate:,.0f} (-P {p})" for p, a in peers.items())
            )
    return [
        _figure("B1", CHUNK_MUTATIONS, b1, peers),
        _figure("B1s", SMALL_CHUNK, b1s, peers),
    ]


def _publisher(server: UprServer, chunk_mutations: int) -> Worker:
    return Worker(
        "publish",
        url=server.url,
        connections=CONNECTIONS,
        seed=1,
        keys=KEYS,
        partitions=PARTITIONS,
        chunk_mutations=chunk_mutations,
    )


def _run(server: UprServer, client: Worker, mutations: int) -> _Ours:
    server.clock.lap()
    answer = client.ask(mutations=mutations)
    return _Ours(
        rate=answer["mutations"] / answer["seconds"],
        server_s=server.clock.lap(),
        client_s=answer["processor_s"],
        seconds=answer["seconds"],
        mutations=answer["mutations"],
    )


def _figure(row: str, chunk: int, ours: list[_Ours], peers: dict[int, list[Added]]) -> Figure:
    rates = {pipeline: Spread.of([a.rate for a in added]) for pipeline, added in peers.items()}
    best = max(rates, key=lambda pipeline: rates[pipeline].median)
    return Figure.more_is_better(
        row=row,
        text=f"Ingest acknowledged in memory, {chunk:,} a chunk, {CONNECTIONS} connections.",
        unit="mutations/s",
        ours=Spread.of([run.rate for run in ours]),
        peer=rates[best],
        peer_name=f"Redis XADD, redis-benchmark -c {CONNECTIONS} -P {best}",
        first_bar=1.2,
        aim=2.0,
        details=_details(ours, peers, rates, best),
    )


def _details(
    ours: list[_Ours], peers: dict[int, list[Added]], rates: dict[int, Spread], best: int
) -> dict[str, Any]:
    server = Spread.of([run.server_s / run.mutations * 1e9 for run in ours])
    client = Spread.of([run.client_s / run.mutations * 1e9 for run in ours])
    server_busy = Spread.of([run.server_s / run.seconds for run in ours]).median
    client_busy = Spread.of([run.client_s / run.seconds for run in ours]).median
    added = peers[best]
    return {
        "server_ns_per_mutation": server.to_json(),
        "client_ns_per_mutation": client.to_json(),
        "server_busy": round(server_busy, 2),
        "client_busy": round(client_busy, 2),
        "limited_by": _limit(server_busy, client_busy),
        "redis_by_pipeline": {str(p): spread.to_json() for p, spread in rates.items()},
        "redis_server_ns_per_entry": Spread.of(
            [run.server_s / REDIS_COUNT * 1e9 for run in added]
        ).to_json(),
        "redis_client_ns_per_entry": Spread.of(
            [run.client_s / REDIS_COUNT * 1e9 for run in added]
        ).to_json(),
    }


def _limit(server_busy: float, client_busy: float) -> str:
    if server_busy >= _BUSY and client_busy >= _BUSY:
        return "both"
    if max(server_busy, client_busy) < _BUSY:
        return "neither is busy all the time: the machine, or waiting"
    return "server" if server_busy > client_busy else "client"
