"""What goes through the queues: some of a partition's stream, and where the partition is then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs

from upr_protocol.chunk import Chunk
from upr_protocol.ids import Operation, PartitionId
from upr_server.indexer.extractor import NOT_JSON, decode_value
from upr_server.indexer.mark import Mark
from upr_server.indexer.pool import Pool

PIECE_OVERHEAD_BYTES: Final = 256
"""What a piece is taken to cost beside its chunks."""


_NOT_DECODED: Final = object()


class Row:
    """A document, or that there is none, under a number.

    Attributes:
        seq: The number.
        key: The document's key.
        value: Its bytes; None when it was deleted.
    """

    __slots__ = ("_document", "key", "seq", "value")

    def __init__(self, seq: int, key: bytes, value: bytes | None) -> None:
        self.seq = seq
        self.key = key
        self.value = value
        self._document: Any = _NOT_DECODED

    @property
    def document(self) -> Any:
        """The value as JSON, decoded once for all indexes; `NOT_JSON` of one that is none."""
        if self._document is _NOT_DECODED:
            self._document = NOT_JSON if self.value is None else decode_value(self.value)
        return self._document


@attrs.frozen
class Piece:
    """Some of a partition's stream.

    Attributes:
        partition: The partition.
        mark: How far the partition is behind it.
        chunks: Mutations.
        undone: What is put in place of what the server never had; None when nothing is.
        forgets: Whether all that there is of the partition goes first.
        nbytes: What it takes of the pool.
    """

    partition: PartitionId
    mark: Mark
    chunks: Sequence[Chunk] = ()
    undone: Mapping[bytes, bytes | None] | None = None
    forgets: bool = False
    nbytes: int = 0

    @property
    def goes_back(self) -> bool:
        """Whether the mark holds though it may be lower than what was."""
        return self.forgets or self.undone is not None

    def rows(self) -> Iterator[Row]:
        """The documents, in order."""
        for key, value in (self.undone or {}).items():
            yield Row(0, key, value)
        for chunk in self.chunks:
            for seq, key, operation, value in zip(
                chunk.seqs.tolist(), chunk.keys(), chunk.operations, chunk.values(), strict=True
            ):
                yield Row(seq, key, value if operation == Operation.SET else None)


@attrs.define
class _Held:
    """What came of a partition and is no piece yet.

    Attributes:
        mark: How far the partition is behind it.
        chunks: Mutations.
        nbytes: What they take.
    """

    mark: Mark
    chunks: list[Chunk] = attrs.field(factory=list)
    nbytes: int = 0


class Assembler:
    """Puts a stream's chunks together to pieces: whole snapshots, or parts of large ones.

    Whole, so that an index goes from one state that the server had to another in one commit; but a
    snapshot may be larger than what there is memory for.

    Args:
        pool: The chunks' and pieces' bytes are taken of it.
        put: Given each piece.
        piece_bytes: Above this a part of a snapshot is a piece.
    """

    def __init__(self, pool: Pool, put: Callable[[Piece], None], piece_bytes: int) -> None:
        self._pool = pool
        self._put = put
        self._piece_bytes = piece_bytes
        self._held: dict[PartitionId, _Held] = {}

    def chunk(self, partition: PartitionId, chunk: Chunk, mark: Mark) -> None:
        """A chunk came, behind which the partition is at `mark`."""
        self._pool.take(chunk.nbytes)
        held = self._held.get(partition)
        if held is None:
            held = self._held[partition] = _Held(mark)
        held.chunks.append(chunk)
        held.nbytes += chunk.nbytes
        held.mark = mark
        if held.nbytes >= self._piece_bytes:
            self.flush(partition)

    def move(self, partition: PartitionId, mark: Mark) -> None:
        """A partition is at `mark`: that and what came of it before is a piece."""
        held = self._held.pop(partition, None) or _Held(mark)
        self.put(Piece(partition, mark, held.chunks, nbytes=held.nbytes))

    def holds(self, partition: PartitionId) -> bool:
        """Whether some of a partition is no piece yet."""
        return partition in self._held

    def flush(self, partition: PartitionId) -> None:
        """What came of a partition, if anything, is a piece, though its snapshot is not whole."""
        if partition in self._held:
            self.move(partition, self._held[partition].mark)

    def flush_all(self) -> None:
        """See `flush`; of every partition. So nobody waits for room that only this would make."""
        for partition in list(self._held):
            self.flush(partition)

    def put(self, piece: Piece) -> None:
        """Hands on a piece. What it takes beside its chunks is taken of the pool here."""
        self._pool.take(PIECE_OVERHEAD_BYTES)
        self._put(attrs.evolve(piece, nbytes=piece.nbytes + PIECE_OVERHEAD_BYTES))

    def drop(self, partition: PartitionId) -> None:
        """What came of a partition and is no piece yet is not wanted."""
        held = self._held.pop(partition, None)
        if held is not None:
            self._pool.give_back(held.nbytes)

    def drop_all(self) -> None:
        """See `drop`; of every partition."""
        for partition in list(self._held):
            self.drop(partition)
