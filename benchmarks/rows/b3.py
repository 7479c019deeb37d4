"""B3: streaming from memory to one consumer, against `XRANGE` and against a plain socket."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from benchmarks.kit.figures import Figure
from benchmarks.kit.processes import RedisServer, UprServer, Worker
from benchmarks.kit.streaming import (
    WARM_UPS,
    Consumers,
    Ran,
    Sockets,
    fill,
    processor_details,
    rate,
    rates,
    server_cost,
)
from benchmarks.kit.upkeep import rest
from benchmarks.kit.work import PARTITIONS

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
        fill(server, MUTATIONS)
        rest(server)
        consumer, socket = Consumers(server, 1, stack), Sockets(1, stack)
        reader.answer()
        ours: list[Ran] = []
        sockets: list[Ran] = []
        peers: dict[int, list[Ran]] = {ahead: [] for ahead in AHEAD}
        for index in range(-WARM_UPS, runs):  # those below 0 warm up and are not kept
            ran = consumer.stream(MUTATIONS)
            plain = socket.move(ran["bytes"])
            read = {ahead: reader.ask(ahead=ahead) for ahead in AHEAD}
            if index < 0:
                continue
            ours.append(ran)
            sockets.append(plain)
            for ahead, answer in read.items():
                peers[ahead].append(answer)
            say(
                f"  run {index + 1}: {rate(ran):,.0f} mutations/s, {rate(ran, 'bytes'):,.0f} B/s "
                f"({server_cost(ran)}); socket {rate(plain, 'bytes'):,.0f} B/s; XRANGE "
                + ", ".join(f"{rate(r):,.0f} ({a} ahead)" for a, r in read.items())
            )
    return _figures(ours, sockets, peers)


def _figures(ours: list[Ran], sockets: list[Ran], peers: dict[int, list[Ran]]) -> list[Figure]:
    pages = {ahead: rates(ran) for ahead, ran in peers.items()}
    best = max(pages, key=lambda ahead: pages[ahead].median)
    details = processor_details(ours)
    redis = {str(ahead): spread.to_json() for ahead, spread in pages.items()}
    return [
        Figure.more_is_better(
            row="B3",
            text="Streaming from memory, one consumer that reads every key and value as columns.",
            unit="mutations/s",
            ours=rates(ours),
            peer=pages[best],
            peer_name=f"Redis XRANGE COUNT 1000, {best} pages asked ahead, read raw",
            first_bar=5.0,
            aim=10.0,
            details={**details, "redis_by_pages_ahead": redis},
        ),
        Figure.more_is_better(
            row="B3 bytes",
            text="The same runs, by bytes of frames.",
            unit="bytes/s",
            ours=rates(ours, "bytes"),
            peer=rates(sockets, "bytes"),
            peer_name="a plain loopback socket, the same bytes, 1 MiB at a time",
            first_bar=0.4,
            aim=0.7,
            details=details,
        ),
    ]
