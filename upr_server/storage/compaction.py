"""Compaction: chunks rewritten without what was superseded, small ones into large ones.

A sweep goes over one partition from its oldest chunk to where the index has come, in bounded steps.
A mutation is kept if the index names it as its key's newest, or if it lies in a range that is
leased: whoever reads such a range again reads the same again, every version in it. A lease that has
lapsed keeps nothing, but while nothing of its ranges is dropped it can be renewed; so the commit
that drops something marks it broken.

A tombstone that is old enough goes too, once nothing older of its key is left. The sweep sees to
that by going from the oldest on and leaving nothing superseded behind; where a lease made it leave
something, no tombstone goes. The last mutation of a partition is never dropped, whatever it is.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Final

import msgspec

from upr_protocol.chunk import Chunk, ChunkBuilder
from upr_protocol.ids import Operation, SeqNo
from upr_server.storage.chunk_log import ChunkLog
from upr_server.storage.errors import CorruptionError
from upr_server.storage.key_index import KeyIndex
from upr_server.storage.records import (
    CHUNK_HEAD,
    FLOOR,
    PURGE,
    IndexEntry,
    LeaseRecord,
    chunk_head,
    chunk_key,
    lease_key,
    number_in,
    pack_record,
    partition_key,
)

CHUNK_BYTES: Final = 256 * 1024
"""Chunks that result are about this long: `segment.SEGMENT_BYTES` of the engine says why."""

WHOLE_BYTES_MIN: Final = 64 * 1024
"""A chunk this long of which nothing goes stays as it is."""

Ranges = Sequence[tuple[int, int]]
"""Leased ranges of one partition: (start, end], start exclusive."""


class Swept(msgspec.Struct, frozen=True):
    """What one step did.

    Attributes:
        seq: How far the sweep has come.
        is_done: Whether it is at its end.
        grown_bytes: By how much the log's chunks have grown: mostly a negative number.
        purge_seq: The partition's purge number now.
        purged: Tombstones dropped, key and number.
        broken: Lapsed leases of whose ranges something was dropped.
    """

    seq: SeqNo
    is_done: bool
    grown_bytes: int
    purge_seq: SeqNo
    purged: Sequence[tuple[bytes, int]] = ()
    broken: Sequence[int] = ()


class Sweep:
    """A compaction of one partition under way.

    Args:
        log: The bucket's log.
        index: The bucket's index.
        partition: The partition.
        through: Where the sweep ends: not above the index's watermark.
    """

    def __init__(self, log: ChunkLog, index: KeyIndex, partition: int, through: SeqNo) -> None:
        self._log = log
        self._index = index
        self._left_behind = False
        self.partition = partition
        self.through = through
        self.seq = SeqNo(0)

    def step(
        self,
        bytes_max: int,
        leases: Ranges,
        purge_before_cas: int,
        lapsed: Sequence[LeaseRecord] = (),
    ) -> Swept:
        """Goes over about `bytes_max` bytes of chunks, in one commit.

        Args:
            bytes_max: How many.
            leases: Ranges that are held now.
            purge_before_cas: Tombstones with a lower CAS, which tells the time, are old enough.
            lapsed: Leases that hold nothing back.
        """
        partition, log = self.partition, self._log
        if leases:
            self._left_behind = True
        high = log.high(partition)
        # Whole chunks: what is put in their place stands where they end.
        read = log.read(partition, self.seq, high, bytes_max=bytes_max)
        chunks = [chunk for chunk in read if chunk.end <= self.through]
        rewriting = _Rewriting()
        held = _merged(leases)
        dropped: list[int] = []
        purged: list[tuple[bytes, int]] = []
        for chunk in chunks:
            entries = self._index.entries(partition, chunk.keys())
            seqs = chunk.seqs.tolist()
            keep = bytearray(
                _keeps(seq, entry, held) for seq, entry in zip(seqs, entries, strict=True)
            )
            if not self._left_behind:
                purged += _purge(chunk, keep, purge_before_cas, high)
            if lapsed:
                dropped += [seq for seq, kept in zip(seqs, keep, strict=True) if not kept]
            rewriting.take(chunk, keep)
        replaced, written = rewriting.finish()
        broken = [lease for lease in lapsed if _has_lost(lease, partition, dropped)]
        purge_seq, grown = self._replace(replaced, written, purged, broken)
        if chunks:
            self.seq = chunks[-1].end
        return Swept(
            self.seq,
            len(chunks) < len(read) or self.seq >= self.through,
            grown,
            purge_seq,
            purged,
            [lease.lease_id for lease in broken],
        )

    def _replace(
        self,
        replaced: list[Chunk],
        written: list[Chunk],
        purged: list[tuple[bytes, int]],
        broken: list[LeaseRecord],
    ) -> tuple[SeqNo, int]:
        number, log = self.partition, self._log
        grown = sum(chunk.nbytes + CHUNK_HEAD.size for chunk in written)
        grown -= sum(chunk.nbytes + CHUNK_HEAD.size for chunk in replaced)
        key = partition_key(PURGE, number)
        floor_key = partition_key(FLOOR, number)
        # The index says what is superseded, and by what: also by what is not swept yet.
        floor = self._index.watermark(number).seq
        with log.ordered_map.read() as transaction:
            purge_seq = number_in(transaction, key)
            is_known = number_in(transaction, floor_key) >= floor
        highest = SeqNo(max((seq for _, seq in purged), default=0))
        if not replaced:
            return purge_seq, 0
        with log.ordered_map.write() as transaction:
            for chunk in replaced:
                if transaction.get(chunk_key(number, chunk.end)) is None:
                    raise CorruptionError(f"{chunk!r} of partition {number} is not in the log")
                transaction.delete(chunk_key(number, chunk.end))
            for chunk in written:
                at = chunk_key(number, chunk.end)
                transaction.put(at, chunk_head(at, chunk.crc) + bytes(chunk))
            for lease in broken:
                at = lease_key(lease.lease_id)
                transaction.put(at, pack_record(at, msgspec.structs.replace(lease, is_whole=False)))
            if not is_known:
                transaction.put(floor_key, pack_record(floor_key, floor))
            if highest > purge_seq:
                purge_seq = highest
                transaction.put(key, pack_record(key, purge_seq))
        return purge_seq, grown


def _merged(ranges: Ranges) -> list[tuple[int, int]]:
    """The same numbers, in ranges that rise and do not touch."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif start < end:
            merged.append((start, end))
    return merged


