"""The chunk: a run of mutations of one partition, held as columns.

One shape from end to end: what a publisher sends, what the mutation queue keeps (seed 000's
fixed-size document array), what goes to disk, what a consumer is sent, and what Arrow reads. All
integers are little-endian, every column starts at a multiple of 8, and offsets are laid out as
Arrow lays them out (int32, one more than there are items)::

    head           count u32, key bytes u32, value bytes u32, reserved u32, start u64, end u64
    seqs           u64 * count
    cas            u64 * count
    expiries       u32 * count     seconds since 1970, 0 for never
    flags          u32 * count     the application's own
    key offsets    i32 * (count + 1)
    value offsets  i32 * (count + 1)
    operations     u8  * count
    keys           key bytes
    values         value bytes

A **stored** chunk has rising sequence numbers in (start, end]: it says that between those two
numbers there is nothing but what it holds, so that a missing chunk is noticed. A **published**
chunk has no numbers yet: start, end and the sequence numbers are 0, the CAS column holds what the
publisher expects (0 for anything), and the value of an increment or decrement is a `CounterDelta`.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, compress, pairwise, repeat
from operator import ge, itemgetter, sub
from struct import Struct
from typing import TYPE_CHECKING, Final, cast

import msgspec
from crc32c import crc32c

from upr_protocol.errors import ChunkError
from upr_protocol.ids import PUBLISHED_OPERATIONS, STORED_OPERATIONS, Cas, Operation, SeqNo
from upr_protocol.limits import CHUNK_MUTATIONS_MAX, KEY_BYTES_MAX, VALUE_BYTES_MAX

if TYPE_CHECKING:
    import pyarrow as pa

Buffer = bytes | bytearray | memoryview

if sys.byteorder != "little":
    raise ImportError("chunks are read where they lie, which needs a little-endian processor")

_HEAD: Final = Struct("<IIIIQQ")
_DELTA: Final = Struct("<QQ?7x")
_TWO_NUMBERS: Final = Struct("<QQ")
_TWO_OFFSETS: Final = Struct("<ii")
_COLUMNS_OF_ONE: Final = Struct(f"<{_HEAD.size}xQQI4xI4x16xB")
_SET: Final = bytes((Operation.SET,))
_PADDING: Final = tuple(bytes(n) for n in range(8))
_FALSE: Final = bytes((1,)) + bytes(255)

CHUNK_HEAD_BYTES: Final = _HEAD.size

_EVEN_MAX: Final = 4096
"""Keys or values of one length are found out, and cut apart at once, up to so many and so long."""


@lru_cache(maxsize=64)
def _multiples(length: int) -> bytes:
    return array("i", range(0, length * _EVEN_MAX + 1, length)).tobytes()


def _even_offsets(at: int, length: int, count: int) -> bytes:
    """Where strings of one length end that stand behind `at` bytes."""
    first, rest = divmod(at, length)
    if rest or first + count > _EVEN_MAX:
        return array("i", range(at + length, at + length * count + 1, length)).tobytes()
    return _multiples(length)[4 * first + 4 : 4 * (first + count) + 4]


@lru_cache(maxsize=16)
def _cutter(length: int, count: int) -> Callable[[Buffer], tuple[bytes, ...]]:
    return Struct(f"{length}s" * count).unpack


def _padded(length: int) -> int:
    return (length + 7) & ~7


def encoded_bytes(count: int, key_bytes: int, value_bytes: int) -> int:
    """The encoded length of a chunk of `count` mutations with so many bytes of keys and values."""
    return (
        CHUNK_HEAD_BYTES
        + 16 * count
        + 2 * _padded(4 * count)
        + 2 * _padded(4 * count + 4)
        + _padded(count)
        + _padded(key_bytes)
        + _padded(value_bytes)
    )


class Mutation(msgspec.Struct, frozen=True, order=False):
    """One mutation, as a row. See the module's text for the columns.

    In a published chunk `seq` is 0 and `cas` is the expected CAS; in a stored one they are the
    mutation's own.
    """

    op: Operation
    key: bytes
    value: bytes = b""
    seq: SeqNo = SeqNo(0)
    cas: Cas = Cas(0)
    flags: int = 0
    expiry: int = 0


class CounterDelta(msgspec.Struct, frozen=True):
    """The value of an increment or decrement in a published chunk.

    Attributes:
        delta: How much to add or subtract, below 2**64.
        initial: The value that a missing counter starts at; the delta is not applied to it.
        create: Whether a missing counter is made at all; otherwise it is an error.
    """

    delta: int
    initial: int = 0
    create: bool = True

    def encode(self) -> bytes:
        """The 24 bytes that stand in the value column."""
        return _DELTA.pack(self.delta, self.initial, self.create)

    @classmethod
    def decode(cls, data: Buffer) -> CounterDelta:
        """The reverse of `encode`; raises `ChunkError` when the length is wrong."""
        if len(data) != _DELTA.size:
            raise ChunkError(f"a counter's delta is {_DELTA.size} bytes, not {len(data)}")
        return cls(*_DELTA.unpack(data))


class Chunk:
    """An immutable view of an encoded chunk. Making one copies nothing.

    The constructor checks what costs O(1): the head, the limits on counts, and that the lengths
    agree with the buffer's. `check` checks the rest.

    Args:
        buffer: The encoded chunk, whole. It must not change afterwards.
        crc: Its CRC32C, where that is known already.

    Raises:
        ChunkError: The buffer is no chunk.
    """

    __slots__ = (
        "_crc",
        "_key_offsets_at",
        "_keys_at",
        "_operations_at",
        "_view",
        "count",
        "end",
        "key_length",
        "start",
        "value_length",
    )

    def __init__(self, buffer: Buffer, crc: int | None = None) -> None:
        view = memoryview(buffer)
        if len(view) < CHUNK_HEAD_BYTES:
            raise ChunkError(f"a chunk has at least {CHUNK_HEAD_BYTES} bytes, not {len(view)}")
        count, key_length, value_length, reserved, start, end = _HEAD.unpack_from(view)
        if count > CHUNK_MUTATIONS_MAX:
            raise ChunkError(f"{count} mutations in a chunk; at most {CHUNK_MUTATIONS_MAX}")
        if reserved:
            raise ChunkError("the reserved field of a chunk is not 0")
        # The same sum as `encoded_bytes`, kept at three places: every column is found from them.
        self._key_offsets_at = at = CHUNK_HEAD_BYTES + 16 * count + 2 * ((4 * count + 7) & ~7)
        self._operations_at = at = at + 2 * ((4 * count + 11) & ~7)
        self._keys_at = at = at + ((count + 7) & ~7)
        if at + ((key_length + 7) & ~7) + ((value_length + 7) & ~7) != len(view):
            raise ChunkError(f"a chunk's lengths do not add up to its {len(view)} bytes")
        if end < start:
            raise ChunkError(f"a chunk cannot end at {end}, before its start at {start}")
        self._view = view
        self._crc = crc
        self.count: int = count
        self.key_length: int = key_length
        self.value_length: int = value_length
        self.start = SeqNo(start)
        self.end = SeqNo(end)

    @classmethod
    def build(
        cls, mutations: Iterable[Mutation], start: SeqNo | None = None, end: SeqNo | None = None
    ) -> Chunk:
        """A chunk of `mutations`, in their order.

        `start` and `end` are the covered range; by default it reaches from just below the first
        mutation's number to the last one's.
        """
        builder = ChunkBuilder()
        for mutation in mutations:
            builder.append(
                mutation.op,
                mutation.key,
                mutation.value,
                mutation.seq,
                mutation.cas,
                mutation.flags,
                mutation.expiry,
            )
        return builder.build(start, end)

    # The columns.

    @property
    def seqs(self) -> memoryview:
        """The sequence numbers, u64."""
        return self._view[CHUNK_HEAD_BYTES : CHUNK_HEAD_BYTES + 8 * self.count].cast("Q")

    @property
    def cas(self) -> memoryview:
        """The CAS values, u64; what the publisher expects, in a published chunk."""
        at = CHUNK_HEAD_BYTES + 8 * self.count
        return self._view[at : at + 8 * self.count].cast("Q")

    @property
    def expiries(self) -> memoryview:
        """The expiry times, u32, seconds since 1970, 0 for never."""
        at = CHUNK_HEAD_BYTES + 16 * self.count
        return self._view[at : at + 4 * self.count].cast("I")

    @property
    def flags(self) -> memoryview:
        """The application's flags, u32."""
        at = CHUNK_HEAD_BYTES + 16 * self.count + _padded(4 * self.count)
        return self._view[at : at + 4 * self.count].cast("I")

    @property
    def key_offsets(self) -> memoryview:
        """Where each key begins, and where the last ends; i32, count + 1 of them."""
        at = self._key_offsets_at
        return self._view[at : at + 4 * self.count + 4].cast("i")

    @property
    def value_offsets(self) -> memoryview:
        """Where each value begins, and where the last ends; i32, count + 1 of them."""
        at = self._key_offsets_at + ((4 * self.count + 11) & ~7)
        return self._view[at : at + 4 * self.count + 4].cast("i")

    @property
    def operations(self) -> memoryview:
        """The operations, u8; see `Operation`."""
        at = self._operations_at
        return self._view[at : at + self.count]

    @property
    def key_bytes(self) -> memoryview:
        """All keys, one behind the other."""
        at = self._keys_at
        return self._view[at : at + self.key_length]

    @property
    def value_bytes(self) -> memoryview:
        """All values, one behind the other."""
        at = self._keys_at + ((self.key_length + 7) & ~7)
        return self._view[at : at + self.value_length]

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
        return [data[a:b] for a, b in pairwise(self.key_offsets.tolist())]

    def values(self) -> list[bytes]:
        """Every value, in order. O(count), and a copy of the bytes."""
        data = self.value_bytes
        return [bytes(data[a:b]) for a, b in pairwise(self.value_offsets.tolist())]

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
        """The mutations as rows, in order; an operation that is none raises `ValueError`."""
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

    def _is_zero(self, at: int, nbytes: int) -> bool:
        return self._view[at : at + nbytes].tobytes() == bytes(nbytes)

    @property
    def nbytes(self) -> int:
        """The encoded length."""
        return self._view.nbytes

    @property
    def crc(self) -> int:
        """CRC32C of the encoded chunk; computed once."""
        if self._crc is None:
            self._crc = crc32c(self._view)
        return self._crc

    def chained(self, previous: int) -> int:
        """CRC32C over this chunk's CRC, continued from that over the chunks before it: one number
        that vouches for all of them, in their order. Never 0, which stands for none."""
        return crc32c(self.crc.to_bytes(4, "little"), previous) or 1

    def encode(self) -> memoryview:
        """The encoded chunk, without a copy."""
        return self._view

    def copied(self) -> Chunk:
        """The same chunk in memory of its own."""
        return Chunk(self._view.tobytes(), self._crc)

    def __bytes__(self) -> bytes:
        return self._view.tobytes()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Chunk):
            return NotImplemented
        return bytes(self) == bytes(other)

    def __hash__(self) -> int:
        return hash(bytes(self))

    def __repr__(self) -> str:
        return f"<Chunk of {self.count} in ({self.start}, {self.end}], {self.nbytes} bytes>"

    def _one_length(self, offsets_at: int, total: int) -> int:
        """The length that all keys, or all values, have; 0 where that is not so, or not known.

        It is found at memory speed, and then the offsets are in order too.
        """
        count = self.count
        if count == 1:
            return total if _TWO_OFFSETS.unpack_from(self._view, offsets_at) == (0, total) else 0
        if not 0 < count <= _EVEN_MAX:
            return 0
        length, rest = divmod(total, count)
        if rest or not 0 < length <= _EVEN_MAX:
            return 0
        if _TWO_OFFSETS.unpack_from(self._view, offsets_at) != (0, length):
            return 0
        offsets = self._view[offsets_at + 4 : offsets_at + 4 * count + 4].tobytes()
        return length if offsets == _even_offsets(0, length, count) else 0

    def one_lengths(self) -> tuple[int, int]:
        """The length that all keys have, and that of all values; 0 where that is not so, or not
        known. At memory speed."""
        values_at = self._key_offsets_at + ((4 * self.count + 11) & ~7)
        return (
            self._one_length(self._key_offsets_at, self.key_length),
            self._one_length(values_at, self.value_length),
        )

    def checked_keys(self) -> list[bytes]:
        """Every key, after checking that offsets and lengths are in order. O(count).

        Raises:
            ChunkError: Key offsets fall or leave the key bytes, or a key is empty or too long.
        """
        data = self.key_bytes.tobytes()
        length = self._one_length(self._key_offsets_at, self.key_length)
        if 0 < length <= KEY_BYTES_MAX:
            return [data] if self.count == 1 else list(_cutter(length, self.count)(data))
        # Looked at before anything is cut: offsets that go to and fro name the same bytes again and
        # again, and keys cut by them would take the square of the chunk's own memory.
        offsets = self.key_offsets.tolist()
        if offsets[0] != 0 or offsets[-1] != len(data):
            raise ChunkError("the key offsets do not span the key bytes")
        if sorted(offsets) != offsets:  # linear when they are in order
            raise ChunkError("the key offsets fall")
        keys = [data[a:b] for a, b in pairwise(offsets)]
        if keys:
            lengths = set(map(len, keys))
            if 0 in lengths or max(lengths) > KEY_BYTES_MAX:
                raise ChunkError(f"a key is not 1 to {KEY_BYTES_MAX} bytes")
        return keys

    def _check_values(self) -> None:
        offsets_at = self._key_offsets_at + ((4 * self.count + 11) & ~7)
        if 0 < self._one_length(offsets_at, self.value_length) <= VALUE_BYTES_MAX:
            return
        offsets = self.value_offsets.tolist()
        if offsets[0] != 0 or offsets[-1] != self.value_length:
            raise ChunkError("the value offsets do not span the value bytes")
        if sorted(offsets) != offsets:  # linear when they are in order
            raise ChunkError("the value offsets fall")
        if self.value_length > VALUE_BYTES_MAX and any(
            b - a > VALUE_BYTES_MAX for a, b in pairwise(offsets)
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
            raise ChunkError("an operation in the chunk is none that a publisher may send")
        if self.start or self.end or not self._is_zero(CHUNK_HEAD_BYTES, 8 * self.count):
            raise ChunkError("a published chunk has no sequence numbers")
        return keys

    def check(self, crc: int | None = None) -> None:
        """Checks a stored chunk, whole. O(count).

        Args:
            crc: What its CRC32C should be; not checked when it is None.

        Raises:
            ChunkError: The CRC differs, offsets or lengths are wrong, numbers do not rise or leave
                the range, or an operation cannot be stored.
        """
        if crc is not None and crc != self.crc:
            raise ChunkError(f"the chunk's CRC32C is {self.crc:#010x}, not {crc:#010x}")
        self.checked_keys()
        self._check_values()
        if self.operations.tobytes().translate(None, STORED_OPERATIONS):
            raise ChunkError("an operation in the chunk is none that is ever stored")
        seqs = self.seqs.tolist()
        if not seqs:
            return
        if seqs[0] <= self.start or seqs[-1] > self.end:
            raise ChunkError(f"numbers leave the chunk's range ({self.start}, {self.end}]")
        if any(map(ge, seqs, seqs[1:])):
            raise ChunkError("the chunk's sequence numbers do not rise")

    # Chunks from chunks.

    def numbered(self, first_seq: SeqNo, first_cas: Cas, start: SeqNo, end: SeqNo) -> Chunk:
        """This published chunk with consecutive numbers and CAS values, as a stored one.

        One copy of the bytes and no work a mutation beyond writing two columns.
        """
        count = self.count
        at = CHUNK_HEAD_BYTES + 16 * count
        head = _HEAD.pack(count, self.key_length, self.value_length, 0, start, end)
        if count == 1:
            return Chunk(b"".join((head, _TWO_NUMBERS.pack(first_seq, first_cas), self._view[at:])))
        seqs = array("Q", range(first_seq, first_seq + count))
        cas = array("Q", range(first_cas, first_cas + count))
        return Chunk(b"".join((head, seqs, cas, self._view[at:])))

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
        0 too; of a stored one see `slice`.
        """
        key_offsets = self.key_offsets[low : high + 1].tolist()
        value_offsets = self.value_offsets[low : high + 1].tolist()
        key_low, value_low = key_offsets[0], value_offsets[0]
        return _encode(
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

    @staticmethod
    def merge(chunks: Sequence[Chunk]) -> Chunk:
        """One chunk of neighbouring stored `chunks`, oldest first, each key only in its newest.

        O(mutations).

        Raises:
            ChunkError: There are no chunks, or a range does not begin where the one before ends.
        """
        if not chunks:
            raise ChunkError("nothing to merge")
        for older, newer in pairwise(chunks):
            if older.end != newer.start:
                raise ChunkError(f"{newer!r} does not follow {older!r}")
        seen: set[bytes] = set()
        keeps: list[list[bool]] = []
        for chunk in reversed(chunks):
            keep = []
            for key in reversed(chunk.keys()):
                keep.append(key not in seen)
                seen.add(key)
            keep.reverse()
            keeps.append(keep)
        builder = ChunkBuilder()
        for chunk, keep in zip(chunks, reversed(keeps), strict=True):
            builder.extend(chunk, keep)
        return builder.build(chunks[0].start, chunks[-1].end)

    def to_arrow(self) -> pa.RecordBatch:
        """The chunk as an Arrow record batch, over the same bytes.

        Columns: seq u64, cas u64, expiry u32, flags u32, op u8, key binary, value binary; none may
        be null. Needs pyarrow (the extra `arrow`).
        """
        import pyarrow as pa

        def fixed(kind: pa.DataType, column: memoryview) -> pa.Array:
            return pa.Array.from_buffers(kind, self.count, [None, pa.py_buffer(column)])

        def binary(offsets: memoryview, data: memoryview) -> pa.Array:
            buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
            return pa.Array.from_buffers(pa.binary(), self.count, buffers)

        columns = {
            "seq": fixed(pa.uint64(), self.seqs),
            "cas": fixed(pa.uint64(), self.cas),
            "expiry": fixed(pa.uint32(), self.expiries),
            "flags": fixed(pa.uint32(), self.flags),
            "op": fixed(pa.uint8(), self.operations),
            "key": binary(self.key_offsets, self.key_bytes),
            "value": binary(self.value_offsets, self.value_bytes),
        }
        schema = pa.schema([pa.field(name, column.type, False) for name, column in columns.items()])
        return pa.RecordBatch.from_arrays(list(columns.values()), schema=schema)


class ChunkBuilder:
    """A chunk being filled: the same columns, growing.

    `append` costs O(1); `extend` costs O(mutations), mostly in copies of whole columns.
    """

    __slots__ = (
        "cas",
        "expiries",
        "flags",
        "key_bytes",
        "key_offsets",
        "operations",
        "seqs",
        "value_bytes",
        "value_offsets",
    )

    def __init__(self) -> None:
        self.seqs = array("Q")
        self.cas = array("Q")
        self.expiries = array("I")
        self.flags = array("I")
        self.key_offsets = array("i", (0,))
        self.value_offsets = array("i", (0,))
        self.operations = bytearray()
        self.key_bytes = bytearray()
        self.value_bytes = bytearray()

    def __len__(self) -> int:
        return len(self.operations)

    @property
    def nbytes(self) -> int:
        """What the chunk would take, encoded."""
        return encoded_bytes(len(self), len(self.key_bytes), len(self.value_bytes))

    def append(
        self,
        op: int,
        key: Buffer,
        value: Buffer = b"",
        seq: int = 0,
        cas: int = 0,
        flags: int = 0,
        expiry: int = 0,
    ) -> None:
        """Adds one mutation at the end."""
        self.seqs.append(seq)
        self.cas.append(cas)
        self.expiries.append(expiry)
        self.flags.append(flags)
        self.operations.append(op)
        self.key_bytes += key
        self.value_bytes += value
        self.key_offsets.append(len(self.key_bytes))
        self.value_offsets.append(len(self.value_bytes))

    def pop(self) -> None:
        """Takes the last mutation away again."""
        for column in (self.seqs, self.cas, self.expiries, self.flags, self.operations):
            column.pop()
        self.key_offsets.pop()
        self.value_offsets.pop()
        del self.key_bytes[self.key_offsets[-1] :]
        del self.value_bytes[self.value_offsets[-1] :]

    def extend(self, chunk: Chunk, keep: Sequence[int] | None = None) -> None:
        """Adds the mutations of `chunk`; with `keep`, those at whose index it is true."""
        if keep is not None:
            self.extend_numbered(chunk, chunk.seqs, chunk.cas, keep)
        elif chunk.count == 1:
            self.append(*chunk.single())
        else:
            self.seqs.frombytes(chunk.seqs.tobytes())
            self.cas.frombytes(chunk.cas.tobytes())
            self._extend_unnumbered(chunk)

    def extend_numbered(
        self,
        chunk: Chunk,
        seqs: Sequence[int],
        cas: Sequence[int],
        keep: Sequence[int] | None = None,
    ) -> None:
        """`extend`, with numbers and CAS values given beside the chunk's own."""
        if keep is None:
            if chunk.count == 1:
                op, key, value, _, _, flags, expiry = chunk.single()
                self.append(op, key, value, seqs[0], cas[0], flags, expiry)
            else:
                self.seqs.fromlist(list(seqs))
                self.cas.fromlist(list(cas))
                self._extend_unnumbered(chunk)
            return
        wanted = bytes(keep)
        kept = len(wanted) - wanted.count(0)
        if not kept:
            return
        zeros = bytes(4 * chunk.count)
        for column, source in ((self.expiries, chunk.expiries), (self.flags, chunk.flags)):
            if source.tobytes() == zeros:
                column.frombytes(zeros[: 4 * kept])
            else:
                column.fromlist(list(compress(source, wanted)))
        # Where little is kept, what goes must cost next to nothing.
        if 2 * kept < chunk.count:
            self._extend_few(chunk, seqs, cas, wanted)
        else:
            self._extend_many(chunk, seqs, cas, wanted)

    def _extend_unnumbered(self, chunk: Chunk) -> None:
        """Adds all columns of `chunk` but the numbers and CAS values."""
        self.expiries.frombytes(chunk.expiries.tobytes())
        self.flags.frombytes(chunk.flags.tobytes())
        self.operations += chunk.operations
        for target, offsets, data, bounds, length in self._strings(chunk):
            at = len(target)
            if length:
                offsets.frombytes(_even_offsets(at, length, chunk.count))
            else:
                offsets.fromlist([at + offset for offset in bounds[1:].tolist()])
            target += data

    def _extend_few(
        self, chunk: Chunk, seqs: Sequence[int], cas: Sequence[int], wanted: bytes
    ) -> None:
        """Picks by index, which costs what is kept."""
        indexes = list(compress(range(chunk.count), wanted))
        pick = itemgetter(*indexes) if len(indexes) > 1 else _picker_of_one(indexes[0])
        self.seqs.extend(pick(seqs))
        self.cas.extend(pick(cas))
        self.operations += bytes(pick(chunk.operations.tobytes()))
        for target, offsets, data, source, _ in self._strings(chunk):
            # Slicing bytes is a third of the price of slicing a view, but first copies everything.
            few = 4 * len(indexes) < chunk.count
            whole = data if few else data.tobytes()
            bounds = source if few else source.tolist()
            lows, highs = pick(bounds), pick(bounds[1:])
            offsets.pop()
            offsets.extend(accumulate(map(sub, highs, lows), initial=len(target)))
            target += b"".join([whole[low:high] for low, high in zip(lows, highs, strict=True)])

    def _extend_many(
        self, chunk: Chunk, seqs: Sequence[int], cas: Sequence[int], wanted: bytes
    ) -> None:
        """Copies runs of neighbours at once: of most columns that costs what goes, not what is
        kept."""
        gone = list(compress(range(chunk.count), wanted.translate(_FALSE)))
        # Some of the runs are empty.
        runs = list(zip([0, *[index + 1 for index in gone]], [*gone, chunk.count], strict=True))
        kept = chunk.count - len(gone)
        operations = chunk.operations.tobytes()
        if operations.count(operations[0]) == chunk.count:
            self.operations += operations[:kept]
        else:
            self.operations += bytes(compress(operations, wanted))
        for column, source in ((self.seqs, seqs), (self.cas, cas)):
            if isinstance(source, memoryview):
                column.frombytes(b"".join([source[low:high] for low, high in runs]))
            else:
                column.fromlist(list(compress(source, wanted)))
        for target, offsets, data, bounds, length in self._strings(chunk):
            at = len(target)
            if length:
                offsets.frombytes(_even_offsets(at, length, kept))
                target += b"".join([data[length * low : length * high] for low, high in runs])
            else:
                places = bounds.tolist()
                lengths = compress(map(sub, places[1:], places), wanted)
                offsets.pop()
                offsets.fromlist(list(accumulate(lengths, initial=at)))
                target += b"".join([data[places[low] : places[high]] for low, high in runs])

    def _strings(
        self, chunk: Chunk
    ) -> tuple[tuple[bytearray, array[int], memoryview, memoryview, int], ...]:
        """Our bytes and offsets, the chunk's bytes and offsets, and the length that all of the
        chunk's have, if it is found: of keys and of values."""
        keys, values = chunk.key_offsets, chunk.value_offsets
        key_length, value_length = chunk.one_lengths()
        return (
            (self.key_bytes, self.key_offsets, chunk.key_bytes, keys, key_length),
            (self.value_bytes, self.value_offsets, chunk.value_bytes, values, value_length),
        )

    def build(self, start: SeqNo | None = None, end: SeqNo | None = None) -> Chunk:
        """The chunk as it stands; the builder may go on being filled.

        `start` and `end` are the covered range, by default from just below the first number to the
        last; a chunk without numbers covers (0, 0].
        """
        seqs = self.seqs
        if start is None:
            start = SeqNo(max(seqs[0] - 1, 0) if seqs else 0)
        if end is None:
            end = SeqNo(seqs[-1] if seqs else start)
        return _encode(
            start,
            end,
            seqs,
            self.cas,
            self.expiries,
            self.flags,
            self.key_offsets,
            self.value_offsets,
            self.operations,
            self.key_bytes,
            self.value_bytes,
        )


def _encode(
    start: SeqNo,
    end: SeqNo,
    seqs: array[int] | Buffer,
    cas: array[int] | Buffer,
    expiries: array[int] | Buffer,
    flags: array[int] | Buffer,
    key_offsets: array[int] | Buffer,
    value_offsets: array[int] | Buffer,
    operations: Buffer,
    key_bytes: Buffer,
    value_bytes: Buffer,
) -> Chunk:
    head = _HEAD.pack(len(operations), len(key_bytes), len(value_bytes), 0, start, end)
    pieces: list[Buffer] = [head]
    for column in (
        seqs,
        cas,
        expiries,
        flags,
        key_offsets,
        value_offsets,
        operations,
        key_bytes,
        value_bytes,
    ):
        view = memoryview(column)
        # An empty view cannot be cast; it has no bytes either way.
        data = view.cast("B") if view.nbytes else b""
        pieces.append(data)
        pieces.append(_PADDING[-len(data) & 7])
    return Chunk(b"".join(pieces))


def _picker_of_one(index: int) -> Callable[[Sequence[int]], tuple[int, ...]]:
    return lambda column: (column[index],)


def plain_chunk(
    keys: Sequence[bytes], values: Sequence[bytes], operations: bytes | None = None
) -> Chunk:
    """A published chunk from columns of keys and values, without flags, expiry or expected CAS.

    Args:
        keys: The keys.
        values: As many values.
        operations: One operation a key; by default every one is a `SET`.

    Raises:
        ValueError: There are not as many values, or operations, as keys.
    """
    count = len(keys)
    if operations is None:
        operations = bytes(repeat(Operation.SET, count))
    # Columns of different lengths may still add up, as they are padded.
    if not count == len(values) == len(operations):
        raise ValueError(
            f"{count} keys need as many values and operations, "
            f"not {len(values)} and {len(operations)}"
        )
    key_bytes, value_bytes = b"".join(keys), b"".join(values)
    zeros = bytes(8 * count)
    return _encode(
        SeqNo(0),
        SeqNo(0),
        zeros,
        zeros,
        zeros[: 4 * count],
        zeros[: 4 * count],
        _offsets(keys),
        _offsets(values),
        operations,
        key_bytes,
        value_bytes,
    )


def published_chunk(
    key_offsets: Buffer,
    key_bytes: Buffer,
    value_offsets: Buffer,
    value_bytes: Buffer,
    operations: Buffer,
    *,
    cas: Buffer | None = None,
    flags: Buffer | None = None,
    expiries: Buffer | None = None,
) -> Chunk:
    """A published chunk from columns as they lie in it: one copy, and no work a mutation.

    Args:
        key_offsets: Where each key begins, from 0, and where the last ends; i32.
        key_bytes: All keys.
        value_offsets: The same of the values.
        value_bytes: All values.
        operations: The operations, u8.
        cas: The expected CAS values, u64; None for all 0.
        flags: The flags, u32; None for all 0.
        expiries: The expiry times, u32; None for all 0.

    Raises:
        ValueError: A column has not as many items as there are operations.
        ChunkError: There are more of them than a chunk may hold.
    """
    count = memoryview(operations).nbytes
    zeros = bytes(8 * count)
    columns = (
        cas or zeros,
        expiries or zeros[: 4 * count],
        flags or zeros[: 4 * count],
        key_offsets,
        value_offsets,
    )
    lengths = [memoryview(column).nbytes for column in columns]
    if lengths != [8 * count, 4 * count, 4 * count, 4 * count + 4, 4 * count + 4]:
        raise ValueError(f"columns of {lengths} bytes do not belong to {count} operations")
    return _encode(SeqNo(0), SeqNo(0), zeros, *columns, operations, key_bytes, value_bytes)


def _offsets(items: Sequence[bytes]) -> array[int]:
    return array("i", accumulate(map(len, items), initial=0))
