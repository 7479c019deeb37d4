"""The maintenance of one bucket's disk: it indexes the log, and compacts it, in bounded steps.

The two take turns. Memory cannot be freed before it is indexed, and compaction knows a superseded
mutation by the index; but only compaction makes room on a full disk. Which is next depends on how
far the index is behind, and on how much of the log is garbage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec

from upr_protocol.ids import SeqNo
from upr_server.storage.chunk_log import ChunkLog
from upr_server.storage.compaction import Compaction
from upr_server.storage.errors import CorruptionError, DiskFullError
from upr_server.storage.key_index import KeyIndex
from upr_server.storage.leased_ranges import covered_ranges
from upr_server.storage.partition_usage import PartitionUsage
from upr_server.storage.records import LeaseRecord

Answer = TypeVar("Answer")

INDEX_MUTATIONS: Final = 32 * 1024
"""Mutations that one step of indexing takes in: 20 to 40 ms, for which a commit may wait."""

INDEX_LAG_MUTATIONS: Final = 128 * 1024
"""A bucket is indexed when the index is so far behind, or when it is urgent. Large batches touch
each page of the tree once for many keys, and of a key that changes often they see only the last."""

INDEX_DELETE_KEYS: Final = 64 * 1024
"""Keys that one step deletes from the index: some 50 ms, for which a commit may wait."""

COMPACTION_BYTES: Final = 4 * 1024 * 1024
"""Bytes of chunks that one step of a compaction goes over."""

GARBAGE_SHARE: Final = 0.35
"""A partition is compacted when its superseded mutations come to this share of the others, plus"""

GARBAGE_BYTES: Final = 192 * 1024 * 1024
"""its part of this. A bucket may have this much garbage, however little it holds."""

GARBAGE_SHARE_FULL: Final = 0.05
"""While the disk is full, this share alone is enough."""

STEPS: Final = (1, 1)
STEPS_URGENT: Final = (3, 1)
STEPS_WASTEFUL: Final = (1, 3)
"""Steps of indexing, and of compaction, in turn when both have something to do. Memory cannot be
freed before it is indexed, so indexing goes first when it is urgent; but not while more and more of
the disk is garbage."""

WASTEFUL_SHARE: Final = 0.7
"""A bucket is wasteful when its garbage exceeds this share of its live data plus twice
`GARBAGE_BYTES`."""


class IndexProgress(msgspec.Struct, frozen=True):
    """How far the index of a partition has come.

    Attributes:
        partition: The partition.
        indexed_seq: How far the index has followed its log.
        item_count: How many keys exist at `indexed_seq`.
    """

    partition: int
    indexed_seq: SeqNo
    item_count: int


class MaintenanceStep(msgspec.Struct, frozen=True):
    """What one step of a bucket's maintenance did.

    Attributes:
        partition: The partition that it worked on; None if there was nothing to do. A step of
            indexing works on the one whose index is furthest behind.
        indexed_seq: How far the index has followed its log.
        item_count: How many keys exist at `indexed_seq`.
        purge_seq: The partition's purge number.
        is_compaction: Whether it was a step of a compaction, and not of indexing.
        has_more: Whether there is more to do at once.
        broken_leases: Leases that compaction broke.
        damage: The damage that it met in the partition; empty for none.
        is_stuck: Whether the partition's index is damaged, and follows its log no further.
        other_partitions: Other partitions that were indexed in the same commit.
        full_reason: Why there was no room to index anything; empty if there was, or nothing was to
            be indexed.
    """

    partition: int | None = None
    indexed_seq: SeqNo = SeqNo(0)
    item_count: int = 0
    purge_seq: SeqNo = SeqNo(0)
    is_compaction: bool = False
    has_more: bool = False
    broken_leases: Sequence[int] = ()
    damage: str = ""
    is_stuck: bool = False
    other_partitions: Sequence[IndexProgress] = ()
    full_reason: str = ""


class BucketMaintenance:
    """Keeps a bucket's index and log in order.

    Args:
        log: The log.
        index: The index.
        partitions: What each partition uses of the disk; shared with the bucket's storage.

    Attributes:
        is_full: Whether the last commit found no room. Then less garbage is enough to compact.
        compactions: How many were done.
    """

    def __init__(
        self, log: ChunkLog, index: KeyIndex, partitions: Sequence[PartitionUsage]
    ) -> None:
        self.is_full = False
        self.compactions = 0
        self._log = log
        self._index = index
        self._partitions = partitions
        self._compaction: Compaction | None = None
        self._garbage_at_start = 0
        # Where the look for the next partition to compact begins.
        self._next_to_compact = 0
        self._steps_in_round = 0
        # How much one step does. Less than the most only while the disk has no room for so much.
        self._keys_to_delete = INDEX_DELETE_KEYS
        self._mutations_to_index = INDEX_MUTATIONS
        self._bytes_to_compact = COMPACTION_BYTES

    def abandon_compaction(self, partition: int | None = None) -> None:
        """Gives up the compaction under way, or only that of `partition`: what it goes by is about
        to change."""
        if partition is None or (
            self._compaction is not None and self._compaction.partition == partition
        ):
            self._compaction = None

    def delete_entries(self, partition: int) -> bool:
        """Deletes some of a partition's index entries. Each writes its pages again, and one that
        expires has a second record elsewhere: a full disk may have room for fewer. Their pages are
        free for later commits.

        Returns:
            Whether there may be more.

        Raises:
            DiskFullError: There is no room to delete even one.
        """
        has_more, self._keys_to_delete = _in_step_that_fits(
            lambda keys_max: self._index.delete_entries(partition, keys_max),
            self._keys_to_delete,
            INDEX_DELETE_KEYS,
        )
        return has_more

    def step(
        self,
        *,
        urgent: bool,
        leases: Sequence[tuple[int, int, int]],
        lapsed_leases: Sequence[LeaseRecord] = (),
        purge_before_cas: int,
        keep_unindexed: int = 0,
    ) -> MaintenanceStep:
        """One bounded step of indexing or compaction: they take turns when both have something to
        do. The call `Maintain` describes the arguments. Damage concerns the partition in which it
        is, and no other: the step tells of it.

        Raises:
            DiskFullError: There is not enough space, and nothing to compact that could make some;
                nothing has changed.
        """
        self._count_unleased(leases)
        partition = self._furthest_behind(urgent, keep_unindexed)
        compaction = self._due_compaction()
        full_reason = ""
        if partition is not None and (compaction is None or not self._compacts_next(urgent)):
            try:
                other_partitions, damage = self._follow(partition, keep_unindexed)
            except DiskFullError as error:
                if compaction is None:
                    raise
                # The index may have room only once the compaction has made some.
                full_reason = str(error) or "the disk is full"
            else:
                return self._outcome(
                    partition,
                    damage,
                    urgent,
                    keep_unindexed,
                    other_partitions=[self._index_progress(index) for index in other_partitions],
                )
        if compaction is None:
            return MaintenanceStep()
        broken_leases: Sequence[int] = ()
        try:
            broken_leases, damage = self._compact(
                compaction, leases, lapsed_leases, purge_before_cas
            )
        except CorruptionError as error:
            self._compaction = None
            damage = str(error)
        return self._outcome(
            compaction.partition,
            damage,
            urgent,
            keep_unindexed,
            is_compaction=True,
            broken_leases=broken_leases,
            full_reason=full_reason,
        )

    def _outcome(
        self,
        partition: int,
        damage: str,
        urgent: bool,
        keep_unindexed: int,
        *,
        is_compaction: bool = False,
        broken_leases: Sequence[int] = (),
        other_partitions: Sequence[IndexProgress] = (),
        full_reason: str = "",
    ) -> MaintenanceStep:
        """What a step did that worked on `partition`. Notes the damage that it met there."""
        usage = self._partitions[partition]
        # Before looking for more to do: a damaged partition is not compacted.
        if damage and not usage.damage:
            usage.damage = damage
        return MaintenanceStep(
            partition,
            usage.watermark.seq,
            usage.watermark.item_count,
            usage.purge_seq,
            is_compaction,
            self._furthest_behind(urgent, keep_unindexed) is not None
            or self._due_compaction() is not None,
            broken_leases,
            damage,
            usage.is_stuck,
            other_partitions,
            full_reason,
        )

    def _count_unleased(self, leases: Sequence[tuple[int, int, int]]) -> None:
        """Counts as garbage again what compaction has left for ranges that are leased no more."""
        usages = {
            partition: usage
            for partition, usage in enumerate(self._partitions)
            if usage.leased_bytes
        }
        if not usages:
            return
        ranges: dict[int, list[tuple[int, int]]] = {partition: [] for partition in usages}
        for partition, start, end in leases:
            if partition in ranges:
                ranges[partition].append((start, end))
        for partition, usage in usages.items():
            covered = covered_ranges(usage.leased_bytes, ranges[partition])
            usage.leased_bytes = {
                leased_range: usage.leased_bytes[leased_range] for leased_range in covered
            }

    def _index_progress(self, partition: int) -> IndexProgress:
        mark = self._partitions[partition].watermark
        return IndexProgress(partition, mark.seq, mark.item_count)

    def _compacts_next(self, urgent: bool) -> bool:
        garbage = sum(usage.garbage_bytes for usage in self._partitions)
        live = sum(usage.chunk_bytes for usage in self._partitions) - garbage
        if garbage > WASTEFUL_SHARE * live + 2 * GARBAGE_BYTES:
            indexing_steps, compaction_steps = STEPS_WASTEFUL
        else:
            indexing_steps, compaction_steps = STEPS_URGENT if urgent else STEPS
        self._steps_in_round = (self._steps_in_round + 1) % (indexing_steps + compaction_steps)
        return self._steps_in_round >= indexing_steps

    def _furthest_behind(self, urgent: bool, keep_unindexed: int) -> int | None:
        """The partition to index, or None if that is not due."""
        lags = [usage.lag for usage in self._partitions]
        lag_sum = sum(lags) - keep_unindexed
        if lag_sum <= 0 or (not urgent and lag_sum < INDEX_LAG_MUTATIONS):
            return None
        return max(range(len(lags)), key=lags.__getitem__)

    def _follow(self, partition: int, keep_unindexed: int) -> tuple[Sequence[int], str]:
        """Indexes the next part of a partition's log, and of others if there is little of it: a
        commit costs the same for many. Returns those, and what is damaged in the partition."""
        usage = self._partitions[partition]
        if usage.has_old_entries:
            # They would count as items that are overwritten; and the log may have been truncated
            # since, to an end below what they name.
            try:
                usage.has_old_entries = self.delete_entries(partition)
            except CorruptionError as error:
                usage.is_stuck = True
                return (), str(error)
            return (), ""
        # What stays unindexed is shared out among the partitions in proportion to their lags. The
        # first comes at least so far, and no other one further.
        lag_sum = sum(usage.lag for usage in self._partitions)
        stop_seqs: dict[int, SeqNo] = {}
        for index in self._furthest_first(partition):
            usage = self._partitions[index]
            rounding_up = 0 if index == partition else lag_sum - 1
            stop_seqs[index] = SeqNo(
                usage.high - (keep_unindexed * usage.lag + rounding_up) // lag_sum
            )
        try:
            marks, self._mutations_to_index = _in_step_that_fits(
                lambda mutations_max: self._index.follow_logs(stop_seqs, mutations_max),
                self._mutations_to_index,
                INDEX_MUTATIONS,
            )
        except CorruptionError:
            # Indexing this partition alone tells which one is damaged.
            return (), self._follow_alone(partition, stop_seqs[partition])
        for index, mark in marks.items():
            self._partitions[index].watermark = mark
        return [index for index in marks if index != partition], ""

    def _furthest_first(self, partition: int) -> list[int]:
        """A partition, and those that are indexed with it: those furthest behind, as many as come
        to `INDEX_MUTATIONS`, without damaged ones."""
        lags = {
            index: usage.lag
            for index, usage in enumerate(self._partitions)
            if usage.lag and not usage.damage and not usage.has_old_entries
        }
        partitions, lag_sum = [partition], self._partitions[partition].lag
        for index in sorted(lags, key=lags.__getitem__, reverse=True):
            if lag_sum >= INDEX_MUTATIONS or self._partitions[partition].damage:
                break
            if index != partition:
                partitions.append(index)
                lag_sum += lags[index]
        return partitions

    def _follow_alone(self, partition: int, through: SeqNo) -> str:
        """Indexes the next part of a partition's log. Returns what is damaged there."""
        usage = self._partitions[partition]
        try:
            usage.watermark = self._index.follow_log(partition, INDEX_MUTATIONS, through=through)
        except CorruptionError as error:
            try:
                usage.watermark = self._index.skip_damage(partition)
            except CorruptionError:
                usage.is_stuck = True
            return str(error)
        return ""

    def _due_compaction(self) -> Compaction | None:
        """The compaction under way, or a new one of the next partition with too much garbage. They
        take turns: one that changes much may have too much again as soon as it is done."""
        if self._compaction is None:
            share = GARBAGE_SHARE_FULL if self.is_full else GARBAGE_SHARE
            allowance_bytes = 0 if self.is_full else GARBAGE_BYTES // len(self._partitions)
            count = len(self._partitions)
            for offset in range(count):
                partition = (self._next_to_compact + offset) % count
                usage = self._partitions[partition]
                garbage = usage.garbage_bytes
                if usage.damage:
                    continue
                if garbage > share * (usage.chunk_bytes - garbage) + allowance_bytes:
                    through = usage.watermark.seq
                    self._compaction = Compaction(self._log, self._index, partition, through)
                    self._garbage_at_start = usage.watermark.garbage_bytes
                    self._next_to_compact = partition + 1
                    break
        return self._compaction

    def _compact(
        self,
        compaction: Compaction,
        leases: Sequence[tuple[int, int, int]],
        lapsed_leases: Sequence[LeaseRecord],
        purge_before_cas: int,
    ) -> tuple[Sequence[int], str]:
        """One step. Returns the leases that it broke, and what is damaged in the index."""
        usage = self._partitions[compaction.partition]
        leased_ranges = [
            (start, end) for partition, start, end in leases if partition == compaction.partition
        ]
        step, self._bytes_to_compact = _in_step_that_fits(
            lambda bytes_max: compaction.step(
                bytes_max, leased_ranges, purge_before_cas, lapsed_leases
            ),
            self._bytes_to_compact,
            COMPACTION_BYTES,
        )
        usage.chunk_bytes += step.grown_bytes
        usage.purge_seq = step.purge_seq
        if step.is_done:
            # What was superseded while it ran may be left, and counts. What leases protected is
            # left, too, and counts once they are released.
            new_bytes = max(0, usage.watermark.garbage_bytes - self._garbage_at_start)
            usage.leased_bytes = dict(compaction.left_bytes)
            garbage_bytes = new_bytes + sum(usage.leased_bytes.values())
            usage.watermark = msgspec.structs.replace(usage.watermark, garbage_bytes=garbage_bytes)
            self._compaction = None
            self.compactions += 1
        if step.is_done or step.purged_tombstones:
            # The log is compacted, and the server must learn the purge number whatever happens
            # here. Stale index entries of purged tombstones do no harm: they say "deleted".
            try:
                self._index.apply_compaction(
                    compaction.partition, step.purged_tombstones, usage.watermark.garbage_bytes
                )
            except DiskFullError:
                pass
            except CorruptionError as error:
                usage.is_stuck = True
                return step.broken_leases, str(error)
        return step.broken_leases, ""


def _in_step_that_fits(
    step: Callable[[int], Answer], size: int, size_max: int
) -> tuple[Answer, int]:
    """Takes a step of `size`, or a smaller one if a full disk has no room for that. Each step
    writes its pages again, and the pages before are free for later steps: so small ones may go on,
    and make room, where a large one cannot.

    Args:
        step: Takes a step of a size. If there is no room for it, it changes nothing.
        size: The size to begin with.
        size_max: The largest size.

    Returns:
        What the step answers, and the size of the next one.

    Raises:
        DiskFullError: There is no room even for a step of size 1.
    """
    while True:
        try:
            return step(size), min(2 * size, size_max)
        except DiskFullError:
            if size == 1:
                raise
            size = max(1, size // 8)
