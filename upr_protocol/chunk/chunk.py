"""The chunk as its readers use it: rows, checks, and chunks made from it."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from operator import ge
from struct import Struct
from typing import Final, cast

from upr_protocol.chunk.columns import Columns
from upr_protocol.chunk.layout import (
    CHUNK_HEAD,
    CHUNK_HEAD_BYTES,
    Buffer,
    covered_range,
    encode_columns,
    offsets_of,
)
from upr_protocol.chunk.mutation import Mutation
from upr_protocol.errors import ChunkError
from upr_protocol.ids import PUBLISHED_OPERATIONS, STORED_OPERATIONS, Cas, Operation, SeqNo
from upr_protocol.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX

_TWO_NUMBERS: Final = Struct("<QQ")
_COLUMNS_OF_ONE: Final = Struct(f"<{CHUNK_HEAD.size}xQQI4xI4x16xB")
_SET: Final = bytes((Operation.SET,))


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

    def single(self) -> tuple[int, Buffer, Buffer, int, int, int, int]:
        """The mutation of a chunk of one, as `ChunkBuilder.append` takes it. O(1), no copy."""
        seq, cas, expiry, flags, operation = _COLUMNS_OF_ONE.unpack_from(self._view)
        return operation, self.key_bytes, self.value_bytes, seq, cas, flags, expiry

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

    @property
    def may_expire(self) -> bool:
        """Whether any mutation has an expiry time. O(count), at memory speed."""
        count = self.count
        return not self._is_zero(CHUNK_HEAD_BYTES + 16 * count, 4 * count)

    def _is_zero(self, first: int, nbytes: int) -> bool:
        return self._view[first : first + nbytes].tobytes() == bytes(nbytes)

    # Checks.

    def checked_keys(self) -> list[bytes]:
        """Every key, after checking that offsets and lengths are in order. O(count).

        Raises:
            ChunkError: Key offsets decrease or leave the key bytes, or a key is empty or too long.
        """
        data = self.key_bytes.tobytes()
        length = self._one_length(self._key_offsets_at, self.key_length)
        if 0 < length <= KEY_BYTES_MAX:
            return [data] if self.count == 1 else list(_cutter(length, self.count)(data))
        # The offsets are checked before any key is cut: offsets that go back and forth name the
        # same bytes again and again, and keys cut by them would take the square of the chunk's
        # memory.
        offsets = self.key_offsets.tolist()
        if offsets[0] != 0 or offsets[-1] != len(data):
            raise ChunkError("the key offsets do not span the key bytes")
        if sorted(offsets) != offsets:  # linear when they are in order
            raise ChunkError("the key offsets decrease")
        keys = [data[start:end] for start, end in pairwise(offsets)]
        if keys:
            lengths = set(map(len, keys))
            if 0 in lengths or max(lengths) > KEY_BYTES_MAX:
                raise ChunkError(f"a key is not 1 to {KEY_BYTES_MAX} bytes")
        return keys

    def _check_values(self) -> None:
        if 0 < self._one_length(self._value_offsets_at, self.value_length) <= VALUE_BYTES_MAX:
            return
        offsets = self.value_offsets.tolist()
        if offsets[0] != 0 or offsets[-1] != self.value_length:
            raise ChunkError("the value offsets do not span the value bytes")
        if sorted(offsets) != offsets:  # linear when they are in order
            raise ChunkError("the value offsets decrease")
        if self.value_length > VALUE_BYTES_MAX and any(
            end - start > VALUE_BYTES_MAX for start, end in pairwise(offsets)
        ):
            raise ChunkError(f"a value is longer than {VALUE_BYTES_MAX} bytes")

    def check_published(self) -> list[bytes]:
        """Checks a published chunk and returns its keys. O(count).

        Raises:
            ChunkError: Offsets, lengths, operations or limits are wrong, or a number is set.
        """
        keys = self.checked_keys()
        self._check_values()
        operations = self.operations.tobytes()
        if operations.translate(None, PUBLISHED_OPERATIONS):
            raise ChunkError("the chunk holds an operation that no publisher may send")
        if self.start or self.end or not self._is_zero(CHUNK_HEAD_BYTES, 8 * self.count):
            raise ChunkError("a published chunk has no sequence numbers")
        return keys

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
        self.checked_keys()
        self._check_values()
        if self.operations.tobytes().translate(None, STORED_OPERATIONS):
            raise ChunkError("the chunk holds an operation that is never stored")
        seqs = self.seqs.tolist()
        if not seqs:
            return
        if seqs[0] <= self.start or seqs[-1] > self.end:
            raise ChunkError(f"sequence numbers leave the chunk's range ({self.start}, {self.end}]")
        if any(map(ge, seqs, seqs[1:])):
            raise ChunkError("the chunk's sequence numbers do not increase")

    # Chunks from chunks.

    def numbered(self, first_seq: SeqNo, first_cas: Cas, start: SeqNo, end: SeqNo) -> Chunk:
        """This published chunk with consecutive numbers and CAS values, as a stored one.

        One copy of the bytes and no work a mutation beyond writing two columns.
        """
        count = self.count
        after_cas = CHUNK_HEAD_BYTES + 16 * count
        head = CHUNK_HEAD.pack(count, self.key_length, self.value_length, 0, start, end)
        if count == 1:
            numbers = _TWO_NUMBERS.pack(first_seq, first_cas)
            return Chunk(b"".join((head, numbers, self._view[after_cas:])))
        seqs = array("Q", range(first_seq, first_seq + count))
        cas = array("Q", range(first_cas, first_cas + count))
        return Chunk(b"".join((head, seqs, cas, self._view[after_cas:])))

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
        key_offsets = self.key_offsets[low : high + 1].tolist()
        value_offsets = self.value_offsets[low : high + 1].tolist()
        key_low, value_low = key_offsets[0], value_offsets[0]
        return Chunk(
            encode_columns(
                start,
                end,
                self.seqs[low:high],
                self.cas[low:high],
                self.expiries[low:high],
                self.flags[low:high],
                array("i", [offset - key_low for offset in key_offsets]),
                array("i", [offset - value_low for offset in value_offsets]),
                self.operations[low:high],
                self.key_bytes[key_low : key_offsets[-1]],
                self.value_bytes[value_low : value_offsets[-1]],
            )
        )

    def copied(self) -> Chunk:
        """The same chunk in memory of its own."""
        return Chunk(self._view.tobytes(), self._crc)
