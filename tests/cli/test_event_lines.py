"""A consumer's events as lines of JSON and as a summary."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.cli.event_lines import EventCounts, event_lines
from upr_protocol.client import (
    BarrierReached,
    ChunkReceived,
    CycleCompleted,
    Event,
    RolledBack,
    SnapshotEnd,
    SnapshotStart,
    StreamEnded,
    Undone,
)
from upr_protocol.errors import Status
from upr_protocol.ids import SEQ_MAX, Cas, HistoryId, Operation, PartitionId, SeqNo, SnapshotKind

P = PartitionId(3)


def lines(event: Event | Undone) -> list[Any]:
    data = event_lines(event)
    assert data == b"" or data.endswith(b"\n")
    return [msgspec.json.decode(line) for line in data.splitlines()]


def test_each_mutation_is_one_line() -> None:
    chunk = Chunk.build(
        [
            Mutation(Operation.SET, b"k", b"v\n", SeqNo(4), Cas(2**63), 7, 1_800_000_000),
            Mutation(Operation.DELETE, b"gone", b"", SeqNo(6), Cas(9)),
        ]
    )
    assert lines(ChunkReceived(P, chunk)) == [
        {
            "event": "mutation",
            "partition": 3,
            "seq": 4,
            "op": "set",
            "key": "k",
            "value": "v\n",
            "cas": "9223372036854775808",
            "flags": 7,
            "expiry": 1_800_000_000,
        },
        {
            "event": "mutation",
            "partition": 3,
            "seq": 6,
            "op": "delete",
            "key": "gone",
            "value": None,
            "cas": "9",
            "flags": 0,
            "expiry": 0,
        },
    ]


def test_bytes_that_are_not_utf8_are_marked_as_base64() -> None:
    chunk = Chunk.build([Mutation(Operation.SET, b"\xff", b"\xfe\x00", SeqNo(1), Cas(1))])
    (line,) = lines(ChunkReceived(P, chunk))
    assert (line["key"], line["key_encoding"]) == ("/w==", "base64")
    assert (line["value"], line["value_encoding"]) == ("/gA=", "base64")


def test_text_that_looks_like_base64_is_not_marked() -> None:
    chunk = Chunk.build([Mutation(Operation.SET, b"/w==", b"/w==", SeqNo(1), Cas(1))])
    (line,) = lines(ChunkReceived(P, chunk))
    assert (line["key"], line["value"]) == ("/w==", "/w==")
    assert "key_encoding" not in line
    assert "value_encoding" not in line


def test_an_empty_chunk_prints_nothing() -> None:
    assert event_lines(ChunkReceived(P, Chunk.build([]))) == b""


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            SnapshotStart(P, HistoryId(255), SeqNo(1), SeqNo(9), SnapshotKind.MEMORY, False),
            {
                "event": "snapshot_start",
                "partition": 3,
                "history": "00000000000000ff",
                "start": 1,
                "end": 9,
                "kind": "memory",
                "may_repeat": False,
            },
        ),
        (SnapshotEnd(P, SeqNo(9)), {"event": "snapshot_end", "partition": 3, "end": 9}),
        (CycleCompleted(2), {"event": "completed", "cycle": 2}),
        (
            BarrierReached(b"x", {PartitionId(1): SeqNo(2), PartitionId(0): SeqNo(1)}),
            {"event": "barrier", "cookie": "x", "ends": {"0": 1, "1": 2}},
        ),
        (
            RolledBack(
                P, SeqNo(5), SeqNo(0), "the server and the client have no history in common"
            ),
            {
                "event": "rollback",
                "partition": 3,
                "restarts_from": 0,
                "ceiling": 5,
                "reason": "the server and the client have no history in common",
            },
        ),
        (
            StreamEnded(P, Status.BUCKET_DELETED),
            {"event": "stream_end", "partition": 3, "reason": "bucket_deleted"},
        ),
    ],
)
def test_every_other_event_is_one_line(event: Event, line: dict[str, object]) -> None:
    assert lines(event) == [line]


@pytest.mark.parametrize(("consistent_from", "settled"), [(SeqNo(9), 9), (SEQ_MAX, None)])
def test_what_was_undone_is_one_line(consistent_from: SeqNo, settled: int | None) -> None:
    undone = Undone(P, SeqNo(5), SeqNo(6), consistent_from, "a failover", {b"k": None})
    assert lines(undone) == [
        {
            "event": "undone",
            "partition": 3,
            "restarts_from": 6,
            "ceiling": 5,
            "settled": settled,
            "reason": "a failover",
            "documents": [{"key": "k", "value": None}],
        }
    ]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def chunk_received(*operations: Operation) -> ChunkReceived:
    rows = [Mutation(op, b"k%d" % n, b"", SeqNo(n + 1)) for n, op in enumerate(operations)]
    return ChunkReceived(P, Chunk.build(rows))


def test_the_summary_has_totals_and_a_rate() -> None:
    clock = Clock()
    summary = EventCounts(clock)
    summary.add(chunk_received(Operation.SET, Operation.SET))
    summary.add(SnapshotEnd(P, SeqNo(2)))
    clock.now = 2.0
    assert summary.line() == "2 changes in 1 snapshots of 1 partitions, 128 B, now 1/s"
    summary.add(chunk_received(Operation.SET))
    clock.now = 4.0
    assert summary.line().endswith(", now 0/s")
    assert summary.total() == "3 changes in 1 snapshots of 1 partitions, 224 B, in 4.0 s (1/s)"


def test_the_summary_names_removals_and_restarts_only_if_there_are_some() -> None:
    summary = EventCounts(Clock())
    summary.add(chunk_received(Operation.SET, Operation.DELETE, Operation.EXPIRE))
    summary.add(RolledBack(P, SeqNo(1), SeqNo(0), "another history"))
    assert summary.line().startswith("3 changes (2 of them removals) in 0 snapshots")
    assert ", 1 restarts" in summary.line()
