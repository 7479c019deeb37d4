"""SOAK: a long run at 40 % of B1's rate, with eight consumers that read everything as it comes.

Does the server's memory grow, and what is the latency? B1's rate is measured first. Should 40 % of
it be too much for the machine with so many consumers, short runs look for the share that is not,
and the long run is at that; the second line says how much that is of what was wanted.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np

from benchmarks.kit.figures import Figure, Spread, significant
from benchmarks.kit.ingest import CONNECTIONS, publish, publishers
from benchmarks.kit.processes import UprServer, Worker, wait_until
from benchmarks.kit.processor import anonymous_bytes
from benchmarks.kit.stamps import Times
from benchmarks.kit.upkeep import Disk, statistics
from benchmarks.kit.work import CHUNK_MUTATIONS, PARTITIONS
from upr_protocol.client import BlockingClient

MINUTES: Final = float(os.environ.get("SOAK_MINUTES", "10"))
"""How long the long run is; at least 3."""

WANTED: Final = 0.4
"""The share of B1's rate that is wanted."""

SHARES: Final = (WANTED, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05)
"""Tried one after the other until one is kept up with."""

TRY_S: Final = 60.0
"""Long enough to fall behind: a rate that was kept up with for 20 s was not for three minutes."""

LATE_MAX_S: Final = 1.0
"""A rate is kept up with if in the run's second half 99 of 100 chunks were nowhere later."""

CONSUMERS: Final = 8
B1_MUTATIONS: Final = 4_000_000
SAMPLE_S: Final = 5.0
CATCH_UP_TIMEOUT_S: Final = 600.0


