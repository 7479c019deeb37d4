"""A replica that follows a fake active node: what it receives, undoes and has on disk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import attrs
import msgspec
import pytest
import structlog.testing
import trio
from trio.testing import MockClock

from tests.kit.answer_rows import unpack_rows
from tests.kit.fake_cluster import FakeCluster
from tests.kit.fake_partition import FakePartition
from tests.kit.fake_server import BUCKET, FakeServer
from tests.kit.placed_keys import key_in
from tests.kit.process import eventually
from tests.kit.steps import LargestStep
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.errors import ServerError, Status
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import (
    Cas,
    HistoryId,
    Operation,
    PartitionId,
    PartitionState,
    SeqNo,
    SnapshotKind,
)
from upr_protocol.partition_map import Assignment
from upr_protocol.wire import (
    Message,
    PartitionAnswers,
    PartitionChunk,
    PartitionStart,
    Stream,
)
from upr_server.app import Server, running_server
from upr_server.config import ServerConfig
from upr_server.engine import FetchRequest, MutateResult, Partition, WriterToken, batch_of
from upr_server.engine.mutate_result import pack_result
from upr_server.engine.publisher_answers import BATCHES_MAX
from upr_server.engine.snapshots.collapse import SHORT_RUN_BYTES_MAX
from upr_server.replication.received_answers import STEP_ANSWER_BYTES
from upr_server.replication.received_snapshots import PublisherAnswer, ReceivedSnapshots
from upr_server.replication.replica_writer import (
    COLLECTED_PARTITIONS,
    NOTIFIED_BYTES,
    NOTIFIED_CHUNK_BYTES,
    ReplicaWriter,
)
from upr_server.replication.replicator import (
    RECONNECT_S,
    REPLICATION_RETRY_S,
)
from upr_server.replication.roles import STEP_PARTITIONS
from upr_server.runtime import System
from upr_server.startup import _unsaved_mutations
from upr_server.storage.calls import (
    Commit,
    DeleteIndexEntries,
    LoadBuckets,
    Maintain,
    StoreCall,
    Truncate,
)
from upr_server.storage.errors import DiskFullError
from upr_server.storage.online.bucket_disk import BucketDisk
from upr_server.storage.online.maintenance import IDLE_S, REST_S
from upr_server.storage.online.unsaved_answers import STEP_ANSWERS
from upr_server.storage.records import (
    CLEAN_STOP,
    FLOOR,
    PartitionRecord,
    chunk_key,
    pack_record,
    partition_key,
)
from upr_server.storage.records import PARTITION as PARTITION_RECORD
from upr_server.storage.simulated import SimulatedStore

PARTITION: Final = PartitionId(0)
OTHER_PARTITION: Final = PartitionId(1)
REFUSED_EVENT: Final = "damaged partition; the others are served; run upr-server check"
NOW: Final = 1000.0
NEW_HISTORY: Final = 77
OTHER_HISTORY: Final = 78
LOST: Final = MutateResult(HistoryId(1), SeqNo(3), SeqNo(3), Cas(3))
"""The answer to a batch that only the lost history had."""


class Store(SimulatedStore):
    """A store in which commits find no room while `is_full`.

    Attributes:
        is_full: Whether the disk is full.
        fills_up: Whether the disk is full as soon as something was truncated.
        call_without_room: Another type of call that finds no room; None if there is none.
        commit_s: How long a commit takes.
        on_index_deletion: Called when index entries are to be deleted, which takes a second.
        urgent_steps: For each step of maintenance, whether it had to index even a few changes.
        truncations: The truncations so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_full = False
        self.fills_up = False
        self.call_without_room: type[StoreCall[Any]] | None = None
        self.commit_s = 0.0
        self.on_index_deletion: Callable[[], None] = lambda: None
        self.urgent_steps: list[bool] = []
        self.truncations: list[Truncate] = []

    async def wait(self, call: StoreCall[Any]) -> None:
        await super().wait(call)
        if type(call) is self.call_without_room:
            raise DiskFullError("no room")
        if isinstance(call, Commit):
            await trio.sleep(self.commit_s)
            if self.is_full:
                raise DiskFullError("no room")
        elif isinstance(call, DeleteIndexEntries):
            self.on_index_deletion()
            await trio.sleep(1.0)
        elif isinstance(call, Truncate):
            self.truncations.append(call)
            self.is_full = self.is_full or self.fills_up
        elif isinstance(call, Maintain):
            self.urgent_steps.append(call.urgent)


@attrs.frozen
class Replica:
    """The node `b`, which can follow the fake nodes `a` and `c`.

    Attributes:
        server: The node.
        store: Its disk.
        cluster: The other nodes, which share one partition.
        starts: The sequence number after which each requested stream was to start.
    """

    server: Server
    store: Store
    cluster: FakeCluster
    starts: list[SeqNo] = attrs.field(factory=list)

    @property
    def source(self) -> FakeServer:
        return self.cluster.server("a")

    @property
    def disk(self) -> BucketDisk:
        return self.server.catalog.disks[self.server.catalog.bucket(BUCKET)]

    @property
    def partition(self) -> Partition:
        return self.disk.bucket.partitions[PARTITION]

    async def assign(self, *assignments: Assignment) -> None:
        """Gives all nodes the next map, in which the first partitions have these assignments."""
        self.cluster.move(dict(enumerate(assignments)))
        new_map = self.cluster.map
        await self.server.partition_maps.set_map(new_map.revision - 1, new_map.encode())

    def record_start(self, message: Message) -> None:
        """Records after which sequence number a stream is requested."""
        if isinstance(message, Stream):
            self.starts.append(message.position.highest_received)

    async def receive(self, *keys: bytes) -> None:
        """Writes these keys to the source, one snapshot each, and waits until the replica has
        received them."""
        for key in keys:
            self.source.put(key, b"value")
            await eventually(self._has_reported, f"{key!r} was received")

    def _has_reported(self) -> bool:
        reports = self.source.reports
        high = self.source.partitions[PARTITION].high
        return bool(reports) and reports[-1].rows[-1][2] == high

    async def persist(self) -> None:
        """Waits until the replica has everything on disk that the source has."""
        await eventually(
            lambda: self.partition.high_seq == self.source.partitions[PARTITION].high,
            "the disk has everything",
        )

    async def lose(self, end: int) -> None:
        """The source begins a new history at `end`, and loses what is above it."""
        self.source.partitions[PARTITION].fail_over(NEW_HISTORY, end)
        self.source.end_streams(Status.STATE_CHANGED)
        await trio.sleep(1.0)  # the replica requests a new stream


