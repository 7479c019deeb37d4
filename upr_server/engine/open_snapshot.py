"""The open snapshot: where mutations arrive, and where the newest of each key stays (seed 001).

It holds documents in a list of arrays and counters in a list of their own (seed 000). A key's older
event is taken out: from the counters by number, in a document array by flagging it skipped, or, if
it is the very last of the array being filled, by putting the new one in its place.

**The window.** Flags of the newest arrays stand in one bytearray, indexed by sequence number: most
of what a mutation supersedes is recent, so the hot loop flags it with one subtraction and one store
(14 ns), without looking for its array (86 ns when flags stand in each array, sorted and swept). The
window covers the numbers from `_base` on. It is kept to 4 flags a live mutation (and 8,192), so it
never costs more than a few bytes beside a mutation's hundred; arrays that it leaves behind are
*settled*: they get their piece of the flags and a count of their own.

**Tidying.** Whatever is skipped takes memory until its array goes. Arrays skipped whole are
dropped; when what is skipped outweighs what is not, arrays skipped by more than half are rewritten,
runs of neighbours into one. Each rewritten mutation stands for one at least that was freed, so
tidying adds a constant to the cost of a mutation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise
from operator import attrgetter
from typing import Final

from upr_protocol.chunk import Chunk, ChunkBuilder, Mutation
from upr_protocol.ids import SEQ_MAX, Cas, SeqNo
from upr_server.engine.closed_snapshot import ClosedSnapshot
from upr_server.engine.counters import Counters
from upr_server.engine.documents import (
    ARRAY_BYTES_MAX,
    ROW_BYTES,
    DocumentArray,
    FillingArray,
    NumberedArray,
    PublishedArray,
)
from upr_server.engine.hash_table import HashTable
from upr_server.engine.memory import Memory

PUBLISHED_MUTATIONS_MIN: Final = 64
"""A batch of fewer is copied into the array being filled: as an array of its own its fixed cost (an
array, a chunk, a view, about 400 bytes) would show."""

PUBLISHED_BYTES_MIN: Final = 64 * 1024
"""Nor is a batch copied that is as large as this, however few mutations it has."""

PUBLISHED_MUTATIONS_MAX: Final = 4096
"""A batch of more is cut, so that no array, segment or step of a collapse is longer than that."""

PUBLISHED_BYTES_MAX: Final = 1024 * 1024
"""The same in bytes."""

LARGE_VALUE_BYTES: Final = 64 * 1024
"""A value above this gets an array of its own. It is freed the moment it is superseded, and in the
other arrays a count of mutations is a fair measure of bytes."""

WINDOW_MIN: Final = 8192
"""Numbers that the window may always cover: 8 KiB a partition at most."""

WINDOW_PER_LIVE: Final = 4
"""Numbers that it may cover for each live mutation."""

SLACK_BYTES: Final = 64 * 1024
"""What may be skipped beyond what is live. It is per partition: 64 MiB with 1,024 of them."""

TIDY_MUTATIONS_MAX: Final = 8192
"""Mutations looked at in one rewriting; at 0.2 µs each, 1.6 ms."""

CROWD: Final = 16
"""So many small arrays side by side are made one, whatever is skipped in them."""

SMALL_ARRAY_BYTES: Final = 8 * 1024
"""An array below this is joined to a neighbour that is being rewritten."""

_FIRST: Final = attrgetter("first")
_LAST: Final = attrgetter("last")


class OpenSnapshot:
    """The newest mutation of every key that changed after `start`.

    Attributes:
        start: Its mutations have higher numbers.
        high: The highest number it ever held; `start` when it is empty.
        live: Mutations that are not superseded: its keys.
        rewritten: Mutations that tidying has copied, ever: a figure for `statistics`.
    """

    __slots__ = (
        "_added",
        "_arrays",
        "_base",
        "_counters",
        "_filling",
        "_flags",
        "_memory",
        "_tidy_at",
        "high",
        "live",
        "rewritten",
        "start",
    )

    def __init__(self, start: SeqNo, memory: Memory) -> None:
        self._memory = memory
        self._arrays: list[DocumentArray] = []
        self._counters = Counters(memory)
        self._filling: FillingArray | None = None
        # The window: flag i is for the number _base + i. It is empty when all arrays are settled.
        self._flags = bytearray()
        self._base = start + 1
        # Bytes added since tidying last looked, and how many make it look again.
        self._added = 0
        self._tidy_at = SLACK_BYTES
        self.start = start
        self.high = start
        self.live = 0
        self.rewritten = 0

    def __len__(self) -> int:
        return self.live

    # Taking mutations in.

    def add_chunk(
        self, chunk: Chunk, keys: list[bytes], first_seq: SeqNo, first_cas: Cas, table: HashTable
    ) -> None:
        """Takes in a publisher's chunk of `SET`s that expect no CAS. O(count).

        Args:
            chunk: The chunk, checked.
            keys: Its keys.
            first_seq: Its first mutation's number, above all numbers so far; the others follow.
            first_cas: The same for the CAS.
            table: The table in which the keys' older numbers stand; it gets the new ones.
        """
        if chunk.value_length > LARGE_VALUE_BYTES and _longest_value(chunk) > LARGE_VALUE_BYTES:
            self._add_rows(chunk, first_seq, first_cas, table)
            return
        count = len(keys)
        filling = self._filling
        if not self._flags:
            self._base = first_seq
        self._flags += bytes(count)
        # With counters about, a superseded number may be one of theirs: the loop flags nothing.
        base = SEQ_MAX if self._counters else self._base
        superseded, fresh = table.put_all(keys, first_seq, self.start, base, self._flags)
        if count >= PUBLISHED_MUTATIONS_MIN or chunk.nbytes >= PUBLISHED_BYTES_MIN:
            if filling is not None:
                self._seal(filling)
            self._add_published(chunk, first_seq, first_cas)
        else:
            if filling is None:
                filling = self._fill(first_seq)
            taken = filling.extend(chunk, first_seq, first_cas)
            self._memory.arrays += taken
            self._added += taken + ROW_BYTES * count
            if filling.is_full:
                self._seal(filling)
        self.high = SeqNo(first_seq + count - 1)
        self.live += fresh
        if superseded:
            self._supersede(superseded)
        if self._added > self._tidy_at:
            self._tidy()

    def add(self, row: Mutation, previous: int) -> None:
        """Takes in one document. O(1).

        Args:
            row: A `SET`, `DELETE` or `EXPIRE` with its number, above all numbers so far.
            previous: The number of the key's older event, negative for a tombstone, or 0.
        """
        seq = row.seq
        filling = self._filling
        previous = abs(previous)
        if previous <= self.start:
            self.live += 1
        elif filling is not None and filling.last == previous and filling.count:
            self._memory.arrays -= filling.pop()
        else:
            self._supersede([previous])
        if len(row.value) > LARGE_VALUE_BYTES:
            self._add_large(row)
        else:
            if not self._flags:
                self._base = seq
            self._flags.append(0)
            filling = self._filling or self._fill(seq)
            taken = filling.append(row.op, row.key, row.value, seq, row.cas, row.flags, row.expiry)
            self._memory.arrays += taken
            self._added += taken + ROW_BYTES
            if filling.is_full:
                self._seal(filling)
        self.high = seq
        if self._added > self._tidy_at:
            self._tidy()

    def add_counter(self, row: Mutation, previous: int) -> None:
        """Takes in one counter: the result of an increment or decrement. O(1). See `add`."""
        previous = abs(previous)
        if previous <= self.start:
            self.live += 1
        else:
            self._supersede([previous])
        if self._flags:
            self._flags.append(0)
        self._counters.append(row)
        self.high = row.seq
        self._added += 2 * ROW_BYTES
        if self._added > self._tidy_at:
            self._tidy()

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

    def _add_published(self, chunk: Chunk, first_seq: SeqNo, first_cas: Cas) -> None:
        for piece in _pieces(chunk):
            array = PublishedArray(piece, first_seq, first_cas)
            self._arrays.append(array)
            self._memory.arrays += array.nbytes
            self._added += array.nbytes
            first_seq = SeqNo(first_seq + piece.count)
            first_cas = Cas(first_cas + piece.count)

    def _add_rows(self, chunk: Chunk, first_seq: SeqNo, first_cas: Cas, table: HashTable) -> None:
        for index, row in enumerate(chunk):
            seq, cas = SeqNo(first_seq + index), Cas(first_cas + index)
            previous = table.newest(row.key)
            table.put(row.key, seq)
            self.add(
                Mutation(row.op, row.key, row.value, seq, cas, row.flags, row.expiry), previous
            )

    def _add_large(self, row: Mutation) -> None:
        if self._filling is not None:
            self._seal(self._filling)
        self._settle(row.seq)
        array = NumberedArray(Chunk.build((row,)))
        array.skip = bytearray(1)
        self._arrays.append(array)
        self._base = row.seq + 1
        self._memory.arrays += array.nbytes

    # Taking older events out.

    def _supersede(self, numbers: list[int]) -> None:
        """Takes out events of this snapshot by number; no array lies wholly behind them yet."""
        counters, flags, base = self._counters, self._flags, self._base
        settled: list[int] = []
        for number in numbers:
            if counters and counters.remove(number):
                continue
            if flags and number >= base:
                flags[number - base] = 1
            else:
                settled.append(number)
        if settled:
            settled.sort()
            self._skip(settled)

    def _skip(self, numbers: list[int]) -> None:
        """Flags rising `numbers` in settled arrays. O(log arrays) each; drops what is done with."""
        arrays = self._arrays
        at = 0
        for number in numbers:
            at = bisect_left(arrays, number, at, key=_LAST)
            array = arrays[at]
            skip = array.skip
            assert skip is not None, "a settled array has flags of its own"
            index = array.index(number)
            assert not skip[index], "superseded twice"
            skip[index] = 1
            array.live -= 1
            if not array.live:
                self._memory.arrays -= array.nbytes
                del arrays[at]

    # Keeping the memory near what is live.

    def _tidy(self) -> None:
        """Counts what is skipped and frees some of it, by rules that the module's text explains.

        O(arrays + window / 4,000), and at most `TIDY_MUTATIONS_MAX` mutations rewritten.
        """
        self._count_window()
        live_bytes = sum(array.live_bytes for array in self._arrays)
        held_bytes = sum(array.nbytes for array in self._arrays)
        done = True
        if held_bytes - live_bytes > live_bytes + SLACK_BYTES or len(self._arrays) > CROWD:
            done = self._rewrite(held_bytes - live_bytes > live_bytes + SLACK_BYTES)
        self._trim_window()
        self._added = 0
        self._tidy_at = (SLACK_BYTES + live_bytes) // 4 if done else 0

    def _count_window(self) -> None:
        flags, base = self._flags, self._base
        if not flags:
            return
        arrays = self._arrays
        for array in arrays[bisect_left(arrays, base, key=_FIRST) :]:
            skipped = flags.count(1, array.first - base, array.last + 1 - base)
            array.live = array.count - skipped

    def _rewrite(self, skipped_by_half: bool) -> bool:
        """Drops arrays skipped whole and, if told so, rewrites those skipped by more than half.

        Returns:
            Whether it came to the end.
        """
        kept: list[DocumentArray] = []
        run: list[DocumentArray] = []
        run_bytes = 0
        budget = TIDY_MUTATIONS_MAX
        for array in self._arrays:
            if not array.live and array is not self._filling:
                self._memory.arrays -= array.nbytes
                continue
            mostly_skipped = skipped_by_half and 2 * array.live < array.count
            small = array.nbytes < SMALL_ARRAY_BYTES
            if not (mostly_skipped or small) or array is self._filling or budget <= 0:
                self._join(run, kept)
                kept.append(array)
                continue
            run_bytes = run_bytes + array.live_bytes if run else array.live_bytes
            settled = array.skip is not None
            if run and (run_bytes > ARRAY_BYTES_MAX or settled != (run[0].skip is not None)):
                self._join(run, kept)
                run_bytes = array.live_bytes
            budget -= array.count
            run.append(array)
        self._join(run, kept)
        self._arrays = kept
        return budget > 0

    def _join(self, run: list[DocumentArray], kept: list[DocumentArray]) -> None:
        """Rewrites `run` into one array at the end of `kept`; empties it."""
        worth_it = len(run) >= CROWD or any(2 * array.live < array.count for array in run)
        if not worth_it:
            kept += run
            run.clear()
            return
        first, last = run[0].first, run[-1].last
        in_window = run[0].skip is None
        builder = ChunkBuilder()
        for array in run:
            if in_window:
                array.settle(self._flags, self._base)
            array.copy_into(builder, first - 1, last)
            self._memory.arrays -= array.nbytes
        run.clear()
        joined = NumberedArray(builder.build())
        if in_window:
            # Whatever was flagged there is gone.
            at = joined.first - self._base
            self._flags[at : at + joined.last - joined.first + 1] = bytes(
                joined.last - joined.first + 1
            )
        else:
            joined.skip = bytearray(joined.count)
        self._memory.arrays += joined.nbytes
        self.rewritten += joined.count
        kept.append(joined)

    def _trim_window(self) -> None:
        """Lets the window begin at its first array, and settles arrays when it is too long."""
        flags = self._flags
        if not flags:
            return
        limit = WINDOW_MIN + WINDOW_PER_LIVE * self.live
        base = self._base
        if len(flags) > limit:
            # Half of it, so that what this costs is spread over as many numbers.
            base += len(flags) - limit // 2
            if self._filling is not None and self._filling.first < base:
                self._seal(self._filling)
        self._settle(base)

    def _settle(self, base: int) -> None:
        """Settles the window's arrays that begin below `base`."""
        arrays, flags = self._arrays, self._flags
        if not flags:
            return
        at = bisect_left(arrays, self._base, key=_FIRST)
        while at < len(arrays) and arrays[at].first < base:
            array = arrays[at]
            array.settle(flags, self._base)
            if array.live:
                at += 1
            else:
                self._memory.arrays -= array.nbytes
                del arrays[at]
        if at == len(arrays):
            flags.clear()
            return
        first = arrays[at].first
        del flags[: first - self._base]
        self._base = first

    # Reading.

    def find(self, number: int) -> Mutation:
        """The mutation with this number, which must not be superseded. O(log mutations).

        Raises:
            KeyError: There is none.
        """
        counter = self._counters.find(number)
        if counter is not None:
            return counter
        at = bisect_left(self._arrays, number, key=_LAST)
        if at == len(self._arrays):
            raise KeyError(number)
        array = self._arrays[at]
        return array.mutation(array.index(number))

    def close(self) -> ClosedSnapshot:
        """What it holds, as a closed snapshot; the open one is done with. O(arrays + counters)."""
        assert self.live, "an empty open snapshot is never closed"
        if self._filling is not None and not self._filling.count:
            self._arrays.pop()
        self._settle(SEQ_MAX)
        counters = self._counters.in_order()
        return ClosedSnapshot.of_arrays(
            self.start, self.high, self._arrays, counters, self._counters.nbytes, self._memory
        )

    @property
    def nbytes(self) -> int:
        """What it takes, with what is skipped."""
        return sum(array.nbytes for array in self._arrays) + self._counters.nbytes

    def recount(self, memory: Memory) -> None:
        """Adds what it holds to `memory`. O(arrays)."""
        memory.arrays += sum(array.nbytes for array in self._arrays)
        memory.counters += self._counters.nbytes

    def statistics(self) -> dict[str, int]:
        """Figures of this snapshot. O(arrays)."""
        return {
            "start": self.start,
            "high": self.high,
            "keys": self.live,
            "arrays": len(self._arrays),
            "counters": len(self._counters),
            "bytes": self.nbytes,
            "window": len(self._flags),
            "rewritten": self.rewritten,
        }

    def check_invariants(self) -> None:
        """Order, counts, unique keys, the window's place. O(mutations)."""
        arrays, flags, base = self._arrays, self._flags, self._base
        self._counters.check_invariants()
        keys: list[bytes] = [counter.key for counter in self._counters.in_order()]
        last: int = self.start
        for array in arrays:
            assert last < array.first, (last, array.first)
            last = array.last
            if array is self._filling and not array.count:
                continue
            array.check_invariants()
            in_window = bool(flags) and array.first >= base
            assert in_window == (array.skip is None), "flags in the wrong place"
            skip = array.skip
            for index, number in enumerate(array.numbers()):
                if not (skip[index] if skip is not None else flags[number - base]):
                    keys.append(array.mutation(index).key)
                assert skip is not None or number - base < len(flags), "beyond the window"
        assert last <= self.high, (last, self.high)
        assert len(keys) == len(set(keys)) == self.live, (len(keys), len(set(keys)), self.live)
        assert not flags or base + len(flags) == self.high + 1, "the window ends at the high number"
        assert not flags or base <= next(a.first for a in arrays if a.skip is None)
        assert self._filling is None or self._filling is arrays[-1]


def _longest_value(chunk: Chunk) -> int:
    offsets = chunk.value_offsets.tolist()
    return max(high - low for low, high in pairwise(offsets))


def _pieces(chunk: Chunk) -> Iterator[Chunk]:
    """`chunk` in pieces within the limits, none of which holds much more memory than its own."""
    count, nbytes = chunk.count, chunk.nbytes
    if count <= PUBLISHED_MUTATIONS_MAX and nbytes <= PUBLISHED_BYTES_MAX:
        held = memoryview(chunk.encode().obj).nbytes
        yield chunk if held < 2 * nbytes else Chunk(bytes(chunk))
        return
    parts = max(-(-count // PUBLISHED_MUTATIONS_MAX), -(-nbytes // PUBLISHED_BYTES_MAX))
    step = -(-count // parts)
    for low in range(0, count, step):
        yield chunk.rows(low, min(low + step, count), SeqNo(0), SeqNo(0))