def _keeps(number: int, entry: IndexEntry | None, held: list[tuple[int, int]]) -> bool:
    # A key that the index does not know had a tombstone that was purged: what is left is older.
    if entry is not None and abs(entry.number) == number:
        return True
    at = bisect_left(held, (number,)) - 1
    return at >= 0 and number <= held[at][1]


def _has_lost(lease: LeaseRecord, partition: int, dropped: list[int]) -> bool:
    """Whether one of these numbers, which rise, lies in the lease's ranges."""
    for number, start, end in lease.ranges:
        if number == partition:
            at = bisect_right(dropped, start)
            if at < len(dropped) and dropped[at] <= end:
                return True
    return False


def _purge(chunk: Chunk, keep: bytearray, before_cas: int, high: int) -> list[tuple[bytes, int]]:
    """Takes out of `keep` the tombstones that are old enough; returns their keys and numbers."""
    operations = chunk.operations.tobytes()
    if operations == bytes((Operation.SET,)) * chunk.count:
        return []
    purged = []
    for at, (operation, cas, seq) in enumerate(
        zip(operations, chunk.cas.tolist(), chunk.seqs.tolist(), strict=True)
    ):
        if operation != Operation.SET and keep[at] and cas < before_cas and seq != high:
            keep[at] = 0
            purged.append((chunk.key(at), seq))
    return purged


class _Rewriting:
    """Puts what is kept of a run of chunks into new ones that cover the same numbers."""

    def __init__(self) -> None:
        self._replaced: list[Chunk] = []
        self._written: list[Chunk] = []
        self._group: list[Chunk] = []
        self._builder = ChunkBuilder()

    def take(self, chunk: Chunk, keep: bytearray) -> None:
        whole = all(keep)
        if whole and chunk.nbytes >= WHOLE_BYTES_MIN and (len(self._builder) or not self._group):
            self._put_together()
            return
        self._group.append(chunk)
        self._builder.extend(chunk, None if whole else keep)
        if self._builder.nbytes >= CHUNK_BYTES:
            self._put_together()

    def finish(self) -> tuple[list[Chunk], list[Chunk]]:
        """What is to be replaced, and by what."""
        self._put_together()
        return self._replaced, self._written

    def _put_together(self) -> None:
        group, self._group = self._group, []
        builder, self._builder = self._builder, ChunkBuilder()
        if not group or (len(group) == 1 and len(builder) == group[0].count):
            return
        self._replaced += group
        self._written.append(builder.build(group[0].start, group[-1].end))
