"""The open snapshot: where mutations arrive and are deduplicated by key.

**Deduplication by key.** Of each key only the newest mutation stays. The hash table names the
number of the key's older mutation; if that is in this snapshot, it is taken out or skipped. (A
batch that a publisher sends again is another matter: see `repeated_batches`.)

It holds documents in a list of arrays, with the kernel's rows behind them, and counters in a list
of their own. A key's older event is taken out: from the counters by number, from the documents by
flagging it skipped, or, if it is the very last of the rows, by putting the new one in its place. An
open snapshot is never read, so no reader has seen the older event.

Its numbers stand in the kernel's `OpenRows`, which the open snapshots of one partition have one
after the other. So the kernel adds the runs of a bundle (`plain_runs`) without a step of Python for
each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from upr_kernel import OpenRows
from upr_protocol.chunk import LARGE_BYTES, Chunk, Mutation
from upr_protocol.ids import Cas, SeqNo
from upr_server.engine.hash_table import HashTable
from upr_server.engine.memory_account import MemoryAccount
from upr_server.engine.snapshots.closed_snapshot import ClosedSnapshot
from upr_server.engine.snapshots.counters import Counters
from upr_server.engine.snapshots.document_arrays import ROW_BYTES, SingleArray
from upr_server.engine.snapshots.document_list import (
    LARGE_VALUE_BYTES,
    SLACK_BYTES,
    DocumentList,
    has_large_value,
)


class EvaluatedArray(NamedTuple):
    """Documents that a batch comes to, by rising number.

    Attributes:
        rows: The documents, of different keys, with their numbers.
        chunk: The same as a stored chunk; None if each stands alone.
        singles: The same as arrays of one document, if each stands alone: those that are large, and
            a few between them.
    """

    rows: Sequence[Mutation]
    chunk: Chunk | None = None
    singles: Sequence[SingleArray] = ()


class OpenSnapshot:
    """The newest mutation of every key that changed after `start`.

    A partition has one. When it is closed, it begins again behind what it held: a consumer that
    keeps up has it closed for nearly every change, and a new object each time costs more.

    Args:
        start: The highest number before it.
        rows: Its rows, numbers and flags.
        memory: What the bucket holds.

    Attributes:
        rows: See above.
    """

    __slots__ = ("_counters", "_documents", "_key_count", "_memory", "rows")

    def __init__(self, start: SeqNo, rows: OpenRows, memory: MemoryAccount) -> None:
        self.rows = rows
        self._memory = memory
        self._documents = DocumentList(rows, memory)
        self._counters = Counters(memory)
        self._begin(start)

    def _begin(self, start: SeqNo) -> None:
        """Begins with nothing, behind `start`."""
        rows = self.rows
        self._memory.arrays -= rows.nbytes
        rows.begin(start, SLACK_BYTES)
        self._key_count = len(rows.table)

    @property
    def start(self) -> SeqNo:
        """Its mutations have higher numbers."""
        return SeqNo(self.rows.start)

    @property
    def high_seq(self) -> SeqNo:
        """The highest number it ever held; `start` when it is empty."""
        return SeqNo(self.rows.high)

    @property
    def live_count(self) -> int:
        """Mutations that are not superseded: its keys."""
        return self.rows.live

    # Taking mutations in.

    def add_rows(
        self,
        chunk: Chunk,
        low: int,
        high: int,
        first_seq: SeqNo,
        first_cas: Cas,
        table: HashTable,
    ) -> None:
        """Takes in rows of a published chunk: `SET`s that expect no CAS. O(rows).

        Args:
            chunk: The chunk, checked.
            low: The first row.
            high: One more than the last row.
            first_seq: The first row's number, above all numbers so far; the others follow.
            first_cas: The same for the CAS.
            table: The table in which the keys' older numbers stand; it gets the new ones.
        """
        if has_large_value(chunk, low, high):
            self._add_one_by_one(chunk, low, high, first_seq, first_cas, table)
            return
        documents, counters, count = self._documents, self._counters, high - low
        rows, skip_flags = self.rows, documents.skip_flags
        # The memory is taken first: if that fails after the keys were entered, they have numbers
        # that later mutations get.
        arrays = documents.prepare_rows(chunk, low, high, first_seq, first_cas)
        skip_flags.extend(first_seq, count)
        # A superseded number may be a counter's, which has no flag. While there are any, the table
        # returns what is superseded, and flags nothing.
        flags = bytearray() if counters else skip_flags.flags
        try:
            superseded_seqs, new_key_count = table.put_run(
                chunk, low, high, first_seq, rows.start, rows.base, flags
            )
        except MemoryError:
            # No key was entered, and the numbers go to what comes next.
            del skip_flags.flags[len(skip_flags) - count :]
            documents.take_back(arrays, count)
            raise
        documents.add_prepared(arrays)
        rows.high = first_seq + count - 1
        rows.live += new_key_count
        if superseded_seqs:
            if counters:
                superseded_seqs = [seq for seq in superseded_seqs if not counters.remove(seq)]
            documents.skip_all(superseded_seqs)
        if new_key_count < count:
            documents.count_superseded(count - new_key_count)
        documents.tidy(rows.live)

    def note_added_run(self, superseded_seqs: Sequence[int]) -> None:
        """The kernel has added a run to the rows: does what it left to do.

        Args:
            superseded_seqs: Numbers that the run superseded and that are not flagged yet.
        """
        documents, counters = self._documents, self._counters
        if superseded_seqs:
            documents.skip_all([seq for seq in superseded_seqs if not counters.remove(seq)])
        if self.rows.is_full:
            documents.close_rows()
        documents.tidy(self.rows.live)

    def _add_one_by_one(
        self,
        chunk: Chunk,
        low: int,
        high: int,
        first_seq: SeqNo,
        first_cas: Cas,
        table: HashTable,
    ) -> None:
        # The memory of a large chunk is nobody else's.
        is_alone = chunk.count == 1 and chunk.nbytes > LARGE_BYTES
        # First the memory: where it runs out, nothing has changed.
        rows = (
            [chunk.shared_mutation(0)]
            if is_alone
            else [chunk.mutation(index) for index in range(low, high)]
        )
        for offset, row in enumerate(rows):
            seq, cas = SeqNo(first_seq + offset), Cas(first_cas + offset)
            previous_seq = table.put(row.key, seq)
            self.add(
                Mutation(row.op, row.key, row.value, seq, cas, row.flags, row.expiry),
                previous_seq,
                chunk if is_alone else None,
            )

    def add(self, row: Mutation, previous_seq: int, published_chunk: Chunk | None = None) -> None:
        """Takes in one document. O(1).

        Args:
            row: A `SET`, `DELETE` or `EXPIRE` with its number, above all numbers so far.
            previous_seq: The number of the key's older event; 0 where none is known.
            published_chunk: See `SingleArray`.
        """
        documents = self._documents
        if previous_seq <= self.start:
            self.rows.live += 1  # the older event, if any, is in another snapshot
        elif not documents.pop(previous_seq) and not self._counters.remove(previous_seq):
            documents.skip(previous_seq)
            documents.count_superseded(1)
        if len(row.value) > LARGE_VALUE_BYTES:
            documents.add_singles([SingleArray(row, published_chunk)])
        else:
            covered_count = documents.skip_flags.extend_through(row.seq)
            documents.add(row)
            documents.count_added_bytes(ROW_BYTES * (covered_count - 1))
        self.rows.high = row.seq
        documents.tidy(self.rows.live)

    def add_evaluated(
        self,
        arrays: Sequence[EvaluatedArray],
        counter_rows: Sequence[Mutation],
        table: HashTable,
    ) -> None:
        """Takes in what a long batch comes to: by the array, as each row alone costs thrice as
        much. O(rows).

        Args:
            arrays: The documents, by rising number, all above those so far.
            counter_rows: The counters, by rising number; they may stand between the documents.
            table: As in `add_rows`.
        """
        documents, rows = self._documents, self.rows
        previous_seqs: list[int] = []
        for array in arrays:
            if array.chunk is not None:
                documents.add_array(array.chunk)
            else:
                documents.add_singles(array.singles)
            rows.high = array.rows[-1].seq
            previous_seqs += table.put_all(array.rows)
        if previous_seqs:
            self._supersede(previous_seqs)
        if counter_rows:
            self._supersede(table.put_all(counter_rows))
            self._counters.extend(counter_rows)
            rows.has_counters = True
            # The last number may be a counter's: the flags of the documents reach up to it, too.
            high = SeqNo(max(rows.high, counter_rows[-1].seq))
            if high > rows.high and documents.skip_flags:
                documents.count_added_bytes(ROW_BYTES * documents.skip_flags.extend_through(high))
            rows.high = high
        documents.tidy(rows.live)

    def _supersede(self, previous_seqs: Sequence[int]) -> None:
        """Takes out the older events of keys that have new ones; numbers up to `start` are in other
        snapshots."""
        start, documents, counters = self.start, self._documents, self._counters
        superseded_seqs = [seq for seq in previous_seqs if seq > start]
        self.rows.live += len(previous_seqs) - len(superseded_seqs)
        if counters:
            superseded_seqs = [seq for seq in superseded_seqs if not counters.remove(seq)]
        if superseded_seqs:
            documents.skip_all(superseded_seqs)
            documents.count_superseded(len(superseded_seqs))

    def add_counter(self, row: Mutation, previous_seq: int) -> None:
        """Takes in one counter: the result of an increment or decrement. O(1).

        The arguments are those of `add`.
        """
        documents, counters = self._documents, self._counters
        if previous_seq <= self.start:
            self.rows.live += 1
        elif not counters.remove(previous_seq):
            documents.skip(previous_seq)
            documents.count_superseded(1)
        counters.append(row)
        self.rows.high = row.seq
        self.rows.has_counters = True
        if documents.skip_flags:
            documents.count_added_bytes(ROW_BYTES * documents.skip_flags.extend_through(row.seq))
            documents.tidy(self.rows.live)

    # Reading.

    def find(self, seq: int) -> Mutation:
        """The mutation with this number, which must not be superseded. O(log mutations).

        Raises:
            KeyError: No mutation has this number.
        """
        return self._counters.find(seq) or self._documents.find(seq)

    def close(self) -> ClosedSnapshot:
        """What it holds, as a closed snapshot; the open one begins again where that one ends.

        O(arrays + counters + bytes of the rows).
        """
        rows, memory = self.rows, self._memory
        start, end = SeqNo(rows.start), SeqNo(rows.high)
        assert rows.live, "an empty open snapshot is never closed"
        # A key that the table forgot meanwhile is missing among the new ones, and counts as one
        # that it knew. No key of an open snapshot can be forgotten.
        renews_keys = rows.live > len(rows.table) - self._key_count
        if not rows.has_counters and not self._documents.has_arrays:
            # Most have no more than the rows.
            closed_snapshot = ClosedSnapshot.of_chunk(Chunk(rows.encoded(start, end, True)), memory)
        else:
            arrays, counters = self._documents.close(), self._counters
            closed_snapshot = ClosedSnapshot.of_arrays(
                start, end, arrays, counters.in_order(), counters.nbytes, memory
            )
            self._documents, self._counters = DocumentList(rows, memory), Counters(memory)
        closed_snapshot.renews_keys = renews_keys
        self._begin(end)
        return closed_snapshot

    # Figures and checks.

    @property
    def nbytes(self) -> int:
        """What it takes, with what is skipped. O(arrays)."""
        return self._documents.nbytes + self._counters.nbytes

    def recount(self, memory: MemoryAccount) -> None:
        """Adds what it holds to `memory`. O(arrays)."""
        memory.arrays += self._documents.nbytes
        memory.counters += self._counters.nbytes

    def statistics(self) -> dict[str, int]:
        """Figures of this snapshot. O(arrays)."""
        return {
            "start": self.start,
            "high": self.high_seq,
            "keys": self.live_count,
            "arrays": len(self._documents),
            "counters": len(self._counters),
            "bytes": self.nbytes,
            "window": len(self._documents.skip_flags),
            "rewritten": self._documents.rewritten_count,
        }

    def check_invariants(self) -> None:
        """Order, counts, unique keys, the end of the skip flags. O(mutations)."""
        self._counters.check_invariants()
        rows = self._documents.check_invariants() + self._counters.in_order()
        assert all(self.start < row.seq <= self.high_seq for row in rows), "beyond its numbers"
        assert len({row.key for row in rows}) == len(rows), "a key occurs twice"
        assert len({row.seq for row in rows}) == len(rows), "a number occurs twice"
        assert len(rows) == self.live_count, (len(rows), self.live_count)
        skip_flags = self._documents.skip_flags
        assert not skip_flags or skip_flags.base + len(skip_flags) == self.high_seq + 1, "their end"
