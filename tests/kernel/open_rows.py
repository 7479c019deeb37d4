"""Open rows of every build beside a naive model, all of which must say the same."""

from __future__ import annotations

from collections.abc import Sequence
from operator import sub
from struct import Struct
from typing import Any, Final, NamedTuple

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

ANSWER_LIMITS: Final = (4, 200, 3, 400, 7, 10, 5, 6)
NO_WRITER: Final = bytes(16)

_RUN: Final = Struct("<IIQI4x")
_LINE: Final = Struct("<IIQQQQ")

Row = tuple[int, bytes, bytes, int, int, int, int]


class PublishedRun(NamedTuple):
    """A run that is given to `add_runs`."""

    partition: int
    rows: Sequence[Mutation]
    writer: bytes = NO_WRITER
    counter: int = 0
    chain: int = 0
    skipped: bool = False


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
        self.history_id = 7
        self.is_awaited = False
        self.has_refused = False
        self.counters: dict[bytes, int] = {}
        self.begin(0)

    def begin(self, start: int) -> None:
        self.rows: list[Row] = []
        self.start = self.high = start
        self.flagged: set[int] = set()
        self.covered: set[int] = set()
        self.has_counters = False

    def takes(self, run: PublishedRun) -> bool:
        is_new = not self.has_refused and run.counter > self.counters.get(run.writer, 0)
        return (
            self.history_id > 0
            and not run.chain
            and not run.skipped
            and (run.writer == NO_WRITER or is_new)
            and self.fits(run.rows)
        )

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


def new_rows(build: Any, partition: int) -> Any:
    """Rows of a build, without any."""
    answers = build.Answers(*ANSWER_LIMITS)
    limits = (ROWS_MAX, BYTES_MAX, SPAN_MAX)
    rows = build.OpenRows(build.KeyTable(), answers, partition, *limits)
    rows.history_id = 7
    return rows


class Partitions:
    """The open rows of some partitions, of each build, and the naive ones."""

    def __init__(self) -> None:
        self.naive = [NaiveRows(partition) for partition in range(PARTITIONS)]
        self.builds: list[tuple[Any, list[Any]]] = [
            (
                build,
                [new_rows(build, partition) for partition in range(PARTITIONS)],
            )
            for build in BUILDS.values()
        ]

    def add_runs(
        self,
        runs: Sequence[PublishedRun],
        cas: int,
        *,
        attempt: int = 0,
        rows_before: Sequence[Mutation] = (),
        in_order: bool = False,
    ) -> None:
        """Adds runs of a chunk that begins with other rows."""
        rows = [*rows_before, *(row for run in runs for row in run.rows)]
        chunk = bytes(Chunk.build(rows, SeqNo(0), SeqNo(0)).encode())
        lines, left, superseded, awaited = self._add_to_naive(runs, cas, in_order=in_order)
        writers = {run.writer for run in runs}
        notes: list[Any] = []
        for build, targets in self.builds:
            before = [(r.table.nbytes, r.nbytes, r.answers.nbytes) for r in targets]
            result = build.add_runs(
                *(chunk, len(rows_before)),
                b"".join(_RUN.pack(r.partition, len(r.rows), r.counter, r.chain) for r in runs),
                writers.pop() if len(writers) == 1 else b"".join(run.writer for run in runs),
                *(tuple(targets), attempt),
                bytes(run.skipped for run in runs) if any(r.skipped for r in runs) else None,
                *(cas, RUN_ROWS_MAX, RUN_BYTES_MAX, in_order),
            )
            writers = {run.writer for run in runs}
            assert list(_LINE.iter_unpack(result[0])) == lines
            assert (result[1], result[3]) == (left, awaited)
            after = [(r.table.nbytes, r.nbytes, r.answers.nbytes) for r in targets]
            growth = tuple(sum(column) for column in zip(*after, strict=True))
            shrinkage = tuple(sum(column) for column in zip(*before, strict=True))
            assert result[4:] == tuple(map(sub, growth, shrinkage))
            noted: list[tuple[int, int]] = []
            for partition, seqs in result[2]:
                noted += [(partition, seq) for seq in seqs]
            assert noted == superseded
            notes.append(result[2])
        assert all(note == notes[0] for note in notes)

    def _add_to_naive(
        self, runs: Sequence[PublishedRun], cas: int, *, in_order: bool
    ) -> tuple[list[Any], list[int], list[tuple[int, int]], list[int]]:
        lines: list[Any] = []
        left: list[int] = []
        superseded: list[tuple[int, int]] = []
        awaited: list[int] = []
        for index, run in enumerate(runs):
            naive = self.naive[run.partition] if run.partition < PARTITIONS else None
            if naive is None or (in_order and left) or not naive.takes(run):
                left.append(index)
                lines.append((0,) * 6)
                continue
            (first_seq, first_cas), without_flag = naive.add(run.rows, cas)
            naive.counters[run.writer] = run.counter
            lines.append((run.partition, 0, naive.history_id, first_seq, naive.high, first_cas))
            superseded += [(run.partition, seq) for seq in without_flag]
            awaited += [run.partition] * naive.is_awaited
        return lines, left, superseded, awaited

    def set_all(self, partition: int, **values: Any) -> None:
        """Sets attributes of a partition's rows, in all builds and the naive one."""
        for target in (self.naive[partition], *(rows[partition] for _, rows in self.builds)):
            for name, value in values.items():
                setattr(target, name, value)

    def refuse(self, partition: int, *, has_refused: bool) -> None:
        """Batches of publishers were refused, or those that were have come again."""
        self.naive[partition].has_refused = has_refused
        for _, rows in self.builds:
            rows[partition].answers.has_refused = has_refused

    def add_damaged(
        self, chunk: bytes, runs: bytes, writers: bytes, cas: int, *, first_row: int = 0
    ) -> Outcome:
        """Adds runs of a chunk that may be damaged, in all builds alike; not in the naive one."""
        outcomes = []
        for build, targets in self.builds:
            outcome_kind, result = outcome(
                build.add_runs,
                *(chunk, first_row, runs, writers, tuple(targets), 0, None, cas),
                *(RUN_ROWS_MAX, RUN_BYTES_MAX, False),
            )
            outcomes.append((outcome_kind, result[:4] if outcome_kind == "returned" else result))
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
                    rows.answers.between(0, 1 << 63, 1 << 62),
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
            rows.answers.check_invariants()
            assert rows.seqs() == [row[3] for row in naive.rows]
            assert [rows.find(seq) for seq in rows.seqs()] == naive.rows
            assert rows.find(naive.high + 1) is None
            assert rows.live == sum(seq > naive.start for seq in naive.newest.values())
            flagged = {rows.base + row for row, flag in enumerate(rows.flags) if flag}
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
