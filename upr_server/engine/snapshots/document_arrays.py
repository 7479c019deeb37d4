"""Document arrays: runs of mutations with skip flags.

Three kinds, which differ in where the numbers stand:

- a `PublishedArray` is a publisher's chunk, kept as it came: its mutations have consecutive
  numbers, which are written into its columns only if it lives to be encoded;
- a `SingleArray` is one mutation with a large value, which is copied only if it lives to be
  encoded;
- a `NumberedArray` was filled, or is what is left of arrays that were mostly skipped.

Mutations that come one by one, or few at a time, are copied to the kernel's `OpenRows` first. Full,
these become an array.

An array of the newest part of the open snapshot has no flags of its own: `SkipFlags` covers it, and
the array gets its part of them by `copy_flags`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, cast

from upr_protocol.chunk import Buffer, Chunk, Mutation, encoded_bytes
from upr_protocol.ids import Cas, SeqNo
from upr_server.engine.snapshots.skip_flags import SkipFlags

ARRAY_MUTATIONS_MAX: Final = 1024
"""Rows become an array at this many: a reader's step is one array."""

ARRAY_BYTES_MAX: Final = 256 * 1024
"""Rows become an array at this many bytes, which make a segment."""

ARRAY_SPAN_MAX: Final = 4096
"""Rows become an array once they span so many numbers (counters take those between): the skip flags
cannot let go of numbers that the rows span."""

ROW_BYTES: Final = 33
"""What a mutation takes in the columns of a chunk, beside its key and value."""

Rows = tuple[Buffer, int, int, Buffer | None, int | None, int]
"""Rows of a chunk as the kernel's `gather` takes them: the encoded chunk, the first row, the row
behind the last, the skip flags (None where nothing is skipped), and the number and CAS that the
first row gets (None and 0 where the rows keep the chunk's)."""


class DocumentArray(ABC):
    """A run of mutations by rising number, some of them skipped.

    Attributes:
        first_seq: The lowest number it ever held.
        last_seq: The highest number it holds.
        count: Mutations, with those skipped.
        live_count: Mutations that are not skipped; without flags of its own, as of the last count.
        nbytes: What it takes in memory.
        skip: A flag for each mutation, 1 for skipped; None while `SkipFlags` covers the array.
        holder_count: Segments of a closed snapshot that read from it; it is freed at 0.
    """

    __slots__ = ("count", "first_seq", "holder_count", "last_seq", "live_count", "nbytes", "skip")

    first_seq: SeqNo
    last_seq: SeqNo
    count: int
    live_count: int
    nbytes: int
    skip: bytearray | None
    holder_count: int

    @property
    def live_bytes(self) -> int:
        """The bytes of what is not skipped, as if all mutations were of one size."""
        if self.live_count == self.count:
            return self.nbytes
        return self.nbytes * self.live_count // self.count

    @abstractmethod
    def index(self, seq: int) -> int:
        """Where `seq` stands; `KeyError` when it is not here. O(log count)."""

    @abstractmethod
    def mutation(self, index: int) -> Mutation:
        """The mutation at `index`, with its number and CAS."""

    @abstractmethod
    def whole_chunk(self, start: SeqNo, end: SeqNo) -> Chunk:
        """Everything, skipped or not, as a stored chunk that covers (`start`, `end`]."""

    def stored_chunk(self, start: SeqNo, end: SeqNo) -> Chunk | None:  # noqa: ARG002
        """What `whole_chunk` would return, if it is there already and nothing of it is skipped."""
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
        return after < self.first_seq and self.last_seq <= through and self.live_count == self.count

    def copy_flags(self, skip_flags: SkipFlags) -> None:
        """Takes a copy of its flags. At memory speed, if its numbers are consecutive."""
        flags, base = skip_flags.flags, skip_flags.base
        if self.last_seq - self.first_seq + 1 == self.count:
            offset = self.first_seq - base
            self.skip = flags[offset : offset + self.count]
        else:
            self.skip = bytearray([flags[seq - base] for seq in self.seqs()])
        self.live_count = self.count - self.skip.count(1)

    def check_invariants(self) -> None:
        """Order, counts. O(count)."""
        seqs = list(self.seqs())
        assert len(seqs) == self.count > 0, (self.count, seqs)
        assert all(a < b for a, b in pairwise(seqs)), "numbers must rise"
        assert self.first_seq <= seqs[0], (self.first_seq, seqs[0])
        assert self.last_seq == seqs[-1], (self.last_seq, seqs[-1])
        assert 0 <= self.live_count <= self.count, (self.live_count, self.count)
        if self.skip is not None:
            assert len(self.skip) == self.count, (len(self.skip), self.count)
            assert self.live_count == self.skip.count(0), (self.live_count, self.skip)