@asynccontextmanager
async def replica(partition_count: int = 1) -> AsyncIterator[Replica]:
    """A replica of `a`, with a mock clock."""
    store = Store()
    async with trio.open_nursery() as nursery:
        cluster = FakeCluster(nursery, "ac", partition_count)
        cluster.map = msgspec.structs.replace(
            cluster.map, nodes={**cluster.map.nodes, "b": "127.0.0.1:1"}
        )
        config = ServerConfig(listen="127.0.0.1:0", node="b", buckets=())
        system = System(dial=cluster.dial)
        async with running_server(config, store, system) as server:
            follower = Replica(server, store, cluster)
            for name in "ac":
                cluster.server(name).refuse = follower.record_start
            cluster.map = msgspec.structs.replace(cluster.map, revision=0)
            await follower.assign(Assignment("a", {"b": ""}))
            yield follower
        nursery.cancel_scope.cancel()


def trouble(follower: Replica) -> str:
    """The reason for which the replica does not replicate, from its figures; empty if it does."""
    replicators = follower.server.partition_maps._buckets[BUCKET].replicators
    (figures,) = replicators.statistics()
    return str(figures["trouble"])


async def starts_after_a_full_disk(follower: Replica) -> set[SeqNo]:
    """After which sequence numbers streams are requested, after a map has ended a replication that
    found no room."""
    streams_before = len(follower.starts)
    with pytest.raises(DiskFullError):
        await follower.assign(Assignment("c"))
    await trio.sleep(REPLICATION_RETRY_S)
    return set(follower.starts[streams_before:])


async def test_a_replica_that_receives_changes_does_not_count_as_idle(
    autojump_clock: MockClock,
) -> None:
    """Each commit must be reported to the maintenance. Otherwise it would index a few changes at a
    time, as for an idle bucket."""
    async with replica() as follower:
        await follower.receive(b"0")
        await follower.persist()
        progress = follower.disk.progress.next_event()
        follower.store.urgent_steps.clear()
        for count in range(20):
            await follower.receive(b"%d" % count)
            await follower.persist()
            await trio.sleep(IDLE_S / 2)
        assert progress.is_set()
        assert follower.store.urgent_steps
        assert not any(follower.store.urgent_steps)
        await trio.sleep(2 * REST_S)
        assert follower.store.urgent_steps[-1]


async def test_a_map_is_refused_that_would_drop_what_waits_for_room(
    autojump_clock: MockClock,
) -> None:
    """The map fences this replica for a failover, and no other node may have what it received."""
    fenced = Assignment(replicas={"a": "", "b": ""}, lost_active="a")
    async with replica() as follower:
        await follower.receive(b"1", b"2", b"3")
        await follower.persist()
        map_before = follower.cluster.map
        follower.store.is_full = True
        await follower.receive(b"4")
        await trio.sleep(1.0)
        for _ in range(2):
            with pytest.raises(DiskFullError, match="waits for room"):
                await follower.assign(fenced)
            follower.cluster.map = map_before
        follower.store.is_full = False
        await trio.sleep(2 * REPLICATION_RETRY_S)
        await follower.assign(fenced)
        assert follower.partition.high_seq == 4


async def test_a_map_is_refused_for_what_a_commit_under_way_finds_no_room_for(
    autojump_clock: MockClock,
) -> None:
    """When the map arrives, it is not known yet that the disk is full. This replica may have the
    only copy of the change."""
    fenced = Assignment(replicas={"a": "", "b": ""}, lost_active="a")
    async with replica() as follower:
        await follower.receive(b"1")
        await follower.persist()
        map_before = follower.cluster.map
        follower.store.is_full = True
        follower.store.commit_s = 5.0
        await follower.receive(b"2")
        with pytest.raises(DiskFullError):
            await follower.assign(fenced)
        follower.cluster.map = map_before
        follower.store.is_full = False
        await trio.sleep(2 * follower.store.commit_s)
        await follower.assign(fenced)
        assert follower.partition.high_seq == 2


async def test_a_replica_receives_nothing_while_a_map_waits_for_its_commit(
    autojump_clock: MockClock,
) -> None:
    """Otherwise a busy source could keep a map from being applied. After the map is refused, the
    replica continues to receive."""
    async with replica() as follower, trio.open_nursery() as nursery:
        await follower.receive(b"1")
        await follower.persist()
        follower.store.is_full = True
        follower.store.commit_s = 5.0
        await follower.receive(b"2")
        new_map = follower.cluster.map.with_assignments({PARTITION: Assignment("c", {"b": ""})})

        async def wait_until_refused() -> None:
            with pytest.raises(DiskFullError):
                await follower.server.partition_maps.set_map(new_map.revision - 1, new_map.encode())
            follower.store.is_full = False
            follower.store.commit_s = 0.0

        nursery.start_soon(wait_until_refused)
        await trio.sleep(1.0)
        follower.source.put(b"3", b"value")
        await trio.sleep(1.0)
        assert not follower._has_reported()
        await eventually(follower._has_reported, "it was received")
        await follower.persist()


async def test_nobody_waits_for_a_commit_of_a_replication_that_has_ended(
    autojump_clock: MockClock,
) -> None:
    """A map waits for it. If it waited for ever, the node would apply no other map either."""
    async with replica() as follower:
        replicators = follower.server.partition_maps._buckets[BUCKET].replicators
        (replicator,) = replicators._replicators.values()
        received = {PARTITION: ReceivedSnapshots(FailoverLog(), SeqNo(0), Cas(0))}
        writer = ReplicaWriter(follower.server, follower.disk, received, replicator._streams)
        writer.mark_dirty(PARTITION)
        with trio.fail_after(60.0):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(writer.written.wait_until, lambda: writer.is_settled)
                await trio.testing.wait_all_tasks_blocked()
                writer.close()


async def test_a_replica_that_waits_for_room_writes_nothing_to_the_next_bucket_of_its_name(
    autojump_clock: MockClock,
) -> None:
    async with replica() as follower:
        await follower.receive(b"1")
        await follower.persist()
        follower.store.is_full = True
        await follower.receive(b"2")
        await trio.sleep(1.0)
        assert trouble(follower) == "no room"
        catalog = follower.server.catalog
        await catalog.delete_bucket(BUCKET)
        await catalog.create_bucket(BUCKET, 1, catalog.quota_bytes_default)
        follower.store.is_full = False
        await trio.sleep(60.0)
        (stored,) = (await follower.store.ask(LoadBuckets())).buckets
        assert stored.partitions[PARTITION].record.high == 0


