"""R1: ingest with a replica that keeps up, against the same without one.

R1s: the same of single mutations, each answered when the replica has it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import attrs
import trio

from benchmarks.kit.errors import CannotMeasureError
from benchmarks.kit.figures import Figure, Spread
from benchmarks.kit.ingest import CONNECTIONS, publish, publishers
from benchmarks.kit.processes import HOST, UprServer, Worker
from benchmarks.kit.work import CHUNK_MUTATIONS, PARTITIONS
from upr_protocol.client import Address, BlockingClient, NodeClient
from upr_protocol.partition_map import Assignment, PartitionMap

FRACTIONS: Final = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
"""Of the rate without a replica, tried one after the other until one is kept up with."""

LAG_MAX_S: Final = 1.0
"""How far behind the replica may be."""

SECONDS: Final = 6.0
"""How long each rate is held."""

MUTATIONS: Final = 4_000_000


SLOWEST: Final = 1_000
FASTEST: Final = 160_000
STEP: Final = 1.25
"""R1s tries the rates from `SLOWEST` to `FASTEST`, each so many times the one before, until one is
too high. Where a rate fails once it is tried again."""

TOGETHER_MAX: Final = 1_000
"""Of the mutations that are due, R1s's publisher sends so many at once at most."""

KEYS: Final = 1_000_000


@attrs.define
class Lag:
    """How far the replica is behind, as the active hears of it.

    Attributes:
        longest_s: The longest that a number took to be reported as received.
    """

    longest_s: float = 0.0
    _marks: list[tuple[float, int]] = attrs.field(factory=list)

    def look(self, high: int, replicated: int) -> None:
        """The partitions' numbers, added up, are so high now."""
        now = time.monotonic()
        self._marks.append((now, high))
        while self._marks and self._marks[0][1] <= replicated:
            self._marks.pop(0)
        if self._marks:
            self.longest_s = max(self.longest_s, now - self._marks[0][0])


@contextmanager
def watched(url: str) -> Iterator[Lag]:
    """Asks for the numbers every 20 ms meanwhile."""
    lag, end_event = Lag(), threading.Event()

    def watch() -> None:
        with BlockingClient(url, identity="bench:lag") as client:
            while not end_event.wait(0.02):
                rows = client.seqnos()
                lag.look(sum(r.high_seq for r in rows), sum(r.replicated_seq for r in rows))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lag
    finally:
        end_event.set()
        thread.join()


def replicate(active: UprServer, replica: UprServer) -> None:
    """Has one server follow the other for all partitions."""
    nodes = {"active": f"{HOST}:{active.port}", "replica": f"{HOST}:{replica.port}"}
    assignment = Assignment("active", {"replica": ""})
    partition_map = PartitionMap(
        bucket=UprServer.BUCKET, revision=1, nodes=nodes, partitions=(assignment,) * PARTITIONS
    )

    async def give() -> None:
        for address in nodes.values():
            node = NodeClient(Address.parse(f"upr://{address}/{UprServer.BUCKET}"))
            await node.set_map(0, partition_map)

    trio.run(give)


def reached_rate(active: UprServer, client: Worker, rate: float) -> tuple[float, float]:
    """The rate that was reached, and the longest lag."""
    with watched(active.url) as lag:
        answer = client.ask(mutations=int(rate * SECONDS), rate=rate)
        reached = answer["mutations"] / answer["seconds"]
    return reached, lag.longest_s


