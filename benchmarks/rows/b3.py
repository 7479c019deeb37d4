"""B3: streaming from memory to one consumer, against `XRANGE` and against a plain socket."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

from benchmarks.kit.errors import CannotMeasureError
from benchmarks.kit.figures import Figure, Spread
from benchmarks.kit.processes import RedisServer, UprServer, Worker
from benchmarks.kit.work import CHUNK_MUTATIONS, PARTITIONS

MUTATIONS: Final = 1_000_000
"""Distinct keys, so that deduplication leaves them all to be sent."""

AHEAD: Final = (1, 4)


def measure(runs: int, say: Callable[[str], None]) -> list[Figure]:
    """B3 by mutations against Redis, and by bytes against a socket."""
    say(f"B3: filling both servers with {MUTATIONS:,} keys")
    with ExitStack() as stack:
        enter = stack.enter_context
        server = enter(UprServer(partitions=PARTITIONS))
        redis = enter(RedisServer())
        reader = enter(Worker("redis-read", port=redis.port, load=MUTATIONS))
        _fill(server)
        consumer = enter(Worker("consume", url=server.url))
        sender = enter(Worker("socket-send"))
        receiver = enter(Worker("socket-receive", port=sender.answer()["port"]))
        for worker in (reader, consumer, receiver):
            worker.answer()
        ours: list[dict[str, Any]] = []
        sockets: list[dict[str, Any]] = []
        peers: dict[int, list[dict[str, Any]]] = {ahead: [] for ahead in AHEAD}
        for number in range(-1, runs):  # run -1 warms up and is not kept
            server.clock.lap()
            ran = consumer.ask()
            ran["server_s"] = server.clock.lap()
            _check(ran)
            sender.tell({"bytes": ran["bytes"]})
            plain = receiver.ask(bytes=ran["bytes"])
            sender.answer()
            plain["bytes"] = ran["bytes"]
            read = {ahead: reader.ask(ahead=ahead) for ahead in AHEAD}
            if number < 0:
                continue
            ours.append(ran)
            sockets.append(plain)
            for ahead, answer in read.items():
                peers[ahead].append(answer)
            say(
                f"  run {number + 1}: {_rate(ran):,.0f} mutations/s, "
                f"{_rate(ran, 'bytes'):,.0f} B/s; "
                f"socket {_rate(plain, 'bytes'):,.0f} B/s; XRANGE "
                + ", ".join(f"{_rate(r):,.0f} ({a} ahead)" for a, r in read.items())
            )
    return _figures(ours, sockets, peers)


def _fill(server: UprServer) -> None:
    with Worker(
        "publish",
        url=server.url,
        connections=1,
        prepare=False,
        seed=1,
        keys=MUTATIONS,
        partitions=PARTITIONS,
        chunk_mutations=CHUNK_MUTATIONS,
    ) as publisher:
        publisher.answer()
        publisher.ask(fill=True)


def _check(ran: dict[str, Any]) -> None:
    if ran["mutations"] != MUTATIONS:
        raise CannotMeasureError(f"the consumer saw {ran['mutations']:,} mutations, not them all")


def _rate(ran: dict[str, Any], what: str = "mutations") -> float:
    rate: float = ran[what] / ran["seconds"]
    return rate


def _figures(
    ours: list[dict[str, Any]],
    sockets: list[dict[str, Any]],
    peers: dict[int, list[dict[str, Any]]],
) -> list[Figure]:
    rates = {ahead: Spread.of([_rate(r) for r in ran]) for ahead, ran in peers.items()}
    best = max(rates, key=lambda ahead: rates[ahead].median)
    details = {
        "server_ns_per_mutation": _ns(ours, "server_s"),
        "consumer_ns_per_mutation": _ns(ours, "processor_s"),
        "server_busy": _share(ours, "server_s"),
        "consumer_busy": _share(ours, "processor_s"),
        "bytes_per_run": ours[0]["bytes"],
    }
    redis = {str(ahead): spread.to_json() for ahead, spread in rates.items()}
    return [
        Figure.more_is_better(
            row="B3",
            text="Streaming from memory, one consumer that reads every key and value as columns.",
            unit="mutations/s",
            ours=Spread.of([_rate(ran) for ran in ours]),
            peer=rates[best],
            peer_name=f"Redis XRANGE COUNT 1000, {best} pages asked ahead, read raw",
            first_bar=5.0,
            aim=10.0,
            details={**details, "redis_by_pages_ahead": redis},
        ),
        Figure.more_is_better(
            row="B3 bytes",
            text="The same runs, by bytes of frames.",
            unit="bytes/s",
            ours=Spread.of([_rate(ran, "bytes") for ran in ours]),
            peer=Spread.of([_rate(ran, "bytes") for ran in sockets]),
            peer_name="a plain loopback socket, the same bytes, 1 MiB at a time",
            first_bar=0.4,
            aim=0.7,
            details=details,
        ),
    ]


def _ns(ran: list[dict[str, Any]], what: str) -> dict[str, float]:
    return Spread.of([run[what] / run["mutations"] * 1e9 for run in ran]).to_json()


def _share(ran: list[dict[str, Any]], what: str) -> float:
    return round(Spread.of([run[what] / run["seconds"] for run in ran]).median, 2)
