"""A naive partition: a list of all mutations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from upr_protocol.chunk import Chunk, CounterDelta, Mutation
from upr_protocol.errors import Status
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import Cas, HistoryId, Operation, PartitionId, PartitionState, SeqNo
from upr_protocol.wire import RunResult


class RunAnswer(NamedTuple):
    """The answer to one run.

    Attributes:
        result: The result of the run.
        failures: (row of the run, status) of each mutation that failed.
        counters: (row of the run, new value) of each counter that changed.
    """

    result: RunResult
    failures: list[tuple[int, int]]
    counters: list[tuple[int, int]]


class FakePartition:
    """One partition of a `FakeServer`.

    Attributes:
        history: All mutations, by sequence number.
        log: The failover log.
        applied: How many operations took effect; those of repeated batches do not count.
        purge_seq: Deletions at or below it may be missing from what it streams.
    """

    def __init__(self, partition: int, history_id: int) -> None:
        self.id = PartitionId(partition)
        self.state = PartitionState.ACTIVE
        self.log = FailoverLog.of_pairs([(history_id, 0)])
        self.history: list[Mutation] = []
        self.applied = 0
        self.purge_seq = SeqNo(0)
        self._answers: dict[bytes, dict[int, RunAnswer]] = {}

    @property
    def high(self) -> SeqNo:
        return self.history[-1].seq if self.history else SeqNo(0)

    def contents(self, through: int | None = None) -> dict[bytes, bytes]:
        """Key -> value as of the sequence number `through`, or of now."""
        items: dict[bytes, bytes] = {}
        for mutation in self.history:
            if through is not None and mutation.seq > through:
                break
            if mutation.op is Operation.SET:
                items[mutation.key] = mutation.value
            else:
                items.pop(mutation.key, None)
        return items

    def seq_before(self, cas: int) -> SeqNo:
        """The sequence number of the last mutation with a lower CAS; 0 if there is none."""
        return max((row.seq for row in self.history if row.cas < cas), default=SeqNo(0))

    def newest(self, key: bytes) -> Mutation | None:
        for mutation in reversed(self.history):
            if mutation.key == key:
                return mutation if mutation.op is Operation.SET else None
        return None

    def fail_over(self, history_id: int, end: int) -> None:
        """Begins a new history after the sequence number `end`, and loses all mutations above
        it."""
        self.history = [mutation for mutation in self.history if mutation.seq <= end]
        self.log = self.log.with_branch(HistoryId(history_id), SeqNo(end))
        self._answers.clear()

    # Changes.

    def mutate(self, chunk: Chunk, writer: bytes, counter: int) -> RunAnswer:
        """Answers a run; a run that was answered before gets the same answer."""
        answers = self._answers.setdefault(writer, {})
        if any(writer):
            if counter in answers:
                return answers[counter]
            if answers and counter <= max(answers):
                return RunAnswer(RunResult(self.id, Status.TOKEN_TOO_OLD), [], [])
        reply = self._apply(chunk)
        if any(writer):
            answers[counter] = reply
            if len(answers) > 64:
                del answers[min(answers)]
        return reply

    def _apply(self, chunk: Chunk) -> RunAnswer:
        first = self.high + 1
        failures: list[tuple[int, int]] = []
        counters: list[tuple[int, int]] = []
        for index, request in enumerate(chunk):
            apply_result = self._one(request)
            if isinstance(apply_result, Status):
                failures.append((index, apply_result))
                continue
            op, value = apply_result
            seq = SeqNo(self.high + 1)
            if request.op in (Operation.INCREMENT, Operation.DECREMENT):
                counters.append((index, int(value)))
            self.history.append(
                Mutation(op, request.key, value, seq, Cas(seq), request.flags, request.expiry)
            )
            self.applied += 1
        last = self.high
        succeeded = last >= first
        result = RunResult(
            self.id,
            Status.OK,
            self.log.current,
            SeqNo(first if succeeded else 0),
            SeqNo(last if succeeded else 0),
            Cas(first if succeeded else 0),
        )
        return RunAnswer(result, failures, counters)

    def _one(self, request: Mutation) -> tuple[Operation, bytes] | Status:
        newest = self.newest(request.key)
        if request.cas and (newest is None or newest.cas != request.cas):
            return Status.CAS_MISMATCH
        if request.op is Operation.SET:
            return Operation.SET, request.value
        if request.op is Operation.ADD:
            return (Operation.SET, request.value) if newest is None else Status.EXISTS
        if request.op is Operation.INCREMENT:
            delta = CounterDelta.decode(request.value)
            if newest is None:
                return Operation.SET, b"%d" % delta.initial
            return Operation.SET, b"%d" % (int(newest.value) + delta.delta)
        if newest is None:
            return Status.NOT_FOUND
        if request.op is Operation.DELETE:
            return Operation.DELETE, b""
        if request.op is Operation.APPEND:
            return Operation.SET, newest.value + request.value
        return Status.UNSUPPORTED

    # Streaming.

    def snapshot(self, start: SeqNo, at_least: SeqNo, size: int) -> tuple[SeqNo, Iterator[Chunk]]:
        """The end of the snapshot that starts after `start`, and its deduplicated chunks of at most
        `size` mutations."""
        end = self.high
        assert end >= at_least
        newest = {mutation.key: mutation for mutation in self.history}
        rows = [m for m in self.history if m.seq > start and newest[m.key] is m]
        pieces = [rows[first : first + size] for first in range(0, len(rows), size)]

        def chunks() -> Iterator[Chunk]:
            chunk_start = start
            for index, piece in enumerate(pieces):
                through = end if index == len(pieces) - 1 else piece[-1].seq
                yield Chunk.build(piece, chunk_start, through)
                chunk_start = through

        return end, chunks()
