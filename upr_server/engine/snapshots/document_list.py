"""The document list: the documents of an open snapshot, in arrays and in the rows behind them, with
skip flags over its end.

**Rows.** What comes one by one, or few at a time, is copied to the kernel's `OpenRows`, and becomes
an array when it is enough. The kernel adds the runs of a whole bundle there in one call.

**Tidying.** A skipped document takes memory until its array goes. Arrays skipped whole are dropped.
When the skipped documents outweigh the live ones, the arrays skipped the most are rewritten, runs
of neighbours into one. Rewriting a mutation frees at least one other, mostly several, so that
tidying adds a constant to the cost of a mutation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from operator import attrgetter, sub
from typing import Final

from upr_kernel import OpenRows, gather
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.ids import SEQ_MAX, Cas, Operation, SeqNo
from upr_server.engine.memory_account import MemoryAccount
from upr_server.engine.snapshots.document_arrays import (
    ARRAY_BYTES_MAX,
    ROW_BYTES,
    DocumentArray,
    NumberedArray,
    PublishedArray,
    Rows,
    SingleArray,
)
from upr_server.engine.snapshots.skip_flags import SkipFlags

PUBLISHED_MUTATIONS_MIN: Final = 64
"""A batch of fewer is copied to the rows: as an array of its own its fixed cost (an array, a chunk,
a view, about 400 bytes) would show."""

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
"""How many small arrays side by side are merged into one, however little is skipped in them."""

SMALL_ARRAY_BYTES: Final = 2 * 1024
"""An array below this is joined to a neighbour that is being rewritten."""

_FIRST: Final = attrgetter("first_seq")
_LAST: Final = attrgetter("last_seq")


class DocumentList:
    """Document arrays by rising number, and the rows behind them.

    Args:
        rows: The rows, empty.
        memory: What the bucket holds.

    Attributes:
        skip_flags: The flags of the newest arrays and of the rows, all of which they cover.
        rewritten_count: Mutations that tidying has copied, ever: a figure for `statistics`.
    """

    __slots__ = ("_arrays", "_memory", "_rows", "rewritten_count", "skip_flags")

    def __init__(self, rows: OpenRows, memory: MemoryAccount) -> None:
        self._memory = memory
        self._arrays: list[DocumentArray] = []
        # They count, too, what was added and superseded since tidying last looked, and say when it
        # should look again. Mostly the two are alike; deletions add little and supersede much.
        self._rows = rows
        self.skip_flags = SkipFlags(rows)
        self.rewritten_count = 0

    def __len__(self) -> int:
        """Arrays; the rows are one more, if there are any."""
        return len(self._arrays) + (len(self._rows) > 0)

    @property
    def has_arrays(self) -> bool:
        """Whether there is any array, beside the rows."""
        return bool(self._arrays)

    # Taking documents in. The skip flags cover them already.

    def prepare_rows(
        self, chunk: Chunk, low: int, high: int, first_seq: SeqNo, first_cas: Cas
    ) -> list[PublishedArray]:
        """Takes the memory that rows of a published chunk need: `SET`s without large values,
        numbered on end. The caller then calls `add_prepared`, or `take_back`.

        Returns:
            The arrays of the rows; none if they are few, and were copied to the rows.
        """
        count = high - low
        nbytes = chunk.nbytes * count // chunk.count
        if count < PUBLISHED_MUTATIONS_MIN and nbytes < PUBLISHED_BYTES_MIN:
            rows = self._rows
            nbytes_before = rows.nbytes
            try:
                rows.extend(chunk.encode(), low, high, first_seq, first_cas)
            finally:
                self._memory.arrays += rows.nbytes - nbytes_before
            return []
        self.close_rows()
        arrays: list[PublishedArray] = []
        for piece in _pieces(chunk, low, high):
            arrays.append(PublishedArray(piece, first_seq, first_cas))
            first_seq = SeqNo(first_seq + piece.count)
            first_cas = Cas(first_cas + piece.count)
        return arrays

    def add_prepared(self, arrays: Sequence[PublishedArray]) -> None:
        """Takes in the rows for which `prepare_rows` has taken memory."""
        for array in arrays:
            self._append(array)
        if not arrays and self._rows.is_full:
            self.close_rows()

    def take_back(self, arrays: Sequence[PublishedArray], count: int) -> None:
        """Gives up so many rows for which `prepare_rows` has taken memory. O(rows) if they are
        few."""
        if not arrays:
            for _ in range(count):
                self._rows.pop()

    def add_array(self, chunk: Chunk) -> None:
        """Takes in documents that are not large, with numbers above all so far: a stored chunk. The
        skip flags need not cover it."""
        self.close_rows()
        array, skip_flags = NumberedArray(chunk), self.skip_flags
        if skip_flags:
            covered_count = skip_flags.extend_through(array.last_seq)
        else:
            covered_count = array.last_seq + 1 - array.first_seq
            skip_flags.extend(array.first_seq, covered_count)
        self._append(array)
        self.count_added_bytes(ROW_BYTES * (covered_count - array.count))

    def add(self, row: Mutation) -> None:
        """Takes in one document that is not large. O(1)."""
        rows = self._rows
        nbytes_before = rows.nbytes
        rows.append(row.op, row.key, row.value, row.seq, row.cas, row.flags, row.expiry)
        self._memory.arrays += rows.nbytes - nbytes_before
        if rows.is_full:
            self.close_rows()

    def add_singles(self, arrays: Sequence[SingleArray]) -> None:
        """Takes in documents that have an array of their own each, as large ones do. All before
        them get flags of their own. O(arrays).

        The skip flags must not cover them.
        """
        self.close_rows()
        self.move_flags_to_arrays()
        for array in arrays:
            self._append(array)

    def close_rows(self) -> None:
        """Makes an array of the rows. O(bytes)."""
        rows = self._rows
        nbytes, first_seq = rows.nbytes, rows.first
        if len(rows):
            array = NumberedArray(Chunk(rows.encoded(first_seq - 1, rows.last, False)))
            # The flags begin there, though the first row may have been taken out since.
            array.first_seq = SeqNo(first_seq)
            self._arrays.append(array)
            self._memory.arrays += array.nbytes
        rows.clear()
        self._memory.arrays -= nbytes

    def _append(self, array: DocumentArray) -> None:
        self._arrays.append(array)
        self._memory.arrays += array.nbytes
        self._rows.added += array.nbytes

    # Taking older documents out.

    def pop(self, seq: int) -> bool:
        """Takes `seq` out without a trace if it is the last of the rows.

        What replaces it must be added next: the flags may cover nothing meanwhile.
        """
        rows = self._rows
        if rows.last != seq:
            return False
        rows.pop()
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
        base = skip_flags.base if skip_flags else SEQ_MAX
        uncovered_seqs = [seq for seq in seqs if seq < base]
        if len(uncovered_seqs) < len(seqs):
            for seq in seqs:
                if seq >= base:
                    skip_flags.skip(seq)
        if uncovered_seqs:
            uncovered_seqs.sort()
            self._skip_in_arrays(uncovered_seqs)

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
            array.live_count -= 1
            if not array.live_count:
                self._memory.arrays -= array.nbytes
                del arrays[array_index]

    def move_flags_to_arrays(self, below_seq: int = SEQ_MAX) -> None:
        """Gives arrays that begin below a number flags of their own, and lets go of the shared
        ones."""
        arrays, skip_flags = self._arrays, self.skip_flags
        if not skip_flags:
            return
        index = bisect_left(arrays, skip_flags.base, key=_FIRST)
        while index < len(arrays) and arrays[index].first_seq < below_seq:
            array = arrays[index]
            array.copy_flags(skip_flags)
            if array.live_count:
                index += 1
            else:
                self._memory.arrays -= array.nbytes
                del arrays[index]
        if index < len(arrays):
            skip_flags.drop_below(arrays[index].first_seq)
        elif len(self._rows):
            skip_flags.drop_below(self._rows.first)
        else:
            skip_flags.flags.clear()

    # Keeping the memory near what is live.

    def tidy(self, live: int) -> None:
        """Frees some of what is skipped, by the rules that the module's text explains.

        O(1) until enough was added; then O(arrays + skip flags / 4,000), and at most
        `TIDY_MUTATIONS_MAX` mutations rewritten.

        Args:
            live: The snapshot's live mutations.
        """
        rows, skip_flags = self._rows, self.skip_flags
        if not rows.wants_tidying:
            return
        for array in self._arrays[bisect_left(self._arrays, skip_flags.base, key=_FIRST) :]:
            if array.skip is None:
                array.live_count = array.count - skip_flags.count_skipped(
                    array.first_seq, array.last_seq
                )
        sizes = self._live_sizes()
        live_bytes = sum([size for size, _ in sizes])
        nbytes = sum([array.nbytes for array in self._arrays]) + rows.row_bytes
        excess_bytes = nbytes - 2 * live_bytes - SLACK_BYTES
        is_complete = True
        if excess_bytes > 0 or len(self._arrays) > ARRAYS_TO_MERGE_MIN:
            is_complete = self._rewrite(self._rewrite_divisor(excess_bytes))
            sizes = self._live_sizes()
        excess_flag_count = skip_flags.excess_flags(live)
        if excess_flag_count and len(rows) and rows.first < skip_flags.base + excess_flag_count:
            self.close_rows()
        self.move_flags_to_arrays(skip_flags.base + excess_flag_count)
        rows.added = rows.superseded = 0
        rows.mean_bytes = _weighted_mean(sizes)
        # If the budget ended it, the next call goes on at once.
        rows.tidy_at = min(SLACK_BYTES + live_bytes, TIDY_BYTES_MAX) if is_complete else 0

    def _live_sizes(self) -> list[tuple[int, int]]:
        """The live bytes and the live documents of each array, and of the rows."""
        sizes = [(array.live_bytes, array.live_count) for array in self._arrays]
        rows = self._rows
        count = len(rows)
        if count:
            live = count - self.skip_flags.count_skipped(rows.first, rows.last)
            sizes.append((rows.row_bytes * live // count, live))
        return sizes

    def count_added_bytes(self, nbytes: int) -> None:
        """Counts bytes that were added elsewhere towards the next tidying."""
        self._rows.added += nbytes

    def count_superseded(self, count: int) -> None:
        """Counts documents that were superseded towards the next tidying."""
        self._rows.superseded += count

    def _rewrite_divisor(self, excess_bytes: int) -> int:
        """The divisor by which to choose arrays: those with less than 1/divisor live are to be
        rewritten, to free `excess_bytes`."""
        for divisor in LIVE_DIVISORS:
            if excess_bytes <= 0:
                break
            freed_bytes = sum(
                [
                    array.nbytes - array.live_bytes
                    for array in self._arrays
                    if divisor * array.live_count < array.count
                ]
            )
            if freed_bytes >= excess_bytes:
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
            if not array.live_count:
                self._memory.arrays -= array.nbytes
                continue
            is_little_live = (
                divisor * array.live_count < array.count or array.nbytes < SMALL_ARRAY_BYTES
            )
            if not is_little_live or budget <= 0:
                self._join(run, arrays)
                arrays.append(array)
                continue
            # One array has flags of its own or shares them: the two kinds are not joined.
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
            2 * array.live_count < array.count for array in run
        ):
            arrays += run
            run.clear()
            return
        skip_flags, is_shared = self.skip_flags, run[0].skip is None
        rows: list[Rows] = []
        for array in run:
            if is_shared:
                array.copy_flags(skip_flags)
            rows += array.rows(array.first_seq - 1, array.last_seq)
            self._memory.arrays -= array.nbytes
        start, end = SeqNo(run[0].first_seq - 1), run[-1].last_seq
        run.clear()
        joined_array = NumberedArray(Chunk(gather(rows, start, end)))
        if is_shared:
            # The joined array holds none of the skipped documents: a flag left behind would count
            # as skipped a number that is no longer there.
            skip_flags.clear(joined_array.first_seq, joined_array.last_seq)
        else:
            joined_array.skip = bytearray(joined_array.count)
        self._memory.arrays += joined_array.nbytes
        self.rewritten_count += joined_array.count
        arrays.append(joined_array)

    # Reading.

    def find(self, seq: int) -> Mutation:
        """The document with this number. O(log documents).

        Raises:
            KeyError: No document has this number.
        """
        row = self._rows.find(seq)
        if row is not None:
            op, key, value, _, cas, flags, expiry = row
            return Mutation(Operation(op), key, value, SeqNo(seq), Cas(cas), flags, expiry)
        index = bisect_left(self._arrays, seq, key=_LAST)
        if index == len(self._arrays):
            raise KeyError(seq)
        array = self._arrays[index]
        return array.mutation(array.index(seq))

    def close(self) -> list[DocumentArray]:
        """The arrays with anything live, with flags of their own; the list is done with.
        O(arrays + bytes of the rows)."""
        self.close_rows()
        live_arrays: list[DocumentArray] = []
        for array in self._arrays:
            if array.skip is None:
                array.copy_flags(self.skip_flags)
            if array.live_count:
                live_arrays.append(array)
            else:
                self._memory.arrays -= array.nbytes
        return live_arrays

    @property
    def nbytes(self) -> int:
        """What the arrays and rows take, with what is skipped. O(arrays)."""
        return sum(array.nbytes for array in self._arrays) + self._rows.nbytes

    def check_invariants(self) -> list[Mutation]:
        """Order, counts, the place of the skip flags. O(documents).

        Returns:
            What is not skipped, in order.
        """
        skip_flags = self.skip_flags
        rows: list[Mutation] = []
        last_seq = 0
        for array in self._arrays:
            array.check_invariants()
            assert last_seq < array.first_seq, "arrays out of order"
            last_seq = array.last_seq
            assert (array.first_seq in skip_flags) == (array.skip is None), (
                "flags in the wrong place"
            )
            for index, seq in enumerate(array.seqs()):
                if array.skip is not None:
                    is_skipped = array.skip[index]
                else:
                    is_skipped = skip_flags.flags[seq - skip_flags.base]
                if not is_skipped:
                    rows.append(array.mutation(index))
            if array.skip is None:
                outside = skip_flags.count_skipped(array.first_seq, array.last_seq)
                inside = sum(skip_flags.flags[n - skip_flags.base] for n in array.seqs())
                assert outside == inside, "a flag that is for no document"
        open_rows = self._rows
        seqs = open_rows.seqs()
        if skip_flags:
            is_covering = bool(seqs) or any(array.skip is None for array in self._arrays)
            assert is_covering, "skip flags that cover no row"
        if seqs:
            assert last_seq < open_rows.first <= seqs[0], "rows before arrays"
            assert all(seq in skip_flags for seq in seqs), "rows without a flag"
            outside = skip_flags.count_skipped(open_rows.first, open_rows.last)
            skipped_seqs = [seq for seq in seqs if skip_flags.flags[seq - skip_flags.base]]
            assert outside == len(skipped_seqs), "a flag that is for no document"
            rows += [self.find(seq) for seq in seqs if seq not in skipped_seqs]
        return rows


def _weighted_mean(sizes: Sequence[tuple[int, int]]) -> int:
    """The mean size of a live document, each counted by its bytes: what the bytes are made of.

    Where a few large documents stand among many tombstones, it is near the size of the large.

    Args:
        sizes: The live bytes and the live documents of each array.
    """
    total = sum([nbytes for nbytes, live in sizes if live])
    return sum([nbytes * nbytes // live for nbytes, live in sizes if live]) // total if total else 0


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
        chunk.rows(begin, min(begin + step, high), SeqNo(0), SeqNo(0))
        for begin in range(low, high, step)
    ]
