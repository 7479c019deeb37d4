"""Maintenance: has a bucket's log indexed and compacted, step by step, while it is served."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import structlog
import trio

from upr_protocol.concurrency import Notifier
from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import PartitionId, PartitionState
from upr_server.engine import Bucket, Partition
from upr_server.storage.api import Store
from upr_server.storage.bucket_maintenance import INDEX_LAG_MUTATIONS, MaintenanceStep
from upr_server.storage.calls import Maintain
from upr_server.storage.errors import CorruptionError, DiskFullError
from upr_server.storage.online.flusher import FULL_DISK_RETRY_S, Flusher
from upr_server.storage.online.leases import LeaseBook

IDLE_S: Final = 0.5
"""After so long without a commit the index takes in what there is, however little."""

REST_S: Final = 10.0
"""How long a bucket with nothing to do is left alone by a server whose event bus wakes it after
updates. It is not for ever, because leases lapse."""

_NANOSECONDS: Final = 1_000_000_000

log = structlog.get_logger(__name__)


class Maintenance:
    """Maintains one bucket's disk.

    Args:
        store: The disk.
        bucket: The bucket.
        flusher: Its flusher, which may wait for the index.
        leases: Its leases, which protect ranges from compaction.
        time: Seconds since 1970.
        purge_age_s: How old a tombstone must be to be dropped.
        on_progress: Called when the index or a compaction has come further.
        rest_s: How long to leave a bucket alone that needs nothing, unless `wake` is called.
    """

    def __init__(
        self,
        store: Store,
        bucket: Bucket,
        flusher: Flusher,
        leases: LeaseBook,
        time: Callable[[], float],
        purge_age_s: float,
        on_progress: Callable[[], None],
        rest_s: float = IDLE_S,
    ) -> None:
        self._store = store
        self._bucket = bucket
        self._flusher = flusher
        self._leases = leases
        self._time = time
        self._purge_age_s = purge_age_s
        self._on_progress = on_progress
        self._rest_s = rest_s
        self._step_lock = trio.Lock()
        self._wakeup = Notifier()
        self._progress = Notifier()
        # Tasks in `wait_until_indexed`.
        self._waiters = 0
        self._disk_full_reason = ""
        # Why the index of a partition follows its log no further, by partition.
        self._stuck_reasons: dict[PartitionId, str] = {}
        self._is_abandoned = False
        self._last_commit_at = trio.current_time()
        self._figures: dict[str, object] = {}

    @property
    def undo_mutations(self) -> int:
        """How many of the newest mutations stay out of the index, unless memory is short or they
        are looked up: what is not indexed can be undone exactly."""
        return self._flusher.index_lag.left_unindexed

    @undo_mutations.setter
    def undo_mutations(self, count: int) -> None:
        self._flusher.index_lag.left_unindexed = count

    def wake(self) -> None:
        """Has it look for something to do."""
        self._wakeup.notify()

    def note_committed(self) -> None:
        """Tells of a commit. If there is little to index, it can wait until `run` looks again."""
        self._last_commit_at = trio.current_time()
        if self._flusher.index_lag.unindexed_count() >= INDEX_LAG_MUTATIONS + self.undo_mutations:
            self.wake()

    def abandon(self) -> None:
        """Tells that the bucket was deleted."""
        self._is_abandoned = True
        self._progress.notify()

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Keeps steps away for as long as the context: the next one respects what leases hold and
        what is persisted then.

        Raises:
            ServerError: `NO_BUCKET`: the bucket was deleted.
        """
        async with self._step_lock:
            self.check_not_deleted()
            yield

    def check_not_deleted(self) -> None:
        """Raises `ServerError` once the bucket was deleted. Calls to the disk name the bucket, and
        another of the same name may be there already."""
        if self._is_abandoned:
            raise ServerError(Status.NO_BUCKET, "the bucket was deleted")

    async def wait_until_indexed(self, partition: Partition) -> None:
        """Waits until the index has all that was on disk when the server started.

        Raises:
            StorageError: It cannot be indexed now.
            ServerError: `NO_BUCKET`: the bucket was deleted.
        """
        self._waiters += 1
        try:
            while not partition.eviction.is_index_ready:
                if partition.id in self._stuck_reasons:
                    raise CorruptionError(self._stuck_reasons[partition.id])
                self.check_not_deleted()
                if self._disk_full_reason:
                    raise DiskFullError(self._disk_full_reason)
                self.wake()
                await self._progress.wait()
        finally:
            self._waiters -= 1

    async def run(self) -> None:
        """Does what there is to do, until it is cancelled.

        Raises:
            StoreFailedError: The disk has failed.
        """
        while True:
            has_more = False
            # Taken before the step: a wakeup during the step counts.
            wakeup = self._wakeup.next_event()
            try:
                async with self._step_lock:
                    has_more = await self._step()
            except DiskFullError as error:
                # Indexing can wait, and even compaction needs some space. But those who wait for
                # the index must not.
                self._disk_full_reason = str(error)
                self._flusher.index_lag.set_can_move(False)
                self._progress.notify()
                await trio.sleep(FULL_DISK_RETRY_S)
            if not has_more:
                with trio.move_on_after(self._rest_s if self._is_idle() else IDLE_S):
                    await wakeup.wait()

    def _is_idle(self) -> bool:
        """Whether there is nothing to do until something changes."""
        unindexed_count = sum(
            partition.high_seq - partition.eviction.indexed_seq
            for partition in self._bucket.partitions
            if partition.id not in self._stuck_reasons
        )
        return (
            unindexed_count <= self.undo_mutations
            and not self._disk_full_reason
            and not self._is_urgently_needed()
        )

    def _is_urgently_needed(self) -> bool:
        # A partition that has just become active answers look-ups of stored keys only once all that
        # it had then is indexed. With `undo_mutations` that would be never.
        return bool(self._waiters) or (
            self.undo_mutations > 0
            and any(
                partition.state is PartitionState.ACTIVE
                and not partition.eviction.is_index_ready
                and partition.id not in self._stuck_reasons
                for partition in self._bucket.partitions
            )
        )

    async def _step(self) -> bool:
        """Returns whether there is more to do at once."""
        is_idle = trio.current_time() - self._last_commit_at >= IDLE_S
        needs_index = (
            self._bucket.memory_policy.is_short(self._bucket.memory) or self._is_urgently_needed()
        )
        self._leases.limit_times_left()
        await self._leases.delete_lapsed()
        # The step comes behind these on the disk.
        commits = self._flusher.commits_under_way()
        step, self._figures = await self._store.ask(
            Maintain(
                self._bucket.name,
                urgent=is_idle or needs_index,
                leases=self._leases.held_ranges(),
                lapsed_leases=self._leases.lapsed_leases(),
                purge_before_cas=self._purge_before_cas(),
                keep_unindexed=0 if needs_index else self.undo_mutations,
            )
        )
        for commit_noted in commits:
            # The step may have indexed them, and compacted what they supersede. The next task
            # relies on it that the disk has the state at the end that the partition names.
            await commit_noted.wait()
        self._leases.mark_broken(step.broken_leases)
        self._disk_full_reason = step.full_reason
        self._flusher.index_lag.set_can_move(not step.full_reason)
        if step.partition is None:
            return False
        partition = self._bucket.partitions[step.partition]
        self._note_damage(partition.id, step)
        partition.note_index_progress(step.indexed_seq, step.item_count)
        for progress in step.other_partitions:
            self._bucket.partitions[progress.partition].note_index_progress(
                progress.indexed_seq, progress.item_count
            )
        partition.purge_seq = max(partition.purge_seq, step.purge_seq)
        self._progress.notify()
        self._on_progress()
        return step.has_more

    def _purge_before_cas(self) -> int:
        # The age may be infinite, which no whole number is: then no tombstone is old enough.
        return int(max(0.0, self._time() - self._purge_age_s) * _NANOSECONDS)

    def _note_damage(self, partition: PartitionId, step: MaintenanceStep) -> None:
        """Damage concerns the partition in which it is, and no other."""
        if step.damage:
            log.error(
                "damaged record; the rest is served; run upr-server check",
                bucket=self._bucket.name,
                partition=partition,
                error=step.damage,
            )
        if self._bucket.partitions[partition].damage:
            # It was refused while this step was made.
            return
        if step.is_stuck:
            self._stuck_reasons.setdefault(partition, step.damage)
        else:
            self._stuck_reasons.pop(partition, None)
        self._flusher.index_lag.set_stuck(partition, step.is_stuck)

    def note_refused(self, partition: Partition) -> None:
        """A partition is refused, as a record of it is damaged: its index follows its log no
        further."""
        self._stuck_reasons[partition.id] = partition.damage
        self._flusher.index_lag.set_stuck(partition.id, True)
        self._progress.notify()
        # The figures of its disk are to name it.
        self.wake()

    def statistics(self) -> dict[str, object]:
        """Figures of the bucket's disk, as of the last step, and of what is left to do."""
        return {
            **self._figures,
            "unindexed_mutations": self._flusher.index_lag.unindexed_count(),
            "full": self._disk_full_reason,
        }
