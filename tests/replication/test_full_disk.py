"""A replica whose disk is full: what it keeps, drops and reports."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from tests.kit.fake_server import BUCKET
from tests.kit.process import eventually
from tests.replication.fake_source import NOW, PARTITION, Replica, replica, trouble
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.ids import (
    Cas,
    HistoryId,
    Operation,
    PartitionState,
    SeqNo,
)
from upr_protocol.partition_map import Assignment
from upr_server.engine import MutateResult, WriterToken, batch_of
from upr_server.engine.mutate_result import pack_result
from upr_server.replication.replicator import (
    REPLICATION_RETRY_S,
)
from upr_server.startup import _unsaved_mutations
from upr_server.storage.calls import (
    LoadBuckets,
)
from upr_server.storage.errors import DiskFullError
from upr_server.storage.simulated import SimulatedStore


async def starts_after_a_full_disk(follower: Replica) -> set[SeqNo]:
    """After which sequence numbers streams are requested, after a map has ended a replication that
    found no room."""
    streams_before = len(follower.starts)
    with pytest.raises(DiskFullError):
        await follower.assign(Assignment("c"))
    await trio.sleep(REPLICATION_RETRY_S)
    return set(follower.starts[streams_before:])


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