@attrs.frozen
class _Held:
    """A rate, held for a while.

    Attributes:
        share: Of B1's rate.
        asked: Mutations a second that were due.
        reached: Mutations a second, from when the first was due to when the last consumer had all.
        begun_ns: When the first was due.
        due: When each chunk was due, of all consumers, in rising order.
        late: How much later it came.
        memory: Anonymous memory in MiB, by process, and `at`, seconds after the first was due.
        processor_s: Processor time, by process.
        seen_share: How much of what was published reached a consumer: the rest was superseded.
    """

    share: float
    asked: float
    reached: float
    begun_ns: int
    due: Times
    late: Times
    memory: Sequence[dict[str, float]]
    processor_s: dict[str, float]
    seen_share: float

    @property
    def keeps_up(self) -> bool:
        """Whether it was kept up with."""
        second_half = self.late[len(self.late) // 2 :]
        return bool(np.percentile(second_half, 99) < LATE_MAX_S * 1e9)

    def to_json(self) -> dict[str, Any]:
        """The rate, and how late chunks were."""
        return {
            "share_of_b1": self.share,
            "asked_per_s": significant(self.asked),
            "reached_per_s": significant(self.reached),
            "keeps_up": self.keeps_up,
            "latency": latency_ms(self.late),
            "last_s_latency": latency_ms(self.late[self.due > self.due[-1] - 1_000_000_000]),
        }


def latency_ms(late: Times) -> dict[str, float]:
    """p50, p99, p99.9 and maximum of nanoseconds, in milliseconds."""
    p50, p99, p999 = np.percentile(late, (50, 99, 99.9)) / 1e6
    return {
        "p50_ms": significant(float(p50)),
        "p99_ms": significant(float(p99)),
        "p99.9_ms": significant(float(p999)),
        "max_ms": significant(float(late.max()) / 1e6),
    }


class _Stand:
    """A fresh server, its publishers and its consumers."""

    def __init__(self, stack: ExitStack) -> None:
        enter = stack.enter_context
        self.folder = Path(enter(tempfile.TemporaryDirectory()))
        self.server = enter(UprServer(partitions=PARTITIONS))
        self._client = enter(publishers(self.server, CHUNK_MUTATIONS))
        self._consumers = [
            enter(Worker("live-consume", url=self.server.url)) for _ in range(CONSUMERS)
        ]
        for worker in (self._client, *self._consumers):
            worker.answer()

    def hold(self, share: float, rate: float, seconds: float) -> _Held:
        """Publishes at `rate`, once, and waits until every consumer has all."""
        self.server.lap()
        with sampled(self.server) as samples:
            answer = self._client.ask(mutations=int(rate * seconds), rate=rate, stamp=True)
            self._catch_up()
            ended_at = time.monotonic()
        processor_s = {**self.server.lap(), "client": answer["processor_s"]}
        due, late, mutation_count, processor_s["consumer"] = self._samples()
        started_at = answer["begun"]
        return _Held(
            share=share,
            asked=rate,
            reached=answer["mutations"] / (ended_at - started_at),
            begun_ns=round(started_at * 1e9),
            due=due,
            late=late,
            memory=[{**sample, "at": sample["at"] - started_at} for sample in samples],
            processor_s=processor_s,
            seen_share=mutation_count / CONSUMERS / answer["mutations"],
        )

    def _catch_up(self) -> None:
        with BlockingClient(self.server.url) as client:
            high = sum(row.high_seq for row in client.seqnos())
        wait_until(
            lambda: all(worker.ask()["reached"] >= high for worker in self._consumers),
            timeout_s=CATCH_UP_TIMEOUT_S,
        )

    def _samples(self) -> tuple[Times, Times, int, float]:
        """When chunks were due and how late they were, of all consumers; mutations that these have
        seen, and processor time that they have used."""
        path = self.folder / "samples.npy"
        pieces: list[Times] = []
        mutation_count, used_s = 0, 0.0
        for worker in self._consumers:
            answer = worker.ask(save=str(path))
            pieces.append(np.load(path))
            mutation_count += answer["mutations"]
            used_s += answer["processor_s"]
        due, received_counts = np.concatenate(pieces, axis=1)
        order = np.argsort(due, kind="stable")
        return due[order], (received_counts - due)[order], mutation_count, used_s


@contextmanager
def sampled(server: UprServer) -> Iterator[list[dict[str, float]]]:
    """Looks at the memory of the server's processes every few seconds meanwhile; MiB, and `at`,
    seconds of the monotonic clock."""
    samples: list[dict[str, float]] = []
    end_event = threading.Event()
    processes = dict(zip(server.ROLES, (server.pid, server.writer, server.reader), strict=True))

    def watch() -> None:
        while not end_event.wait(SAMPLE_S):
            sizes = {role: anonymous_bytes(pid) / 2**20 for role, pid in processes.items()}
            samples.append({"at": time.monotonic(), **sizes})

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield samples
    finally:
        end_event.set()
        thread.join()


def measure(runs: int, say: Callable[[str], None]) -> list[Figure]:
    """SOAK: B1's rate several times, and one long run."""
    say(f"SOAK: B1's rate, then {MINUTES:g} min with {CONSUMERS} consumers")
    rates = Spread.of(_b1_rates(runs, say))
    tries = _tried(rates.median, say)
    return _figures(rates, tries, *_long_run(tries[-1], say))


def _tried(b1_rate: float, say: Callable[[str], None]) -> list[_Held]:
    """Short runs at less and less, until one is kept up with; each on a fresh server."""
    tries: list[_Held] = []
    for share in SHARES:
        with ExitStack() as stack:
            tries.append(_Stand(stack).hold(share, share * b1_rate, TRY_S))
        say(f"  {_text(tries[-1])}")
        if tries[-1].keeps_up:
            break
    return tries


def _long_run(attempt: _Held, say: Callable[[str], None]) -> tuple[_Held, dict[str, Any]]:
    """The long run, and what the server held at its end."""
    with ExitStack() as stack:
        stand = _Stand(stack)
        sustained = stand.hold(attempt.share, attempt.asked, 60 * MINUTES)
        end = {
            "memory_counted_by_the_server": statistics(stand.server)["memory"],
            "disk": attrs.asdict(Disk.of(stand.server)),
        }
    say(f"  {MINUTES:g} min: {_text(sustained)}")
    return sustained, end


def _figures(
    rates: Spread, tries: Sequence[_Held], sustained: _Held, end: dict[str, Any]
) -> list[Figure]:
    minutes, count = _minutes(sustained), sustained.asked * 60 * MINUTES
    details = {
        "minutes": minutes,
        "memory_mib": [
            {name: round(size, 1) for name, size in s.items()} for s in sustained.memory
        ],
        "latency": latency_ms(sustained.late),
        "samples": len(sustained.late),
        "tries": [attempt.to_json() for attempt in (*tries, sustained)],
        "b1_per_s": rates.to_json(),
        "seen_share": significant(sustained.seen_share),
        "ns_per_mutation": {
            role: significant(used_s / count * 1e9)
            for role, used_s in sustained.processor_s.items()
        },
        "busy": {
            role: round(used_s / (60 * MINUTES), 2)
            for role, used_s in sustained.processor_s.items()
        },
        **end,
    }
    return [
        Figure.less_is_better(
            row="SOAK",
            text=f"The server's anonymous memory in the last of {MINUTES:g} minutes at "
            f"{sustained.share:.0%} of B1's rate with {CONSUMERS} live consumers, median of the "
            f"minute; {CHUNK_MUTATIONS:,} mutations a chunk, {CONNECTIONS} connections.",
            unit="MiB",
            ours=Spread.of([minutes[-1]["server_mib"]]),
            peer=Spread.of([minutes[1]["server_mib"]]),
            peer_name="the same in its second minute",
            first_bar=0.95,
            aim=1.0,
            details=details,
        ),
        Figure.more_is_better(
            row="SOAK rate",
            text="The same run: mutations by the time until the last consumer had them all.",
            unit="mutations/s",
            ours=Spread.of([sustained.reached]),
            peer=Spread.of([WANTED * rates.median]),
            peer_name=f"{WANTED:.0%} of B1, in the same runs",
            first_bar=0.99,
            aim=1.0,
        ),
    ]


def _b1_rates(runs: int, say: Callable[[str], None]) -> list[float]:
    with UprServer(partitions=PARTITIONS) as server, publishers(server, CHUNK_MUTATIONS) as client:
        client.answer()
        publish(server, client, B1_MUTATIONS // 4)
        rates = [publish(server, client, B1_MUTATIONS).rate for _ in range(runs)]
    say("  B1: " + ", ".join(f"{rate:,.0f}" for rate in rates) + " mutations/s")
    return rates


def _text(sustained: _Held) -> str:
    late = latency_ms(sustained.late)
    return (
        f"{sustained.share:.0%} of B1: {sustained.asked:,.0f} mutations/s due, "
        f"{sustained.reached:,.0f} reached; "
        f"p50 {late['p50_ms']:,.1f} ms, p99 {late['p99_ms']:,.1f} ms, "
        f"p99.9 {late['p99.9_ms']:,.1f} ms; "
        + ("keeps up" if sustained.keeps_up else "falls behind")
    )


def _minutes(sustained: _Held) -> list[dict[str, float]]:
    """Latency of what was due in each minute, and the medians of memory."""
    minutes: list[dict[str, float]] = []
    for index in range(round(MINUTES)):
        low, high = (sustained.begun_ns + 60_000_000_000 * n for n in (index, index + 1))
        late = sustained.late[(sustained.due >= low) & (sustained.due < high)]
        sizes = [
            sample for sample in sustained.memory if 60 * index <= sample["at"] < 60 * index + 60
        ]
        minutes.append(
            {
                **latency_ms(late),
                **{
                    f"{role}_mib": significant(Spread.of([s[role] for s in sizes]).median)
                    for role in UprServer.ROLES
                },
            }
        )
    return minutes
