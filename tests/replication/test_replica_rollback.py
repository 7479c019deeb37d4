"""A replica that rolls back: what it undoes, in memory and on disk."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import pytest
import trio
from trio.testing import MockClock

from tests.kit.fake_partition import FakePartition
from tests.kit.fake_server import BUCKET
from tests.kit.placed_keys import key_in
from tests.kit.process import eventually
from tests.replication.fake_source import (
    NEW_HISTORY,
    NOW,
    OTHER_PARTITION,
    PARTITION,
    replica,
    trouble,
)
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import (
    Cas,
    Operation,
    PartitionState,
    SeqNo,
)
from upr_protocol.partition_map import Assignment
from upr_server.engine import FetchRequest, batch_of
from upr_server.engine.snapshots.collapse import SHORT_RUN_BYTES_MAX
from upr_server.storage.calls import (
    DeleteIndexEntries,
    StoreCall,
    Truncate,
)
from upr_server.storage.records import (
    PartitionRecord,
    chunk_key,
)

OTHER_HISTORY: Final = 78


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
        await follower.receive_snapshots(3)
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


async def test_unindexed_changes_can_be_undone_however_old_they_are(
    autojump_clock: MockClock,
) -> None:
    async with replica() as follower:
        await follower.receive(b"1", b"2", b"3", b"4", b"5")
        await trio.sleep(60)  # time for the index to catch up
        await follower.lose(3)
        assert follower.starts[-1] == 3


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
