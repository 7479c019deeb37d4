"""Batches of plain sets."""

from __future__ import annotations

from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.ids import Operation, SeqNo


def batch(first: int, count: int, *, expiry: int = 0, nbytes: int = 100) -> Chunk:
    """A batch that sets so many items."""
    rows = [
        Mutation(Operation.SET, b"%d" % index, bytes(nbytes), expiry=expiry)
        for index in range(first, first + count)
    ]
    return Chunk.build(rows, SeqNo(0), SeqNo(0))
