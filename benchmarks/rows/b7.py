"""B7: does ingest cost the same whatever there is much of?

Four axes, each varied alone: partitions, keys, idle consumers, history. The servers of an axis run
side by side and are measured in turn, so that what disturbs one disturbs all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import attrs

from benchmarks.kit.figures import Figure, Spread, significant
from benchmarks.kit.processes import UprServer, Worker
from benchmarks.kit.processor import resident_bytes
from benchmarks.kit.work import CHUNK_MUTATIONS, KEYS, PARTITIONS

CONNECTIONS: Final = 4
WARM_UP: Final = 1_000_000
RUN: Final = 2_000_000


@attrs.frozen
class Point:
    """One place on an axis.

    Attributes:
        label: What it is called.
        partitions: The bucket's.
        keys: Keys that are drawn from; above the standard number, each is set once beforehand.
        idle: Consumers that stream every partition and read nothing.
        history: Mutations made before the clock starts.
        run: Mutations in one run.
        fresh: Whether each run has a server of its own, so that the history stays what it is.
    """

    label: str
    partitions: int = PARTITIONS
    keys: int = KEYS
    idle: int = 0
    history: int = WARM_UP
    run: int = RUN
    fresh: bool = False


AXES: Final[Mapping[str, Sequence[Point]]] = {
    "partitions": (
        Point("1", partitions=1),
        Point("64"),
        Point("1,024", partitions=1_024),
    ),
    "keys": (Point("10 k", keys=10_000), Point("10 M", keys=10_000_000)),
    "idle consumers": (Point("0"), Point("100", idle=100)),
    "history": (
        Point("1 M", history=1_000_000, run=1_000_000, fresh=True),
        Point("20 M", history=20_000_000, run=1_000_000),
    ),
}


class _Stand:
    """A server with its client, and with what the point asks for already there."""

    def __init__(self, point: Point, stack: ExitStack) -> None:
        enter = stack.enter_context
        self.server = enter(UprServer(partitions=point.partitions))
        if point.idle:
            idle = enter(
                Worker(
                    "idle",
                    port=self.server.port,
                    bucket=self.server.BUCKET,
                    consumers=point.idle,
                )
            )
            idle.answer()
        work = {
            "url": self.server.url,
            "connections": CONNECTIONS,
            "seed": 1,
            "keys": point.keys,
            "partitions": point.partitions,
            "chunk_mutations": CHUNK_MUTATIONS,
        }
        if point.keys > KEYS:
            with Worker("publish", prepare=False, **work) as filler:
                filler.answer()
                filler.ask(fill=True)
        self._client = enter(Worker("publish", **work))
        self._client.answer()
        self._client.ask(mutations=point.history)

    def run(self, mutations: int) -> dict[str, float]:
        """Ingests so many; nanoseconds a mutation of the server's processor time and of the
        clock, and the server's memory."""
        self.server.clock.lap()
        answer = self._client.ask(mutations=mutations)
        server_s, count = self.server.clock.lap(), answer["mutations"]
        return {
            "server_ns": server_s / count * 1e9,
            "wall_ns": answer["seconds"] / count * 1e9,
            "resident_mib": resident_bytes(self.server.pid) / 2**20,
        }


def measure(runs: int, say: Callable[[str], None]) -> list[Figure]:
    """B7: one line, for the axis that is least flat; the others are in its details."""
    axes = {name: _measure_axis(name, points, runs, say) for name, points in AXES.items()}
    return [_figure(axes)]


def _measure_axis(
    name: str, points: Sequence[Point], runs: int, say: Callable[[str], None]
) -> dict[str, list[dict[str, float]]]:
    say(f"B7, {name}: preparing {', '.join(point.label for point in points)}")
    measured: dict[str, list[dict[str, float]]] = {point.label: [] for point in points}
    with ExitStack() as stack:
        stands = {point.label: _Stand(point, stack) for point in points if not point.fresh}
        for number in range(runs):
            for point in points:
                if point.fresh:
                    with ExitStack() as alone:
                        ran = _Stand(point, alone).run(point.run)
                else:
                    ran = stands[point.label].run(point.run)
                measured[point.label].append(ran)
            last = [f"{label}: {ran[-1]['server_ns']:.0f} ns" for label, ran in measured.items()]
            say(f"  run {number + 1}: {', '.join(last)} of the server's processor a mutation")
    return measured


def _spreads(measured: Mapping[str, Sequence[Mapping[str, float]]], what: str) -> dict[str, Spread]:
    return {label: Spread.of([run[what] for run in ran]) for label, ran in measured.items()}


def _flatness(costs: Mapping[str, Spread]) -> float:
    medians = [cost.median for cost in costs.values()]
    return min(medians) / max(medians)


def _figure(axes: Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]) -> Figure:
    costs = {name: _spreads(measured, "server_ns") for name, measured in axes.items()}
    worst = min(costs, key=lambda name: _flatness(costs[name]))
    by_cost = sorted(costs[worst].items(), key=lambda item: item[1].median)
    (cheapest, low), (dearest, high) = by_cost[0], by_cost[-1]
    return Figure.less_is_better(
        row="B7",
        text=f"Ingest cost, the least flat of {len(axes)} axes: {worst} ({dearest}).",
        unit="server ns/mutation",
        ours=high,
        peer=low,
        peer_name=f"this server at its cheapest on that axis ({cheapest})",
        first_bar=0.67,
        aim=0.9,
        details={"axes": {name: _details(measured) for name, measured in axes.items()}},
    )


def _details(measured: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    server, wall = _spreads(measured, "server_ns"), _spreads(measured, "wall_ns")
    resident = _spreads(measured, "resident_mib")
    return {
        "flatness": significant(_flatness(server)),
        "flatness_wall": significant(_flatness(wall)),
        "points": {
            label: {
                "server_ns_per_mutation": server[label].to_json(),
                "wall_ns_per_mutation": wall[label].to_json(),
                "server_resident_mib": round(resident[label].high),
            }
            for label in measured
        },
    }
