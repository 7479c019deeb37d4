"""Compaction: rewriting chunks without superseded mutations, and small chunks into large ones.

A compaction goes over one partition from its oldest chunk to the index's watermark, in bounded
steps. A mutation is kept if the index names it as its key's newest (`live_seqs`), or if it lies in
a leased range: a reader of such a range gets the same versions each time. A lapsed lease protects
nothing, but can be renewed while its ranges are whole; so the commit that drops something of them
marks it broken.

A tombstone that is old enough is dropped once nothing older of its key is left. Going from the
oldest chunk on and leaving nothing superseded behind ensures that. A lease makes it leave something
only above the start of its ranges, so above the lowest start no tombstone is dropped. The last
mutation of a partition is never dropped: the log must end at the partition's high number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from upr_protocol.chunk import Chunk, ChunkBuilder
from upr_protocol.ids import Operation, SeqNo
from upr_server.storage.chunk_log import ChunkLog
from upr_server.storage.errors import CorruptionError
from upr_server.storage.key_index import KeyIndex
from upr_server.storage.leased_ranges import LeasedRanges, SeqRange, SeqRanges, covers_any
from upr_server.storage.live_seqs import SPAN, LiveSeqs
from upr_server.storage.records import (
    CHUNK_HEAD,
    FLOOR,
    PURGE,
    SEQS_END,
    LeaseRecord,
    chunk_head,
    chunk_key,
    lease_key,
    pack_record,
    partition_key,
    read_seq,
)

CHUNK_BYTES: Final = 256 * 1024
"""About how long the chunks that it writes are: `segment.SEGMENT_BYTES` of the engine says why."""

WHOLE_BYTES_MIN: Final = 64 * 1024
"""A chunk of at least this size of which nothing is dropped is not rewritten."""


class CompactionStep(msgspec.Struct, frozen=True):
    """What one step of a compaction did.

    Attributes:
        seq: How far the compaction has come.
        is_done: Whether it has come to its end.
        grown_bytes: By how much the log's chunks have grown: mostly a negative number.
        purge_seq: The partition's purge number now.
        purged_tombstones: Key and sequence number of each tombstone dropped.
        broken_leases: Lapsed leases of whose ranges something was dropped.
    """

    seq: SeqNo
    is_done: bool
    grown_bytes: int
    purge_seq: SeqNo
    purged_tombstones: Sequence[tuple[bytes, int]] = ()
    broken_leases: Sequence[int] = ()


class Compaction:
    """A compaction of one partition that is under way.

    Args:
        log: The bucket's log.
        index: The bucket's index.
        partition: The partition.
        through: Where it ends: not above the index's watermark.

    Attributes:
        partition: The partition.
        through: Where it ends.
        seq: How far it has come.
        left_bytes: About how many bytes of superseded mutations each leased range made it leave.
    """

    def __init__(self, log: ChunkLog, index: KeyIndex, partition: int, through: SeqNo) -> None:
        self._log = log
        self._index = index
        # What is superseded may be left above this.
        self._left_after = SEQS_END
        self._live_seqs: LiveSeqs | None = None
        self.partition = partition
        self.through = through
        self.seq = SeqNo(0)
        self.left_bytes: Counter[SeqRange] = Counter()

    def step(
        self,
        bytes_max: int,
        leases: SeqRanges,
        purge_before_cas: int,
        lapsed_leases: Sequence[LeaseRecord] = (),
    ) -> CompactionStep:
        """Goes over about `bytes_max` bytes of chunks, in one commit; or reads a part of the
        index, which tells what of them is superseded.

        Args:
            bytes_max: How many.
            leases: Ranges of this partition that are held now.
            purge_before_cas: Tombstones with a lower CAS are old enough: a CAS tells the time.
            lapsed_leases: Leases that protect nothing.

        Raises:
            CorruptionError: The log or the index is damaged; nothing was changed.
        """
        self._left_after = min([self._left_after, *(start for start, _ in leases)])
        high = self._log.high_seq(self.partition)
        live_seqs = self._read_live_seqs(high)
        if not live_seqs.is_complete:
            return self._unchanged_step()
        # Whole chunks: a rewritten one is stored under the same last number.
        read_chunks = self._log.read_chunks(self.partition, self.seq, high, bytes_max=bytes_max)
        due_chunks = [chunk for chunk in read_chunks if chunk.end <= self.through]
        chunks = [chunk for chunk in due_chunks if chunk.end <= live_seqs.through]
        if due_chunks and not chunks:
            self._live_seqs = None
            return self._unchanged_step()
        selection = _Selection(
            live_seqs,
            LeasedRanges(leases),
            purge_before_cas,
            min(self._left_after, high - 1),
            notes_dropped=bool(lapsed_leases),
        )
        replaced_chunks, new_chunks = _rewritten(chunks, selection)
        broken_leases = [
            lease
            for lease in lapsed_leases
            if covers_any(lease, self.partition, selection.dropped_seqs)
        ]
        purge_seq, grown_bytes = self._replace(
            replaced_chunks, new_chunks, selection.purged_tombstones, broken_leases
        )
        # This is noted only after the commit: a step that finds no space is repeated.
        self.left_bytes.update(selection.left_bytes)
        if chunks:
            self.seq = chunks[-1].end
        return CompactionStep(
            self.seq,
            len(chunks) == len(due_chunks)
            and (len(due_chunks) < len(read_chunks) or self.seq >= self.through),
            grown_bytes,
            purge_seq,
            selection.purged_tombstones,
            [lease.lease_id for lease in broken_leases],
        )

    def _read_live_seqs(self, high: SeqNo) -> LiveSeqs:
        """Reads on, if the numbers that are live where this goes on are not all known."""
        if self._live_seqs is None:
            chunks = self._log.read_chunks(self.partition, self.seq, high, bytes_max=1)
            through = max(self.seq + SPAN, chunks[0].end)
            self._live_seqs = LiveSeqs(self._index, self.partition, self.seq, through)
        if not self._live_seqs.is_complete:
            self._live_seqs.read_step()
        return self._live_seqs

    def _unchanged_step(self) -> CompactionStep:
        """A step that has changed nothing: only the index was read."""
        with self._log.ordered_map.read() as transaction:
            purge_seq = read_seq(transaction, partition_key(PURGE, self.partition))
        return CompactionStep(self.seq, False, 0, purge_seq)

    def _replace(
        self,
        replaced_chunks: list[Chunk],
        new_chunks: list[Chunk],
        purged_tombstones: list[tuple[bytes, int]],
        broken_leases: list[LeaseRecord],
    ) -> tuple[SeqNo, int]:
        partition, log = self.partition, self._log
        grown_bytes = sum(chunk.nbytes + CHUNK_HEAD.size for chunk in new_chunks)
        grown_bytes -= sum(chunk.nbytes + CHUNK_HEAD.size for chunk in replaced_chunks)
        purge_key = partition_key(PURGE, partition)
        floor_key = partition_key(FLOOR, partition)
        # What is dropped here may be superseded by any mutation up to the watermark, also by one
        # that this compaction has not come to. So up to there the log shows no state any more.
        floor = self._index.watermark(partition).seq
        with log.ordered_map.read() as transaction:
            purge_seq = read_seq(transaction, purge_key)
            has_floor = read_seq(transaction, floor_key) >= floor
        highest_purged = SeqNo(max((seq for _, seq in purged_tombstones), default=0))
        if not replaced_chunks:
            return purge_seq, 0
        with log.ordered_map.write() as transaction:
            for chunk in replaced_chunks:
                key = chunk_key(partition, chunk.end)
                if transaction.get(key) is None:
                    raise CorruptionError(f"{chunk!r} of partition {partition} is not in the log")
                transaction.delete(key)
            for chunk in new_chunks:
                key = chunk_key(partition, chunk.end)
                transaction.put(key, chunk_head(key, chunk.crc) + bytes(chunk))
            for lease in broken_leases:
                key = lease_key(lease.lease_id)
                record = msgspec.structs.replace(lease, is_whole=False)
                transaction.put(key, pack_record(key, record))
            if not has_floor:
                transaction.put(floor_key, pack_record(floor_key, floor))
            if highest_purged > purge_seq:
                purge_seq = highest_purged
                transaction.put(purge_key, pack_record(purge_key, purge_seq))
        return purge_seq, grown_bytes


def _left_bytes(
    chunk: Chunk,
    are_live: bytes,
    keep: bytearray,
    leased_ranges: LeasedRanges,
) -> dict[SeqRange, int]:
    """About how many bytes of a chunk are superseded and kept for each leased range."""
    counts: Counter[SeqRange] = Counter()
    for seq, is_live, is_kept in zip(chunk.seqs.tolist(), are_live, keep, strict=True):
        if is_kept and not is_live:
            leased_range = leased_ranges.range_of(seq)
            assert leased_range is not None, seq
            counts[leased_range] += 1
    return {
        leased_range: chunk.nbytes * count // chunk.count for leased_range, count in counts.items()
    }


def _purge(chunk: Chunk, keep: bytearray, before_cas: int, through: int) -> list[tuple[bytes, int]]:
    """Clears `keep` for the tombstones up to `through` that are old enough. Returns their keys and
    numbers."""
    operations = chunk.operations.tobytes()
    if chunk.start >= through or operations == bytes((Operation.SET,)) * chunk.count:
        return []
    purged_tombstones = []
    for row, (operation, cas, seq) in enumerate(
        zip(operations, chunk.cas.tolist(), chunk.seqs.tolist(), strict=True)
    ):
        if operation != Operation.SET and keep[row] and cas < before_cas and seq <= through:
            keep[row] = 0
            purged_tombstones.append((chunk.key(row), seq))
    return purged_tombstones


class _Selection:
    """Decides which mutations of successive chunks are kept, and gathers what becomes of others.

    Args:
        live_seqs: The mutations that the index names.
        leased_ranges: Ranges of which every mutation is kept.
        purge_before_cas: Tombstones with a lower CAS are old enough to be dropped,
        purge_through: those up to this number.
        notes_dropped: Whether to note what is not kept.

    Attributes:
        dropped_seqs: The numbers of what is not kept, if they are noted.
        left_bytes: About how many bytes of superseded mutations each leased range makes it keep.
        purged_tombstones: Key and sequence number of each tombstone that is not kept.
    """

    def __init__(
        self,
        live_seqs: LiveSeqs,
        leased_ranges: LeasedRanges,
        purge_before_cas: int,
        purge_through: int,
        *,
        notes_dropped: bool,
    ) -> None:
        self.dropped_seqs: list[int] = []
        self.left_bytes: Counter[SeqRange] = Counter()
        self.purged_tombstones: list[tuple[bytes, int]] = []
        self._live_seqs = live_seqs
        self._leased_ranges = leased_ranges
        self._purge_before_cas = purge_before_cas
        self._purge_through = purge_through
        self._notes_dropped = notes_dropped

    def rows_to_keep(self, chunk: Chunk) -> bytearray:
        """For each row of a chunk 1 if it is kept, and 0 if not."""
        seqs = chunk.seqs.tolist()
        are_live = self._live_seqs.are_live(seqs)
        keep = bytearray(are_live)
        if self._leased_ranges:
            for row, seq in enumerate(seqs):
                keep[row] = keep[row] or self._leased_ranges.range_of(seq) is not None
        self.purged_tombstones += _purge(chunk, keep, self._purge_before_cas, self._purge_through)
        if self._leased_ranges:
            self.left_bytes.update(_left_bytes(chunk, are_live, keep, self._leased_ranges))
        if self._notes_dropped:
            self.dropped_seqs += [
                seq for seq, is_kept in zip(seqs, keep, strict=True) if not is_kept
            ]
        return keep


def _rewritten(chunks: Iterable[Chunk], selection: _Selection) -> tuple[list[Chunk], list[Chunk]]:
    """The chunks to replace, and the chunks to put in their place."""
    rewrite = _Rewrite()
    for chunk in chunks:
        rewrite.add(chunk, selection.rows_to_keep(chunk))
    return rewrite.finish()


class _Rewrite:
    """Writes what is kept of successive chunks into new chunks that cover the same numbers."""

    def __init__(self) -> None:
        self._replaced: list[Chunk] = []
        self._written_chunks: list[Chunk] = []
        self._group: list[Chunk] = []
        self._builder = ChunkBuilder()

    def add(self, chunk: Chunk, keep: bytearray) -> None:
        is_whole = all(keep)
        # A group of which everything was dropped would become an empty chunk. Then even a large
        # chunk that could stay as it is joins the group.
        group_is_empty = self._group and not len(self._builder)
        if is_whole and chunk.nbytes >= WHOLE_BYTES_MIN and not group_is_empty:
            self._close_group()
            return
        self._group.append(chunk)
        self._builder.extend(chunk, None if is_whole else keep)
        if self._builder.nbytes >= CHUNK_BYTES:
            self._close_group()

    def finish(self) -> tuple[list[Chunk], list[Chunk]]:
        """The chunks to replace, and the chunks to put in their place."""
        self._close_group()
        return self._replaced, self._written_chunks

    def _close_group(self) -> None:
        group, self._group = self._group, []
        builder, self._builder = self._builder, ChunkBuilder()
        if not group or (len(group) == 1 and len(builder) == group[0].count):
            # Nothing to rewrite: one chunk of which nothing was dropped.
            return
        self._replaced += group
        self._written_chunks.append(builder.build(group[0].start, group[-1].end))
