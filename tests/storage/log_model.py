"""A model of a bucket's log: a plain list of all committed mutations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from upr_protocol.chunk import Chunk, ChunkBuilder, Mutation
from upr_protocol.ids import Cas, Operation, PartitionState, SeqNo
from upr_server.storage.chunk_log import ChunkLog
from upr_server.storage.partition_write import PartitionWrite
from upr_server.storage.records import PartitionRecord

Contents = dict[bytes, Mutation]
"""The items that exist, by key."""

READ_BYTES: Final = 300
"""A limit so low that most reads take several transactions."""


def record_of(high: int) -> PartitionRecord:
    return PartitionRecord(PartitionState.ACTIVE, ((1, 0),), SeqNo(high), high)


def row(op: Operation, key: bytes, seq: int, cas: int, expiry: int = 0, size: int = 8) -> Mutation:
    """A mutation as it is stored, with a value that no other mutation has."""
    value = (b"%d of " % seq + key).ljust(size, b".") if op is Operation.SET else b""
    return Mutation(op, key, value, SeqNo(seq), Cas(cas), seq % 3, expiry)


def chunk_of(rows: Iterable[Mutation], start: int, end: int) -> Chunk:
    builder = ChunkBuilder()
    for row in rows:
        builder.append(row.op, row.key, row.value, row.seq, row.cas, row.flags, row.expiry)
    return builder.build(SeqNo(start), SeqNo(end))


def apply(contents: Contents, rows: Iterable[Mutation]) -> Contents:
    """`contents` after a consumer has applied `rows`."""
    changed = dict(contents)
    for row in rows:
        if row.op is Operation.SET:
            changed[row.key] = row
        else:
            changed.pop(row.key, None)
    return changed


def read(
    log: ChunkLog, partition: int, start: int, end: int, bytes_max: int = READ_BYTES
) -> list[Mutation]:
    """The mutations in the log in (start, end], in order; checks that each chunk begins where the
    one before ends."""
    rows: list[Mutation] = []
    after = start
    while after < end:
        chunks = log.read_chunks(partition, after, end, bytes_max=bytes_max)
        assert chunks
        for chunk in chunks:
            assert chunk.start == after, f"{chunk!r} does not touch {after}"
            assert after < chunk.end <= end
            chunk.check()
            after = chunk.end
            rows += chunk
    return rows


class Model:
    """All partitions of one bucket.

    Attributes:
        histories: By partition, all mutations.
        highs: By partition, the highest sequence number.
        ends: By partition, 0 and then the snapshots' ends.
    """

    def __init__(self, partitions: int) -> None:
        self.histories: list[list[Mutation]] = [[] for _ in range(partitions)]
        self.highs = [0] * partitions
        self.ends = [[0] for _ in range(partitions)]

    def contents(self, partition: int, seq: int) -> Contents:
        """The items that existed when `at` was the newest sequence number."""
        return apply({}, (row for row in self.histories[partition] if row.seq <= seq))

    def take(self, writes: Sequence[PartitionWrite]) -> None:
        """Adds mutations that were committed."""
        for write in writes:
            partition = write.partition
            for chunk in write.chunks:
                self.histories[partition] += chunk
            self.highs[partition] = write.record.high
            self.ends[partition].append(write.record.high)

    def check_read(self, log: ChunkLog, partition: int, start: int, end: int) -> None:
        """Checks that a consumer at `start` that reads up to `end` has the items that existed
        there."""
        rows = read(log, partition, start, end)
        contents = apply(self.contents(partition, start), rows)
        assert contents == self.contents(partition, end)
