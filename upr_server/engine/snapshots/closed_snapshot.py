"""Closed snapshots: consistent states of a partition, which do not change any more."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import Final

from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.ids import SeqNo
from upr_server.engine.memory_account import MemoryAccount
from upr_server.engine.snapshots.document_arrays import DocumentArray
from upr_server.engine.snapshots.segment import (
    SEGMENT_BYTES,
    SEGMENT_COUNTERS_MAX,
    FreedMemory,
    Segment,
    segments_of,
)

_START: Final = attrgetter("start")
_END: Final = attrgetter("end")


class ClosedSnapshot:
    """The newest mutation of every key that changed in (start, end], in segments.

    All its readers share its encoded chunks.

    Attributes:
        start: Exclusive; the end of the snapshot before it.
        end: Inclusive; the number of its last mutation.
        nbytes: What it takes, about, as of when it was made.
        renews_keys: Whether it may have keys that the hash table knew before it. If not, it
            supersedes nothing in older snapshots, as a bulk load of new keys does not, but for keys
            that the table had forgotten by then.
    """

    __slots__ = ("_segments", "end", "nbytes", "renews_keys", "start")

    def __init__(self, segments: Sequence[Segment], nbytes: int) -> None:
        self._segments = segments
        self.start = segments[0].start
        self.end = segments[-1].end
        self.nbytes = nbytes
        self.renews_keys = True

    @classmethod
    def of_arrays(
        cls,
        start: SeqNo,
        end: SeqNo,
        arrays: Sequence[DocumentArray],
        counters: Sequence[Mutation],
        counter_bytes: int,
        memory: MemoryAccount,
    ) -> ClosedSnapshot:
        """From what an open snapshot held; see `segments_of`."""
        if len(arrays) == 1 and not counters:
            chunk = arrays[0].stored_chunk(start, end)
            if chunk is not None:
                memory.arrays -= arrays[0].nbytes
                return cls([Segment(start, end, memory, chunk=chunk)], chunk.nbytes)
        nbytes = counter_bytes + sum([array.live_bytes for array in arrays])
        if nbytes <= SEGMENT_BYTES and len(counters) < SEGMENT_COUNTERS_MAX:
            return cls([Segment(start, end, memory, arrays, counters)], nbytes)
        return cls(list(segments_of(start, end, arrays, counters, memory)), nbytes)

    @classmethod
    def of_chunk(cls, chunk: Chunk, memory: MemoryAccount) -> ClosedSnapshot:
        """From one stored chunk. O(1)."""
        return cls([Segment(chunk.start, chunk.end, memory, chunk=chunk)], chunk.nbytes)

    @classmethod
    def of_chunks(cls, chunks: Sequence[Chunk], memory: MemoryAccount) -> ClosedSnapshot:
        """From stored chunks, each of which begins where the one before ends."""
        segments = [Segment(chunk.start, chunk.end, memory, chunk=chunk) for chunk in chunks]
        return cls(segments, sum(chunk.nbytes for chunk in chunks))

    def __len__(self) -> int:
        """Its segments: at least one."""
        return len(self._segments)

    def chunk(self, index: int) -> Chunk:
        """The segment at `index`, encoded; O(its mutations) for the first call, then O(1)."""
        return self._segments[index].chunk()

    def whole_chunk(self) -> Chunk | None:
        """The snapshot as one chunk; None if it has more. O(its mutations) for the first call, then
        O(1)."""
        segments = self._segments
        return segments[0].chunk() if len(segments) == 1 else None

    def segment_index_after(self, after: int) -> int:
        """The first segment with numbers above `after`. O(log segments)."""
        return 0 if after == self.start else bisect_right(self._segments, after, key=_END)

    def find(self, seq: int) -> Mutation:
        """The mutation with this number, which must be in the snapshot's range. O(log mutations).

        Raises:
            KeyError: No mutation has this number.
        """
        return self._segments[bisect_left(self._segments, seq, key=_END)].find(seq)

    def free(self) -> list[FreedMemory]:
        """Lets go of what it holds, which counts no more; it must not be read any more.
        O(segments).

        Returns:
            What it held. The memory is free once the caller lets go of it, too.
        """
        return [segment.free() for segment in self._segments]

    def recount(self, memory: MemoryAccount) -> None:
        """Adds what it holds to `memory`. O(segments)."""
        counted_arrays: set[int] = set()
        for segment in self._segments:
            segment.recount(memory, counted_arrays)

    def statistics(self) -> dict[str, int]:
        """Figures of this snapshot."""
        return {
            "start": self.start,
            "end": self.end,
            "segments": len(self._segments),
            "encoded": sum(segment.is_encoded for segment in self._segments),
            "bytes": self.nbytes,
        }

    def check_invariants(self) -> None:
        """Segments touch; numbers rise; keys are unique. O(mutations)."""
        previous_end = self.start
        keys: set[bytes] = set()
        count = 0
        for segment in self._segments:
            assert segment.start == previous_end < segment.end, (
                previous_end,
                segment.start,
                segment.end,
            )
            previous_end = segment.end
            chunk = segment.peek()
            chunk.check()
            assert (chunk.start, chunk.end) == (segment.start, segment.end)
            keys.update(chunk.keys())
            count += chunk.count
        assert previous_end == self.end, (previous_end, self.end)
        assert len(keys) == count, f"{count - len(keys)} keys occur twice"
        assert self._segments[-1].peek().seqs[-1] == self.end, "ends at a mutation"
