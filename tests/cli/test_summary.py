from __future__ import annotations

from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.cli.summary import Summary
from upr_protocol.client import ChunkReceived, RolledBack, SnapshotEnd
from upr_protocol.ids import Operation, PartitionId, SeqNo

P = PartitionId(1)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def chunk(*operations: Operation) -> ChunkReceived:
    rows = [Mutation(op, b"k%d" % n, b"", SeqNo(n + 1)) for n, op in enumerate(operations)]
    return ChunkReceived(P, Chunk.build(rows))


def test_the_totals_and_the_rate() -> None:
    clock = Clock()
    summary = Summary(clock)
    summary.add(chunk(Operation.SET, Operation.SET))
    summary.add(SnapshotEnd(P, SeqNo(2)))
    clock.now = 2.0
    assert summary.line() == "2 changes in 1 snapshots of 1 partitions, 128 B, now 1/s"
    summary.add(chunk(Operation.SET))
    clock.now = 4.0
    assert summary.line().endswith(", now 0/s")
    assert summary.total() == "3 changes in 1 snapshots of 1 partitions, 224 B, in 4.0 s (1/s)"


def test_what_is_rare_is_told_where_it_happened() -> None:
    summary = Summary(Clock())
    summary.add(chunk(Operation.SET, Operation.DELETE, Operation.EXPIRE))
    summary.add(RolledBack(P, SeqNo(1), SeqNo(0), "another history"))
    assert summary.line().startswith("3 changes (2 of them removals) in 0 snapshots")
    assert ", 1 restarts" in summary.line()
