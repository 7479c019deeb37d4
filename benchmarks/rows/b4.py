"""B4: streaming from memory to eight consumers at once, against one, and against plain sockets."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from benchmarks.kit.figures import Figure
from benchmarks.kit.processes import UprServer
from benchmarks.kit.streaming import (
    Consumers,
    Ran,
    Sockets,
    fill,
    processor_details,
    rate,
    rates,
)
from benchmarks.kit.upkeep import rest
from benchmarks.kit.work import PARTITIONS

CONSUMERS: Final = 8
MUTATIONS: Final = 1_000_000
"""Distinct keys, as in B3."""


def measure(runs: int, say: Callable[[str], None]) -> list[Figure]:
    """B4 against B3's one consumer in the same run, and against sockets."""
    say(f"B4: filling the server with {MUTATIONS:,} keys; {CONSUMERS} consumers")
    with ExitStack() as stack:
        server = stack.enter_context(UprServer(partitions=PARTITIONS))
        fill(server, MUTATIONS)
        rest(server)
        one, eight = Consumers(server, 1, stack), Consumers(server, CONSUMERS, stack)
        socket = Sockets(CONSUMERS, stack)
        ours: list[Ran] = []
        alone: list[Ran] = []
        sockets: list[Ran] = []
        for number in range(-1, runs):  # run -1 warms up and is not kept
            ran, single = eight.stream(MUTATIONS), one.stream(MUTATIONS)
            plain = socket.move(ran["bytes_each"])
            if number < 0:
                continue
            ours.append(ran)
            alone.append(single)
            sockets.append(plain)
            say(
                f"  run {number + 1}: {rate(ran, 'bytes'):,.0f} B/s; one consumer "
                f"{rate(single, 'bytes'):,.0f} B/s; sockets {rate(plain, 'bytes'):,.0f} B/s"
            )
    details = processor_details(ours)
    return [
        Figure.more_is_better(
            row="B4",
            text=f"Streaming from memory to {CONSUMERS} consumers, bytes of all together.",
            unit="bytes/s",
            ours=rates(ours, "bytes"),
            peer=rates(alone, "bytes"),
            peer_name="this server with one consumer (B3), in the same runs",
            first_bar=1.0,
            aim=1.0,
            details={**details, "one_consumer": processor_details(alone)},
        ),
        Figure.more_is_better(
            row="B4 bytes",
            text="The same runs, against sockets.",
            unit="bytes/s",
            ours=rates(ours, "bytes"),
            peer=rates(sockets, "bytes"),
            peer_name=f"plain loopback sockets to {CONSUMERS} readers, the same bytes to each",
            first_bar=0.4,
            aim=0.7,
            details=details,
        ),
    ]
