"""Segments: the parts of a closed snapshot, each encoded once for all its readers.

A segment covers a contiguous range of numbers, and ends where the next begins. Until a cursor reads
it, it refers to document arrays and counters as the open snapshot left them. The first read merges
them into one chunk, in the order of their numbers; from then on the segment holds only the chunk.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Final, NamedTuple, cast

from upr_kernel import gather
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.ids import SeqNo
from upr_server.engine.memory_account import MemoryAccount
from upr_server.engine.snapshots.counters import counter_bytes
from upr_server.engine.snapshots.document_arrays import DocumentArray, Rows

SEGMENT_BYTES: Final = 256 * 1024
"""Neighbouring arrays share a segment up to this: a send of that size already runs at memory
speed, and encoding it takes well under a millisecond."""

SEGMENT_COUNTERS_MAX: Final = 1024
"""Counters in one segment; as rows they cost more to encode than documents do."""

_SEQ: Final = attrgetter("seq")
_FIRST: Final = attrgetter("first_seq")
_LAST: Final = attrgetter("last_seq")


class FreedMemory(NamedTuple):
    """What a segment held.

    Attributes:
        nbytes: About how many bytes it takes.
        content: What takes them.
    """

    nbytes: int
    content: object


class Segment:
    """The mutations of one closed snapshot with numbers in (start, end].

    Attributes:
        start: Exclusive.
        end: Inclusive.
    """

    __slots__ = ("_arrays", "_chunk", "_counters", "_memory", "end", "start")

    def __init__(
        self,
        start: SeqNo,
        end: SeqNo,
        memory: MemoryAccount,
        arrays: Sequence[DocumentArray] = (),
        counters: Sequence[Mutation] = (),
        chunk: Chunk | None = None,
    ) -> None:
        self._memory = memory
        self._arrays = arrays
        self._counters = counters
        self._chunk = chunk
        self.start = start
        self.end = end
        for array in arrays:
            array.holder_count += 1
        if chunk is not None:
            memory.encoded += chunk.nbytes

    @property
    def is_encoded(self) -> bool:
        """Whether a cursor has read it already."""
        return self._chunk is not None

    def chunk(self) -> Chunk:
        """The segment, encoded. O(mutations) the first time, then O(1)."""
        chunk = self._chunk
        if chunk is None:
            chunk = self.peek()
            self.free()
            self._chunk = chunk
            self._memory.encoded += chunk.nbytes
        return chunk

    def free(self) -> FreedMemory:
        """Lets go of what it holds, which counts no more. Its memory is free once the caller lets
        go of it, too."""
        memory, nbytes = self._memory, 0
        content: object = self._chunk
        if self._chunk is not None:
            nbytes = self._chunk.nbytes
            memory.encoded -= nbytes
            self._chunk = None
        else:
            content = self._arrays, self._counters
        for array in self._arrays:
            nbytes += array.nbytes
            array.holder_count -= 1
            if not array.holder_count:
                memory.arrays -= array.nbytes
        if self._counters:
            counters_bytes = sum(map(counter_bytes, self._counters))
            memory.counters -= counters_bytes
            nbytes += counters_bytes
        self._arrays = self._counters = ()
        return FreedMemory(nbytes, content)

    def peek(self) -> Chunk:
        """The segment, encoded, without keeping it. O(mutations) if no cursor has read it."""
        if self._chunk is not None:
            return self._chunk
        arrays, counters = self._arrays, self._counters
        start, end = self.start, self.end
        if not counters and len(arrays) == 1 and arrays[0].is_whole_in(start, end):
            return arrays[0].whole_chunk(start, end)
        rows = [part for array in arrays for part in array.rows(start, end)]
        documents = Chunk(gather(rows, start, end))
        return _merge_counters(documents, counters, start, end) if counters else documents

    def find(self, seq: int) -> Mutation:
        """The mutation with this number. O(log mutations).

        Raises:
            KeyError: No mutation has this number.
        """
        chunk = self._chunk
        if chunk is not None:
            seqs = chunk.seqs
            index = bisect_left(seqs, seq)
            if index == chunk.count or seqs[index] != seq:
                raise KeyError(seq)
            return chunk.shared_mutation(index)
        index = bisect_left(self._counters, seq, key=_SEQ)
        if index < len(self._counters) and self._counters[index].seq == seq:
            return self._counters[index]
        index = bisect_left(self._arrays, seq, key=_LAST)
        if index == len(self._arrays):
            raise KeyError(seq)
        array = self._arrays[index]
        return array.mutation(array.index(seq))

    def recount(self, memory: MemoryAccount, counted_arrays: set[int]) -> None:
        """Adds what it holds to `memory`, except arrays whose `id` is in `counted_arrays`."""
        if self._chunk is not None:
            memory.encoded += self._chunk.nbytes
        memory.counters += sum(map(counter_bytes, self._counters))
        for array in self._arrays:
            if id(array) not in counted_arrays:
                counted_arrays.add(id(array))
                memory.arrays += array.nbytes


def _merge_counters(
    documents: Chunk, counters: Sequence[Mutation], start: SeqNo, end: SeqNo
) -> Chunk:
    """Documents and counters, by number. O(counters log documents), and a copy: 4,000 documents as
    rows took 8 ms."""
    seqs = cast("Sequence[int]", documents.seqs)
    counter_rows, document_rows = Chunk.build(counters).encode(), documents.encode()
    parts: list[Rows] = []
    low = low_counter = 0
    while low_counter < len(counters):
        high = bisect_left(seqs, counters[low_counter].seq, low)
        if high > low:
            parts.append((document_rows, low, high, None, None, 0))
        low, high_counter = high, len(counters)
        if low < documents.count:
            high_counter = bisect_left(counters, seqs[low], low_counter, key=_SEQ)
        parts.append((counter_rows, low_counter, high_counter, None, None, 0))
        low_counter = high_counter
    if low < documents.count:
        parts.append((document_rows, low, documents.count, None, None, 0))
    return Chunk(gather(parts, start, end))


def segments_of(
    start: SeqNo,
    end: SeqNo,
    arrays: Sequence[DocumentArray],
    counters: Sequence[Mutation],
    memory: MemoryAccount,
) -> Iterator[Segment]:
    """Divides (start, end] into segments, with no work a mutation: O(arrays + counters / 1,024).

    Args:
        start: The snapshot's start.
        end: Its end, the number of its last mutation.
        arrays: Its document arrays, in order, with flags of their own.
        counters: Its counters, in order.
        memory: What the bucket holds.
    """
    segment_ends = {
        counter.seq for counter in counters[SEGMENT_COUNTERS_MAX - 1 :: SEGMENT_COUNTERS_MAX]
    }
    segment_ends.update(_array_ends(arrays))
    segment_ends.add(end)
    low = low_counter = 0
    for segment_end in sorted(segment_ends):
        high = bisect_left(arrays, segment_end + 1, low, key=_FIRST)
        high_counter = bisect_left(counters, segment_end + 1, low_counter, key=_SEQ)
        yield Segment(
            start, segment_end, memory, arrays[low:high], counters[low_counter:high_counter]
        )
        start = segment_end
        # An array that reaches beyond the cut belongs to the next segment too.
        low = high - 1 if high > low and arrays[high - 1].last_seq > segment_end else high
        low_counter = high_counter


def _array_ends(arrays: Iterable[DocumentArray]) -> Iterator[SeqNo]:
    total, last_seq = 0, SeqNo(0)
    for array in arrays:
        if total and total + array.live_bytes > SEGMENT_BYTES:
            yield last_seq
            total = 0
        total += array.live_bytes
        last_seq = array.last_seq
