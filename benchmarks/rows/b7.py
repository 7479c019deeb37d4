"""B7: does ingest cost the same whatever there is much of?

Four axes, each varied alone: partitions, keys, idle consumers, history; and two of them once more
with keys that are not overwritten before they are on disk. The servers of an axis run side by side
and are measured in turn, so that what disturbs one disturbs all; but for history, of which one
server makes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Final

import attrs

from benchmarks.kit.figures import Figure, Spread, significant
from benchmarks.kit.processes import UprServer, Worker, pause_s
from benchmarks.kit.processor import resident_bytes
from benchmarks.kit.work import (
    CHUNK_MUTATIONS,
    KEYS,
    PARTITIONS,
    PREPARED_MUTATIONS,
    distinct_share,
)
from upr_protocol.client import BlockingClient

CONNECTIONS: Final = 4
WARM_UP: Final = 1_000_000
RUN: Final = 1_000_000


@attrs.frozen
class Point:
    """One place on an axis.

    Attributes:
        label: What it is called.
        axis_value: Where it is on the axis.
        partitions: The bucket's.
        keys: Keys that are drawn from; above the standard number, each is set once beforehand.
        in_rounds: Whether each key comes once before one comes again; drawn uniformly otherwise.
        prepared: Mutations that the client has ready before the clock starts, and repeats.
        idle: Consumers that stream every partition and read nothing.
    """

    label: str
    axis_value: int
    partitions: int = PARTITIONS
    keys: int = KEYS
    in_rounds: bool = False
    prepared: int = PREPARED_MUTATIONS
    idle: int = 0

    @property
    def distinct(self) -> float:
        """How much of a chunk is left when each key stays once, 0 to 1."""
        if self.in_rounds:
            return 1.0
        return distinct_share(self.keys, self.partitions, CHUNK_MUTATIONS)


_PARTITIONS: Final = tuple(Point(f"{n:,}", n, partitions=n) for n in (1, 8, 64, 256, 1_024))

_MANY: Final = (
    Point("1 M", 1_000_000, keys=1_000_000),
    # So many prepared that a run does not have the keys that the one before had.
    Point("10 M", 10_000_000, keys=10_000_000, prepared=3_000_000),
)

AXES: Final[Mapping[str, tuple[Point, ...]]] = {
    "partitions": _PARTITIONS,
    "keys": (Point("10 k", 10_000, keys=10_000), Point("100 k", KEYS), *_MANY),
    "idle consumers": tuple(Point(str(n), n, idle=n) for n in (0, 10, 100)),
}

ALIKE: Final[Mapping[str, tuple[str, tuple[Point, ...]]]] = {
    "partitions, all written": (
        "partitions",
        tuple(
            Point(f"{n:,}", n, partitions=n, keys=1_000_000, in_rounds=True) for n in (1, 64, 1_024)
        ),
    ),
    "keys, all written": (
        "keys",
        (Point("1 M", 1_000_000, keys=1_000_000, in_rounds=True), _MANY[-1]),
    ),
}
"""Axes on which next to nothing is overwritten before it is on disk, and beside which axis they are
measured. What is overwritten costs less, and with the uniform draw the fewer keys there are, or the
fewer a partition has, the more that is. Points that are equal are one server."""

HISTORY: Final = tuple(Point(f"{n} M", n * 1_000_000) for n in (1, 5, 10, 20))
"""Mutations that a server has taken in before the clock starts."""

RUNS_MAX: Final = 3
"""More would take long, and the processor time of one run is much like that of another."""

HISTORIES_MAX: Final = 2
"""Servers of which each makes all of the history; half a minute each, or so."""

Ran = dict[str, float]
Axis = dict[Point, list[Ran]]


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
        self._client = enter(
            Worker("publish", prepared=point.prepared, in_rounds=point.in_rounds, **work)
        )
        self._client.answer()
        self._taken = self._written = 0
        self.grow(WARM_UP)

    def run(self) -> Ran:
        """Ingests some.

        Returns:
            Nanoseconds a mutation of the server's processor time until all is on disk, and until
            all is acknowledged, and of the clock until then; how much was written to disk; and the
            server's memory.
        """
        clock = self.server.clock
        clock.lap()
        answer = self._client.ask(mutations=RUN)
        acknowledged_s, count, before = clock.lap(), answer["mutations"], self._written
        self._taken += RUN
        self._look()
        return {
            "server_ns": (acknowledged_s + clock.lap()) / count * 1e9,
            "acknowledged_ns": acknowledged_s / count * 1e9,
            "wall_ns": answer["seconds"] / count * 1e9,
            "written_share": (self._written - before) / count,
            "resident_mib": resident_bytes(self.server.pid) / 2**20,
        }

    def grow(self, history: int) -> None:
        """Ingests until it has taken in so many, and waits until they are on disk."""
        if history > self._taken:
            self._client.ask(mutations=history - self._taken)
            self._taken = history
        self._look()

    def _look(self) -> None:
        """Waits until all is on disk. Looks seldom: the server is being timed."""
        bucket = self.server.BUCKET
        with BlockingClient(self.server.url) as client:
            while (flusher := client.stats(bucket)["flusher"])["lag_mutations"]:
                pause_s(0.2)
        self._written = flusher["commits"] * flusher["mutations_per_commit"]


def measure(runs: int, say: Callable[[str], None]) -> list[Figure]:
    """B7: a line for the axis that is least flat, and one for the least flat of those on which all
    is written to disk."""
    axes: dict[str, Axis] = {}
    alike: dict[str, Axis] = {}
    for name, points in AXES.items():
        beside = {other_axis: more for other_axis, (axis, more) in ALIKE.items() if axis == name}
        servers = dict.fromkeys(sum(beside.values(), points))
        ran = _measure_points(name, servers, min(runs, RUNS_MAX), say)
        axes[name] = {point: ran[point] for point in points}
        for other_axis, more in beside.items():
            alike[other_axis] = {point: ran[point] for point in more}
    axes["history"] = _measure_history(min(runs, HISTORIES_MAX), say)
    details = {name: _details(axis) for name, axis in {**axes, **alike}.items()}
    return [
        _figure("B7", axes, {"axes": details}),
        _figure("B7 all written", alike, {}),
    ]


def _measure_points(
    name: str, points: Iterable[Point], runs: int, say: Callable[[str], None]
) -> Axis:
    axis: Axis = {point: [] for point in points}
    say(f"B7, {name}: preparing {len(axis)} servers")
    with ExitStack() as stack:
        stands = {point: _Stand(point, stack) for point in axis}
        for index in range(runs):
            for point, stand in stands.items():
                axis[point].append(stand.run())
            _say_last(index, axis, say)
    return axis


def _measure_history(servers: int, say: Callable[[str], None]) -> Axis:
    say(f"B7, history: {servers} servers, one after the other")
    axis: Axis = {point: [] for point in HISTORY}
    for index in range(servers):
        with ExitStack() as stack:
            stand = _Stand(HISTORY[0], stack)
            for point in HISTORY:
                stand.grow(point.axis_value)
                axis[point].append(stand.run())
        _say_last(index, axis, say)
    return axis


def _say_last(run: int, axis: Axis, say: Callable[[str], None]) -> None:
    last = [
        f"{point.label} ({point.distinct:.0%} distinct, {ran[-1]['written_share']:.0%} written): "
        f"{ran[-1]['server_ns']:.0f}"
        for point, ran in axis.items()
    ]
    say(f"  run {run + 1}, ns of the server's processor a mutation: {', '.join(last)}")


def _spreads(axis: Axis, key: str) -> dict[Point, Spread]:
    return {point: Spread.of([run[key] for run in ran]) for point, ran in axis.items()}


def _flatness(costs: Mapping[Point, Spread]) -> float:
    medians = [cost.median for cost in costs.values()]
    return min(medians) / max(medians)


def _figure(row: str, axes: Mapping[str, Axis], details: dict[str, Any]) -> Figure:
    costs = {name: _spreads(axis, "server_ns") for name, axis in axes.items()}
    worst = min(costs, key=lambda name: _flatness(costs[name]))
    by_cost = sorted(costs[worst].items(), key=lambda item: item[1].median)
    (cheapest, low), (dearest, high) = by_cost[0], by_cost[-1]
    return Figure.less_is_better(
        row=row,
        text=f"Ingest cost, the least flat of {len(axes)} axes: {worst} ({dearest.label}).",
        unit="server ns/mutation",
        ours=high,
        peer=low,
        peer_name=f"this server at its cheapest on that axis ({worst}, {cheapest.label})",
        first_bar=0.67,
        aim=0.9,
        details=details,
    )


def _details(axis: Axis) -> dict[str, Any]:
    server, acknowledged = _spreads(axis, "server_ns"), _spreads(axis, "acknowledged_ns")
    wall = _spreads(axis, "wall_ns")
    resident, written = _spreads(axis, "resident_mib"), _spreads(axis, "written_share")
    return {
        "flatness": significant(_flatness(server)),
        "flatness_until_acknowledged": significant(_flatness(acknowledged)),
        "points": {
            point.label: {
                "at": point.axis_value,
                "distinct_in_a_chunk": significant(point.distinct),
                "written_share": written[point].to_json(),
                "server_ns_per_mutation": server[point].to_json(),
                "server_ns_until_acknowledged": acknowledged[point].to_json(),
                "wall_ns_per_mutation": wall[point].to_json(),
                "server_resident_mib": round(resident[point].high),
            }
            for point in axis
        },
    }
