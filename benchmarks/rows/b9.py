"""B9: how long until a server that was killed is ready again, against reading its files once.

It also follows the bucket's disk through its life: as loaded, and once compaction has come to rest.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import attrs

from benchmarks.kit.errors import CannotMeasureError
from benchmarks.kit.figures import Figure, Spread, significant
from benchmarks.kit.files import copy, drop_from_cache, read_once
from benchmarks.kit.machine import check_disk
from benchmarks.kit.processes import UprServer
from benchmarks.kit.raw import RawConnection
from benchmarks.kit.streaming import Consumers, filler, processor_details, rate, rates
from benchmarks.kit.upkeep import Disk, persisted, rest, statistics
from benchmarks.kit.work import KEY_BYTES, PARTITIONS, VALUE_BYTES, key_of
from upr_protocol.client import BlockingClient
from upr_protocol.hashing import partition_of
from upr_protocol.wire import PartitionChunk

MUTATIONS: Final = 10_000_000
KEYS: Final = 1_000_000
ASKED: Final = tuple(
    {partition_of(key_of(index), PARTITIONS): key_of(index) for index in range(2_000)}.values()
)
"""Keys that are asked for, one after the other: one of every partition."""


@attrs.frozen
class Started:
    """One start, in seconds since the process was begun.

    Attributes:
        read_s: What reading the files once took, just before.
        unindexed: Mutations on disk that the index did not know yet, about.
        listening: When it said that it listens.
        streams: When the first chunk of a stream from the beginning was there.
        answers: When it had answered a get besides.
        ready: When it had answered a get in every partition, one after the other.
        processor_s: What its processes used until then.
    """

    read_s: float
    unindexed: int
    listening: float
    streams: float
    answers: float
    ready: float
    processor_s: Mapping[str, float]


def measure(runs: int, say: Callable[[str], None]) -> list[Figure]:
    """B9: killed in the midst of its upkeep, and at rest."""
    check_disk()
    with tempfile.TemporaryDirectory() as folder:
        loaded, killed = Path(folder) / "loaded", Path(folder) / "killed"
        say(f"B9: loading {MUTATIONS:,} mutations of {KEYS:,} keys")
        life = _load(loaded)
        say(f"  {_say(life['loaded'])} once all was on disk, after {life['load_s']} s")
        busy: list[Started] = []
        for index in range(runs):
            copy(loaded, killed)
            busy.append(_start(killed, lambda: None))
            shutil.rmtree(killed)
            say(f"  run {index + 1}, killed after the load: {_say_start(busy[-1])}")
        life.update(_come_to_rest(loaded, runs, say))
        warm, cold = [], []
        for index in range(runs):
            warm.append(_start(loaded, lambda: None))
            cold.append(_start(loaded, lambda: drop_from_cache(loaded)))
            say(
                f"  run {index + 1}, killed at rest: {_say_start(warm[-1])}; "
                f"with nothing in the page cache: {_say_start(cold[-1])}"
            )
    life["restart_to_ready_s"] = Spread.of([start.ready for start in warm]).to_json()
    return [
        _figure("B9", f"killed when {MUTATIONS:,} mutations were on disk", busy, {"life": life}),
        _figure("B9 at rest", "killed when compaction had come to rest", warm),
        _figure("B9 cold", "the same, with nothing in the page cache", cold),
    ]


def _load(data_dir: Path) -> dict[str, Any]:
    with UprServer(partitions=PARTITIONS, data_dir=data_dir) as server:
        with filler(server, KEYS) as publisher:
            publisher.answer()
            started_at = time.monotonic()
            publisher.ask(fill=True)
            publisher.ask(draw=MUTATIONS - KEYS)
            persisted(server)
            took_s = time.monotonic() - started_at
        disk = Disk.of(server)
        server.kill()
    return {"load_s": significant(took_s), "loaded": _disk(disk)}


def _come_to_rest(data_dir: Path, runs: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Compaction, and backfill of what it has left."""
    with ExitStack() as stack:
        server = stack.enter_context(UprServer(partitions=PARTITIONS, data_dir=data_dir))
        rest_s = rest(server)
        disk = Disk.of(server)
        say(f"  {_say(_disk(disk))} once at rest, after {rest_s:.0f} s")
        consumer = Consumers(server, 1, stack)
        # Compaction leaves superseded mutations: how many, the first run tells.
        count = _count(server)
        ran = [consumer.stream(count) for _ in range(runs)]
        say(
            f"  backfill of {count:,} mutations: "
            + ", ".join(f"{rate(r):,.0f} mutations/s, {rate(r, 'bytes'):,.0f} B/s" for r in ran)
        )
        server.kill()
    live = KEYS * (KEY_BYTES + VALUE_BYTES)
    return {
        "compaction_s": significant(rest_s),
        "at_rest": _disk(disk),
        "mutations_at_rest": count,
        "live_keys": KEYS,
        "live_bytes": live,
        "file_bytes_by_live_bytes": significant(disk.files / live),
        "live_chunk_bytes": round(disk.chunks * KEYS / count),
        "chunk_bytes_by_live_chunk_bytes": significant(count / KEYS),
        "backfill": {
            "mutations_per_s": rates(ran).to_json(),
            "bytes_per_s": rates(ran, "bytes").to_json(),
            **processor_details(ran),
        },
    }