class PublishedArray(DocumentArray):
    """A publisher's chunk of `SET`s as it came, numbered consecutively.

    Args:
        chunk: The chunk, which belongs to nobody else from now on: it becomes the stored chunk.
        first_seq: The number of its first mutation.
        first_cas: The CAS of its first mutation.
    """

    __slots__ = ("_chunk", "_first_cas")

    def __init__(self, chunk: Chunk, first_seq: SeqNo, first_cas: Cas) -> None:
        self._chunk = chunk
        self._first_cas = first_cas
        self.first_seq = first_seq
        self.last_seq = SeqNo(first_seq + chunk.count - 1)
        self.count = self.live_count = chunk.count
        self.nbytes = chunk.nbytes
        self.skip = None
        self.holder_count = 0

    def index(self, seq: int) -> int:
        if not self.first_seq <= seq <= self.last_seq:
            raise KeyError(seq)
        return seq - self.first_seq

    def mutation(self, index: int) -> Mutation:
        chunk = self._chunk
        row = chunk.shared_mutation(index)
        return Mutation(
            row.op,
            row.key,
            row.value,
            SeqNo(self.first_seq + index),
            Cas(self._first_cas + index),
            row.flags,
            row.expiry,
        )

    def seqs(self) -> Sequence[int]:
        return range(self.first_seq, self.first_seq + self.count)

    def whole_chunk(self, start: SeqNo, end: SeqNo) -> Chunk:
        return self._chunk.numbered_in_place(self.first_seq, self._first_cas, start, end)

    def rows(self, after: int, through: int) -> list[Rows]:
        # Only counters make segments end inside an array, and there are none between its numbers.
        assert after < self.first_seq <= self.last_seq <= through, (
            after,
            self.first_seq,
            self.last_seq,
            through,
        )
        assert self.skip is not None
        skip = None if self.live_count == self.count else self.skip
        return [(self._chunk.encode(), 0, self.count, skip, self.first_seq, self._first_cas)]


class NumberedArray(DocumentArray):
    """A stored chunk: its numbers stand in a column."""

    __slots__ = ("_chunk",)

    def __init__(self, chunk: Chunk) -> None:
        seqs = chunk.seqs
        self._chunk = chunk
        self.first_seq = SeqNo(seqs[0])
        self.last_seq = SeqNo(seqs[-1])
        self.count = self.live_count = chunk.count
        self.nbytes = chunk.nbytes
        self.skip = None
        self.holder_count = 0

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

    def whole_chunk(self, start: SeqNo, end: SeqNo) -> Chunk:
        chunk = self._chunk
        if chunk.start == start and chunk.end == end:
            return chunk
        return chunk.rows(0, chunk.count, start, end)

    def stored_chunk(self, start: SeqNo, end: SeqNo) -> Chunk | None:
        chunk = self._chunk
        is_whole = self.live_count == self.count and chunk.start == start and chunk.end == end
        return chunk if is_whole else None

    def rows(self, after: int, through: int) -> list[Rows]:
        assert self.skip is not None
        chunk, low, high = self._chunk, 0, self.count
        if after >= self.first_seq or through < self.last_seq:
            seqs = cast("Sequence[int]", chunk.seqs)
            low, high = bisect_right(seqs, after), bisect_right(seqs, through)
        skip = None if self.live_count == self.count else self.skip[low:high]
        return [(chunk.encode(), low, high, skip, None, 0)]


class SingleArray(DocumentArray):
    """One mutation, which refers to its value: storing a value that is in memory copies nothing.

    Args:
        row: The mutation.
        published_chunk: The publisher's chunk that has it and nothing else, and that belongs to
            nobody else from now on; None for none. It becomes the stored chunk.
    """

    __slots__ = ("_published", "_row")

    def __init__(self, row: Mutation, published_chunk: Chunk | None = None) -> None:
        self._row = row
        self._published = published_chunk
        self.first_seq = self.last_seq = row.seq
        self.count = self.live_count = 1
        self.nbytes = encoded_bytes(1, len(row.key), len(row.value))
        self.skip = bytearray(1)
        self.holder_count = 0

    def index(self, seq: int) -> int:
        if seq != self.first_seq:
            raise KeyError(seq)
        return 0

    def mutation(self, index: int) -> Mutation:  # noqa: ARG002  # there is only one
        return self._row

    def seqs(self) -> Sequence[int]:
        return (self.first_seq,)

    def whole_chunk(self, start: SeqNo, end: SeqNo) -> Chunk:
        row = self._row
        if self._published is not None:
            return self._published.numbered_in_place(row.seq, row.cas, start, end)
        return Chunk.build((row,), start, end)

    def rows(self, after: int, through: int) -> list[Rows]:
        # A segment has just the arrays with numbers in its range.
        assert after < self.first_seq <= through, (after, self.first_seq, through)
        row = self._row
        if self._published is not None:
            return [(self._published.encode(), 0, 1, None, row.seq, row.cas)]
        return [(Chunk.build((row,)).encode(), 0, 1, None, None, 0)]
