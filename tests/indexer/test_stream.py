"""How far the stream of the running indexes is."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from tests.indexer.kit import BUCKET, POOL_BYTES
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.client import Address, ReceivedKeysLimits, ResumeState, RollbackConsumer
from upr_protocol.failover import FailoverLog, Position
from upr_protocol.ids import Cas, Operation, PartitionId, SeqNo
from upr_server.indexer.mark import Mark
from upr_server.indexer.pipeline import Pipeline, worker_thread
from upr_server.indexer.pool import MemoryPool
from upr_server.indexer.slices import SliceId
from upr_server.indexer.stream import IndexerStream


def position(seq: int) -> Position:
    return Position(FailoverLog.of([(1, 0)]), SeqNo(seq), SeqNo(seq), None)


class Standing:
    """A consumer that is at some positions."""

    def __init__(self, positions: dict[PartitionId, Position]) -> None:
        self.resume_state = ResumeState(BUCKET, positions)


def test_a_partition_without_changes_is_as_far_as_its_consumer(tmp_path: Path) -> None:
    """After a failover no change may come for long. An index that is built must not wait for it."""
    pool = MemoryPool(POOL_BYTES)
    stream = IndexerStream(
        Address.parse(f"upr://127.0.0.1:1/{BUCKET}"),
        Pipeline(pool, worker_thread()),
        pool,
        tmp_path / "received-keys",
        ReceivedKeysLimits(),
        SliceId(),
    )
    idle, busy = PartitionId(0), PartitionId(1)
    stream.marks = {busy: Mark(position(5))}
    assert stream.reached() == stream.marks
    stream._consumer = cast("RollbackConsumer", Standing({idle: position(7), busy: position(9)}))
    row = Mutation(Operation.SET, b"k", b"v", SeqNo(9), Cas(9))
    # A part of a snapshot has come, and is not put yet.
    stream._assembler.add_chunk(busy, Chunk.build([row]), Mark(position(9)))
    assert stream.reached() == {idle: Mark(position(7)), busy: Mark(position(5))}