async def test_a_stop_on_a_full_disk_tells_what_it_drops(autojump_clock: MockClock) -> None:
    """Otherwise the server would end as if everything were on disk."""
    followers: list[Replica] = []

    async def start_and_stop() -> None:
        async with replica() as follower:
            followers.append(follower)
            await follower.receive(b"1")
            await follower.persist()
            follower.store.is_full = True
            await follower.receive(b"2")

    with pytest.RaisesGroup(DiskFullError, flatten_subgroups=True):
        await start_and_stop()
    (follower,) = followers
    assert _unsaved_mutations([follower.server]) == {BUCKET: 1}
    (stored_bucket,) = (await SimulatedStore(follower.store.directory).ask(LoadBuckets())).buckets
    assert stored_bucket.is_clean, "the disks were stopped, too"


async def test_a_stop_on_a_full_disk_reports_what_an_unfinished_map_has_dropped(
    autojump_clock: MockClock,
) -> None:
    """The map removes the copy from the node, and waits for a commit. When it is refused, the
    replication has already ended."""
    followers: list[Replica] = []

    async def wait_until_refused(follower: Replica) -> None:
        with pytest.raises(DiskFullError):
            await follower.assign(Assignment("c"))

    async def start_and_stop(nursery: trio.Nursery) -> None:
        async with replica() as follower:
            followers.append(follower)
            await follower.receive(b"1")
            await follower.persist()
            follower.store.is_full = True
            follower.store.commit_s = 5.0
            await follower.receive(b"2")
            nursery.start_soon(wait_until_refused, follower)
            await trio.sleep(1.0)

    with pytest.RaisesGroup(DiskFullError, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            await start_and_stop(nursery)
    (follower,) = followers
    assert _unsaved_mutations([follower.server]) == {BUCKET: 1}


async def test_a_node_whose_disk_is_full_can_give_its_copies_up(autojump_clock: MockClock) -> None:
    async with replica() as follower:
        await follower.receive(b"1")
        await follower.persist()
        map_before = follower.cluster.map
        follower.store.is_full = True
        await follower.receive(b"2")
        await trio.sleep(1.0)
        with pytest.raises(DiskFullError):
            await follower.assign(Assignment("a"))
        follower.cluster.map = map_before
        await follower.assign(Assignment("a"))
        assert follower.partition.state is PartitionState.DEAD


async def test_a_full_disk_takes_a_replica_back_to_what_was_committed(
    autojump_clock: MockClock,
) -> None:
    """A map removes the copy, so the replication ends and drops what found no room. The map is
    refused, and the replica requests the dropped changes again."""
    async with replica() as follower:
        await follower.receive(b"1", b"2", b"3")
        await follower.persist()
        follower.store.is_full = True
        follower.store.commit_s = 5.0
        await follower.receive(b"4")
        assert await starts_after_a_full_disk(follower) == {3}


async def test_a_full_disk_drops_the_answers_of_the_batches_that_it_drops(
    autojump_clock: MockClock,
) -> None:
    """The node becomes active without these batches, and their publisher sends them again. If the
    node still had their answers, it would not apply them, and they would be lost."""
    async with replica() as follower:
        await follower.receive(b"1")
        await follower.persist()
        follower.store.is_full = True
        follower.store.commit_s = 5.0
        token = WriterToken(bytes(range(16)), 1)
        applied = MutateResult(HistoryId(1), SeqNo(2), SeqNo(2), Cas(2))
        follower.source.answers = ((token.writer, token.counter, 2, pack_result(applied)),)
        await follower.receive(b"2")
        follower.source.paused = True
        map_before = follower.cluster.map
        await starts_after_a_full_disk(follower)
        follower.cluster.map = map_before
        follower.store.is_full = False
        await follower.assign(Assignment("b", {"a": ""}))
        assert follower.partition.high_seq == 1
        chunk = Chunk.build([Mutation(Operation.SET, b"2", b"value")])
        result = follower.partition.mutate(batch_of(chunk, token), now=NOW)
        assert not result.is_repeated
        assert follower.partition.high_seq == 2
        (row,) = follower.partition.get([b"2"], NOW)
        assert row.value == b"value"


async def test_a_full_disk_takes_a_replica_back_to_what_a_rollback_left(
    autojump_clock: MockClock,
) -> None:
    async with replica() as follower:
        await follower.receive(b"1", b"2", b"3", b"4", b"5")
        await follower.persist()
        follower.store.fills_up = True
        follower.store.commit_s = 5.0
        await follower.lose(2)
        assert follower.store.is_full
        assert follower.partition.high_seq == 2
        assert await starts_after_a_full_disk(follower) == {2}


@pytest.mark.parametrize("lost_state", [PartitionState.ACTIVE, PartitionState.REPLICA])
async def test_a_replica_reports_one_state_while_it_does_not_reach_the_other(
    autojump_clock: MockClock, lost_state: PartitionState
) -> None:
    """The replica uses two connections to `a`: one for partitions that are active there, one for
    those that are replicas there. It must report what is on disk over either one, because
    publishers wait for it."""
    async with replica(partition_count=2) as follower:
        await follower.assign(Assignment("a", {"b": ""}), Assignment("c", {"a": "", "b": "a"}))
        source = follower.source

        def is_reported(partition: PartitionId) -> bool:
            rows = [row for report in source.reports for row in report.rows if row[0] == partition]
            return bool(rows) and rows[-1][3] == source.partitions[partition].high

        for partition in (PARTITION, OTHER_PARTITION):
            source.put(key_in(partition, 2, b"early"), b"value")
            await eventually(partial(is_reported, partition), "it is on disk and reported")
        lost_partition = PARTITION if lost_state is PartitionState.ACTIVE else OTHER_PARTITION
        reached = OTHER_PARTITION if lost_partition == PARTITION else PARTITION
        source.refuse = lambda message: (
            Status.WRONG_STATE
            if isinstance(message, Stream) and message.state is lost_state
            else None
        )
        (connection,) = (
            connection
            for connection in source.connections
            if lost_partition in connection.session.streams
        )
        connection.scope.cancel()
        await trio.sleep(2 * RECONNECT_S)
        source.put(key_in(reached, 2, b"late"), b"value")
        await eventually(partial(is_reported, reached), "it is on disk and reported")


async def test_changes_are_on_disk_with_their_history_though_another_partition_was_refused(
    autojump_clock: MockClock,
) -> None:
    """If the changes were stored with the failover log of the earlier history, a rollback would not
    undo them."""
    async with replica(partition_count=2) as follower:
        source = follower.source
        await follower.assign(*[Assignment("a", {"b": ""})] * 2)
        source.put(key_in(PARTITION, 2), b"value")
        await follower.persist()
        source.refuse = lambda message: (
            Status.WRONG_STATE
            if isinstance(message, Stream) and message.partition == OTHER_PARTITION
            else None
        )
        await follower.lose(1)
        source.refuse = lambda _message: None
        source.put(key_in(PARTITION, 2), b"newer value")
        await follower.persist()
        assert follower.partition.failover_log.current == NEW_HISTORY


async def test_a_partition_that_the_source_refuses_keeps_no_other_from_being_replicated(
    autojump_clock: MockClock,
) -> None:
    """The source's copy of that partition may be damaged; its other copies are not."""
    async with replica(partition_count=2) as follower:
        source = follower.source
        source.refuse = lambda message: (
            Status.NOT_MY_PARTITION
            if isinstance(message, Stream) and message.partition == OTHER_PARTITION
            else None
        )
        await follower.assign(*[Assignment("a", {"b": ""})] * 2)
        source.put(key_in(PARTITION, 2), b"value")
        await follower.persist()
        opens = source.bucket_opens
        await trio.sleep(20)
        source.put(key_in(PARTITION, 2), b"value")
        await follower.persist()
        assert "told to" in trouble(follower)
        source.refuse = lambda _message: None
        await trio.sleep(1)
        assert trouble(follower) == ""
        assert source.bucket_opens == opens, "the connection goes on"


async def test_the_figures_call_the_disk_full_only_while_it_is(autojump_clock: MockClock) -> None:
    async with replica() as follower:
        await follower.receive(b"1")
        await follower.persist()
        follower.store.is_full = True
        await follower.receive(b"2")
        await trio.sleep(1)
        assert trouble(follower) == "no room"
        follower.store.is_full = False
        await follower.persist()
        await trio.sleep(1)
        assert trouble(follower) == ""


async def test_a_rollback_keeps_what_was_received_and_not_yet_on_disk(
    autojump_clock: MockClock,
) -> None:
    """While a slow commit runs, the replica has received more changes that the new active node has,
    too."""
    async with replica() as follower:
        follower.store.commit_s = 5.0
        # The snapshots are too large to be joined, so a rollback can go to the end of each.
        await follower.receive(*(bytes(SHORT_RUN_BYTES_MAX) for _ in range(5)))
        assert follower.partition.high_seq < 4
        await follower.lose(4)
        await trio.sleep(30)
        assert follower.starts[-1] == 4


async def test_a_damaged_chunk_holds_up_no_rollback(autojump_clock: MockClock) -> None:
    """All partitions of a source share one connection, so a rollback that fails would stop the
    replication of all."""
    async with replica(partition_count=2) as follower:
        await follower.assign(*[Assignment("a", {"b": ""})] * 2)
        source = follower.source
        for _ in range(3):
            # The snapshots are too large to be joined.
            source.put(key_in(PARTITION, 2), bytes(SHORT_RUN_BYTES_MAX))
            await follower.persist()
        log, _ = follower.store.directory.disks[BUCKET]
        log.flip_bit(chunk_key(PARTITION, 2), 0)
        await follower.lose(2)
        source.put(key_in(OTHER_PARTITION, 2), b"value")
        other_partition = follower.disk.bucket.partitions[OTHER_PARTITION]
        await eventually(lambda: other_partition.high_seq == 1, "the other one is replicated")
        await follower.persist()
        assert follower.partition.failover_log.current == NEW_HISTORY
        assert SeqNo(1) in follower.starts


async def test_compaction_can_run_while_a_rollback_waits_for_room(
    autojump_clock: MockClock,
) -> None:
    """The disk becomes full between the last commit and the rollback, and a commit of another
    partition waits for room."""
    async with replica(partition_count=2) as follower:
        # Partitions in two states are replicated over two connections.
        await follower.assign(Assignment("a", {"b": ""}), Assignment("c", {"a": "", "b": "a"}))
        source, maintenance = follower.source, follower.disk.maintenance
        for _ in range(2):
            source.put(key_in(PARTITION, 2), b"value")
        await follower.persist()
        async with maintenance.paused():
            await follower.lose(1)
            follower.store.is_full = True
            source.put(key_in(OTHER_PARTITION, 2), b"value")
            await trio.sleep(1.0)
        with trio.fail_after(60.0):
            async with maintenance.paused():
                follower.store.is_full = False
        await eventually(lambda: follower.partition.high_seq == 1, "it has rolled back")
        other_partition = follower.disk.bucket.partitions[OTHER_PARTITION]
        await eventually(lambda: other_partition.high_seq == 1, "the disk has the other change")


async def test_a_rollback_starts_from_what_the_commit_before_it_has_left(
    autojump_clock: MockClock,
) -> None:
    """The rollback waits for a commit, which finds no room and drops what was received."""
    async with replica() as follower, trio.open_nursery() as nursery:
        await follower.receive(b"1", b"2")
        await follower.persist()
        replicators = follower.server.partition_maps._buckets[BUCKET].replicators
        (replicator,) = replicators._replicators.values()
        writer, rollback = replicator._writer, replicator._rollback
        async with writer.commit_lock:
            nursery.start_soon(rollback.roll_back, PARTITION, SeqNo(1), "a new history")
            await trio.testing.wait_all_tasks_blocked()
            await writer._drop_received()
        await eventually(lambda: follower.partition.high_seq == 1, "it has rolled back")
        assert replicator._received_snapshots[PARTITION].received_seq == 1


@pytest.mark.parametrize("call_without_room", [DeleteIndexEntries, Truncate])
async def test_a_rollback_that_finds_no_room_leaves_a_copy_that_can_be_read(
    autojump_clock: MockClock, call_without_room: type[StoreCall[Any]]
) -> None:
    """Its index entries may already be deleted."""
    async with replica() as follower:
        maintenance = follower.disk.maintenance
        undo_mutations, maintenance.undo_mutations = maintenance.undo_mutations, 0
        await follower.receive(b"1", b"2")
        await eventually(lambda: follower.partition.eviction.indexed_seq == 2, "it is indexed")
        maintenance.undo_mutations = undo_mutations
        follower.store.call_without_room = call_without_room
        await follower.lose(1)
        await eventually(lambda: trouble(follower) == "no room", "the rollback found no room")
        await follower.assign(Assignment("b"))
        with trio.fail_after(60.0):
            items = await follower.disk.find_items(
                follower.partition, [FetchRequest(b"1", 0, True)]
            )
        item = items[b"1"]
        assert item is not None
        assert item.value == b"value"


async def test_a_truncation_stops_when_its_bucket_is_deleted(
    autojump_clock: MockClock,
) -> None:
    """Deleting the index entries of a large partition takes seconds. By then there may be another
    bucket of the same name."""
    async with replica() as follower, trio.open_nursery() as nursery:
        disk, delete_bucket = follower.disk, follower.server.catalog.delete_bucket
        follower.store.on_index_deletion = partial(nursery.start_soon, delete_bucket, BUCKET)
        record = PartitionRecord(PartitionState.REPLICA, (), SeqNo(0), Cas(0))
        with pytest.raises(ServerError, match="the bucket was deleted"):
            await disk.truncate(PARTITION, record, [])


@pytest.mark.parametrize("is_map_new", [False, True])
async def test_a_snapshot_that_lacks_only_its_end_counts_once_its_answers_came(
    autojump_clock: MockClock, is_map_new: bool
) -> None:
    """The stream ended after the last chunk. Without the answers, a batch of this snapshot would be
    applied a second time if this node became active."""
    assignment = Assignment("a", {"b": ""})
    async with replica(partition_count=2) as follower:
        source = follower.source
        await follower.receive(key_in(PARTITION, 2))
        await follower.persist()
        source.paused = True
        source.put(key_in(PARTITION, 2), b"newer value")
        (connection,) = (c for c in source.connections if PARTITION in c.session.streams)
        session = connection.session
        assert session.next_partition() == PARTITION
        place: dict[str, Any] = {"partition": PARTITION, "opaque": session.opaque_of(PARTITION)}
        (*_, row) = source.partitions[PARTITION].history
        history_id = source.partitions[PARTITION].log.current
        start = PartitionStart(
            history_id, SeqNo(1), row.seq, SeqNo(0), SnapshotKind.MEMORY, False, **place
        )
        session.send(start)
        session.send(PartitionChunk(Chunk.build([row], SeqNo(1), row.seq), **place))
        connection.wake()
        await trio.sleep(1.0)
        if is_map_new:
            # The next replication has the chunk in memory.
            await follower.assign(assignment, assignment)
        else:
            connection.scope.cancel()
        await trio.sleep(2 * RECONNECT_S)
        assert 1 in follower.starts[1:]
        assert row.seq not in follower.starts
        assert not any(row.seq in report[2:] for ack in source.reports for report in ack.rows)
        token = WriterToken(bytes(range(16)), 1)
        applied = MutateResult(HistoryId(1), row.seq, row.seq, row.cas)
        source.answers = ((token.writer, token.counter, row.seq, pack_result(applied)),)
        source.resume()
        await follower.persist()
        assert follower.partition.high_seq == row.seq
        batch = batch_of(Chunk.build([Mutation(Operation.SET, row.key, b"newer value")]), token)
        assert not follower.partition.repeated_batches.is_new(batch)


class WritingSteps(trio.abc.Instrument):
    """Counts the steps of the task that writes what a replica received."""

    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += task.name.endswith("ReplicaWriter.run")


async def test_a_commit_of_many_partitions_is_collected_in_steps(
    autojump_clock: MockClock,
) -> None:
    """While a slow commit runs, the replica receives changes of all other partitions."""
    count = 32 * COLLECTED_PARTITIONS
    async with replica(count) as follower:
        await follower.assign(*[Assignment("a", {"b": ""})] * count)
        follower.store.commit_s = 5.0
        keys = [key_in(partition, count) for partition in range(count)]
        follower.source.put(keys[0], b"value")
        await trio.sleep(1)
        for key in keys[1:]:
            follower.source.put(key, b"value")
        await trio.sleep(1)
        steps = WritingSteps()
        trio.lowlevel.add_instrument(steps)
        await eventually(
            lambda: all(partition.high_seq for partition in follower.disk.bucket.partitions),
            "the disk has everything",
        )
        trio.lowlevel.remove_instrument(steps)
        assert steps.count > count // COLLECTED_PARTITIONS


async def test_what_a_full_disk_drops_is_dropped_in_steps(autojump_clock: MockClock) -> None:
    count = 32 * COLLECTED_PARTITIONS
    async with replica(count) as follower:
        await follower.assign(*[Assignment("a", {"b": ""})] * count)
        await trio.sleep(1)  # the logs are on disk
        follower.store.is_full = True
        follower.store.commit_s = 5.0
        for partition in range(count):
            follower.source.put(key_in(partition, count), b"value")
        await trio.sleep(1)
        steps = WritingSteps()
        trio.lowlevel.add_instrument(steps)
        with pytest.raises(DiskFullError):
            await follower.assign(*[Assignment("c")] * count)
        trio.lowlevel.remove_instrument(steps)
        assert steps.count > count // COLLECTED_PARTITIONS


class CountingSnapshots(dict[PartitionId, ReceivedSnapshots]):
    """Counts how often the received snapshots of a partition are looked up."""

    lookups = 0

    def __getitem__(self, partition_id: PartitionId) -> ReceivedSnapshots:
        self.lookups += 1
        return super().__getitem__(partition_id)


async def test_a_chunk_costs_the_same_however_many_partitions_wait_for_the_disk(
    autojump_clock: MockClock,
) -> None:
    """Before each chunk the replica compares the waiting bytes with its limit."""
    count = 32
    async with replica(count) as follower:
        await follower.assign(*[Assignment("a", {"b": ""})] * count)
        await trio.sleep(1)  # the logs are on disk
        follower.store.commit_s = 600.0
        keys = [key_in(partition, count) for partition in range(count)]
        follower.source.put(keys[0], b"value")
        await trio.sleep(1)
        replicators = follower.server.partition_maps._buckets[BUCKET].replicators
        (replicator,) = replicators._replicators.values()
        snapshots = CountingSnapshots(replicator._received_snapshots)
        for part in (replicator, replicator._writer, replicator._streams):
            part._received_snapshots = snapshots
        lookups: list[int] = []
        for key in keys[1:]:
            follower.source.put(key, b"value")
            await trio.sleep(1)
            lookups.append(snapshots.lookups)
        assert lookups[-1] - lookups[-2] == lookups[0]
        waiting_bytes = sum(part.nbytes for part in snapshots.values())
        assert replicator.statistics()["waiting_bytes"] == waiting_bytes > 0
        follower.store.commit_s = 0.0
        await trio.sleep(600)
        assert replicator.statistics()["waiting_bytes"] == 0


def answers_of(follower: Replica) -> int:
    """How many answers to publishers the replica remembers."""
    return len(follower.partition.repeated_batches.answers.answers_between(0, 1))


def answers_of_steps(count: int) -> tuple[PublisherAnswer, ...]:
    """So many answers that they are processed in `count` steps."""
    packed = pack_result(LOST)
    return tuple(
        (writer.to_bytes(16), counter, SeqNo(1), packed)
        for writer in range(1, count * STEP_ANSWERS // BATCHES_MAX + 1)
        for counter in range(BATCHES_MAX)
    )


async def test_many_answers_to_publishers_are_taken_in_steps(autojump_clock: MockClock) -> None:
    """A new replica receives the answers of a thousand publishers at once."""
    step_count = 4
    async with replica() as follower:
        follower.source.answers = answers_of_steps(step_count)
        largest_step = LargestStep(partial(answers_of, follower))
        trio.lowlevel.add_instrument(largest_step)
        await follower.receive(b"1")
        await follower.persist()
        trio.lowlevel.remove_instrument(largest_step)
        answers = follower.partition.repeated_batches.answers
        assert len(answers.answers_between(0, 1)) == step_count * STEP_ANSWERS
        assert largest_step.added_count == STEP_ANSWERS


async def test_many_answers_to_publishers_are_undone_in_steps(autojump_clock: MockClock) -> None:
    """The source has lost everything, and a partition may have 65,536 answers."""
    step_count = 2
    async with replica() as follower:
        follower.source.answers = answers_of_steps(step_count)
        await follower.receive(b"1")
        await follower.persist()
        assert answers_of(follower) == step_count * STEP_ANSWERS
        largest_step = LargestStep(lambda: -answers_of(follower))
        trio.lowlevel.add_instrument(largest_step)
        await follower.lose(0)
        await eventually(lambda: not answers_of(follower), "they are undone")
        trio.lowlevel.remove_instrument(largest_step)
        assert largest_step.added_count == STEP_ANSWERS
        (truncation,) = follower.store.truncations
        row_counts = [len(unpack_rows(rows)) for rows in truncation.answers]
        assert row_counts == [STEP_ANSWERS] * step_count
        (stored,) = (await follower.store.ask(LoadBuckets())).buckets
        assert not stored.partitions[PARTITION].tokens


async def test_answers_to_publishers_of_many_partitions_are_taken_in_steps(
    autojump_clock: MockClock,
) -> None:
    """The answers of one partition fit into a step; those of several together are too many for
    one."""
    count, writer_count = COLLECTED_PARTITIONS, STEP_ANSWERS // 8
    async with replica(count) as follower:
        await follower.assign(*[Assignment("a", {"b": ""})] * count)
        follower.store.commit_s = 5.0
        keys = [key_in(partition, count) for partition in range(count)]
        follower.source.put(keys[0], b"value")
        await trio.sleep(1)
        packed = pack_result(LOST)
        follower.source.answers = tuple(
            (writer.to_bytes(16), 1, 1, packed) for writer in range(1, writer_count + 1)
        )
        for key in keys[1:]:
            follower.source.put(key, b"value")
        partitions = follower.disk.bucket.partitions
        largest_step = LargestStep(lambda: sum(len(p.repeated_batches.answers) for p in partitions))
        trio.lowlevel.add_instrument(largest_step)
        await eventually(
            lambda: all(partition.high_seq for partition in partitions), "the disk has everything"
        )
        trio.lowlevel.remove_instrument(largest_step)
        assert largest_step.added_count == writer_count


async def test_large_answers_to_publishers_are_taken_in_more_steps(
    autojump_clock: MockClock,
) -> None:
    """Processing the answer to a thousand increments takes a hundred times as long as that to a few
    changes."""
    counters = [(index, index) for index in range(1000)]
    packed = pack_result(msgspec.structs.replace(LOST, counters=counters))
    count = 2 * STEP_ANSWER_BYTES // len(packed)
    async with replica() as follower:
        follower.source.answers = tuple(
            (writer.to_bytes(16), 1, 1, packed) for writer in range(1, count + 1)
        )
        largest_step = LargestStep(partial(answers_of, follower))
        trio.lowlevel.add_instrument(largest_step)
        await follower.receive(b"1")
        await follower.persist()
        trio.lowlevel.remove_instrument(largest_step)
        answers = follower.partition.repeated_batches.answers
        assert len(answers.answers_between(0, 1)) == count
        assert largest_step.added_count == count // 2 + 1


async def test_readers_of_many_committed_partitions_are_updated_in_steps(
    autojump_clock: MockClock,
) -> None:
    """After the commit each reader must continue from disk."""
    count = 8 * COLLECTED_PARTITIONS
    async with replica(count) as follower:
        await follower.assign(*[Assignment("a", {"b": ""})] * count)
        await trio.sleep(1)  # the logs are on disk
        partitions = follower.disk.bucket.partitions
        for partition in partitions:
            for _ in range(STEP_PARTITIONS):
                partition.manager.register("a reader", partition.high_seq)
        follower.source.paused = True
        for number in range(count):
            follower.source.put(key_in(number, count), b"value")
        steps = WritingSteps()
        trio.lowlevel.add_instrument(steps)
        follower.source.resume()
        await eventually(
            lambda: all(partition.high_seq for partition in partitions), "the disk has everything"
        )
        trio.lowlevel.remove_instrument(steps)
        assert steps.count > count


async def test_the_keys_of_a_large_commit_are_searched_in_steps(autojump_clock: MockClock) -> None:
    """A replica may receive 32 MiB of one partition before a slow commit ends."""
    count = 36
    async with replica() as follower:
        update_counts: list[int] = []
        follower.partition.updates._on_update = lambda _designs, updates: update_counts.append(
            updates
        )
        follower.source.chunk_mutations = 1
        follower.store.commit_s = 0.5
        for index in range(count):
            follower.source.put(b"%d" % index, bytes(4 * NOTIFIED_BYTES))
        largest_step = LargestStep(lambda: len(update_counts))
        trio.lowlevel.add_instrument(largest_step)
        await follower.persist()
        await trio.sleep(1)
        trio.lowlevel.remove_instrument(largest_step)
        assert len(update_counts) == count
        assert largest_step.added_count <= STEP_PARTITIONS // 4


async def test_many_small_chunks_of_a_snapshot_are_searched_in_steps(
    autojump_clock: MockClock,
) -> None:
    """If a source accepted changes one by one, its snapshot from disk has a chunk for each."""
    count = 800
    async with replica() as follower:
        update_counts: list[int] = []
        follower.partition.updates._on_update = lambda _designs, updates: update_counts.append(
            updates
        )
        source = follower.source
        source.chunk_mutations = 1
        source.paused = True
        for index in range(count):
            source.put(b"%d" % index, b"value")
        largest_step = LargestStep(lambda: len(update_counts))
        trio.lowlevel.add_instrument(largest_step)
        follower.store.commit_s = 5.0
        source.resume()
        await follower.persist()
        await trio.sleep(1)
        trio.lowlevel.remove_instrument(largest_step)
        assert len(update_counts) == count
        chunks_max = STEP_PARTITIONS * NOTIFIED_BYTES // NOTIFIED_CHUNK_BYTES
        assert largest_step.added_count <= chunks_max


async def test_unindexed_changes_can_be_undone_however_old_they_are(
    autojump_clock: MockClock,
) -> None:
    async with replica() as follower:
        await follower.receive(b"1", b"2", b"3", b"4", b"5")
        await trio.sleep(60)  # time for the index to catch up
        await follower.lose(3)
        assert follower.starts[-1] == 3


async def test_answers_of_a_snapshot_that_was_cut_off_are_dropped_with_it(
    autojump_clock: MockClock,
) -> None:
    """The next snapshot may belong to another history, which never had those batches."""
    async with replica() as follower:
        await follower.receive(b"1", b"2")
        await follower.persist()
        source = follower.source
        source.paused = True
        source.put(b"3", b"value")
        (connection,) = (c for c in source.connections if PARTITION in c.session.streams)
        session = connection.session
        assert session.next_partition() == PARTITION
        lost_answer = (bytes(16), 1, SeqNo(3), pack_result(LOST))
        session.send(
            PartitionAnswers(
                (lost_answer,), partition=PARTITION, opaque=session.opaque_of(PARTITION)
            )
        )
        connection.wake()
        await trio.sleep(1.0)
        source.paused = False
        await follower.lose(2)
        await follower.receive(b"4")
        await follower.persist()
        answers = follower.partition.repeated_batches.answers
        assert answers.answers_between(SeqNo(0), SeqNo(3)) == []


@pytest.mark.parametrize("assignment", [Assignment("a", {"b": ""}), Assignment("a")])
async def test_a_partition_that_is_no_longer_active_keeps_nothing_in_memory(
    autojump_clock: MockClock, assignment: Assignment
) -> None:
    async with replica() as follower:
        await follower.receive(b"1", b"2")
        await follower.persist()
        await follower.assign(Assignment("b", {"a": ""}))
        rows = [Mutation(Operation.SET, b"%d" % index, b"v") for index in range(3)]
        follower.partition.mutate(batch_of(Chunk.build(rows)), now=NOW)
        # The new active node has all of these changes, so nothing is undone.
        source = follower.source.partitions[PARTITION]
        source.mutate(Chunk.build(rows), bytes(16), 0)
        source.log = follower.partition.failover_log
        assert len(follower.partition.table) == 3
        await follower.assign(assignment)
        assert len(follower.partition.table) == 0
        assert follower.partition.snapshots.oldest_start == follower.partition.high_seq == 5


async def test_a_new_active_gives_higher_cas_values_than_the_old_one(
    autojump_clock: MockClock,
) -> None:
    async with replica() as follower:
        await follower.receive(b"1", b"2", b"3")
        await follower.persist()
        newest_cas = follower.source.partitions[PARTITION].history[-1].cas
        await follower.assign(Assignment("b", {"a": ""}))
        chunk = Chunk.build([Mutation(Operation.SET, b"4", b"v")])
        # The clock of `b` is behind.
        result = follower.partition.mutate(batch_of(chunk), now=0.0)
        assert result.first_cas > newest_cas


async def test_a_rollback_breaks_the_leases_on_what_it_undoes(autojump_clock: MockClock) -> None:
    """A lease that `b` granted while it was active covers a range that the rollback removes."""
    async with replica() as follower:
        await follower.receive(b"1", b"2")
        await follower.persist()
        await follower.assign(Assignment("b", {"a": ""}))
        rows = [Mutation(Operation.SET, b"%d" % index, b"v") for index in range(3)]
        follower.partition.mutate(batch_of(Chunk.build(rows)), now=NOW)
        await follower.disk.flusher.wait_until_persisted(follower.partition, SeqNo(5))
        leases = follower.disk.leases
        whole_lease = await leases.acquire(0, "reader", [(PARTITION, 0, 2)], 3600)
        broken_lease = await leases.acquire(0, "reader", [(PARTITION, 0, 5)], 3600)
        await follower.assign(Assignment("a", {"b": ""}))
        await follower.persist()
        assert follower.partition.high_seq == 2
        assert leases.get_whole(whole_lease.lease_id) == whole_lease
        with pytest.raises(ServerError) as refusal:
            leases.get_whole(broken_lease.lease_id)
        assert refusal.value.status is Status.RANGE_GONE


async def test_a_replica_that_copies_takes_the_purge_number_of_its_source(
    autojump_clock: MockClock,
) -> None:
    """The copy never had the deletions up to that number, so a consumer that missed them must roll
    back."""
    async with replica() as follower:
        follower.source.partitions[PARTITION].purge_seq = SeqNo(2)
        follower.source.paused = True
        for key in (b"1", b"2", b"3"):
            follower.source.put(key, b"value")
        follower.source.resume()
        await follower.persist()
        assert follower.partition.purge_seq == 2
        follower.source.partitions[PARTITION].purge_seq = SeqNo(4)
        await follower.receive(b"4", b"5")
        await follower.persist()
        assert follower.partition.purge_seq == 2, "it received the later deletions"


async def wait_until_refused(follower: Replica) -> list[Any]:
    """Waits until the first partition is refused. Returns what is in the figures of the disk."""
    await eventually(lambda: bool(follower.partition.damage), "the partition is refused")
    assert follower.partition.state is PartitionState.DEAD
    await trio.sleep(2 * REST_S)
    figures: Any = follower.disk.statistics()["disk"]
    return list(figures["damaged_partitions"])


async def test_a_record_that_is_damaged_while_it_is_replicated_refuses_its_partition_alone(
    autojump_clock: MockClock,
) -> None:
    """The damage must not end the server."""
    with structlog.testing.capture_logs() as logged:
        async with replica(partition_count=2) as follower:
            await follower.assign(*[Assignment("a", {"b": ""})] * 2)
            source = follower.source
            other_partition = follower.disk.bucket.partitions[OTHER_PARTITION]
            source.put(key_in(PARTITION, 2), b"value")
            source.put(key_in(OTHER_PARTITION, 2), b"value")
            await follower.persist()
            log, _ = follower.store.directory.disks[BUCKET]
            log.flip_bit(partition_key(PARTITION_RECORD, PARTITION), 60)
            before = log.keys()
            # Both changes are in one commit.
            source.put(key_in(PARTITION, 2), b"lost")
            source.put(key_in(OTHER_PARTITION, 2), b"newer")
            assert await wait_until_refused(follower) == [PARTITION]
            assert other_partition.high_seq == 2
            for count in range(3):
                source.put(key_in(PARTITION, 2), b"more")
                source.put(key_in(OTHER_PARTITION, 2), b"more")
                await eventually(
                    lambda end=count + 3: other_partition.high_seq == end,  # type: ignore[misc]
                    "the other one is replicated",
                )
            assert trouble(follower) == ""
            assert follower.partition.high_seq == 1
            # A map with other changes is applied, and the partition stays refused.
            await follower.assign(*[Assignment("a", {"b": "", "c": ""})] * 2)
            source.put(key_in(OTHER_PARTITION, 2), b"last")
            await eventually(lambda: other_partition.high_seq == 6, "it goes on")
            assert follower.partition.state is PartitionState.DEAD
            chunks = [chunk_key(OTHER_PARTITION, end) for end in range(2, 7)]
            assert set(log.keys()) - set(before) <= set(chunks)
    events = [(event["event"], event.get("partition")) for event in logged]
    assert events.count((REFUSED_EVENT, PARTITION)) == 1
    assert not [event for event in logged if event["event"] == "replication interrupted; retrying"]
    assert CLEAN_STOP in log.keys()  # noqa: SIM118


@pytest.mark.parametrize("kind", [PARTITION_RECORD, FLOOR])
async def test_a_rollback_that_meets_a_damaged_record_refuses_its_partition_alone(
    autojump_clock: MockClock, kind: bytes
) -> None:
    """The other partitions of that source are still replicated."""
    async with replica(partition_count=2) as follower:
        await follower.assign(*[Assignment("a", {"b": ""})] * 2)
        source = follower.source
        for _ in range(3):
            source.put(key_in(PARTITION, 2), bytes(SHORT_RUN_BYTES_MAX))
            await follower.persist()
        log, _ = follower.store.directory.disks[BUCKET]
        key = partition_key(kind, PARTITION)
        if kind == FLOOR:
            with log.write() as transaction:
                transaction.put(key, pack_record(key, SeqNo(1)))
        log.flip_bit(key, 60)
        await follower.lose(2)
        assert await wait_until_refused(follower) == [PARTITION]
        other_partition = follower.disk.bucket.partitions[OTHER_PARTITION]
        for end in (1, 2):
            source.put(key_in(OTHER_PARTITION, 2), b"value")
            await eventually(lambda: other_partition.high_seq == end, "it goes on")  # noqa: B023
        assert trouble(follower) == ""


async def test_a_replica_whose_only_partition_is_refused_does_not_connect_again(
    autojump_clock: MockClock,
) -> None:
    async with replica() as follower:
        await follower.receive(b"1")
        await follower.persist()
        log, _ = follower.store.directory.disks[BUCKET]
        log.flip_bit(partition_key(PARTITION_RECORD, PARTITION), 60)
        follower.source.put(b"2", b"value")
        assert await wait_until_refused(follower) == [PARTITION]
        opens = follower.source.bucket_opens
        await trio.sleep(60)
        assert follower.source.bucket_opens == opens
        assert trouble(follower) == ""
        await follower.assign(Assignment("c", {"b": ""}))
        assert follower.partition.state is PartitionState.DEAD


async def test_a_copy_that_a_replica_sent_back_to_0_is_completed_in_the_actives_history(
    autojump_clock: MockClock,
) -> None:
    """The other replica may have more of an old history than the active node has of the new one."""
    async with replica() as follower:
        await follower.assign(Assignment("c", {"a": "", "b": "a"}))
        await follower.receive(b"1", b"2")
        await follower.persist()
        assert not follower.partition.is_incomplete
        active_node = follower.cluster.server("c")
        active_node.told_name = "c"
        active_node.partitions = [FakePartition(PARTITION, OTHER_HISTORY)]
        await follower.lose(0)
        await eventually(lambda: follower.partition.is_incomplete, "it is sent back to 0")
        await follower.receive(b"1", b"2")
        await follower.persist()
        await trio.sleep(60)
        assert follower.partition.is_incomplete
        active_node.partitions = follower.source.partitions
        await eventually(lambda: not follower.partition.is_incomplete, "it is complete")
        assert follower.partition.high_seq == 2


async def test_a_copy_is_completed_by_an_active_node_that_its_map_named_just_now(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket gets a map with one more node while active nodes of other buckets are asked. The
    node was not found in the map of before, and the server ended."""
    async with replica() as follower:
        await follower.assign(Assignment("c", {"a": "", "b": "a"}))
        partition_maps, latest_map = follower.server.partition_maps, follower.cluster.map
        nodes = {name: address for name, address in latest_map.nodes.items() if name != "c"}
        map_before = msgspec.structs.replace(latest_map, nodes=nodes)
        monkeypatch.setattr(partition_maps, "all_maps", lambda: [map_before])
        await follower.receive(b"1", b"2")
        await follower.persist()
        await follower.lose(0)
        await eventually(lambda: follower.partition.is_incomplete, "it is sent back to 0")
        follower.cluster.server("c").told_name = "c"
        await follower.receive(b"3")
        await eventually(lambda: not follower.partition.is_incomplete, "it is complete")


@pytest.mark.parametrize("is_replica", [False, True])
async def test_a_copy_may_lack_changes_once_another_replica_had_it_undo_some(
    autojump_clock: MockClock, *, is_replica: bool
) -> None:
    """One that has not heard of a new history has everything undone that was acknowledged in it.
    What the active node has undone, its map says to be lost."""
    async with replica() as follower:
        if is_replica:
            await follower.assign(Assignment("c", {"a": "", "b": "a"}))
        await follower.receive(b"1", b"2")
        await follower.persist()
        await follower.lose(1)
        await eventually(lambda: follower.partition.high_seq == 1, "the last change is undone")
        assert follower.partition.is_incomplete is is_replica
