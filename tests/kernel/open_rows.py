"""Open rows of every build beside a naive model, all of which must say the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tests.kernel.builds import BUILDS, Outcome, outcome
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.hashing import partition_of
from upr_protocol.ids import Cas, Operation, SeqNo

PARTITIONS: Final = 3
ROWS_MAX: Final = 40
BYTES_MAX: Final = 3000
SPAN_MAX: Final = 90
RUN_ROWS_MAX: Final = 12
RUN_BYTES_MAX: Final = 700

Row = tuple[int, bytes, bytes, int, int, int, int]

FIGURES: Final = (
    *("added", "base", "first", "has_counters", "high", "is_full", "last", "last_cas", "live"),
    *("mean_bytes", "nbytes", "row_bytes", "start", "superseded", "tidy_at", "wants_tidying"),
)


class NaiveRows:
    """The rows of one partition as a list, and the newest number of each key ever."""

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.newest: dict[bytes, int] = {}
        self.last_cas = 0
        self.begin(0)

    def begin(self, start: int) -> None:
        self.rows: list[Row] = []
        self.start = self.high = start
        self.flagged: set[int] = set()
        self.covered: set[int] = set()
        self.has_counters = False

    def fits(self, rows: Sequence[Mutation]) -> bool:
        row_bytes = sum(33 + len(key) + len(value) for _, key, value, *_ in self.rows)
        spans = bool(self.rows) and self.rows[-1][3] - self.rows[0][3] >= SPAN_MAX
        is_full = len(self.rows) >= ROWS_MAX or row_bytes >= BYTES_MAX or spans
        return (
            not is_full
            and 0 < len(rows) < RUN_ROWS_MAX
            and sum(len(row.value) for row in rows) < RUN_BYTES_MAX
            and all(partition_of(row.key, PARTITIONS) == self.partition for row in rows)
        )

    def add(self, rows: Sequence[Mutation], cas: int) -> tuple[tuple[int, int], list[int]]:
        """The first number and CAS of the rows, and what they supersede without a flag."""
        first = self.high + 1, max(self.last_cas + 1, cas)
        superseded: list[int] = []
        self.high += len(rows)
        self.covered.update(range(first[0], self.high + 1))
        for seq, row in enumerate(rows, first[0]):
            previous = self.newest.get(row.key, 0)
            self.newest[row.key] = seq
            if previous > self.start:
                if previous in self.covered and not self.has_counters:
                    self.flagged.add(previous)
                else:
                    superseded.append(previous)
            self.last_cas = first[1] + seq - first[0]
            self.rows.append(
                (row.op, row.key, row.value, seq, self.last_cas, row.flags, row.expiry)
            )
        return first, superseded


class Partitions:
    """The open rows of some partitions, of each build, and the naive ones."""

    def __init__(self) -> None:
        self.naive = [NaiveRows(partition) for partition in range(PARTITIONS)]
        self.builds: list[tuple[Any, list[Any]]] = [
            (
                build,
                [
                    build.OpenRows(build.KeyTable(), partition, ROWS_MAX, BYTES_MAX, SPAN_MAX)
                    for partition in range(PARTITIONS)
                ],
            )
            for build in BUILDS.values()
        ]

    def add_runs(
        self,
        runs: Sequence[tuple[int | None, Sequence[Mutation]]],
        cas: int,
        *,
        in_order: bool = False,
    ) -> None:
        """Adds runs, each with its partition, None for none."""
        chunk = Chunk.build([row for _, rows in runs for row in rows], SeqNo(0), SeqNo(0))
        bounds = [0]
        numbers: list[tuple[int, int] | None] = []
        superseded: list[list[int]] = []
        for partition, rows in runs:
            bounds.append(bounds[-1] + len(rows))
            is_over = in_order and None in numbers
            if partition is None or is_over or not self.naive[partition].fits(rows):
                numbers.append(None)
                superseded.append([])
                continue
            first, without_flag = self.naive[partition].add(rows, cas)
            numbers.append(first)
            superseded.append(without_flag)
        notes: list[Any] = []
        for build, targets in self.builds:
            bytes_before = [(rows.table.nbytes, rows.nbytes) for rows in targets]
            result = build.add_runs(
                bytes(chunk.encode()),
                tuple(bounds),
                tuple(None if p is None else targets[p] for p, _ in runs),
                *(cas, PARTITIONS, RUN_ROWS_MAX, RUN_BYTES_MAX, in_order),
            )
            assert result[0] == numbers
            grown = [
                (rows.table.nbytes - table, rows.nbytes - nbytes)
                for rows, (table, nbytes) in zip(targets, bytes_before, strict=True)
            ]
            assert result[2:] == (sum(t for t, _ in grown), sum(n for _, n in grown))
            superseded_of_run = dict(result[1])
            assert [superseded_of_run.get(index, []) for index in range(len(runs))] == superseded
            notes.append(result[1])
        assert all(note == notes[0] for note in notes)

    def add_damaged(self, chunk: bytes, bounds: tuple[int, ...], cas: int) -> Outcome:
        """Adds runs of a chunk that may be damaged, in all builds alike; not in the naive one."""
        outcomes = []
        for build, targets in self.builds:
            runs = tuple(targets[index % PARTITIONS] for index in range(len(bounds) - 1))
            outcome_kind, result = outcome(
                build.add_runs,
                *(chunk, bounds, runs, cas, PARTITIONS, RUN_ROWS_MAX, RUN_BYTES_MAX, False),
            )
            outcomes.append((outcome_kind, result[:2] if outcome_kind == "returned" else result))
        assert all(result == outcomes[0] for result in outcomes), outcomes
        return outcomes[0]

    def each(self, partition: int, name: str, *args: Any) -> Outcome:
        """The outcome of a method of a partition's rows, in which all builds agree."""
        outcomes = [outcome(getattr(rows[partition], name), *args) for _, rows in self.builds]
        assert all(result == outcomes[0] for result in outcomes), (name, outcomes)
        return outcomes[0]

    def agree(self) -> None:
        """All builds say the same of everything."""
        figures = [
            [
                (
                    *(getattr(rows, name) for name in FIGURES),
                    bytes(rows.flags),
                    rows.seqs(),
                    rows.encoded(1, 1 << 40, False),
                    rows.encoded(0, 5, True),
                    len(rows),
                    rows.table.entries(),
                )
                for rows in partitions
            ]
            for _, partitions in self.builds
        ]
        assert all(figure == figures[0] for figure in figures)

    def check(self) -> None:
        """All builds say what the model does."""
        self.agree()
        for partition, naive in enumerate(self.naive):
            rows = self.builds[0][1][partition]
            assert (rows.high, rows.start) == (naive.high, naive.start)
            assert rows.last_cas == naive.last_cas
            assert rows.seqs() == [row[3] for row in naive.rows]
            assert [rows.find(seq) for seq in rows.seqs()] == naive.rows
            assert rows.find(naive.high + 1) is None
            assert rows.live == sum(seq > naive.start for seq in naive.newest.values())
            flagged = {rows.base + at for at, flag in enumerate(rows.flags) if flag}
            assert flagged == naive.flagged
            live = Chunk(rows.encoded(naive.start, naive.high, True))
            assert live.seqs.tolist() == [
                row[3] for row in naive.rows if row[3] not in naive.flagged
            ]
            every = Chunk(rows.encoded(naive.start, naive.high, False))
            assert (every.start, every.end) == (naive.start, naive.high)
            assert list(every) == [
                Mutation(Operation(op), key, value, SeqNo(seq), Cas(cas), flags, expiry)
                for op, key, value, seq, cas, flags, expiry in naive.rows
            ]
