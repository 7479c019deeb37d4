"""What all connections share: the buckets, and the upkeep between requests."""

from __future__ import annotations

import gc
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

import structlog
import trio

from upr_protocol.errors import ServerError, Status
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import HistoryId, PartitionId, PartitionState, SeqNo
from upr_protocol.limits import SEND_TIMEOUT_S
from upr_protocol.transport import new_scratch
from upr_server.engine import (
    Bucket,
    Buckets,
    Listener,
    Partition,
    PartitionImage,
    Relief,
    check_bucket,
)
from upr_server.net.budget import FrameBudget
from upr_server.net.cluster import Alone, Cluster
from upr_server.net.connection import Connection
from upr_server.net.credit import CreditShares
from upr_server.net.events import Events, NoEvents
from upr_server.net.line import Line
from upr_server.runtime import HeapTrimmer
from upr_server.storage.api import Store
from upr_server.storage.calls import (
    CreateBucket,
    DeleteBucket,
    LoadBuckets,
    MarkCleanStop,
    StartServing,
)
from upr_server.storage.chunk_log import StoredBucket
from upr_server.storage.errors import CorruptionError, DiskFullError, StorageError
from upr_server.storage.online.bucket_disk import BucketDisk, recover_partitions
from upr_server.storage.online.maintenance import IDLE_S
from upr_server.storage.records import BucketRecord, LeaseRecord, PartitionRecord

COLLAPSE_MUTATIONS: Final = 2000
"""Mutations that one step of collapsing goes through: about a millisecond of the loop."""

PURGE_AGE_S: Final = 3 * 24 * 3600.0
"""A consumer that was away for less than this hears of every deletion when it comes back; one that
was away for longer may have to begin again."""

REPLICATION_TIMEOUT_S: Final = 30.0
"""Long enough for a replica that is being started again; then the publisher is told what is so."""

RELIEF_RETRY_S: Final = 0.05
"""When nothing could be freed, how soon to look again."""

EXPIRY_INTERVAL_S: Final = 1.0
"""How often expired items are turned into deletions; a read says missing at once in any case."""

REFUSALS_MAX: Final = 100
"""Connections beyond the limit that are told so at a time; the others are just closed."""

log = structlog.get_logger(__name__)


