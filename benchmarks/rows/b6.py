"""B6: from publish to consume, one mutation a frame, against `XADD` and a blocking `XREAD`.

B6c: the highest rate of single mutations at which that takes 10 ms or less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import attrs

from benchmarks.kit.errors import CannotMeasureError
from benchmarks.kit.figures import Figure, Spread
from benchmarks.kit.processes import Process, RedisServer, UprServer, Worker
from benchmarks.kit.work import PARTITIONS

RATE: Final = 5_000
COUNT: Final = 50_000
SKIP: Final = 5_000
"""Of the count: the first second is not looked at."""

KEYS: Final = 1_000_000
"""More than a run has mutations, so that none supersedes another before the consumer has it."""

P99_US_MAX: Final = 10_000.0
"""How long B6c lets 99 of 100 mutations take."""

SLOWEST: Final = 2_000
FASTEST: Final = 160_000
STEP: Final = 1.25
"""B6c tries the rates from `SLOWEST` to `FASTEST`, each so many times the one before, until one is
too high. Where a rate fails once it is tried again: something else may have disturbed it."""

SECONDS: Final = 4
TOGETHER_MAX: Final = 1_000
"""Of the mutations that are due, B6c's publishers send so many at once at most."""


@attrs.frozen
class _Side:
    server: Process
    consumer: Worker
    publisher: Worker

    def run(self, rate: int, count: int, skip: int, together: int) -> dict[str, Any]:
        self.server.clock.lap()
        self.consumer.tell({"count": count, "skip": skip})
        published = self.publisher.ask(count=count, rate=rate, together=together)
        consumed = self.consumer.answer()
        server_s = self.server.clock.lap()
        return {
            **consumed["latency"],
            "sent_late_p99_us": published["late"]["p99_us"],
            "server_us_per_mutation": server_s / count * 1e6,
            "server_busy": server_s / published["seconds"],
            "publisher_busy": published["processor_s"] / published["seconds"],
            "consumer_busy": consumed["processor_s"] / published["seconds"],
        }

    def highest(self) -> dict[str, Any]:
        """The run with the highest rate that is kept up with."""
        best: dict[str, Any] = {"rate": 0}
        rate = float(SLOWEST)
        while rate <= FASTEST:
            for _attempt in range(2):
                count = int(rate * SECONDS)
                run = self.run(int(rate), count, count // SECONDS, TOGETHER_MAX)
                if run["p99_us"] <= P99_US_MAX:
                    break
            else:
                break
            best = {"rate": int(rate), **run}
            rate *= STEP
        if not best["rate"]:
            raise CannotMeasureError(
                f"{SLOWEST:,} mutations a second take longer than {P99_US_MAX / 1e3:.0f} ms; "
                "measure on a machine on which nothing else runs"
            )
        return best


@contextmanager
def _sides() -> Iterator[tuple[_Side, _Side]]:
    with ExitStack() as stack:
        enter = stack.enter_context
        server = enter(UprServer(partitions=PARTITIONS))
        redis = enter(RedisServer())
        arguments = {"port": server.port, "bucket": server.BUCKET}
        ours = _Side(
            server,
            enter(Worker("timed-consume", **arguments)),
            enter(Worker("paced-publish", **arguments, keys=KEYS)),
        )
        peer = _Side(
            redis,
            enter(Worker("redis-timed-consume", port=redis.port)),
            enter(Worker("redis-paced-publish", port=redis.port, keys=KEYS)),
        )
        for side in (ours, peer):
            side.consumer.answer()
            side.publisher.answer()
        yield ours, peer


def measure(runs: int, say: Callable[[str], None]) -> list[Figure]:
    """B6: the latency from when a mutation was due to be sent until the consumer has it."""
    say(f"B6: {RATE:,} mutations a second, one a frame, {COUNT // RATE} s a run")
    our_runs: list[dict[str, Any]] = []
    peer_runs: list[dict[str, Any]] = []
    with _sides() as (ours, peer):
        for index in range(runs):
            our_runs.append(ours.run(RATE, COUNT, SKIP, 1))
            peer_runs.append(peer.run(RATE, COUNT, SKIP, 1))
            say(f"  run {index + 1}: {_say(our_runs[-1])}; Redis {_say(peer_runs[-1])}")
    return [
        Figure.less_is_better(
            row="B6",
            text=f"Publish to consume, one mutation a frame, {RATE:,} a second: 99th percentile.",
            unit="µs",
            ours=_spread(our_runs, "p99_us"),
            peer=_spread(peer_runs, "p99_us"),
            peer_name="Redis XADD → blocking XREAD, plain Python sockets",
            first_bar=0.5,
            aim=1.0,
            details={"ours": _details(our_runs), "peer": _details(peer_runs)},
        ),
        *_highest(runs, say),
    ]


def _highest(runs: int, say: Callable[[str], None]) -> list[Figure]:
    say(f"B6c: the highest rate with a p99 of {P99_US_MAX / 1e3:.0f} ms, {SECONDS} s a rate")
    our_runs: list[dict[str, Any]] = []
    peer_runs: list[dict[str, Any]] = []
    with _sides() as (ours, peer):
        for index in range(runs):
            our_runs.append(ours.highest())
            peer_runs.append(peer.highest())
            say(
                f"  run {index + 1}: {our_runs[-1]['rate']:,} mutations/s; "
                f"Redis {peer_runs[-1]['rate']:,}"
            )
    return [
        Figure.more_is_better(
            row="B6c",
            text="Single mutations a second, publish to consume, at the highest rate with a 99th "
            f"percentile of {P99_US_MAX / 1e3:.0f} ms or less.",
            unit="mutations/s",
            ours=_spread(our_runs, "rate"),
            peer=_spread(peer_runs, "rate"),
            peer_name="Redis XADD → blocking XREAD, plain Python sockets",
            first_bar=0.3,
            aim=1.0,
            details={"ours": our_runs, "peer": peer_runs},
        )
    ]


def _spread(runs: list[dict[str, Any]], key: str) -> Spread:
    return Spread.of([run[key] for run in runs])


def _details(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: _spread(runs, name).to_json() for name in runs[0] if name != "count"}


def _say(run: dict[str, Any]) -> str:
    return (
        f"p50 {run['p50_us']:,.0f} µs, p99 {run['p99_us']:,.0f} µs, "
        f"server {run['server_us_per_mutation']:.0f} µs a mutation"
    )
