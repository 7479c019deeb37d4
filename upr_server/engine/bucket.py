"""Buckets: named sets of partitions with a memory quota, made and deleted at run time.

When a bucket's memory is short, `Bucket.free_memory` frees it in this order: snapshots that the
disk has and no cursor needs, keys that the disk's index knows, superseded mutations (by
collapsing), and last the memory that slow cursors hold back (cursor drop). Below the quota it
collapses first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, Protocol

from upr_kernel import OpenRows
from upr_protocol.errors import Status, UprError
from upr_protocol.ids import HistoryId, PartitionId, PartitionState
from upr_protocol.limits import BUCKET_NAME_BYTES_MAX, PARTITIONS_DEFAULT, PARTITIONS_MAX
from upr_server.engine.memory_account import MemoryAccount
from upr_server.engine.memory_policy import QUOTA_BYTES_MIN, MemoryAction, MemoryPolicy
from upr_server.engine.partition import Partition
from upr_server.engine.partition_image import PartitionImage
from upr_server.engine.snapshots import RETURNED_BYTES

QUOTA_BYTES_DEFAULT: Final = 1024 * 1024 * 1024

STEP_MUTATIONS: Final = 4096
"""What one step of collapsing looks at: 1 to 3 ms, with the last chunk of it."""

STEP_PARTITIONS: Final = 64
"""Partitions that one step makes: at some 12 µs each, 1 ms."""

FREED_SNAPSHOTS_MAX: Final = 64
"""Snapshots that one step frees: at 10 to 30 µs each."""

_NAME: Final = re.compile(rf"(?!\.)[A-Za-z0-9._-]{{1,{BUCKET_NAME_BYTES_MAX}}}")


class BucketError(UprError):
    """A bucket could not be made or found.

    Attributes:
        status: `BUCKET_EXISTS`, `NO_BUCKET`, `BAD_ARGUMENT` or `LIMIT_REACHED`.
    """

    def __init__(self, message: str, status: Status) -> None:
        super().__init__(message)
        self.status = status


def check_bucket(name: str, partition_count: int, quota_bytes: int) -> None:
    """Whether there can be such a bucket.

    Raises:
        BucketError: There cannot: an argument is out of its range.
    """
    if not _NAME.fullmatch(name):
        raise BucketError(
            f"invalid bucket name {name!r}: use 1 to {BUCKET_NAME_BYTES_MAX} letters, digits, dots,"
            " underscores or hyphens, not beginning with a dot",
            Status.BAD_ARGUMENT,
        )
    if not 1 <= partition_count <= PARTITIONS_MAX:
        raise BucketError(
            f"a bucket has 1 to {PARTITIONS_MAX} partitions, not {partition_count}",
            Status.BAD_ARGUMENT,
        )
    if quota_bytes < QUOTA_BYTES_MIN:
        raise BucketError(
            f"a bucket's quota is {QUOTA_BYTES_MIN} bytes at least, not {quota_bytes}",
            Status.BAD_ARGUMENT,
        )


class Bucket:
    """A named set of partitions.

    Args:
        name: 1 to 100 of `A-Z a-z 0-9 . _ -`, not beginning with a dot: it is a file name too.
        partition_count: 1 to 1,024; fixed for the bucket's life, since keys are spread by it.
        quota_bytes: The memory it may take.
        new_history_id: Draws a fresh non-zero random ID.
        state: What this node is for its partitions.
        on_collapsible: Called when `needs_collapse` becomes true.
        images: Its partitions as the disk has them; None for a new bucket.
        incarnation: Which bucket of this name it is: a random number, or 0.
        on_update: Called whenever something in it has changed, with the keys of the design
            documents that did, and how many batches have changed something.
        in_steps: Whether it has no partitions before the last step of `make_partitions`.

    Attributes:
        name: The name.
        incarnation: Which bucket of this name it is.
        partitions: The partitions, by ID.
        memory: What it holds, by kind.
        memory_policy: When its memory runs short.

    Raises:
        BucketError: An argument is out of its range.
    """

    __slots__ = (
        "_collapsible",
        "_is_exhausted",
        "_next_to_free",
        "_on_collapsible",
        "_partitions_to_make",
        "incarnation",
        "memory",
        "memory_policy",
        "name",
        "open_rows",
        "partitions",
    )

    def __init__(
        self,
        name: str,
        *,
        new_history_id: Callable[[], HistoryId],
        partition_count: int = PARTITIONS_DEFAULT,
        quota_bytes: int = QUOTA_BYTES_DEFAULT,
        state: PartitionState = PartitionState.ACTIVE,
        on_collapsible: Callable[[], None] | None = None,
        images: Sequence[PartitionImage] | None = None,
        incarnation: int = 0,
        on_update: Callable[[Bucket, Sequence[bytes], int], None] | None = None,
        in_steps: bool = False,
    ) -> None:
        check_bucket(name, partition_count, quota_bytes)
        self.name = name
        self.incarnation = incarnation
        notify = partial(on_update, self) if on_update is not None else None
        self.memory = MemoryAccount()
        self.memory_policy = MemoryPolicy(quota_bytes)
        self._on_collapsible = on_collapsible
        # Partitions with something to collapse: a set that keeps its order.
        self._collapsible: dict[int, None] = {}
        self._is_exhausted = False
        # Where freeing goes on, so that all partitions have their turn.
        self._next_to_free = 0
        self.partitions: tuple[Partition, ...] = ()
        self.open_rows: tuple[OpenRows, ...] = ()
        self._partitions_to_make = (
            Partition(
                PartitionId(partition_id),
                new_history_id,
                state=state,
                memory=self.memory,
                on_collapsible=partial(self._became_collapsible, partition_id),
                image=images[partition_id] if images is not None else None,
                on_update=notify,
                answers_bytes_max=self.memory_policy.answers_bytes(partition_count),
            )
            for partition_id in range(partition_count)
        )
        if not in_steps:
            for _ in self.make_partitions():
                pass

    def make_partitions(self) -> Iterator[None]:
        """Makes its partitions, some in each step."""
        partitions: list[Partition] = []
        for partition in self._partitions_to_make:
            partitions.append(partition)
            if len(partitions) % STEP_PARTITIONS == 0:
                yield
        self.partitions = tuple(partitions)
        self.open_rows = tuple(partition.rows for partition in partitions)

    def __repr__(self) -> str:
        return f"<Bucket {self.name!r} of {len(self.partitions)} partitions>"

    def partition(self, partition_id: PartitionId) -> Partition | None:
        """The partition with this number; None when the bucket has fewer."""
        if 0 <= partition_id < len(self.partitions):
            return self.partitions[partition_id]
        return None

    def release_partitions(self) -> Iterator[None]:
        """The bucket was deleted: lets go of its partitions, in steps, so that their memory is
        freed once nobody else uses them. Callers that wait for replicas of a partition are told
        that these will not have it. The bucket has none from the first step on."""
        partitions, self.partitions = list(self.partitions), ()
        self.open_rows = ()
        self._collapsible.clear()
        while partitions:
            partition = partitions.pop()
            manager = partition.manager
            manager.stop_notifying()
            while manager.free_oldest() or manager.snapshots.return_memory():
                yield
            partition.replicas.clear()
            while partition.replicas.make_calls():
                yield
            yield

    # Keeping within the memory.

    @property
    def needs_collapse(self) -> bool:
        """Whether `collapse_step` has something to do. O(1)."""
        return bool(self._collapsible)

    def collapse_step(self, budget_mutations: int = STEP_MUTATIONS) -> bool:
        """Goes on collapsing, one partition after the other, for about so many mutations.

        Returns:
            Whether there is more to do.
        """
        if not self._collapsible:
            return False
        partition_id = next(iter(self._collapsible))
        del self._collapsible[partition_id]
        if self.partitions[partition_id].manager.collapse_step(budget_mutations):
            # At the end, so that all have their turn.
            self._collapsible[partition_id] = None
        return bool(self._collapsible)

    def _became_collapsible(self, partition_id: int) -> None:
        if not self.partitions:
            # The bucket was deleted. A reader of it may still close a snapshot.
            return
        needed_collapse = self.needs_collapse
        self._collapsible[partition_id] = None
        if not needed_collapse and self._on_collapsible is not None:
            self._on_collapsible()

    def memory_action(self) -> MemoryAction:
        """What its memory calls for now: `NOTHING`, freeing some (`FREE`), or keeping publishers
        waiting too (`REFUSE_CREDIT`). O(1)."""
        if not self.memory_policy.is_short(self.memory):
            self._is_exhausted = False
            return MemoryAction.NOTHING
        if self._is_exhausted or self.memory_policy.is_full(self.memory):
            return MemoryAction.REFUSE_CREDIT
        return MemoryAction.FREE

    def free_memory(self, budget_mutations: int = STEP_MUTATIONS) -> MemoryAction:
        """Frees some memory, if it is short, by the first means that helps, cursor drop last; in
        steps of about as many mutations or keys.

        Returns:
            What was done; `REFUSE_CREDIT` when nothing could be freed.
        """
        self._is_exhausted = False
        if not self.memory_policy.is_short(self.memory):
            return MemoryAction.NOTHING
        # Once over the quota, freeing what the disk has is quicker.
        if not self.memory_policy.is_full(self.memory) and self._collapse(budget_mutations):
            return MemoryAction.COLLAPSE
        for action, free in (
            (MemoryAction.FREE, self._free_snapshots),
            (MemoryAction.FREE, self._evict_keys),
            (MemoryAction.COLLAPSE, self._collapse),
            (MemoryAction.DROP, self._drop_cursors),
        ):
            if free(budget_mutations):
                return action
        self._is_exhausted = True
        return MemoryAction.REFUSE_CREDIT

    def _from_next(self) -> Iterator[Partition]:
        """Every partition once, beginning where the last call ended."""
        count = len(self.partitions)
        for _ in range(count):
            self._next_to_free = (self._next_to_free + 1) % count
            yield self.partitions[self._next_to_free]

    def _collapse(self, budget: int) -> bool:
        needed_collapse = self.needs_collapse
        self.collapse_step(budget)
        return needed_collapse

    def _free_snapshots(self, _budget: int) -> bool:
        freed_count, bytes_before = 0, self.memory.total
        for partition in self._from_next():
            if not partition.manager.free_oldest():
                continue
            freed_count += 1
            is_short = self.memory_policy.is_short(self.memory)
            freed_bytes = bytes_before - self.memory.total
            if freed_count == FREED_SNAPSHOTS_MAX or freed_bytes >= RETURNED_BYTES or not is_short:
                break
        return bool(freed_count)

    def _evict_keys(self, budget: int) -> bool:
        return any(partition.eviction.evict(budget) for partition in self._from_next())

    def _drop_cursors(self, _budget: int) -> bool:
        """Cursor drop: of the first partition that has any, drops the droppable cursors furthest
        back."""
        for partition in self._from_next():
            if partition.manager.drop_furthest_back():
                # At once: a reader that has not moved would soon register a cursor there again.
                partition.manager.free_oldest()
                return True
        return False

    # Figures and checks.

    def statistics(self) -> dict[str, object]:
        """Figures of the bucket. O(partitions)."""
        managers = [partition.manager for partition in self.partitions]
        return {
            "partitions": len(self.partitions),
            "items": sum(partition.item_count for partition in self.partitions),
            "keys": sum(len(partition.table) for partition in self.partitions),
            "cursors_dropped": sum(manager.dropped_count for manager in managers),
            "cursors": sum(manager.cursor_count for manager in managers),
            "snapshots": sum(len(partition.snapshots) for partition in self.partitions),
            "memory": self.memory.statistics(),
            "quota": self.memory_policy.statistics(),
        }

    def check_invariants(self) -> None:
        """Every partition, and that the memory counted is the memory held. Slow."""
        recount = MemoryAccount()
        for partition_id, partition in enumerate(self.partitions):
            assert partition.id == partition_id
            partition.check_invariants()
            partition.recount(recount)
            # What was to be collapsed may have been freed since; the next step finds that out.
            assert not partition.manager.needs_collapse or partition_id in self._collapsible
        recount.backfills = self.memory.backfills  # these are held elsewhere
        assert recount == self.memory, (recount, self.memory)


class BucketObserver(Protocol):
    """Hears what becomes of buckets. The engine calls it in the middle of a change: it must be
    quick and must not raise."""

    def bucket_created(self, bucket: Bucket) -> None:
        """A bucket was made."""

    def bucket_deleted(self, bucket: Bucket) -> None:
        """A bucket was deleted; nothing more of it will be heard."""

    def bucket_updated(self, bucket: Bucket, designs: Sequence[bytes], batch_count: int) -> None:
        """Something in a bucket has changed.

        Args:
            bucket: The bucket.
            designs: The keys of the design documents that changed. The bare prefix says that any of
                them may have.
            batch_count: How many batches were taken in together; 1 for a change that is not a
                batch.
        """


class Buckets:
    """The buckets of one node, by name.

    Args:
        new_history_id: Draws a fresh non-zero random ID.
        on_collapsible: Called when there is something to collapse in a bucket that had nothing.
        observer: Hears what becomes of buckets.
    """

    __slots__ = ("_buckets", "_new_history_id", "_observer", "_on_collapsible")

    def __init__(
        self,
        new_history_id: Callable[[], HistoryId],
        on_collapsible: Callable[[Bucket], None] | None = None,
        observer: BucketObserver | None = None,
    ) -> None:
        self._new_history_id = new_history_id
        self._on_collapsible = on_collapsible
        self._observer = observer
        self._buckets: dict[str, Bucket] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def __iter__(self) -> Iterator[Bucket]:
        """The buckets, by name."""
        return iter([self._buckets[name] for name in sorted(self._buckets)])

    def __contains__(self, name: str) -> bool:
        return name in self._buckets

    def create(
        self,
        name: str,
        partition_count: int = PARTITIONS_DEFAULT,
        quota_bytes: int = QUOTA_BYTES_DEFAULT,
        images: Sequence[PartitionImage] | None = None,
        *,
        incarnation: int = 0,
        is_new: bool = True,
    ) -> Bucket:
        """Makes a bucket in one step. O(partitions), about 12 µs each.

        Args:
            name: Its name.
            partition_count: How many partitions it has.
            quota_bytes: The memory it may take.
            images: Its partitions as the disk has them; None for a new bucket.
            incarnation: Which bucket of this name it is.
            is_new: Whether it is created now; else it was recovered from disk.

        Raises:
            BucketError: It exists, or an argument is out of its range.
        """
        bucket = self.begin(name, partition_count, quota_bytes, images, incarnation=incarnation)
        for _ in bucket.make_partitions():
            pass
        self.add(bucket, is_new=is_new)
        return bucket

    def begin(
        self,
        name: str,
        partition_count: int,
        quota_bytes: int,
        images: Sequence[PartitionImage] | None,
        *,
        incarnation: int,
    ) -> Bucket:
        """Begins a bucket, as `create` does. It has no partitions before `Bucket.make_partitions`,
        and is not found before `add`."""
        self.check_absent(name)
        return Bucket(
            name,
            new_history_id=self._new_history_id,
            partition_count=partition_count,
            quota_bytes=quota_bytes,
            on_collapsible=partial(self._became_collapsible, name),
            images=images,
            incarnation=incarnation,
            on_update=self._observer.bucket_updated if self._observer is not None else None,
            in_steps=True,
        )

    def add(self, bucket: Bucket, *, is_new: bool) -> None:
        """Adds a bucket that was begun, and that has its partitions."""
        self._buckets[bucket.name] = bucket
        if is_new and self._observer is not None:
            self._observer.bucket_created(bucket)

    def check_absent(self, name: str) -> None:
        """Raises `BucketError` when there is a bucket of this name."""
        if name in self._buckets:
            raise BucketError(f"bucket {name!r} exists already", Status.BUCKET_EXISTS)

    def get(self, name: str) -> Bucket | None:
        """The bucket of this name; None when there is no such bucket."""
        return self._buckets.get(name)

    def delete(self, name: str) -> Bucket:
        """Removes a bucket. Its readers may go on until its owner ends their streams.

        Raises:
            BucketError: No bucket has this name.
        """
        if name not in self._buckets:
            raise BucketError(f"there is no bucket {name!r}", Status.NO_BUCKET)
        bucket = self._buckets.pop(name)
        for partition in bucket.partitions:
            partition.updates.stop()
        if self._observer is not None:
            self._observer.bucket_deleted(bucket)
        return bucket

    def _became_collapsible(self, name: str) -> None:
        bucket = self._buckets.get(name)
        if bucket is not None and self._on_collapsible is not None:
            self._on_collapsible(bucket)
