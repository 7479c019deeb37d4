"""B6: from publish to consume, one mutation a batch, against `XADD` and a blocking `XREAD`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

from benchmarks.kit.figures import Figure, Spread
from benchmarks.kit.processes import Process, RedisServer, UprServer, Worker
from benchmarks.kit.work import PARTITIONS

RATE: Final = 5_000
COUNT: Final = 50_000
SKIP: Final = 5_000
"""Of the count: the first second is not looked at."""


def measure(runs: int, say: Callable[[str], None]) -> list[Figure]:
    """B6: the latency from when a mutation was due to be sent until the consumer has it."""
    say(f"B6: {RATE:,} mutations a second, one a batch, {COUNT // RATE} s a run")
    with ExitStack() as stack:
        enter = stack.enter_context
        server = enter(UprServer(partitions=PARTITIONS))
        redis = enter(RedisServer())
        ours = (
            enter(Worker("timed-consume", port=server.port, bucket=server.BUCKET)),
            enter(Worker("paced-publish", port=server.port, bucket=server.BUCKET)),
        )
        peers = (
            enter(Worker("redis-timed-consume", port=redis.port)),
            enter(Worker("redis-paced-publish", port=redis.port)),
        )
        for worker in (*ours, *peers):
            worker.answer()
        our_runs: list[dict[str, Any]] = []
        peer_runs: list[dict[str, Any]] = []
        for number in range(runs):
            our_runs.append(_run(server, *ours))
            peer_runs.append(_run(redis, *peers))
            say(f"  run {number + 1}: {_say(our_runs[-1])}; Redis {_say(peer_runs[-1])}")
    return [
        Figure.less_is_better(
            row="B6",
            text=f"Publish to consume, one mutation a batch, {RATE:,} a second: 99th percentile.",
            unit="µs",
            ours=_spread(our_runs, "p99_us"),
            peer=_spread(peer_runs, "p99_us"),
            peer_name="Redis XADD → blocking XREAD, plain Python sockets",
            first_bar=0.5,
            aim=1.0,
            details={"ours": _details(our_runs), "peer": _details(peer_runs)},
        )
    ]


def _run(server: Process, consumer: Worker, publisher: Worker) -> dict[str, Any]:
    server.clock.lap()
    consumer.tell({"count": COUNT, "skip": SKIP})
    sent = publisher.ask(count=COUNT, rate=RATE)
    seen = consumer.answer()
    return {
        **seen["latency"],
        "sent_late_p99_us": sent["late"]["p99_us"],
        "server_busy": server.clock.lap() / sent["seconds"],
        "publisher_busy": sent["processor_s"] / sent["seconds"],
        "consumer_busy": seen["processor_s"] / sent["seconds"],
    }


def _spread(runs: list[dict[str, Any]], what: str) -> Spread:
    return Spread.of([run[what] for run in runs])


def _details(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: _spread(runs, name).to_json() for name in runs[0] if name != "count"}


def _say(run: dict[str, Any]) -> str:
    return f"p50 {run['p50_us']:,.0f} µs, p99 {run['p99_us']:,.0f} µs"