class Service:
    """The buckets of one server and the connections that use them.

    Args:
        store: The disk.
        identity: The server's name for itself, told to clients.
        quota_bytes_default: The memory quota of a bucket that is created without one.
        time: Seconds since 1970.
        new_history_id: Makes a random non-zero 64-bit number.
        connections_max: Connections at a time; one more is refused at once.
        send_timeout_s: How long a peer may take nothing of what waits for it.
        replication_timeout_s: How long replicas may take to have a batch.
        purge_age_s: How old a tombstone must be to be forgotten.
        listener: Told what becomes of buckets.
        rest_s: How long the disk of a bucket with which there is nothing to do is left alone,
            unless its `maintenance` is woken. Whoever gives more than the default wakes it.
    """

    def __init__(
        self,
        store: Store,
        *,
        identity: str,
        quota_bytes_default: int,
        time: Callable[[], float],
        new_history_id: Callable[[], HistoryId],
        connections_max: int,
        send_timeout_s: float = SEND_TIMEOUT_S,
        replication_timeout_s: float = REPLICATION_TIMEOUT_S,
        purge_age_s: float = PURGE_AGE_S,
        listener: Listener | None = None,
        rest_s: float = IDLE_S,
    ) -> None:
        self.store = store
        self.disks: dict[Bucket, BucketDisk] = {}
        self.identity = identity
        self.quota_bytes_default = quota_bytes_default
        self.time = time
        self.buckets = Buckets(new_history_id, self._is_collapsible, listener)
        self.connections: dict[Connection, None] = {}
        self.frame_budget = FrameBudget()
        self.scratch = new_scratch()
        self.credit_shares = CreditShares()
        self.send_timeout_s = send_timeout_s
        self.replication_timeout_s = replication_timeout_s
        self.cluster: Cluster = Alone()
        self.events: Events = NoEvents()
        self._new_history_id = new_history_id
        self._purge_age_s = purge_age_s
        self._rest_s = rest_s
        self._connections_max = connections_max
        self._lines: dict[Partition, Line] = {}
        self._disks_nursery: trio.Nursery
        # Buckets are made and deleted one after the other.
        self._turn = trio.Lock()
        self._refused = 0
        self._being_refused = 0
        self._waiting_for_room: dict[Connection, None] = {}
        # Buckets with something to collapse; a dict, so that they take turns.
        self._collapsible: dict[Bucket, None] = {}
        self._collapse_wanted = trio.Event()
        self._short: dict[Bucket, None] = {}
        # A bucket was deleted.
        self._has_garbage = False
        self._heap_trimmer = HeapTrimmer()
        self._relief_wanted = trio.Event()
        self._started_at = trio.current_time()

    async def serve(self, stream: trio.abc.HalfCloseableStream) -> None:
        """Serves one connection until it ends; what goes wrong in it stays in it."""
        connection = Connection(self, stream, _peer_of(stream))
        if len(self.connections) >= self._connections_max:
            await self._refuse(connection, stream)
            return
        self.connections[connection] = None
        try:
            await self._run(connection)
        finally:
            self.connections.pop(connection, None)
            self._waiting_for_room.pop(connection, None)
            if connection.bucket is not None:
                self.credit_shares.leave(connection.bucket, connection)

    async def _run(self, connection: Connection) -> None:
        try:
            await connection.run()
        except Exception:
            # A fault of ours must not take the other connections with it.
            log.exception("a connection failed", peer=connection.peer)

    async def _refuse(self, connection: Connection, stream: trio.abc.HalfCloseableStream) -> None:
        self._refused += 1
        log.warning("connection refused: too many", connections=len(self.connections))
        if self._being_refused >= REFUSALS_MAX:
            await trio.aclose_forcefully(stream)
            return
        connection.session.fail(
            Status.TOO_MANY, f"there are {len(self.connections)} connections already"
        )
        self._being_refused += 1
        try:
            await self._run(connection)
        finally:
            self._being_refused -= 1

    def bucket(self, name: str) -> Bucket:
        """The bucket of this name.

        Raises:
            ServerError: There is none.
        """
        bucket = self.buckets.get(name)
        if bucket is None:
            raise ServerError(Status.NO_BUCKET, f"there is no bucket {name!r}")
        return bucket

    # The disk.

    @asynccontextmanager
    async def recovered(self) -> AsyncIterator[None]:
        """The buckets that are on disk, for as long as the context; what changes meanwhile is on
        disk when it ends, and the mark of a clean stop with it.

        Raises:
            StorageError: What is on disk cannot be read.
        """
        async with trio.open_nursery() as nursery:
            self._disks_nursery = nursery
            for stored in await self._load():
                record = stored.record
                images, changed = recover_partitions(stored, self._new_history_id)
                await self.store.ask(StartServing(record.name, changed))
                log.info(
                    "bucket recovered",
                    bucket=record.name,
                    partitions=record.partition_count,
                    mutations=sum(image.high for image in images),
                    after="a clean stop" if stored.is_clean else "an unclean stop: new histories",
                )
                bucket = self.buckets.create(
                    record.name,
                    record.partition_count,
                    record.quota_bytes,
                    images,
                    incarnation=record.incarnation,
                    is_new=False,
                )
                self._attach(bucket, stored.leases)
                if stored.cluster_map:
                    partials = {
                        PartitionId(number): partition.record.partial
                        for number, partition in enumerate(stored.partitions)
                        if partition.record.partial is not None
                    }
                    self.cluster.restore(
                        self.disks[bucket],
                        stored.cluster_map,
                        partials,
                        is_clean=stored.is_clean,
                    )
            yield
            await self.cluster.stop()
            await self._stop_disks()
            nursery.cancel_scope.cancel()

    async def _stop_disks(self) -> None:
        """Brings every bucket to disk, and marks those that are there; one that finds no room does
        not keep the others from it."""
        failure: DiskFullError | None = None
        for disk in self.disks.values():
            disk.flusher.stop()
        for bucket, disk in self.disks.items():
            try:
                await disk.stop()
                if not self.cluster.is_suspect(bucket.name):
                    await self.store.ask(MarkCleanStop(bucket.name))
            except DiskFullError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    async def _load(self) -> list[StoredBucket]:
        try:
            return await self.store.ask(LoadBuckets())
        except CorruptionError as error:
            raise CorruptionError(f"{error}; run `upr-server check`") from error

    def disk_of(self, bucket: str) -> BucketDisk | None:
        """The disk of the bucket with this name, if there is one."""
        found = self.buckets.get(bucket)
        return None if found is None else self.disks[found]

    async def create_held(self, name: str, partition_count: int) -> BucketDisk:
        """Makes a bucket whose partitions are dead, and hold nothing.

        Raises:
            BucketError: It exists, or an argument is out of its range.
            StorageError: It could not be put on disk.
        """
        check_bucket(name, partition_count, self.quota_bytes_default)
        states = [PartitionState.DEAD] * partition_count
        async with self._turn:
            self.buckets.check_absent(name)
            with trio.CancelScope(shield=True):
                bucket = await self._make(name, self.quota_bytes_default, states)
        return self.disks[bucket]

    async def _make(self, name: str, quota_bytes: int, states: Sequence[PartitionState]) -> Bucket:
        images = []
        for state in states:
            failover_log = FailoverLog()
            if state is PartitionState.ACTIVE:
                failover_log = failover_log.branch(self._new_history_id(), SeqNo(0))
            images.append(PartitionImage(state, failover_log))
        incarnation = self._new_history_id()
        record = BucketRecord(name, len(states), quota_bytes, incarnation=incarnation)
        partitions = [
            PartitionRecord(image.state, tuple(image.failover_log.pairs()), SeqNo(0), 0)
            for image in images
        ]
        await self.store.ask(CreateBucket(record, partitions))
        bucket = self.buckets.create(
            name, len(states), quota_bytes, images, incarnation=incarnation
        )
        self._attach(bucket)
        return bucket

    def end_streams(
        self, bucket: Bucket, partition: PartitionId, status: Status, *, of_replicas: bool = True
    ) -> None:
        """Ends the streams of a partition, and says why; perhaps but those of replicas."""
        for connection in self.connections:
            if connection.bucket is bucket:
                if of_replicas or not connection.streamer.feeds_replica(partition):
                    connection.streamer.end(partition, status)
                connection.wake()

    def _attach(self, bucket: Bucket, leases: Sequence[LeaseRecord] = ()) -> None:
        disk = BucketDisk(
            self.store,
            bucket,
            time=self.time,
            new_id=self._new_history_id,
            purge_age_s=self._purge_age_s,
            leases=leases,
            on_memory_freed=self._there_is_room,
            rest_s=self._rest_s,
            nursery=self._disks_nursery,
        )
        self._disks_nursery.start_soon(disk.run)
        self.disks[bucket] = disk

    async def create_bucket(self, name: str, partition_count: int, quota_bytes: int) -> None:
        """Makes a bucket; it is on disk when this returns.

        Raises:
            BucketError: It exists, or an argument is out of its range.
            StorageError: It could not be put on disk.
        """
        check_bucket(name, partition_count, quota_bytes)
        async with self._turn:
            self.buckets.check_absent(name)
            # Who asked for it may go meanwhile: what is on disk must be here, and the reverse.
            with trio.CancelScope(shield=True):
                await self._make(name, quota_bytes, [PartitionState.ACTIVE] * partition_count)

    async def delete_bucket(self, name: str) -> None:
        """Deletes a bucket, and ends the streams of those who have it open.

        Raises:
            BucketError: There is none.
            StorageError: It could not be deleted.
        """
        async with self._turn:
            bucket = self.buckets.delete(name)
            self.cluster.drop_bucket(name)
            self._collapsible.pop(bucket, None)
            self._short.pop(bucket, None)
            self.credit_shares.forget(bucket)
            for connection in self.connections:
                if connection.bucket is bucket:
                    connection.leave_bucket()
            for partition in bucket.partitions:
                self._lines.pop(partition, None)
            # Who asked for it may go meanwhile.
            with trio.CancelScope(shield=True):
                await self.disks.pop(bucket).abandon()
                await self.store.ask(DeleteBucket(name))
                self._has_garbage = True

    def line(self, disk: BucketDisk, partition: Partition) -> Line:
        """The line before a partition."""
        line = self._lines.get(partition)
        if line is None:
            line = self._lines[partition] = Line(disk, partition)
        return line

    def wait_for_room(self, connection: Connection) -> None:
        """`connection` is to be paid its credit once its bucket has room."""
        self._waiting_for_room[connection] = None

    def shut_down(self) -> None:
        """Ends every connection with a reason; each closes once its peer took what is queued."""
        for connection in self.connections:
            connection.shut_down()

    # Upkeep.

    async def collapse(self) -> None:
        """Collapses snapshots in bounded steps, for ever, whenever there are any to collapse."""
        while True:
            if not self._collapsible:
                self._collapse_wanted = trio.Event()
                await self._collapse_wanted.wait()
            self._collapse_some(next(iter(self._collapsible)))
            self._pay_credit()
            await trio.lowlevel.checkpoint()

    def _collapse_some(self, bucket: Bucket) -> None:
        if not bucket.collapse_step(COLLAPSE_MUTATIONS):
            del self._collapsible[bucket]

    def _is_collapsible(self, bucket: Bucket) -> None:
        self._collapsible[bucket] = None
        self._collapse_wanted.set()

    def relieve(self, bucket: Bucket) -> None:
        """`bucket` is short of memory: some is to be freed."""
        self._short[bucket] = None
        self._relief_wanted.set()

    def _there_is_room(self) -> None:
        """The disk has come further, so that memory may be freed."""
        self._relief_wanted.set()

    async def free_memory(self) -> None:
        """Frees memory of buckets that are short of it, in bounded steps, for ever."""
        while True:
            self._relief_wanted = trio.Event()
            with trio.move_on_after(RELIEF_RETRY_S if self._short else math.inf):
                await self._relief_wanted.wait()
            await self._free_some()
            self._pay_credit()

    async def _free_some(self) -> None:
        for bucket in list(self._short):
            relief = Relief.FREE
            while relief not in (Relief.NOTHING, Relief.REFUSE_CREDIT):
                relief = bucket.relieve(COLLAPSE_MUTATIONS)
                self._pay_credit()
                await trio.lowlevel.checkpoint()
            if relief is Relief.NOTHING:
                self._short.pop(bucket, None)
            elif bucket in self.disks:
                self.disks[bucket].maintenance.wake()

    def _pay_credit(self) -> None:
        waiting, self._waiting_for_room = self._waiting_for_room, {}
        for connection in waiting:
            connection.pay_credit()

    async def expire(self) -> None:
        """Turns expired items into deletions, for ever; and returns memory that was freed."""
        while True:
            await trio.sleep(EXPIRY_INTERVAL_S)
            await self._expire(self.time())
            self._pay_credit()
            self._return_memory()

    def _return_memory(self) -> None:
        if self._has_garbage:
            # A bucket's parts know one another, and it is much in few objects: left alone, Python
            # might not look for it for hours.
            self._has_garbage = False
            gc.collect()
        self._heap_trimmer.note_use(sum([bucket.memory.total for bucket in self.buckets]))

    async def _expire(self, now: float) -> None:
        for bucket in self.buckets:
            for partition in bucket.partitions:
                # One that is not active expires nothing, whatever is due.
                expired = partition.expire(now)
                while expired:
                    await trio.lowlevel.checkpoint()
                    expired = partition.expire(now)
        for disk in list(self.disks.values()):
            try:
                await disk.expire(now)
            except CorruptionError as error:
                log.error("a damaged record", bucket=disk.bucket.name, error=str(error))
            except StorageError:
                # The bucket was deleted meanwhile, or the store fails, and all of it ends.
                pass
            if disk.bucket.relief() is not Relief.NOTHING:
                self.relieve(disk.bucket)
        for bucket in self.buckets:
            for partition in bucket.partitions:
                partition.replicas.give_up(trio.current_time())

    def statistics(self, bucket: str = "") -> dict[str, object]:
        """The server's figures, or one bucket's; sizes in bytes, times in seconds.

        Raises:
            ServerError: There is no such bucket.
        """
        if bucket:
            found = self.bucket(bucket)
            return {
                "bucket": bucket,
                **found.statistics(),
                **self.disks[found].statistics(),
                **self.cluster.statistics(bucket),
            }
        return {
            "server": {
                "identity": self.identity,
                "uptime_s": trio.current_time() - self._started_at,
                "connections": len(self.connections),
                "connections_refused": self._refused,
                "frame_bytes_under_way": self.frame_budget.used,
            },
            "buckets": {
                found.name: {**found.statistics(), **self.disks[found].statistics()}
                for found in self.buckets
                if found in self.disks
            },
            "events": self.events.statistics(),
            "connections": [connection.statistics() for connection in self.connections],
        }


def _peer_of(stream: trio.abc.HalfCloseableStream) -> str:
    if not isinstance(stream, trio.SocketStream):
        return "no socket"
    try:
        host, port = stream.socket.getpeername()[:2]
    except OSError:
        return "unknown"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
