"""Maintenance: has a bucket's log indexed and compacted, step by step, beside everything else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import structlog
import trio

from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import PartitionState
from upr_server.engine import Bucket, Partition
from upr_server.storage.api import Store
from upr_server.storage.bucket_storage import INDEX_LAG_MUTATIONS
from upr_server.storage.calls import Maintain
from upr_server.storage.errors import CorruptionError, DiskFullError
from upr_server.storage.online.flusher import Flusher
from upr_server.storage.online.leases import LeaseBook

IDLE_S: Final = 0.5
"""With no commit for so long the index takes in whatever there is."""

REST_S: Final = 10.0
"""How long a bucket with nothing to do is left alone by who hears of its updates otherwise: leases
lapse, and a wakeup may come late where the disk of the events is full."""

RETRY_S: Final = 1.0

_NANOSECONDS: Final = 1_000_000_000

log = structlog.get_logger(__name__)


class Maintenance:
    """See the module.

    Args:
        store: The disk.
        bucket: The bucket.
        flusher: Tells when something was committed.
        leases: What must be left readable.
        time: Seconds since 1970.
        purge_age_s: How old a tombstone must be to go.
        on_progress: Called when the index or a compaction has come further.
        rest_s: How long to leave a bucket alone with which there is nothing to do, unless woken.
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
        self._turn = trio.Lock()
        self._wakeup = trio.Event()
        self._progress = trio.Event()
        self._asked = 0
        self._corrupted = self._full = ""
        self._is_abandoned = False
        self._figures: dict[str, object] = {}
        self.undo_mutations = 0
        """So many of the newest mutations are left out of the index, unless memory is short or they
        are asked for: what is not indexed can be undone."""

    def wake(self) -> None:
        """There may be something to do."""
        self._wakeup.set()

    def committed(self) -> None:
        """Something was put on disk. Little of it can wait until somebody wakes this, or looks."""
        if self._flusher.unindexed() >= INDEX_LAG_MUTATIONS:
            self.wake()

    def abandon(self) -> None:
        """The bucket was deleted."""
        self._is_abandoned = True
        self._progress.set()

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """No step is under way for as long as the context: what is persisted now, and the purge
        numbers, are what the next step will respect.

        Raises:
            ServerError: `NO_BUCKET`.
        """
        async with self._turn:
            self.check_not_deleted()
            yield

    def check_not_deleted(self) -> None:
        """There may be another bucket of that name already. Raises `ServerError`."""
        if self._is_abandoned:
            raise ServerError(Status.NO_BUCKET, "the bucket was deleted")

    async def wait_until_indexed(self, partition: Partition) -> None:
        """Waits until the index knows all that was on disk when the server started.

        Raises:
            StorageError: It will not, as it stands.
            ServerError: `NO_BUCKET`.
        """
        self._asked += 1
        try:
            while not partition.eviction.is_index_ready:
                if self._corrupted:
                    raise CorruptionError(self._corrupted)
                self.check_not_deleted()
                if self._full:
                    raise DiskFullError(self._full)
                if self._progress.is_set():
                    # Others may wait for the one that there is.
                    self._progress = trio.Event()
                self.wake()
                await self._progress.wait()
        finally:
            self._asked -= 1

    async def run(self) -> None:
        """Does what there is to do, for ever."""
        while True:
            more = False
            self._wakeup = trio.Event()
            try:
                async with self._turn:
                    more = await self._step()
                self._full = ""
            except DiskFullError as error:
                # Indexing can wait, and compaction cannot make room without some; who asks cannot.
                self._full = str(error)
                self._flusher.index_moves(False)
                self._progress.set()
                await trio.sleep(RETRY_S)
            except CorruptionError as error:
                if not self._corrupted:
                    log.error(
                        "damaged record; indexing and compaction stopped; run upr-server check",
                        bucket=self._bucket.name,
                        error=str(error),
                    )
                self._corrupted = str(error)
                self._flusher.index_moves(False)
                self._progress.set()
                await trio.sleep_forever()
            if not more:
                with trio.move_on_after(self._rest_s if self._is_settled() else IDLE_S):
                    await self._wakeup.wait()

    def _is_settled(self) -> bool:
        """Whether there is nothing to do before something changes."""
        partitions = self._bucket.partitions
        behind = sum(partition.high_seq - partition.eviction.indexed for partition in partitions)
        return behind <= self.undo_mutations and not self._full and not self._is_asked()

    def _is_asked(self) -> bool:
        # A new active cannot be asked for what it does not know before that is indexed; with `keep`
        # that would else be never.
        return bool(self._asked) or (
            self.undo_mutations > 0
            and any(
                one.state is PartitionState.ACTIVE and not one.eviction.is_index_ready
                for one in self._bucket.partitions
            )
        )

    async def _step(self) -> bool:
        idle = trio.current_time() - self._flusher.last_commit_at >= IDLE_S
        short = self._bucket.quota.is_short(self._bucket.memory)
        asked = self._is_asked()
        await self._leases.delete_lapsed()
        done, self._figures = await self._store.ask(
            Maintain(
                self._bucket.name,
                urgent=idle or short or asked,
                leases=self._leases.ranges(),
                lapsed=self._leases.lapsed(),
                purge_before_cas=max(0, int((self._time() - self._purge_age_s) * _NANOSECONDS)),
                keep_unindexed=0 if short or asked else self.undo_mutations,
            )
        )
        self._leases.mark_broken(done.broken)
        self._flusher.index_moves(True)
        if done.partition < 0:
            return False
        partition = self._bucket.partitions[done.partition]
        partition.index_advanced(done.indexed, done.items)
        partition.purge_seq = max(partition.purge_seq, done.purge_seq)
        self._progress.set()
        self._on_progress()
        return done.has_more

    def statistics(self) -> dict[str, object]:
        """Figures of the bucket's disk, as of the last step, and of what is left to do."""
        return {
            **self._figures,
            "unindexed_mutations": self._flusher.unindexed(),
            "damaged": self._corrupted,
        }
