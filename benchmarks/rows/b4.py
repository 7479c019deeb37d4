"""B4: streaming from memory to eight consumers at once, against one, and against plain sockets."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from benchmarks.kit.figures import Figure
from benchmarks.kit.processes import UprServer
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

COUNTS: Final = (1, 2, 4, 8)
"""Consumers at once; the row's figure is of the most of them."""

CONSUMERS: Final = COUNTS[-1]

MUTATIONS: Final = 1_000_000
"""Distinct keys, as in B3."""


def measure(runs: int, say: Callable[[str], None]) -> list[Figure]:
    """B4 against B3's one consumer in the same run, and against sockets."""
    say(f"B4: filling the server with {MUTATIONS:,} keys; {CONSUMERS} consumers")
    with ExitStack() as stack:
        server = stack.enter_context(UprServer(partitions=PARTITIONS))
        fill(server, MUTATIONS)
        rest(server)
        consumers, socket = Consumers(server, CONSUMERS, stack), Sockets(CONSUMERS, stack)
        by_count: dict[int, list[Ran]] = {count: [] for count in COUNTS}
        sockets: list[Ran] = []
        for index in range(-WARM_UPS, runs):  # those below 0 warm up and are not kept
            ran = {count: consumers.stream(MUTATIONS, count) for count in COUNTS}
            plain = socket.move(ran[CONSUMERS]["bytes_each"])
            if index < 0:
                continue
            for count, result in ran.items():
                by_count[count].append(result)
            sockets.append(plain)
            say(f"  run {index + 1}: sockets {rate(plain, 'bytes'):,.0f} B/s")
            for count, result in ran.items():
                say(f"    {count} at once: {rate(result, 'bytes'):,.0f} B/s, {server_cost(result)}")
    ours, alone = by_count[CONSUMERS], by_count[1]
    details = processor_details(ours)
    fan_out = {
        str(count): {
            **processor_details(several),
            "bytes_per_s": rates(several, "bytes").to_json(),
        }
        for count, several in by_count.items()
    }
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
            details={**details, "by_consumers": fan_out},
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
