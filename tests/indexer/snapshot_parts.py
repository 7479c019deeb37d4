"""Parts of snapshots that fill a pool of memory."""

from __future__ import annotations

from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.client import (
    ChunkReceived,
)
from upr_protocol.ids import Cas, Operation, PartitionId, SeqNo

PARTS = 16
"""How many parts of snapshots fill a pool. A node sends one snapshot at a time, so each part is
from another node."""


def part_of_snapshot(partition: PartitionId, nbytes: int) -> ChunkReceived:
    """A chunk with one change of so many bytes, which does not end its snapshot."""
    row = Mutation(Operation.SET, b"k%d" % partition, b"v" * nbytes, SeqNo(1), Cas(1))
    return ChunkReceived(partition, Chunk.build([row]))
