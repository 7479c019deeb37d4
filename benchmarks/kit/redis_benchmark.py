"""`redis-benchmark`: the client that Redis is measured with by those who make it."""

from __future__ import annotations

import csv
import io
import resource
import subprocess
import time
from collections.abc import Sequence
from typing import Final

import attrs

from benchmarks.kit.errors import CannotMeasureError
from benchmarks.kit.processes import HOST, RedisServer, program
from benchmarks.kit.work import KEYS, VALUE_BYTES

_TIMEOUT_S: Final = 300


@attrs.frozen
class Added:
    """One run of `XADD` or `SET`.

    Attributes:
        rate: Requests a second, by its own count.
        server_s: Processor time of the server.
        client_s: Processor time of `redis-benchmark`.
        seconds: How long the process ran, its start included.
    """

    rate: float
    server_s: float
    client_s: float
    seconds: float


def xadd(server: RedisServer, *, connections: int, pipeline: int, count: int) -> Added:
    """Adds `count` entries, a random key and a value of 100 bytes each, to one stream.

    Args:
        server: Where; what it held before is dropped.
        connections: How many it opens.
        pipeline: Requests that it sends before it waits for their answers, on each connection.
        count: Entries in all.
    """
    request = ("XADD", "s", "*", "__rand_int__", "v" * VALUE_BYTES)
    return _run(server, connections, pipeline, count, request)


def set_keys(server: RedisServer, *, connections: int, pipeline: int, count: int) -> Added:
    """The same with `SET`: gives `count` random keys a value of 100 bytes each."""
    request = ("SET", "__rand_int__", "v" * VALUE_BYTES)
    return _run(server, connections, pipeline, count, request)


def _run(
    server: RedisServer, connections: int, pipeline: int, count: int, request: Sequence[str]
) -> Added:
    server.flush()
    command = [
        program("redis-benchmark"),
        *("-h", HOST, "-p", str(server.port), "-c", str(connections), "-P", str(pipeline)),
        *("-n", str(count), "-r", str(KEYS), "--csv"),
        *request,
    ]
    server.clock.lap()
    processor_s, started_at = _children_s(), time.monotonic()
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    seconds = time.monotonic() - started_at
    if process.returncode:
        raise CannotMeasureError(f"redis-benchmark failed: {process.stderr.strip()[-300:]}")
    # "test","rps","avg_latency_ms",… and one line of figures.
    (figures,) = csv.DictReader(io.StringIO(process.stdout))
    return Added(float(figures["rps"]), server.clock.lap(), _children_s() - processor_s, seconds)


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
