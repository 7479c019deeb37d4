"""The work on buckets between requests: collapsing snapshots, freeing memory, expiring items, and
forgetting tombstones that the disk's index knows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import structlog
import trio

from upr_protocol.concurrency import Notifier
from upr_server.engine import Bucket, MemoryAction
from upr_server.runtime import HeapTrimmer, sums_in_steps
from upr_server.storage.errors import CorruptionError, StorageError
from upr_server.storage.online.bucket_disk import BucketDisk

COLLAPSE_MUTATIONS: Final = 2000
"""Mutations that one step of collapsing goes through: about a millisecond of the loop."""

EXPIRIES_STEP: Final = 1024
"""Entries of an index of expiry times that one step looks at."""

TOMBSTONES_STEP: Final = 8192
"""Keys of a hash table that one step of a sweep for tombstones looks at: below a millisecond."""

PARTITIONS_STEP: Final = 16
"""Partitions that one step looks at: some 25 µs if they have nothing to do, and up to 2 ms if many
expiry times are due of items that were stored again since."""

RELIEF_RETRY_S: Final = 0.05
"""When nothing could be freed, how soon to look again."""

EXPIRY_INTERVAL_S: Final = 1.0
"""How often expired items are turned into deletions; a read says missing at once in any case."""

REFUSALS_AGE_S: Final = 600.0
"""How long a partition remembers at least that it refused a publisher's batch. By then everything
that the publisher had sent behind the batch has arrived, or its connection has ended."""

log = structlog.get_logger(__name__)


class Upkeep:
    """Works on buckets in bounded steps, for as long as its loops run.

    Args:
        time: Seconds since 1970.
    """

    def __init__(self, time: Callable[[], float]) -> None:
        self._time = time
        self._disks: dict[Bucket, BucketDisk] = {}
        # Buckets with something to collapse; a dict, so that they take turns.
        self._collapsible: dict[Bucket, None] = {}
        self._collapse_wanted = Notifier()
        self._short: dict[Bucket, None] = {}
        self._relief_wanted = Notifier()
        self._after_step: list[Callable[[], Iterator[None]]] = []
        self._memory_counts: list[Callable[[], Iterator[int]]] = []
        self._heap_trimmer = HeapTrimmer()
        self._forgets_refusals_at = -math.inf
        # Why the disk could not tell which items have expired, when last asked.
        self._expiry_errors: dict[Bucket, str] = {}
        self.count_memory(lambda: sums_in_steps(self._disks, lambda bucket: bucket.memory.total))

    def add_bucket(self, disk: BucketDisk) -> None:
        """Works on one more bucket."""
        self._disks[disk.bucket] = disk

    def remove_bucket(self, bucket: Bucket) -> None:
        """A bucket was deleted."""
        self._disks.pop(bucket, None)
        self._collapsible.pop(bucket, None)
        self._short.pop(bucket, None)
        self._expiry_errors.pop(bucket, None)

    def count_memory(self, count: Callable[[], Iterator[int]]) -> None:
        """Has freed memory returned to the system when much more is resident than is in use.

        Args:
            count: How many bytes are in use for one purpose, in parts. Others may run after each.
        """
        self._memory_counts.append(count)

    def call_after_step(self, callback: Callable[[], Iterator[None]]) -> None:
        """Has `callback` called after each step that may have freed memory, and its own steps made;
        others have their turn between these."""
        self._after_step.append(callback)

    async def _end_step(self) -> None:
        for callback in self._after_step:
            for _ in callback():
                await trio.lowlevel.checkpoint()

    # Collapsing snapshots.

    def collapse_soon(self, bucket: Bucket) -> None:
        """`bucket` has something to collapse."""
        self._collapsible[bucket] = None
        self._collapse_wanted.notify()

    async def run_collapsing(self) -> None:
        """Collapses snapshots whenever there are any to collapse, until cancelled."""
        while True:
            # There may be nothing to do: a bucket that was deleted in the same turn is taken out.
            while not self._collapsible:
                await self._collapse_wanted.wait()
            bucket = next(iter(self._collapsible))
            del self._collapsible[bucket]
            if bucket.collapse_step(COLLAPSE_MUTATIONS):
                # At the end: one that always has something to collapse lets the others have turns.
                self._collapsible[bucket] = None
            await self._end_step()
            await trio.lowlevel.checkpoint()

    # Freeing memory.

    def request_relief(self, bucket: Bucket) -> None:
        """`bucket` is short of memory: some is to be freed. A deleted bucket is left alone."""
        if bucket not in self._disks:
            return
        self._short[bucket] = None
        self._relief_wanted.notify()

    def try_relief_again(self) -> None:
        """The disk has come further, so that more memory may be freed."""
        self._relief_wanted.notify()

    async def run_freeing(self) -> None:
        """Frees memory of buckets that are short of it, until cancelled."""
        while True:
            with trio.move_on_after(RELIEF_RETRY_S if self._short else math.inf):
                await self._relief_wanted.wait()
            await self._free_some()
            await self._end_step()

    async def _free_some(self) -> None:
        for bucket in list(self._short):
            relief = MemoryAction.FREE
            # At each checkpoint the bucket may be deleted.
            while bucket in self._disks and relief not in (
                MemoryAction.NOTHING,
                MemoryAction.REFUSE_CREDIT,
            ):
                relief = bucket.free_memory(COLLAPSE_MUTATIONS)
                if relief is MemoryAction.NOTHING:
                    # Now: when others have had their turn, it may be short again.
                    self._short.pop(bucket, None)
                await self._end_step()
                await trio.lowlevel.checkpoint()
            if relief is not MemoryAction.NOTHING and bucket in self._disks:
                # The rest must go to disk before it can be freed.
                self._disks[bucket].maintenance.wake()

    # Once a second: expiring items, and returning memory.

    async def run_expiring(self) -> None:
        """Turns expired items into deletions, until cancelled."""
        while True:
            await trio.sleep(EXPIRY_INTERVAL_S)
            now = self._time()
            await self._tend_partitions(now)
            await self._expire_on_disk(now)
            await self._end_step()

    async def run_returning_memory(self) -> None:
        """Gives freed memory back to the system, until cancelled. That may take many turns of the
        loop, and what expires does not wait for it."""
        while True:
            await trio.sleep(EXPIRY_INTERVAL_S)
            await self._return_memory()

    async def _tend_partitions(self, now: float) -> None:
        """Does what is due in each partition: most have nothing."""
        forgets_refusals = trio.current_time() >= self._forgets_refusals_at
        if forgets_refusals:
            self._forgets_refusals_at = trio.current_time() + REFUSALS_AGE_S
        for bucket in list(self._disks):
            for partition_count, partition in enumerate(bucket.partitions, 1):
                if bucket not in self._disks:
                    break  # deleted at a checkpoint
                while partition.may_expire(now) and not _is_exhausted(bucket):
                    partition.expire(now)  # a few items
                    await trio.lowlevel.checkpoint()
                await _repeat(partial(partition.clean_expiries, EXPIRIES_STEP))
                evict = partition.eviction.evict_tombstones
                await _repeat(partial(evict, TOMBSTONES_STEP, partition.high_seq))
                # Otherwise small snapshots would wait until there are more of them.
                partition.manager.consider_short_runs()
                answers = partition.repeated_batches.answers
                if forgets_refusals and answers.forget_old_refusals():
                    await trio.lowlevel.checkpoint()
                # Publishers whose replicas took too long are answered.
                await _repeat(partial(partition.replicas.make_calls, trio.current_time()))
                if partition_count % PARTITIONS_STEP == 0:
                    await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()

    async def _expire_on_disk(self, now: float) -> None:
        for disk in list(self._disks.values()):
            try:
                await disk.expire_on_disk(now)
                self._expiry_errors.pop(disk.bucket, None)
            except StorageError as error:
                self._note_expiry_error(disk, error)
            if disk.bucket.memory_action() is not MemoryAction.NOTHING:
                self.request_relief(disk.bucket)

    def _note_expiry_error(self, disk: BucketDisk, error: StorageError) -> None:
        """Logs an error once: a second later it is mostly the same."""
        bucket, text = disk.bucket, str(error)
        # A bucket that was deleted meanwhile needs nothing, and if the store fails all of it ends.
        if bucket not in self._disks or disk.store.failed.is_set():
            return
        if self._expiry_errors.get(bucket) != text:
            self._expiry_errors[bucket] = text
            is_damage = isinstance(error, CorruptionError)
            event = "damaged record" if is_damage else "expired items cannot be read"
            log.error(event, bucket=bucket.name, error=text)

    async def _return_memory(self) -> None:
        bytes_in_use = 0
        for count in self._memory_counts:
            for nbytes in count():
                bytes_in_use += nbytes
                await trio.lowlevel.checkpoint()
        for _ in self._heap_trimmer.note_use(bytes_in_use):
            await trio.lowlevel.checkpoint()


def _is_exhausted(bucket: Bucket) -> bool:
    """Whether the memory of a bucket has no room for more deletions. One takes memory until the
    disk has it, perhaps more than its item did; until there is room, the item reads as missing."""
    return bucket.memory_action() is MemoryAction.REFUSE_CREDIT


async def _repeat(step: Callable[[], object]) -> None:
    """Calls `step` until it has nothing more to do, and lets others run in between."""
    has_more = step()
    while has_more:
        await trio.lowlevel.checkpoint()
        has_more = step()