def _count(server: UprServer) -> int:
    """How many mutations a stream from the beginning brings."""
    with ExitStack() as stack:
        count: int = Consumers(server, 1, stack).stream(None)["mutations"]
        return count


def _start(data_dir: Path, prepare: Callable[[], None]) -> Started:
    """Reads the files, starts a server on them until it is ready, and kills it."""
    prepare()
    read_s = read_once(data_dir)
    prepare()
    started_at = time.monotonic()
    with UprServer(partitions=PARTITIONS, data_dir=data_dir) as server:
        listening = time.monotonic() - started_at
        unindexed = statistics(server)["disk"]["unindexed_mutations"]
        with RawConnection(server.port, server.BUCKET) as connection:
            connection.stream()
            while not any(isinstance(m, PartitionChunk) for m in connection.messages()):
                pass
        streams = time.monotonic() - started_at
        with BlockingClient(server.url) as client:
            items = [client.get(ASKED[0])]
            answers = time.monotonic() - started_at
            items += [client.get(key) for key in ASKED[1:]]
        ready = time.monotonic() - started_at
        if None in items:
            raise CannotMeasureError("a key is missing after the restart")
        processor_s = server.total()
        server.kill()
    return Started(read_s, unindexed, listening, streams, answers, ready, processor_s)


def _disk(disk: Disk) -> dict[str, int]:
    return {**attrs.asdict(disk), "files": disk.files}


def _say(disk: Mapping[str, int]) -> str:
    return (
        f"{disk['files'] / 1e6:,.0f} MB of files "
        f"(log {disk['log_used'] / 1e6:,.0f} of {disk['log_file'] / 1e6:,.0f} in use, "
        f"index {disk['index_used'] / 1e6:,.0f} of {disk['index_file'] / 1e6:,.0f})"
    )


def _say_start(start: Started) -> str:
    return (
        f"listens after {start.listening:.2f} s, streams after {start.streams:.2f}, answers after "
        f"{start.answers:.2f}, in every partition after {start.ready:.2f}, with "
        f"{start.unindexed:,} to be indexed; reading the files {start.read_s:.2f}"
    )


def _figure(
    row: str, text: str, starts: Sequence[Started], more: Mapping[str, Any] | None = None
) -> Figure:
    return Figure.less_is_better(
        row=row,
        text=f"From start to ready (streams, and answers gets in every partition): {text}.",
        unit="s",
        ours=Spread.of([start.ready for start in starts]),
        peer=Spread.of([start.read_s for start in starts]),
        peer_name="reading the files once, 1 MiB at a time",
        first_bar=0.33,
        aim=1.0,
        details={
            "listening_s": Spread.of([start.listening for start in starts]).to_json(),
            "streams_s": Spread.of([start.streams for start in starts]).to_json(),
            "answers_s": Spread.of([start.answers for start in starts]).to_json(),
            "unindexed_mutations": Spread.of([start.unindexed for start in starts]).to_json(),
            "processor_s": {
                role: Spread.of([start.processor_s[role] for start in starts]).to_json()
                for role in starts[0].processor_s
            },
            **(more or {}),
        },
    )
