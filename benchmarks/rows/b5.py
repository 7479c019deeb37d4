"""B5: backfill, streaming from disk to one consumer, against a plain socket."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from benchmarks.kit.errors import CannotMeasureError
from benchmarks.kit.figures import Figure, significant
from benchmarks.kit.files import drop_from_cache
from benchmarks.kit.machine import check_disk
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
)
from benchmarks.kit.upkeep import rest, statistics
from benchmarks.kit.work import PARTITIONS

MUTATIONS: Final = 5_000_000
"""Distinct keys, so that compaction leaves them all."""


def measure(runs: int, say: Callable[[str], None]) -> list[Figure]:
    """B5: the server is started anew after the load, so that it has nothing in memory."""
    check_disk()
    say(f"B5: loading {MUTATIONS:,} keys")
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder) / "data"
        with UprServer(partitions=PARTITIONS, data_dir=data_dir) as server:
            fill(server, MUTATIONS)
            rest(server)
        ours: list[Ran] = []
        sockets: list[Ran] = []
        with ExitStack() as stack:
            server = stack.enter_context(UprServer(partitions=PARTITIONS, data_dir=data_dir))
            consumer, socket = Consumers(server, 1, stack), Sockets(1, stack)
            for index in range(-WARM_UPS, runs):  # those below 0 warm up and are not kept
                ran = _from_disk(server, consumer)
                plain = socket.move(ran["bytes"])
                if index < 0:
                    continue
                ours.append(ran)
                sockets.append(plain)
                say(
                    f"  run {index + 1}: {rate(ran):,.0f} mutations/s, "
                    f"{rate(ran, 'bytes'):,.0f} B/s; socket {rate(plain, 'bytes'):,.0f} B/s"
                )
        drop_from_cache(data_dir)
        with ExitStack() as stack:
            server = stack.enter_context(UprServer(partitions=PARTITIONS, data_dir=data_dir))
            cold = _from_disk(server, Consumers(server, 1, stack))
        say(f"  with nothing in the page cache: {rate(cold, 'bytes'):,.0f} B/s")
    return [
        Figure.more_is_better(
            row="B5",
            text=f"Backfill of {MUTATIONS:,} mutations from disk, the page cache warm; "
            "one consumer that reads every key and value as columns.",
            unit="bytes/s",
            ours=rates(ours, "bytes"),
            peer=rates(sockets, "bytes"),
            peer_name="a plain loopback socket, the same bytes, 1 MiB at a time",
            first_bar=0.4,
            aim=0.7,
            details={
                **processor_details(ours),
                "mutations_per_s": rates(ours).to_json(),
                "cold_once": {
                    "bytes_per_s": significant(rate(cold, "bytes")),
                    "mutations_per_s": significant(rate(cold)),
                },
            },
        )
    ]


def _from_disk(server: UprServer, consumer: Consumers) -> Ran:
    """One run.

    Raises:
        CannotMeasureError: Not all of it came from disk.
    """
    before = statistics(server)["backfill"]["bytes"]
    ran = consumer.stream(MUTATIONS)
    read_bytes = statistics(server)["backfill"]["bytes"] - before
    if read_bytes < 0.99 * ran["bytes"]:
        raise CannotMeasureError(f"only {read_bytes:,} of {ran['bytes']:,} bytes came from disk")
    return ran
