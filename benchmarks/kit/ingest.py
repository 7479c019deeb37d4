"""What B1 and B2 share: publishers against `redis-benchmark`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from benchmarks.kit.figures import Figure, Spread
from benchmarks.kit.processes import UprServer, Worker
from benchmarks.kit.redis_benchmark import Added
from benchmarks.kit.upkeep import rest
from benchmarks.kit.work import KEYS, PARTITIONS

CONNECTIONS: Final = 4
PIPELINES: Final = (1_000, 100)
REDIS_COUNT: Final = 2_000_000

_BUSY: Final = 0.9
"""From this share of the time on, a process is taken to have been the limit."""


@attrs.frozen
class Published:
    """One run of this server.

    Attributes:
        rate: Mutations a second.
        processor_s: Processor time, by process.
        seconds: How long it took.
        mutations: How many there were.
    """

    rate: float
    processor_s: Mapping[str, float]
    seconds: float
    mutations: int

    @property
    def server_ns(self) -> float:
        """Processor time of the server, nanoseconds a mutation."""
        return self.processor_s["server"] / self.mutations * 1e9


def publishers(server: UprServer, chunk_mutations: int, durability: str = "MEMORY") -> Worker:
    """A client with its connections, and its chunks built once it has answered."""
    return Worker(
        "publish",
        url=server.url,
        connections=CONNECTIONS,
        seed=1,
        keys=KEYS,
        partitions=PARTITIONS,
        chunk_mutations=chunk_mutations,
        durability=durability,
    )


def publish_and_rest(server: UprServer, client: Worker, mutations: int) -> Published:
    """One run. What the server does on its disk afterwards has ended when this returns: it would
    take processor time from the next side."""
    published = publish(server, client, mutations)
    rest(server)
    return published


def publish(server: UprServer, client: Worker, mutations: int) -> Published:
    """One run."""
    server.lap()
    answer = client.ask(mutations=mutations)
    return Published(
        rate=answer["mutations"] / answer["seconds"],
        processor_s={**server.lap(), "client": answer["processor_s"]},
        seconds=answer["seconds"],
        mutations=answer["mutations"],
    )


def figure(
    ours: Sequence[Published], peers: Mapping[int, Sequence[Added]], *, peer: str, **row: Any
) -> Figure:
    """The row's line; the peer is Redis with the better of its pipelines."""
    rates = {pipeline: Spread.of([a.rate for a in added]) for pipeline, added in peers.items()}
    best = max(rates, key=lambda pipeline: rates[pipeline].median)
    return Figure.more_is_better(
        unit="mutations/s",
        ours=Spread.of([run.rate for run in ours]),
        peer=rates[best],
        peer_name=f"{peer}, redis-benchmark -c {CONNECTIONS} -P {best}",
        details=_details(ours, peers, rates, best),
        **row,
    )


def _details(
    ours: Sequence[Published],
    peers: Mapping[int, Sequence[Added]],
    rates: Mapping[int, Spread],
    best: int,
) -> dict[str, Any]:
    roles = tuple(ours[0].processor_s)
    busy = {
        role: Spread.of([run.processor_s[role] / run.seconds for run in ours]).median
        for role in roles
    }
    added = peers[best]
    return {
        **{
            f"{role}_ns_per_mutation": Spread.of(
                [run.processor_s[role] / run.mutations * 1e9 for run in ours]
            ).to_json()
            for role in roles
        },
        **{f"{role}_busy": round(share, 2) for role, share in busy.items()},
        "limited_by": _limit(busy),
        "redis_by_pipeline": {str(p): spread.to_json() for p, spread in rates.items()},
        "redis_server_ns_per_entry": Spread.of(
            [run.server_s / REDIS_COUNT * 1e9 for run in added]
        ).to_json(),
        "redis_client_ns_per_entry": Spread.of(
            [run.client_s / REDIS_COUNT * 1e9 for run in added]
        ).to_json(),
    }


def _limit(busy: Mapping[str, float]) -> str:
    limits = [role for role, share in busy.items() if share >= _BUSY]
    return " and ".join(limits) or "none is busy all the time: the machine, or waiting"
