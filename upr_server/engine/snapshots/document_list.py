"""The document list: the documents of an open snapshot, in arrays, with skip flags over its end.

**Tidying.** A skipped document takes memory until its array goes. Arrays skipped whole are dropped.
When the skipped documents outweigh the live ones, the arrays skipped the most are rewritten, runs
of neighbours into one. Rewriting a mutation frees at least one other, mostly several, so that
tidying adds a constant to the cost of a mutation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter, sub
from typing import Final

from upr_kernel import gather
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.ids import SEQ_MAX, Cas, SeqNo
from upr_server.engine.memory_account import MemoryAccount
from upr_server.engine.snapshots.document_arrays import (
    ARRAY_BYTES_MAX,
    DocumentArray,
    FillingArray,
    NumberedArray,
    PublishedArray,
    Rows,
    SingleArray,
)
from upr_server.engine.snapshots.skip_flags import SkipFlags

PUBLISHED_MUTATIONS_MIN: Final = 64
"""A batch of fewer is copied into the array being filled: as an array of its own its fixed cost (an
array, a chunk, a view, about 400 bytes) would show."""

PUBLISHED_BYTES_MIN: Final = 64 * 1024
"""A batch as large as this is not copied either, however few mutations it has."""

PUBLISHED_MUTATIONS_MAX: Final = 4096
"""A batch of more is split, so that no array, segment or step of a collapse is longer than that."""

PUBLISHED_BYTES_MAX: Final = 1024 * 1024
"""The same in bytes."""

LARGE_VALUE_BYTES: Final = 64 * 1024
"""A value above this gets an array of its own. It is freed the moment it is superseded, and in the
other arrays a count of mutations is a fair measure of bytes."""

SLACK_BYTES: Final = 64 * 1024
"""Tidying leaves as much skipped as is live, and this; it looks again when as much was added. So
the arrays take three times what is live at most, and 128 KiB a partition. (Measured on the standard
work: looking four times as often saves a fourth of the memory and costs 70 ns a mutation.)"""

LIVE_DIVISORS: Final = (16, 8, 4, 2)
"""Arrays of which less than a sixteenth is live are rewritten first, then an eighth, and so on, as
far as needed: what is left of an array after a while is little, and cheap to copy."""

TIDY_BYTES_MAX: Final = 16 * 1024 * 1024
"""Tidying looks again after this much at the latest, so that there is never very much to do."""

TIDY_MUTATIONS_MAX: Final = 8192
"""Mutations looked at in one rewriting; at 0.2 µs each, 1.6 ms."""

ARRAYS_TO_MERGE_MIN: Final = 16
"""So many small arrays side by side are merged into one, however little is skipped in them."""

SMALL_ARRAY_BYTES: Final = 2 * 1024
"""An array below this is joined to a neighbour that is being rewritten."""

_FIRST: Final = attrgetter("first")
_LAST: Final = attrgetter("last")


class DocumentList:
    """Document arrays by rising number.

    Args:
        memory: What the bucket holds.

    Attributes:
        skip_flags: The flags of the newest arrays.
        rewritten: Mutations that tidying has copied, ever: a figure for `statistics`.
    """

    __slots__ = (
        "_added",
        "_arrays",
        "_filling",
        "_mean_bytes",
        "_memory",
        "_superseded",
        "_tidy_at",
        "rewritten",
        "skip_flags",
    )

    def __init__(self, memory: MemoryAccount) -> None:
        self._memory = memory
        self._arrays: list[DocumentArray] = []
        self._filling: FillingArray | None = None
        # Bytes added and bytes superseded (by the mean) since tidying last looked, and how many
        # make it look again. Mostly the two are alike; deletions add little and supersede much.
        self._added = 0
        self._superseded = 0
        self._mean_bytes = 0
        self._tidy_at = SLACK_BYTES
        self.skip_flags = SkipFlags()
        self.rewritten = 0

    def __len__(self) -> int:
        """Arrays."""
        return len(self._arrays)

    # Taking documents in. The skip flags cover them already.

    def add_rows(self, chunk: Chunk, low: int, high: int, first_seq: SeqNo, first_cas: Cas) -> None:
        """Takes in rows of a published chunk, `SET`s without large values, numbered on end."""
        count = high - low
        nbytes = chunk.nbytes * count // chunk.count
        # The first batch is often the only one: a consumer that keeps up has the snapshot closed
        # behind it.
        alone = not self._arrays
        if alone or count >= PUBLISHED_MUTATIONS_MIN or nbytes >= PUBLISHED_BYTES_MIN:
            if self._filling is not None:
                self._seal(self._filling)
            if count < PUBLISHED_MUTATIONS_MIN and nbytes < PUBLISHED_BYTES_MIN:
                # With its numbers at once: so few are mostly closed as they are, and read.
                start, end = SeqNo(first_seq - 1), SeqNo(first_seq + count - 1)
                rows: Rows = (chunk.encode(), low, high, None, first_seq, first_cas)
                self._append(NumberedArray(Chunk(gather([rows], start, end))))
                return
            for piece in _pieces(chunk, low, high):
                self._append(PublishedArray(piece, first_seq, first_cas))
                first_seq = SeqNo(first_seq + piece.count)
                first_cas = Cas(first_cas + piece.count)
            return
        filling = self._filling or self._fill(first_seq)
        added_bytes = filling.extend(chunk, low, high, first_seq, first_cas)
        self._memory.arrays += added_bytes
        self._added += added_bytes
        if filling.is_full:
            self._seal(filling)

    def add(self, row: Mutation) -> None:
        """Takes in one document that is not large. O(1)."""
        filling = self._filling or self._fill(row.seq)
        nbytes = filling.append(row)
        self._memory.arrays += nbytes
        self._added += nbytes
        if filling.is_full:
            self._seal(filling)

    def add_large(self, row: Mutation, published: Chunk | None = None) -> None:
        """Takes in one large document, as an array of its own. All before it get flags of
        their own.

        The skip flags must not cover it. `SingleArray` says what `published` is.
        """
        if self._filling is not None:
            self._seal(self._filling)
        self.move_flags_to_arrays()
        self._append(SingleArray(row, published))

    def _fill(self, first: SeqNo) -> FillingArray:
        self._filling = filling = FillingArray(first)
        self._arrays.append(filling)
        return filling

    def _seal(self, filling: FillingArray) -> None:
        assert self._arrays[-1] is filling
        self._filling = None
        if not filling.count:
            self._arrays.pop()
            return
        self._arrays[-1] = array = filling.sealed()
        self._memory.arrays += array.nbytes - filling.nbytes

    def _append(self, array: DocumentArray) -> None:
        self._arrays.append(array)
        self._memory.arrays += array.nbytes
        self._added += array.nbytes

    # Taking older documents out.

    def pop(self, seq: int) -> bool:
        """Takes `seq` out without a trace if it is the last of the array being filled.

        What replaces it must be added next: the array may stand there empty.
        """
        filling = self._filling
        if filling is None or filling.last != seq:
            return False
        freed = filling.pop()
        if freed is None:
            return False
        self._memory.arrays -= freed
        return True

    def skip(self, seq: int) -> None:
        """Flags `seq`. O(log arrays), O(1) where the skip flags cover it."""
        if seq in self.skip_flags:
            self.skip_flags.skip(seq)
        else:
            self._skip_in_arrays([seq])

    def skip_all(self, seqs: list[int]) -> None:
        """Flags all of `seqs`, in any order."""
        skip_flags = self.skip_flags
        uncovered = [seq for seq in seqs if seq not in skip_flags]
        if len(uncovered) < len(seqs):
            for seq in seqs:
                if seq in skip_flags:
                    skip_flags.skip(seq)
        if uncovered:
            uncovered.sort()
            self._skip_in_arrays(uncovered)

    def _skip_in_arrays(self, seqs: list[int]) -> None:
        """Flags rising `seqs` in arrays that have flags of their own, and drops those that are done
        with."""
        arrays = self._arrays
        array_index = 0
        for seq in seqs:
            # The numbers rise, and so do the arrays: the search goes on where the last one ended.
            array_index = bisect_left(arrays, seq, array_index, key=_LAST)
            array = arrays[array_index]
            skip = array.skip
            assert skip is not None, (
                "rows that the shared flags do not cover have flags of their own"
            )
            index = array.index(seq)
            assert not skip[index], "superseded twice"
            skip[index] = 1
            array.live -= 1
            if not array.live:
                self._memory.arrays -= array.nbytes
                del arrays[array_index]

    def move_flags_to_arrays(self, below: int = SEQ_MAX) -> None:
        """Gives arrays that begin below a number flags of their own, and lets go of the shared
        ones."""
        arrays, skip_flags = self._arrays, self.skip_flags
        if not skip_flags:
            return
        index = bisect_left(arrays, skip_flags.base, key=_FIRST)
        while index < len(arrays) and arrays[index].first < below:
            array = arrays[index]
            array.copy_flags(skip_flags)
            if array.live:
                index += 1
            else:
                self._memory.arrays -= array.nbytes
                del arrays[index]
        if index == len(arrays):
            skip_flags.flags.clear()
        else:
            skip_flags.drop_below(arrays[index].first)

    # Keeping the memory near what is live.

    def tidy(self, live: int) -> None:
        """Frees some of what is skipped, by the rules that the module's text explains.

        O(1) until enough was added; then O(arrays + skip flags / 4,000), and at most
        `TIDY_MUTATIONS_MAX` mutations rewritten.

        Args:
            live: The snapshot's live mutations.
        """
        # The second: what was superseded has come to outweigh what should be left.
        added, threshold = self._added, self._tidy_at
        if added <= threshold and 2 * self._superseded <= threshold + added:
            return
        skip_flags = self.skip_flags
        for array in self._arrays[bisect_left(self._arrays, skip_flags.base, key=_FIRST) :]:
            if array.skip is None:
                array.live = array.count - skip_flags.skipped(array.first, array.last)
        live_bytes = sum(array.live_bytes for array in self._arrays)
        too_much = sum(array.nbytes for array in self._arrays) - 2 * live_bytes - SLACK_BYTES
        is_complete = True
        if too_much > 0 or len(self._arrays) > ARRAYS_TO_MERGE_MIN:
            is_complete = self._rewrite(self._rewrite_divisor(too_much))
        excess = skip_flags.excess(live)
        if excess and self._filling is not None and self._filling.first < skip_flags.base + excess:
            self._seal(self._filling)
        self.move_flags_to_arrays(skip_flags.base + excess)
        self._added = self._superseded = 0
        self._mean_bytes = self._weighted_mean()
        self._tidy_at = min(SLACK_BYTES + live_bytes, TIDY_BYTES_MAX) if is_complete else 0

    def _weighted_mean(self) -> int:
        """The mean size of a live document, each counted by its bytes: what the bytes are made of.

        Where a few large documents stand among many tombstones, it is near the size of the large.
        """
        sizes = [(array.live_bytes, array.live) for array in self._arrays if array.live]
        total = sum(nbytes for nbytes, _ in sizes)
        return sum(nbytes * nbytes // live for nbytes, live in sizes) // total if total else 0

    def count(self, nbytes: int) -> None:
        """Counts bytes that were added elsewhere towards the next tidying."""
        self._added += nbytes

    def superseded(self, count: int) -> None:
        """Counts documents that were superseded towards the next tidying."""
        self._superseded += count * self._mean_bytes

    def _rewrite_divisor(self, too_much: int) -> int:
        """The divisor by which to choose arrays: those with less than 1/divisor live are to be
        rewritten, to free `too_much` bytes."""
        for divisor in LIVE_DIVISORS:
            if too_much <= 0:
                break
            freed = sum(
                array.nbytes - array.live_bytes
                for array in self._arrays
                if divisor * array.live < array.count
            )
            if freed >= too_much:
                break
        return divisor

    def _rewrite(self, divisor: int) -> bool:
        """Drops arrays skipped whole, and rewrites those with less than 1/`divisor` live.

        Returns:
            Whether it came to the end.
        """
        arrays: list[DocumentArray] = []
        run: list[DocumentArray] = []
        run_bytes = 0
        budget = TIDY_MUTATIONS_MAX
        for array in self._arrays:
            if not array.live and array is not self._filling:
                self._memory.arrays -= array.nbytes
                continue
            little = divisor * array.live < array.count or array.nbytes < SMALL_ARRAY_BYTES
            if not little or array is self._filling or budget <= 0:
                self._join(run, arrays)
                arrays.append(array)
                continue
            has_own_flags = array.skip is not None
            run_bytes = run_bytes + array.live_bytes if run else array.live_bytes
            if run and (run_bytes > ARRAY_BYTES_MAX or has_own_flags != (run[0].skip is not None)):
                self._join(run, arrays)
                run_bytes = array.live_bytes
            budget -= array.count
            run.append(array)
        self._join(run, arrays)
        self._arrays = arrays
        return budget > 0

    def _join(self, run: list[DocumentArray], arrays: list[DocumentArray]) -> None:
        """Adds `run` to `arrays`, rewritten into one array if that is worth it; empties `run`."""
        if len(run) < ARRAYS_TO_MERGE_MIN and not any(
            2 * array.live < array.count for array in run
        ):
            arrays += run
            run.clear()
            return
        skip_flags, is_shared = self.skip_flags, run[0].skip is None
        rows: list[Rows] = []
        for array in run:
            if is_shared:
                array.copy_flags(skip_flags)
            rows += array.rows(array.first - 1, array.last)
            self._memory.arrays -= array.nbytes
        start, end = SeqNo(run[0].first - 1), run[-1].last
        run.clear()
        joined = NumberedArray(Chunk(gather(rows, start, end)))
        if is_shared:
            # The joined array holds none of the skipped documents: a flag left behind would count
            # as skipped a number that is no longer there.
            skip_flags.clear(joined.first, joined.last)
        else:
            joined.skip = bytearray(joined.count)
        self._memory.arrays += joined.nbytes
        self.rewritten += joined.count
        arrays.append(joined)

    # Reading.

    def find(self, seq: int) -> Mutation:
        """The document with this number. O(log documents).

        Raises:
            KeyError: No document has this number.
        """
        index = bisect_left(self._arrays, seq, key=_LAST)
        if index == len(self._arrays):
            raise KeyError(seq)
        array = self._arrays[index]
        return array.mutation(array.index(seq))

    def close(self) -> list[DocumentArray]:
        """The arrays with anything live, with flags of their own; the list is done with.
        O(arrays)."""
        live: list[DocumentArray] = []
        for array in self._arrays:
            if array.skip is None:
                array.copy_flags(self.skip_flags)
            if array.live:
                live.append(array)
            else:
                self._memory.arrays -= array.nbytes
        return live

    @property
    def nbytes(self) -> int:
        """What the arrays take, with what is skipped. O(arrays)."""
        return sum(array.nbytes for array in self._arrays)

    def check_invariants(self) -> list[Mutation]:
        """Order, counts, the place of the skip flags. O(documents).

        Returns:
            What is not skipped, in order.
        """
        skip_flags = self.skip_flags
        rows: list[Mutation] = []
        last = 0
        for array in self._arrays:
            array.check_invariants()
            assert last < array.first, "arrays out of order"
            last = array.last
            assert (array.first in skip_flags) == (array.skip is None), "flags in the wrong place"
            for index, seq in enumerate(array.seqs()):
                if array.skip is not None:
                    skipped = array.skip[index]
                else:
                    skipped = skip_flags.flags[seq - skip_flags.base]
                if not skipped:
                    rows.append(array.mutation(index))
            if array.skip is None:
                outside = skip_flags.skipped(array.first, array.last)
                inside = sum(skip_flags.flags[n - skip_flags.base] for n in array.seqs())
                assert outside == inside, "a flag that is for no document"
        if skip_flags:
            assert any(array.skip is None for array in self._arrays), "skip flags that cover no row"
        if self._filling is not None:
            assert self._filling is self._arrays[-1]
            assert self._filling.count, "an empty array stayed"
        return rows


def has_large_value(chunk: Chunk, low: int, high: int) -> bool:
    """Whether a value of these rows needs an array of its own.

    O(1) for a chunk no larger than an array: nothing in it is large beside the whole.
    """
    if chunk.value_length <= ARRAY_BYTES_MAX:
        return False
    offsets: list[int] = chunk.value_offsets[low : high + 1].tolist()
    lengths: Iterator[int] = map(sub, offsets[1:], offsets)
    return max(lengths) > LARGE_VALUE_BYTES


def _pieces(chunk: Chunk, low: int, high: int) -> list[Chunk]:
    """Rows of `chunk` in pieces within the limits, none of which holds much more memory than its
    own."""
    count = high - low
    nbytes = chunk.nbytes * count // chunk.count
    if count <= PUBLISHED_MUTATIONS_MAX and nbytes <= PUBLISHED_BYTES_MAX:
        if count < chunk.count:
            return [chunk.rows(low, high, SeqNo(0), SeqNo(0))]
        # A chunk is a view of the frame that it came in, and keeps all of that in memory.
        frame_bytes = memoryview(chunk.encode().obj).nbytes
        return [chunk if frame_bytes < 2 * nbytes else chunk.copied()]
    parts = max(-(-count // PUBLISHED_MUTATIONS_MAX), -(-nbytes // PUBLISHED_BYTES_MAX))
    step = -(-count // parts)
    return [
        chunk.rows(first, min(first + step, high), SeqNo(0), SeqNo(0))
        for first in range(low, high, step)
    ]
