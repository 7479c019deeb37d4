"""Reading a bucket's log: its chunks, and where snapshots end."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from typing import cast

from sortedcontainers import SortedDict

from upr_protocol.chunk import Chunk, Mutation, encoded_bytes
from upr_protocol.ids import SeqNo
from upr_server.storage.errors import CorruptionError
from upr_server.storage.ordered_map import OrderedMap, ReadTransaction
from upr_server.storage.records import (
    CHUNK,
    FLOOR,
    PARTITION,
    PARTITIONS_END,
    SEQS_END,
    PartitionRecord,
    chunk_key,
    parse_chunk,
    parse_chunk_head,
    parse_chunk_key,
    parse_record,
    partition_key,
    read_seq,
)


class ChunkReader:
    """Reads one bucket's log. Every call is one short transaction.

    Args:
        ordered_map: Where the log is stored.
    """

    def __init__(self, ordered_map: OrderedMap) -> None:
        self.ordered_map = ordered_map

    def _record(self, transaction: ReadTransaction, partition: int) -> PartitionRecord:
        key = partition_key(PARTITION, partition)
        stored_value = transaction.get(key)
        if stored_value is None:
            raise CorruptionError(f"the record of partition {partition} is missing")
        return parse_record(key, stored_value, PartitionRecord)

    def high_seq(self, partition: int) -> SeqNo:
        """The persisted snapshot end of a partition."""
        with self.ordered_map.read() as transaction:
            return self._record(transaction, partition).high

    def find_snapshot_end(self, partition: int, ceiling: SeqNo, floor: SeqNo) -> SeqNo | None:
        """The highest snapshot end in [`floor`, `ceiling`] that the log has marked, or None.

        Above the index's watermark every snapshot end is marked. Up to a watermark at which the
        partition was once compacted none is, even if the index was lost since: superseded mutations
        are missing there, so no point is a state of the past. A damaged chunk is passed: nobody
        knows whether a snapshot ends with it. O(chunks from the result to the ceiling).
        """
        with self.ordered_map.read() as transaction:
            high = self._record(transaction, partition).high
            floor = max(floor, read_seq(transaction, partition_key(FLOOR, partition)))
            if ceiling >= high >= floor:
                return high
            first_key, through = chunk_key(partition, floor), min(ceiling, high)
            while through >= floor and through:
                record = transaction.last(first_key, chunk_key(partition, through))
                if record is None:
                    break
                key, value = bytes(record[0]), record[1]
                _, end = parse_chunk_key(key)
                with suppress(CorruptionError):
                    _, ends_snapshot = parse_chunk_head(key, value)
                    if ends_snapshot:
                        return SeqNo(end)
                through = SeqNo(end - 1)
        return None

    def find_first_snapshot_end(self, partition: int, floor: SeqNo) -> SeqNo:
        """The lowest snapshot end at or above `floor` that the log has marked; it must hold as
        much. Points that compaction has passed are left out, as `find_snapshot_end` leaves them
        out. O(chunks from the floor to the result)."""
        with self.ordered_map.read() as transaction:
            high = self._record(transaction, partition).high
            floor = max(floor, read_seq(transaction, partition_key(FLOOR, partition)))
            if not floor:
                return SeqNo(0)
            last_key = chunk_key(partition, high)
            for key, value in transaction.scan(chunk_key(partition, floor), last_key):
                _, ends_snapshot = parse_chunk_head(key, value)
                if ends_snapshot:
                    return SeqNo(parse_chunk_key(key)[1])
        return high

    def find_seq_before(self, partition: int, cas: int) -> SeqNo:
        """The highest sequence number on disk up to which every mutation has a CAS below `cas`; 0
        when the first one has not. CAS values rise with the numbers, so this is a binary search: it
        reads and checks O(log(chunks)) chunks.

        Raises:
            CorruptionError: A chunk that was looked at is damaged.
        """
        low = 0
        with self.ordered_map.read() as transaction:
            high: int = self._record(transaction, partition).high
            while low < high:
                middle = (low + high) // 2
                chunk = self._first_with_rows(transaction, partition, middle, high)
                if chunk is None:
                    # Compaction left no row in (middle, high]: it says nothing of the time.
                    high = middle
                    continue
                rows_before = bisect_left(cast("Sequence[int]", chunk.cas), cas)
                if rows_before == chunk.count:
                    low = min(chunk.end, high)
                elif rows_before == 0:
                    high = min(chunk.start, middle)
                else:
                    return SeqNo(chunk.seqs[rows_before - 1])
        return SeqNo(low)

    def _first_with_rows(
        self, transaction: ReadTransaction, partition: int, after: int, through: int
    ) -> Chunk | None:
        """The first chunk with mutations that reaches beyond `after` and begins before `through`.
        A view of what the transaction sees."""
        last_key = chunk_key(partition, SEQS_END)
        for key, value in transaction.scan(chunk_key(partition, after + 1), last_key):
            chunk = parse_chunk(key, value)
            if chunk.start >= through:
                return None
            if chunk.count:
                return chunk
        return None

    def read_chunks(
        self,
        partition: int,
        after: int,
        through: int,
        *,
        bytes_max: int,
        mutations_max: int = 1 << 62,
        in_pieces: bool = False,
        copy_chunk: Callable[[Chunk], Chunk] = Chunk.copied,
    ) -> list[Chunk]:
        """Copies of the chunks of (`after`, `through`], read in one short transaction.

        Args:
            partition: The partition.
            after: Where the reader stands.
            through: The last sequence number to read; the log must have it.
            bytes_max: The answer ends with the chunk that reaches so many bytes in all,
            mutations_max: or so many mutations.
            in_pieces: Whether a first chunk of more bytes may be cut to its front, of at least one
                mutation.
            copy_chunk: Copies a chunk out of the transaction. That is done at once, while the chunk
                that was just checked is in the processor's cache.

        Returns:
            At least one chunk. The first begins at `after`, each begins where the one before ends,
            and the last ends at `through`, at a damaged chunk, or before them.

        Raises:
            CorruptionError: The first chunk is damaged or missing.
        """
        chunks: list[Chunk] = []
        first_key, last_key = chunk_key(partition, after + 1), chunk_key(partition, SEQS_END)
        with self.ordered_map.read() as transaction:
            for key, value in transaction.scan(first_key, last_key):
                try:
                    chunk = parse_chunk(key, value)
                except CorruptionError:
                    if not chunks:
                        raise
                    break
                # Each chunk begins where the one before ended. Only the first may begin earlier,
                # when the reader stands inside it.
                if not chunk.start <= after < chunk.end or (chunks and chunk.start != after):
                    break
                unread_chunk = chunk.slice(SeqNo(after), SeqNo(through))
                if in_pieces and not chunks and unread_chunk.nbytes > bytes_max:
                    return [copy_chunk(_front(unread_chunk, bytes_max))]
                chunks.append(copy_chunk(unread_chunk))
                after = chunk.end
                bytes_max -= chunk.nbytes
                mutations_max -= chunk.count
                if after >= through or bytes_max <= 0 or mutations_max <= 0:
                    break
        if not chunks:
            raise CorruptionError(f"the log of partition {partition} has no chunk after {after}")
        return chunks

    def find_intact(self, partition: int, after: int, through: int) -> SeqNo:
        """Where the log can be read again after `after`: where the next intact chunk begins, or
        `through` if that is lower. O(damaged chunks)."""
        first_key, last_key = chunk_key(partition, after + 1), chunk_key(partition, SEQS_END)
        with self.ordered_map.read() as transaction:
            for key, value in transaction.scan(first_key, last_key):
                try:
                    chunk = parse_chunk(key, value)
                except CorruptionError:
                    continue
                return SeqNo(min(chunk.start, through))
        return SeqNo(through)

    def find_mutations(
        self, partition: int, seqs: Sequence[int], bytes_max: int
    ) -> list[Mutation | str]:
        """The mutations with these sequence numbers, in the same order; what is damaged, in words,
        in place of one that is missing or whose chunk is damaged. Each chunk is checked once.

        Args:
            partition: The partition.
            seqs: The sequence numbers, in any order.
            bytes_max: The answer ends with the mutation that reaches so many bytes in all.
        """
        mutations: list[Mutation | str] = []
        with self.ordered_map.read() as transaction:
            chunks = _ChunkFinder(transaction, partition)
            for seq in seqs:
                try:
                    mutation = chunks.mutation(seq)
                except CorruptionError as error:
                    mutations.append(str(error))
                    continue
                mutations.append(mutation)
                bytes_max -= len(mutation.key) + len(mutation.value)
                if bytes_max <= 0:
                    break
        return mutations

    def measure_ranges(
        self, ranges: Iterable[tuple[int, int, int]], chunks_max: int
    ) -> list[tuple[int, SeqNo]]:
        """About how many bytes the chunks in each (partition, start, end] have. A chunk that
        reaches beyond the range counts by the share of its sequence numbers.

        Args:
            ranges: The ranges.
            chunks_max: How many chunks to look at, 1 or more.

        Returns:
            For each of the first ranges the bytes, and the number up to which they were counted:
            its end, but for the last one perhaps a lower number, from which to go on.
        """
        sizes: list[tuple[int, SeqNo]] = []
        with self.ordered_map.read() as transaction:
            for partition, start, end in ranges:
                nbytes, counted_through = 0, start
                last_key = chunk_key(partition, SEQS_END)
                scan = transaction.scan(chunk_key(partition, start + 1), last_key)
                for key, value in islice(scan, chunks_max):
                    chunks_max -= 1
                    _, through = parse_chunk_key(key)
                    if through > end:
                        share = end - counted_through, through - counted_through
                        nbytes += len(value) * share[0] // share[1]
                        counted_through = end
                        break
                    nbytes += len(value)
                    counted_through = through
                    if counted_through >= end:
                        break
                else:
                    if chunks_max:
                        # There are no more chunks.
                        counted_through = end
                sizes.append((nbytes, SeqNo(counted_through)))
                if not chunks_max:
                    break
        return sizes

    def chunk_bytes(self) -> dict[int, int]:
        """Stored bytes of chunks, by partition. O(chunks)."""
        sizes: dict[int, int] = {}
        last_key = chunk_key(PARTITIONS_END - 1, SEQS_END)
        with self.ordered_map.read() as transaction:
            for key, value in transaction.scan(CHUNK, last_key):
                partition, _ = parse_chunk_key(key)
                sizes[partition] = sizes.get(partition, 0) + len(value)
        return sizes


class _ChunkFinder:
    """Finds mutations of one partition, and checks each chunk once.

    Args:
        transaction: Where to look.
        partition: The partition.
    """

    def __init__(self, transaction: ReadTransaction, partition: int) -> None:
        self._transaction = transaction
        self._partition = partition
        # By their last number. They are views of what the transaction sees.
        self._chunks: SortedDict[int, Chunk] = SortedDict()
        self._damages: dict[bytes, str] = {}

    def mutation(self, seq: int) -> Mutation:
        """The mutation with a sequence number.

        Raises:
            CorruptionError: It is missing, or its chunk is damaged.
        """
        position = self._chunks.bisect_left(seq)
        chunk = self._chunks.peekitem(position)[1] if position < len(self._chunks) else None
        if chunk is None or chunk.start >= seq:
            chunk = self._chunk_of(seq)
            self._chunks[chunk.end] = chunk
        chunk_seqs = cast("Sequence[int]", chunk.seqs)
        row = bisect_left(chunk_seqs, seq)
        if row == chunk.count or chunk_seqs[row] != seq:
            raise CorruptionError(f"mutation {seq} of partition {self._partition} is missing")
        return chunk.mutation(row)

    def _chunk_of(self, seq: int) -> Chunk:
        first_key, last_key = chunk_key(self._partition, seq), chunk_key(self._partition, SEQS_END)
        for key, value in self._transaction.scan(first_key, last_key):
            if key in self._damages:
                raise CorruptionError(self._damages[key])
            try:
                chunk = parse_chunk(key, value)
            except CorruptionError as error:
                self._damages[key] = str(error)
                raise
            if chunk.start < seq:
                return chunk
            break
        raise CorruptionError(
            f"the chunk with mutation {seq} of partition {self._partition} is missing"
        )


def _front(chunk: Chunk, bytes_max: int) -> Chunk:
    """The first mutations of a chunk: as many as fit in so many bytes, and at least one."""
    keys, values = chunk.key_offsets, chunk.value_offsets

    def nbytes(count: int) -> int:
        return encoded_bytes(count, keys[count], values[count])

    count = max(1, bisect_right(range(chunk.count + 1), bytes_max, key=nbytes) - 1)
    if count >= chunk.count:
        return chunk
    return chunk.rows(0, count, chunk.start, SeqNo(chunk.seqs[count - 1]))