def measure(runs: int, say: Callable[[str], None]) -> list[Figure]:
    """R1 and R1s."""
    say(f"R1: building the chunks; {CONNECTIONS} connections, {PARTITIONS} partitions")
    ours: list[float] = []
    alone: list[float] = []
    lags: list[float] = []
    processor: list[dict[str, Any]] = []
    with (
        UprServer(partitions=PARTITIONS) as single,
        UprServer(partitions=PARTITIONS, node="active") as active,
        UprServer(partitions=PARTITIONS, node="replica") as replica,
        publishers(single, CHUNK_MUTATIONS) as single_client,
        publishers(active, CHUNK_MUTATIONS) as client,
    ):
        single_client.answer()
        client.answer()
        replicate(active, replica)
        publish(single, single_client, 1_000_000)
        publish(active, client, 1_000_000)
        for index in range(runs):
            alone.append(publish(single, single_client, MUTATIONS).rate)
            reached, lag = 0.0, 0.0
            for fraction in FRACTIONS:
                active.lap(), replica.lap()
                reached, lag = reached_rate(active, client, fraction * alone[-1])
                say(f"  {fraction:.0%}: {reached:,.0f} mutations/s, lag {lag:.2f} s")
                if lag < LAG_MAX_S:
                    break
                reached = 0.0
            ours.append(reached)
            lags.append(lag)
            processor.append({"active": active.lap(), "replica": replica.lap()})
            say(f"  run {index + 1}: {reached:,.0f} mutations/s; alone {alone[-1]:,.0f}")
    return [
        Figure.more_is_better(
            row="R1",
            text="Ingest acknowledged in memory at the highest rate at which one replica stays "
            f"less than {LAG_MAX_S:.0f} s behind, {CONNECTIONS} connections.",
            unit="mutations/s",
            ours=Spread.of(ours),
            peer=Spread.of(alone),
            peer_name="B1, the same server without a replica, as fast as it goes",
            first_bar=0.5,
            aim=0.8,
            details={"longest_lag_s": Spread.of(lags).to_json(), "processor_s": processor},
        ),
        *_singles(runs, say),
    ]


def _singles(runs: int, say: Callable[[str], None]) -> list[Figure]:
    say(f"R1s: the highest rate of single mutations answered within {LAG_MAX_S:.0f} s")
    ours: list[dict[str, Any]] = []
    alone: list[dict[str, Any]] = []
    with (
        UprServer(partitions=PARTITIONS) as single,
        UprServer(partitions=PARTITIONS, node="active") as active,
        UprServer(partitions=PARTITIONS, node="replica") as replica,
        Worker("paced-publish", port=single.port, bucket=single.BUCKET, keys=KEYS) as memory_client,
        Worker(
            "paced-publish", port=active.port, bucket=active.BUCKET, keys=KEYS, copies=1
        ) as client,
    ):
        memory_client.answer()
        client.answer()
        replicate(active, replica)
        for index in range(runs):
            alone.append(_highest(memory_client, [single]))
            ours.append(_highest(client, [active, replica]))
            say(
                f"  run {index + 1}: {ours[-1]['rate']:,} mutations/s, server "
                f"{ours[-1]['server_us']}; alone {alone[-1]['rate']:,}"
            )
    return [
        Figure.more_is_better(
            row="R1s",
            text="Single mutations a second, each answered when one replica has it, at the highest "
            f"rate with a 99th percentile of {LAG_MAX_S:.0f} s or less.",
            unit="mutations/s",
            ours=Spread.of([run["rate"] for run in ours]),
            peer=Spread.of([run["rate"] for run in alone]),
            peer_name="the same answered from memory, without a replica",
            first_bar=0.5,
            aim=0.8,
            details={"ours": ours, "peer": alone},
        )
    ]


def _highest(client: Worker, servers: Sequence[UprServer]) -> dict[str, Any]:
    """The run with the highest rate that is kept up with."""
    best: dict[str, Any] = {"rate": 0}
    rate = float(SLOWEST)
    while rate <= FASTEST:
        for _attempt in range(2):
            count = int(rate * SECONDS)
            for server in servers:
                server.lap()
            answer = client.ask(count=count, rate=int(rate), together=TOGETHER_MAX)
            if answer["answered"]["p99_us"] <= LAG_MAX_S * 1e6:
                break
        else:
            break
        used = [round(server.lap()["server"] / count * 1e6, 1) for server in servers]
        best = {"rate": int(rate), "server_us": used, **answer["answered"]}
        rate *= STEP
    if not best["rate"]:
        raise CannotMeasureError(
            f"{SLOWEST:,} mutations a second take longer than {LAG_MAX_S:.0f} s; "
            "measure on a machine on which nothing else runs"
        )
    return best
