"""The chunk as its readers use it: rows, checks, and chunks made from it."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from struct import Struct
from typing import Final, cast

from upr_kernel import (
    HAS_SEQS,
    SEQS_RISE,
    ChunkDefectError,
    Defect,
    check,
    find_misplaced,
    gather,
    number_rows,
    select_prefix,
)
from upr_protocol.chunk.columns import Columns
from upr_protocol.chunk.layout import (
    CHUNK_HEAD,
    CHUNK_HEAD_BYTES,
    LARGE_BYTES,
    Buffer,
    covered_range,
    encode_columns,
    offsets_of,
)
from upr_protocol.chunk.mutation import Mutation
from upr_protocol.errors import ChunkError, Status
from upr_protocol.ids import (
    DESIGN_PREFIX,
    PUBLISHED_OPERATIONS,
    STORED_OPERATIONS,
    Cas,
    Operation,
    PartitionId,
    SeqNo,
)
from upr_protocol.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX

_COLUMNS_OF_ONE: Final = Struct(f"<{CHUNK_HEAD.size}xQQI4xI4x16xB")
_SET: Final = bytes((Operation.SET,))

_SENTENCES: Final = {
    Defect.LAYOUT: "a chunk's lengths do not add up to its bytes",
    Defect.KEY_SPAN: "the key offsets do not span the key bytes",
    Defect.KEY_ORDER: "the key offsets decrease",
    Defect.KEY_LENGTH: f"a key is not 1 to {KEY_BYTES_MAX} bytes",
    Defect.VALUE_SPAN: "the value offsets do not span the value bytes",
    Defect.VALUE_ORDER: "the value offsets decrease",
    Defect.VALUE_LENGTH: f"a value is longer than {VALUE_BYTES_MAX} bytes",
}


_NOT_PUBLISHED: Final = "the chunk holds an operation that no publisher may send"
_NUMBERED: Final = "a published chunk has no sequence numbers"


@lru_cache(maxsize=16)
def _cutter(length: int, count: int) -> Callable[[Buffer], tuple[bytes, ...]]:
    return Struct(f"{length}s" * count).unpack


class Chunk(Columns):
    """An immutable view of an encoded chunk, with its columns and as rows.

    The constructor checks what costs O(1), see `Columns`; `check` checks the rest.
    """

    __slots__ = ()

    @classmethod
    def build(
        cls, mutations: Iterable[Mutation], start: SeqNo | None = None, end: SeqNo | None = None
    ) -> Chunk:
        """A chunk of `mutations`, in their order.

        `start` and `end` are the covered range; by default it reaches from just below the first
        mutation's number to the last one's.
        """
        rows = list(mutations)
        keys, values = [row.key for row in rows], [row.value for row in rows]
        seqs = array("Q", [row.seq for row in rows])
        return cls(
            encode_columns(
                *covered_range(seqs, start, end),
                seqs,
                array("Q", [row.cas for row in rows]),
                array("I", [row.expiry for row in rows]),
                array("I", [row.flags for row in rows]),
                offsets_of(keys),
                offsets_of(values),
                bytes([row.op for row in rows]),
                b"".join(keys),
                b"".join(values),
            )
        )

    # Rows.

    def __len__(self) -> int:
        return self.count

    def keys(self) -> list[bytes]:
        """Every key, in order. O(count)."""
        # Indexing bytes is a third of the price of indexing a memoryview.
        data = self.key_bytes.tobytes()
        length = self._one_length(self._key_offsets_at, self.key_length)
        if length:
            return [data] if self.count == 1 else list(_cutter(length, self.count)(data))
        return [data[start:end] for start, end in pairwise(self.key_offsets.tolist())]

    def values(self) -> list[bytes]:
        """Every value, in order. O(count), and a copy of the bytes."""
        data = self.value_bytes
        return [bytes(data[start:end]) for start, end in pairwise(self.value_offsets.tolist())]

    def key(self, index: int) -> bytes:
        """The key at `index`."""
        offsets = self.key_offsets
        return bytes(self.key_bytes[offsets[index] : offsets[index + 1]])

    def value(self, index: int) -> bytes:
        """The value at `index`, as a copy: a slice would hold the whole chunk."""
        offsets = self.value_offsets
        return bytes(self.value_bytes[offsets[index] : offsets[index + 1]])

    def mutation(self, index: int) -> Mutation:
        """The mutation at `index`, as a row."""
        return Mutation(
            Operation(self.operations[index]),
            self.key(index),
            self.value(index),
            SeqNo(self.seqs[index]),
            Cas(self.cas[index]),
            self.flags[index],
            self.expiries[index],
        )

    def shared_mutation(self, index: int) -> Mutation:
        """The same, but a large value is a view of this chunk, which stays in memory as long."""
        offsets = self.value_offsets
        if offsets[index + 1] - offsets[index] < LARGE_BYTES:
            return self.mutation(index)
        operation, key, value, seq, cas, flags, expiry = self.row(index)
        # A view has nearly all that is asked of bytes here.
        shared = cast("bytes", value)
        return Mutation(
            Operation(operation), bytes(key), shared, SeqNo(seq), Cas(cas), flags, expiry
        )

    def single(self) -> tuple[int, Buffer, Buffer, int, int, int, int]:
        """The mutation of a chunk of one, as `ChunkBuilder.append` takes it. O(1), no copy."""
        seq, cas, expiry, flags, operation = _COLUMNS_OF_ONE.unpack_from(self._view)
        return operation, self.key_bytes, self.value_bytes, seq, cas, flags, expiry

    def row(self, index: int) -> tuple[int, Buffer, Buffer, int, int, int, int]:
        """The mutation at `index`, as `ChunkBuilder.append` takes it. O(1), no copy."""
        if self.count == 1:
            return self.single()
        keys, values = self.key_offsets, self.value_offsets
        return (
            self.operations[index],
            self.key_bytes[keys[index] : keys[index + 1]],
            self.value_bytes[values[index] : values[index + 1]],
            self.seqs[index],
            self.cas[index],
            self.flags[index],
            self.expiries[index],
        )

    def __iter__(self) -> Iterator[Mutation]:
        """The mutations as rows, in order; raises `ValueError` at an unknown operation."""
        return map(
            Mutation,
            map(Operation, self.operations),
            self.keys(),
            self.values(),
            self.seqs.tolist(),
            self.cas.tolist(),
            self.flags.tolist(),
            self.expiries.tolist(),
        )

    # The whole.

    @property
    def is_unconditional(self) -> bool:
        """Whether every mutation of this published chunk is a `SET` that expects no CAS.

        Such a chunk cannot fail, in whole or in part. O(count), at memory speed.
        """
        count = self.count
        cas_at = CHUNK_HEAD_BYTES + 8 * count
        return self.operations.tobytes() == _SET * count and self._is_zero(cas_at, 8 * count)

    def are_unconditional(self, low: int, high: int) -> bool:
        """The same of the mutations at the indexes [`low`, `high`). O(high - low)."""
        count = high - low
        cas_at = CHUNK_HEAD_BYTES + 8 * self.count + 8 * low
        return self.operations[low:high].tobytes() == _SET * count and self._is_zero(
            cas_at, 8 * count
        )

    @property
    def may_expire(self) -> bool:
        """Whether any mutation has an expiry time. O(count), at memory speed."""
        count = self.count
        return not self._is_zero(CHUNK_HEAD_BYTES + 16 * count, 4 * count)

    def _is_zero(self, offset: int, nbytes: int) -> bool:
        return self._view[offset : offset + nbytes].tobytes() == bytes(nbytes)

    # Checks.

    def _checked(self, operations: bytes, wrong_operation: str) -> int:
        """Checks offsets, lengths and operations; returns the kernel's flags. O(count)."""
        try:
            return check(self._view, operations, KEY_BYTES_MAX, VALUE_BYTES_MAX, DESIGN_PREFIX)
        except ChunkDefectError as error:
            raise ChunkError(_SENTENCES.get(error.defect, wrong_operation)) from None

    def published_flags(self) -> int:
        """Checks a published chunk without making its keys, and says what it holds. O(count).

        Returns:
            Bits of `upr_kernel`: `UNCONDITIONAL`, `MAY_EXPIRE`, and `HAS_PREFIX` for a key that
            begins as a design document's.

        Raises:
            ChunkError: Offsets, lengths, operations or limits are wrong, or a number is set.
        """
        flags = self._checked(PUBLISHED_OPERATIONS, _NOT_PUBLISHED)
        if self.start or self.end or flags & HAS_SEQS:
            raise ChunkError(_NUMBERED)
        return flags

    def published_misfits(self) -> dict[int, Status]:
        """Checks a published chunk as `published_flags` does, but for the lengths of single keys
        and values. O(count), and slow: for chunks that `published_flags` refuses.

        Returns:
            By row, `BAD_KEY` or `TOO_LARGE`.

        Raises:
            ChunkError: Another rule is broken.
        """
        try:
            check(self._view, PUBLISHED_OPERATIONS, KEY_BYTES_MAX, VALUE_BYTES_MAX, DESIGN_PREFIX)
        except ChunkDefectError as error:
            if error.defect not in (Defect.KEY_LENGTH, Defect.VALUE_LENGTH):
                raise ChunkError(_SENTENCES.get(error.defect, _NOT_PUBLISHED)) from None
        # `check` tells the first defect only: behind a wrong length there may be others.
        keys, values = self.key_offsets.tolist(), self.value_offsets.tolist()
        for offsets, total, span, order in (
            (keys, self.key_length, Defect.KEY_SPAN, Defect.KEY_ORDER),
            (values, self.value_length, Defect.VALUE_SPAN, Defect.VALUE_ORDER),
        ):
            if offsets[0] or offsets[-1] != total:
                raise ChunkError(_SENTENCES[span])
            if sorted(offsets) != offsets:
                raise ChunkError(_SENTENCES[order])
        if self.operations.tobytes().translate(None, PUBLISHED_OPERATIONS):
            raise ChunkError(_NOT_PUBLISHED)
        if self.start or self.end or any(self.seqs):
            raise ChunkError(_NUMBERED)
        misfits = {}
        for row, (begin, end) in enumerate(pairwise(values)):
            if end - begin > VALUE_BYTES_MAX:
                misfits[row] = Status.TOO_LARGE
        for row, (begin, end) in enumerate(pairwise(keys)):
            if not 1 <= end - begin <= KEY_BYTES_MAX:
                misfits[row] = Status.BAD_KEY
        return misfits

    def check_published(self) -> list[bytes]:
        """Checks a published chunk as `published_flags` does, and returns its keys. O(count)."""
        self.published_flags()
        return self.keys()

    def check(self, crc: int | None = None) -> None:
        """Checks a stored chunk, whole. O(count).

        Args:
            crc: What its CRC32C should be; not checked when it is None.

        Raises:
            ChunkError: The CRC differs, offsets or lengths are wrong, sequence numbers do not
                increase or leave the range, or an operation cannot be stored.
        """
        if crc is not None and crc != self.crc:
            raise ChunkError(f"the chunk's CRC32C is {self.crc:#010x}, not {crc:#010x}")
        flags = self._checked(
            STORED_OPERATIONS, "the chunk holds an operation that is never stored"
        )
        if flags & SEQS_RISE:
            return
        seqs = self.seqs
        if seqs[0] <= self.start or seqs[-1] > self.end:
            raise ChunkError(f"sequence numbers leave the chunk's range ({self.start}, {self.end}]")
        raise ChunkError("the chunk's sequence numbers do not increase")

    # Chunks from chunks.

    def numbered(self, first_seq: SeqNo, first_cas: Cas, start: SeqNo, end: SeqNo) -> Chunk:
        """This published chunk with consecutive numbers and CAS values, as a stored one. One copy
        of the bytes, and no work of Python a mutation."""
        rows = (self._view, 0, self.count, None, first_seq, first_cas)
        return Chunk(gather([rows], start, end))

    def numbered_in_place(
        self, first_seq: SeqNo, first_cas: Cas, start: SeqNo, end: SeqNo
    ) -> Chunk:
        """The same, in this chunk's own memory, if that can be written. Afterwards this chunk
        serves for its keys, values and the like only: its numbers and its range are those of the
        new one. No copy."""
        view = self._view
        if view.readonly:
            return self.numbered(first_seq, first_cas, start, end)
        number_rows(view, first_seq, first_cas, start, end)
        return Chunk(view.toreadonly())

    def slice(self, after: SeqNo, through: SeqNo) -> Chunk:
        """The mutations in (`after`, `through`], covering just that range.

        O(log count) to find them and a copy of their bytes. Both bounds are first moved into the
        chunk's own range.
        """
        after = min(max(after, self.start), self.end)
        through = max(after, min(through, self.end))
        if after == self.start and through == self.end:
            return self
        seqs = self.seqs
        low = bisect_right(cast("Sequence[int]", seqs), after)
        high = bisect_right(cast("Sequence[int]", seqs), through, low)
        return self.rows(low, high, after, through)

    def rows(self, low: int, high: int, start: SeqNo, end: SeqNo) -> Chunk:
        """The mutations at the indexes [`low`, `high`), covering (`start`, `end`].

        A copy of their bytes. Of a published chunk, whose numbers are all 0, `start` and `end` are
        0 too. `slice` selects by the numbers of a stored one.
        """
        return Chunk(gather([(self._view, low, high, None, None, 0)], start, end))

    def with_prefix(self, prefix: bytes) -> Chunk:
        """The mutations whose keys begin with `prefix`, covering the same range. O(count), and a
        copy of their bytes if there are others."""
        selected = select_prefix(self._view, prefix)
        return self if selected is None else Chunk(selected)

    def misplaced_row(
        self, low: int, high: int, partition: PartitionId, partition_count: int
    ) -> int | None:
        """The first of the rows [`low`, `high`) whose key does not belong to `partition` in a
        bucket of so many partitions; None when each of them does. Keys that are too long or empty
        are passed over. About 1 ns a byte of the keys."""
        row = find_misplaced(self._view, low, high, partition, partition_count, KEY_BYTES_MAX)
        return row if row < high else None

    def copied(self) -> Chunk:
        """The same chunk in memory of its own."""
        return Chunk(self._view.tobytes(), self._crc)
