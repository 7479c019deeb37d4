"""Document arrays: runs of mutations with skip flags.

Four kinds, which differ in where the numbers stand:

- a `PublishedArray` is a publisher's chunk, kept as it came: its mutations have consecutive
  numbers, which are written into columns only if it lives to be encoded;
- a `FillingArray` takes single mutations at its end;
- a `SingleArray` is one mutation with a large value, which is copied only if it lives to be
  encoded;
- a `NumberedArray` is one that was filled, or what is left of arrays that were mostly skipped.

An array of the newest part of the open snapshot has no flags of its own: `SkipFlags` covers it, and
the array gets its part of them by `copy_flags`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, cast

from upr_kernel import gather
from upr_protocol.chunk import Buffer, Chunk, ChunkBuilder, Mutation, encoded_bytes
from upr_protocol.ids import Cas, Operation, SeqNo
from upr_server.engine.snapshots.skip_flags import SkipFlags

ARRAY_MUTATIONS_MAX: Final = 1024
"""A filling array is sealed at this many: its columns grow by copying, and a reader's step is one
array."""

ARRAY_BYTES_MAX: Final = 256 * 1024
"""A filling array is sealed at this many bytes, which make a segment."""

ARRAY_SPAN_MAX: Final = 4096
"""A filling array is sealed once it spans so many numbers (counters take those between): the skip
flags cannot let go of numbers that a filling array spans."""

ROW_BYTES: Final = 33
"""What a mutation takes in the columns of a chunk, beside its key and value."""

SMALL_PART_ROWS: Final = 4
"""A part of a filling array with fewer rows is small: most of it is its fixed cost."""

SMALL_PARTS_MAX: Final = 64
"""So many small parts side by side are gathered into one. They take 12 KiB a partition more than
their rows, and gathering them costs 0.1 µs a row."""

PART_BYTES: Final = 130
"""What a part of a filling array takes beside its chunk, about: a bytes object (33), its places in
three lists and two numbers (88)."""

Rows = tuple[Buffer, int, int, Buffer | None, int | None, int]
"""Rows of a chunk as the kernel's `gather` takes them: the encoded chunk, the first row, the row
behind the last, the skip flags (None where nothing is skipped), and the number and CAS that the
first row gets (None and 0 where the rows keep the chunk's)."""


class DocumentArray(ABC):
    """A run of mutations by rising number, some of them skipped.

    Attributes:
        first: The lowest number it ever held.
        last: The highest number it holds.
        count: Mutations, with those skipped.
        live: Mutations that are not skipped; without flags of its own, as of the last count.
        nbytes: What it takes in memory.
        skip: A flag for each mutation, 1 for skipped; None while `SkipFlags` covers the array.
        holders: Segments of a closed snapshot that read from it; it is freed at 0.
    """

    __slots__ = ("count", "first", "holders", "last", "live", "nbytes", "skip")

    first: SeqNo
    last: SeqNo
    count: int
    live: int
    nbytes: int
    skip: bytearray | None
    holders: int

    @property
    def live_bytes(self) -> int:
        """The bytes of what is not skipped, as if all mutations were of one size."""
        if self.live == self.count:
            return self.nbytes
        return self.nbytes * self.live // self.count

    @abstractmethod
    def index(self, seq: int) -> int:
        """Where `seq` stands; `KeyError` when it is not here. O(log count)."""

    @abstractmethod
    def mutation(self, index: int) -> Mutation:
        """The mutation at `index`, with its number and CAS."""

    @abstractmethod
    def whole(self, start: SeqNo, end: SeqNo) -> Chunk:
        """Everything, skipped or not, as a stored chunk that covers (`start`, `end`]."""

    def stored(self, start: SeqNo, end: SeqNo) -> Chunk | None:  # noqa: ARG002
        """What `whole` would return, if it is there already and nothing of it is skipped."""
        return None

    @abstractmethod
    def rows(self, after: int, through: int) -> list[Rows]:
        """What is not skipped of the numbers in (`after`, `through`], for the kernel to gather.
        O(log count).

        The array must have flags of its own.
        """

    @abstractmethod
    def seqs(self) -> Sequence[int]:
        """The number of each mutation. O(count), O(1) for a published array."""

    def is_whole_in(self, after: int, through: int) -> bool:
        """Whether every mutation has a number in (`after`, `through`] and none is skipped."""
        return after < self.first and self.last <= through and self.live == self.count

    def copy_flags(self, skip_flags: SkipFlags) -> None:
        """Takes a copy of its flags. At memory speed, if its numbers are consecutive."""
        flags, base = skip_flags.flags, skip_flags.base
        if self.last - self.first + 1 == self.count:
            offset = self.first - base
            self.skip = flags[offset : offset + self.count]
        else:
            self.skip = bytearray([flags[seq - base] for seq in self.seqs()])
        self.live = self.count - self.skip.count(1)

    def check_invariants(self) -> None:
        """Order, counts. O(count)."""
        seqs = list(self.seqs())
        assert len(seqs) == self.count > 0, (self.count, seqs)
        assert all(a < b for a, b in pairwise(seqs)), "numbers must rise"
        assert self.first <= seqs[0], (self.first, seqs[0])
        assert self.last == seqs[-1], (self.last, seqs[-1])
        assert 0 <= self.live <= self.count, (self.live, self.count)
        if self.skip is not None:
            assert len(self.skip) == self.count, (len(self.skip), self.count)
            assert self.live == self.skip.count(0), (self.live, self.skip)


class PublishedArray(DocumentArray):
    """A publisher's chunk of `SET`s as it came, numbered consecutively."""

    __slots__ = ("_chunk", "_first_cas")

    def __init__(self, chunk: Chunk, first: SeqNo, first_cas: Cas) -> None:
        self._chunk = chunk
        self._first_cas = first_cas
        self.first = first
        self.last = SeqNo(first + chunk.count - 1)
        self.count = self.live = chunk.count
        self.nbytes = chunk.nbytes
        self.skip = None
        self.holders = 0

    def index(self, seq: int) -> int:
        if not self.first <= seq <= self.last:
            raise KeyError(seq)
        return seq - self.first

    def mutation(self, index: int) -> Mutation:
        chunk = self._chunk
        row = chunk.shared_mutation(index)
        return Mutation(
            row.op,
            row.key,
            row.value,
            SeqNo(self.first + index),
            Cas(self._first_cas + index),
            row.flags,
            row.expiry,
        )

    def seqs(self) -> Sequence[int]:
        return range(self.first, self.first + self.count)

    def whole(self, start: SeqNo, end: SeqNo) -> Chunk:
        return self._chunk.numbered(self.first, self._first_cas, start, end)

    def rows(self, after: int, through: int) -> list[Rows]:
        # Only counters make segments end inside an array, and there are none between its numbers.
        assert after < self.first <= self.last <= through, (after, self.first, self.last, through)
        assert self.skip is not None
        skip = None if self.live == self.count else self.skip
        return [(self._chunk.encode(), 0, self.count, skip, self.first, self._first_cas)]


class NumberedArray(DocumentArray):
    """A stored chunk: its numbers stand in a column."""

    __slots__ = ("_chunk",)

    def __init__(self, chunk: Chunk) -> None:
        seqs = chunk.seqs
        self._chunk = chunk
        self.first = SeqNo(seqs[0])
        self.last = SeqNo(seqs[-1])
        self.count = self.live = chunk.count
        self.nbytes = chunk.nbytes
        self.skip = None
        self.holders = 0

    def index(self, seq: int) -> int:
        seqs = cast("Sequence[int]", self._chunk.seqs)
        index = bisect_left(seqs, seq)
        if index == self.count or seqs[index] != seq:
            raise KeyError(seq)
        return index

    def mutation(self, index: int) -> Mutation:
        return self._chunk.shared_mutation(index)

    def seqs(self) -> Sequence[int]:
        seqs: list[int] = self._chunk.seqs.tolist()
        return seqs

    def whole(self, start: SeqNo, end: SeqNo) -> Chunk:
        chunk = self._chunk
        if chunk.start == start and chunk.end == end:
            return chunk
        return chunk.rows(0, chunk.count, start, end)

    def stored(self, start: SeqNo, end: SeqNo) -> Chunk | None:
        chunk = self._chunk
        is_whole = self.live == self.count and chunk.start == start and chunk.end == end
        return chunk if is_whole else None

    def rows(self, after: int, through: int) -> list[Rows]:
        assert self.skip is not None
        chunk, low, high = self._chunk, 0, self.count
        if after >= self.first or through < self.last:
            seqs = cast("Sequence[int]", chunk.seqs)
            low, high = bisect_right(seqs, after), bisect_right(seqs, through)
        skip = None if self.live == self.count else self.skip[low:high]
        return [(chunk.encode(), low, high, skip, None, 0)]


class SingleArray(DocumentArray):
    """One mutation, which refers to its value: storing a value that is in memory copies nothing.

    Args:
        row: The mutation.
        published: The publisher's chunk that has it and nothing else, and that belongs to nobody
            else from now on; None for none. It becomes the stored chunk.
    """

    __slots__ = ("_published", "_row")

    def __init__(self, row: Mutation, published: Chunk | None = None) -> None:
        self._row = row
        self._published = published
        self.first = self.last = row.seq
        self.count = self.live = 1
        self.nbytes = encoded_bytes(1, len(row.key), len(row.value))
        self.skip = bytearray(1)
        self.holders = 0

    def index(self, seq: int) -> int:
        if seq != self.first:
            raise KeyError(seq)
        return 0

    def mutation(self, index: int) -> Mutation:  # noqa: ARG002  # there is only one
        return self._row

    def seqs(self) -> Sequence[int]:
        return (self.first,)

    def whole(self, start: SeqNo, end: SeqNo) -> Chunk:
        row = self._row
        if self._published is not None:
            return self._published.numbered_in_place(row.seq, row.cas, start, end)
        return Chunk.build((row,), start, end)

    def rows(self, after: int, through: int) -> list[Rows]:
        # A segment has just the arrays with numbers in its range.
        assert after < self.first <= through, (after, self.first, through)
        row = self._row
        if self._published is not None:
            return [(self._published.encode(), 0, 1, None, row.seq, row.cas)]
        return [(Chunk.build((row,)).encode(), 0, 1, None, None, 0)]


class FillingArray(DocumentArray):
    """The array at the open snapshot's end, which takes mutations one by one, or few at a time.

    Rows of a published chunk are copied as they come, each run of them into a part of its own; the
    kernel gathers all parts when the array is sealed. So nothing of a publisher's bundle stays in
    memory, and a run costs no work a row here. Mutations that are given one by one go into a
    builder behind the parts, which costs ten times as much.
    """

    __slots__ = ("_builder", "_ends", "_lasts", "_parts", "_small_count")

    def __init__(self, first: SeqNo) -> None:
        self._parts: list[bytes] = []
        # How many mutations the parts hold, up to and with each, and the last number of each.
        self._ends: list[int] = []
        self._lasts: list[int] = []
        # How many parts at the end are small.
        self._small_count = 0
        self._builder = ChunkBuilder()
        self.first = first
        self.last = first
        self.count = self.live = 0
        self.nbytes = 0
        self.skip = None
        self.holders = 0

    def append(self, row: Mutation) -> int:
        """Adds one mutation at the end; returns the bytes it takes. O(1)."""
        self._builder.append(row.op, row.key, row.value, row.seq, row.cas, row.flags, row.expiry)
        self.last = row.seq
        self.count += 1
        self.live += 1
        nbytes = ROW_BYTES + len(row.key) + len(row.value)
        self.nbytes += nbytes
        return nbytes

    def extend(self, chunk: Chunk, low: int, high: int, first_seq: SeqNo, first_cas: Cas) -> int:
        """Adds rows of a published chunk, `SET`s, at the end; returns the bytes they take. O(rows),
        at memory speed."""
        nbytes, count = self.nbytes, high - low
        last = first_seq + count - 1
        builder = self._builder
        if count < SMALL_PART_ROWS and len(builder):
            # Were the builder emptied for each of them, rows of both kinds in turn would cost more.
            data_bytes = len(builder.key_bytes) + len(builder.value_bytes)
            builder.extend_rows(chunk, low, high, first_seq, first_cas)
            added_bytes = len(builder.key_bytes) + len(builder.value_bytes) - data_bytes
            self.nbytes += ROW_BYTES * count + added_bytes
        else:
            if len(builder):
                self._end_builder()
            rows = (chunk.encode(), low, high, None, first_seq, first_cas)
            self._add_part(gather([rows], first_seq - 1, last), count, last)
        self.last = SeqNo(last)
        self.count += count
        self.live += count
        return self.nbytes - nbytes

    def _end_builder(self) -> None:
        """Makes a part of what single mutations are there."""
        builder = self._builder
        self.nbytes -= ROW_BYTES * len(builder) + len(builder.key_bytes) + len(builder.value_bytes)
        self._add_part(bytes(builder.build().encode()), len(builder), builder.seqs[-1])
        self._builder = ChunkBuilder()

    def _add_part(self, part: bytes, count: int, last: int) -> None:
        ends = self._ends
        ends.append(count + ends[-1] if ends else count)
        self._lasts.append(last)
        self._parts.append(part)
        self.nbytes += PART_BYTES + len(part)
        if count >= SMALL_PART_ROWS:
            self._small_count = 0
        else:
            self._small_count += 1
            if self._small_count == SMALL_PARTS_MAX:
                self._join_small_parts()

    def _join_small_parts(self) -> None:
        """Makes one part of the small ones at the end."""
        first, parts, ends = len(self._parts) - self._small_count, self._parts, self._ends
        begins = [ends[first - 1] if first else 0, *ends[first:-1]]
        rows: list[Rows] = [
            (part, 0, end - begin, None, None, 0)
            for part, begin, end in zip(parts[first:], begins, ends[first:], strict=True)
        ]
        joined = gather(rows, self.first - 1, self._lasts[-1])
        self.nbytes += PART_BYTES + len(joined)
        self.nbytes -= sum(PART_BYTES + len(part) for part in parts[first:])
        del parts[first:], ends[first:-1], self._lasts[first:-1]
        parts.append(joined)
        self._small_count = 0

    def pop(self) -> int | None:
        """Takes the last mutation away, for one that replaces it in place; returns its bytes. None
        if it came with others: then it stays."""
        builder = self._builder
        if not len(builder):
            return None
        before = len(builder.key_bytes) + len(builder.value_bytes)
        builder.pop()
        freed = ROW_BYTES + before - len(builder.key_bytes) - len(builder.value_bytes)
        self.count -= 1
        self.live -= 1
        self.nbytes -= freed
        return freed

    @property
    def is_full(self) -> bool:
        """Whether it is to be sealed."""
        return (
            self.count >= ARRAY_MUTATIONS_MAX
            or self.nbytes >= ARRAY_BYTES_MAX
            or self.last - self.first >= ARRAY_SPAN_MAX
        )

    def sealed(self) -> NumberedArray:
        """The same mutations, closely packed. O(bytes)."""
        first_seq = SeqNo(self._seq_at_front())
        array = NumberedArray(self.whole(SeqNo(first_seq - 1), self.last))
        array.first = self.first
        array.live = self.live
        array.skip = self.skip
        return array

    def _seq_at_front(self) -> int:
        return Chunk(self._parts[0]).seqs[0] if self._parts else self._builder.seqs[0]

    def index(self, seq: int) -> int:
        lasts = self._lasts
        if lasts and seq <= lasts[-1]:
            part = bisect_left(lasts, seq)
            seqs = cast("Sequence[int]", Chunk(self._parts[part]).seqs)
            rows_before = self._ends[part - 1] if part else 0
        else:
            seqs = self._builder.seqs
            rows_before = self._ends[-1] if lasts else 0
        index = bisect_left(seqs, seq)
        if index == len(seqs) or seqs[index] != seq:
            raise KeyError(seq)
        return rows_before + index

    def mutation(self, index: int) -> Mutation:
        ends = self._ends
        part = bisect_right(ends, index)
        if part:
            index -= ends[part - 1]
        if part < len(ends):
            return Chunk(self._parts[part]).mutation(index)
        builder = self._builder
        keys, values = builder.key_offsets, builder.value_offsets
        return Mutation(
            Operation(builder.operations[index]),
            bytes(builder.key_bytes[keys[index] : keys[index + 1]]),
            bytes(builder.value_bytes[values[index] : values[index + 1]]),
            SeqNo(builder.seqs[index]),
            Cas(builder.cas[index]),
            builder.flags[index],
            builder.expiries[index],
        )

    def seqs(self) -> Sequence[int]:
        if not self._parts:
            return self._builder.seqs
        seqs: list[int] = []
        for part in self._parts:
            seqs += Chunk(part).seqs.tolist()
        seqs += self._builder.seqs
        return seqs

    def whole(self, start: SeqNo, end: SeqNo) -> Chunk:
        if not self._parts:
            return self._builder.build(start, end)
        parts: list[Rows] = [
            (part, 0, end - begin, None, None, 0)
            for part, begin, end in zip(self._parts, [0, *self._ends], self._ends, strict=False)
        ]
        if len(self._builder):
            parts.append((self._builder.build().encode(), 0, len(self._builder), None, None, 0))
        return Chunk(gather(parts, start, end))

    def rows(self, after: int, through: int) -> list[Rows]:
        return self.sealed().rows(after, through)
