"""TLS1: what encryption costs: B3 and B6 with TLS, against the same in the clear."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

from benchmarks.kit.figures import Figure, Spread
from benchmarks.kit.processes import UprServer, Worker
from benchmarks.kit.streaming import Consumers, Ran, fill, processor_details, rate, rates
from benchmarks.kit.upkeep import rest
from benchmarks.kit.work import PARTITIONS

MUTATIONS: Final = 1_000_000
RATE: Final = 2_000
COUNT: Final = 20_000
SKIP: Final = 2_000
KEYS: Final = 1_000_000

PEER: Final = "this server in the clear, in the same runs"


def measure(runs: int, say: Callable[[str], None]) -> list[Figure]:
    """TLS1 by mutations streamed, and TLS1 p99 from publish to consume."""
    return [_streaming(runs, say), _latency(runs, say)]


def _streaming(runs: int, say: Callable[[str], None]) -> Figure:
    say(f"TLS1: filling two servers with {MUTATIONS:,} keys")
    with ExitStack() as stack:
        consumers: list[Consumers] = []
        for is_encrypted in (True, False):
            server = stack.enter_context(
                UprServer(partitions=PARTITIONS, is_encrypted=is_encrypted)
            )
            fill(server, MUTATIONS)
            rest(server)
            consumers.append(Consumers(server, 1, stack))
        all_runs: tuple[list[Ran], list[Ran]] = ([], [])
        for index in range(-1, runs):  # run -1 warms up and is not kept
            pair = [consumer.stream(MUTATIONS) for consumer in consumers]
            if index < 0:
                continue
            for kept_runs, run in zip(all_runs, pair, strict=True):
                kept_runs.append(run)
            say(f"  run {index + 1}: {rate(pair[0]):,.0f} mutations/s, {rate(pair[1]):,.0f} clear")
    encrypted, clear = all_runs
    return Figure.more_is_better(
        row="TLS1",
        text="B3 over TLS 1.3: streaming from memory to one consumer.",
        unit="mutations/s",
        ours=rates(encrypted),
        peer=rates(clear),
        peer_name=PEER,
        first_bar=None,
        aim=None,
        details={**processor_details(encrypted), "clear": processor_details(clear)},
    )


def _latency(runs: int, say: Callable[[str], None]) -> Figure:
    say(f"TLS1 p99: {RATE:,} mutations a second, one a frame, {COUNT // RATE} s a run")
    all_runs: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    with ExitStack() as stack:
        sides = [_Side(is_encrypted, stack) for is_encrypted in (True, False)]
        for index in range(runs):
            pair = [side.run() for side in sides]
            for kept_runs, run in zip(all_runs, pair, strict=True):
                kept_runs.append(run)
            encrypted, clear = pair
            say(
                f"  run {index + 1}: p99 {encrypted['p99_us']:,.0f} µs, "
                f"{encrypted['server_us_per_mutation']:.0f} µs of the server's processor; "
                f"clear {clear['p99_us']:,.0f} and {clear['server_us_per_mutation']:.0f} µs"
            )
    ours, peer = all_runs
    return Figure.less_is_better(
        row="TLS1 p99",
        text=f"B6 over TLS 1.3 at {RATE:,} mutations a second: 99th percentile.",
        unit="µs",
        ours=_spread(ours, "p99_us"),
        peer=_spread(peer, "p99_us"),
        peer_name=PEER,
        first_bar=None,
        aim=None,
        details={
            "server_us_per_mutation": _spread(ours, "server_us_per_mutation").to_json(),
            "clear_server_us_per_mutation": _spread(peer, "server_us_per_mutation").to_json(),
        },
    )


class _Side:
    """A server, its publisher and its consumer."""

    def __init__(self, is_encrypted: bool, stack: ExitStack) -> None:
        enter = stack.enter_context
        self._server = enter(UprServer(partitions=PARTITIONS, is_encrypted=is_encrypted))
        arguments = {
            "port": self._server.port,
            "bucket": self._server.BUCKET,
            "certificate": self._server.certificate,
        }
        self._consumer = enter(Worker("timed-consume", **arguments))
        self._publisher = enter(Worker("paced-publish", **arguments, keys=KEYS))
        self._consumer.answer()
        self._publisher.answer()

    def run(self) -> dict[str, Any]:
        self._server.clock.lap()
        self._consumer.tell({"count": COUNT, "skip": SKIP})
        self._publisher.ask(count=COUNT, rate=RATE, together=1)
        answer = self._consumer.answer()
        server_s = self._server.clock.lap()
        return {**answer["latency"], "server_us_per_mutation": server_s / COUNT * 1e6}


def _spread(runs: list[dict[str, Any]], name: str) -> Spread:
    return Spread.of([run[name] for run in runs])
