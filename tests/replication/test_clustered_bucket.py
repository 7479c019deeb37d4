"""How a node applies a partition map while its partitions change."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any, Final, cast

import attrs
import pytest
import trio
from trio.testing import MockClock

from tests.kit.held_store import HeldStore
from tests.kit.steps import LargestStep
from upr_protocol.chunk import chunk_of_plain_sets
from upr_protocol.client import Address, NodeClient
from upr_protocol.errors import ServerError, Status
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import HistoryId, PartitionId, PartitionState, SeqNo
from upr_protocol.partition_map import Assignment, PartitionMap
from upr_protocol.transport import dial_tcp
from upr_protocol.wire import Message, Open, Opened
from upr_server.app import Server, running_server
from upr_server.config import ServerConfig
from upr_server.engine import QUOTA_BYTES_MIN, Bucket, Partition, batch_of
from upr_server.net.handlers.streams import FIRST_PARTITIONS, open_bucket
from upr_server.net.request_context import RequestContext
from upr_server.replication import clustered_bucket, roles
from upr_server.replication.roles import STEP_PARTITIONS
from upr_server.storage.chunk_log import ChunkLog
from upr_server.storage.errors import DiskFullError
from upr_server.storage.records import CLEAN_STOP, PARTITION, partition_key
from upr_server.storage.simulated import SimulatedStore

LAST: Final = PartitionId(2 * STEP_PARTITIONS - 1)
PROMPT_S: Final = 60.0


async def test_a_failover_log_that_changes_while_a_map_is_prepared_is_kept(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """A map is prepared in steps, between which other tasks run. A replica may receive a new
    history between two steps; the result of an earlier step was computed from the old log."""
    config = ServerConfig(listen="127.0.0.1:0", node="b")
    async with running_server(config, SimulatedStore()) as server:
        nodes = {"a": "127.0.0.1:1", "b": f"127.0.0.1:{server.port}"}
        following = (Assignment("a", {"b": ""}),) * (LAST + 1)
        first = PartitionMap(bucket="b", revision=1, nodes=nodes, partitions=following)
        await server.partition_maps.set_map(0, first.encode())
        partitions = server.catalog.bucket("b").partitions
        of_first_step, of_second_step = partitions[0], partitions[STEP_PARTITIONS]
        new_log = FailoverLog().with_branch(HistoryId(7), SeqNo(0))
        failover_log_in = roles.failover_log_in

        def becomes_another(partition: Partition, *args: Any, **options: Any) -> FailoverLog:
            if partition is of_second_step:
                of_first_step.change_state(PartitionState.REPLICA, new_log)
            return failover_log_in(partition, *args, **options)

        monkeypatch.setattr(roles, "failover_log_in", becomes_another)
        second = first.with_assignments({LAST: Assignment("a")})
        with trio.fail_after(PROMPT_S):
            await server.partition_maps.set_map(1, second.encode())
        assert partitions[LAST].state is PartitionState.DEAD
        assert of_first_step.failover_log == new_log


async def test_a_node_sends_no_states_of_an_older_map_with_a_newer_revision(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """The node has the new map, but its partitions have not changed yet."""
    config = ServerConfig(listen="127.0.0.1:0", node="a")
    async with running_server(config, SimulatedStore()) as server, trio.open_nursery() as nursery:
        nodes = {"a": f"127.0.0.1:{server.port}", "b": "127.0.0.1:1"}
        first = PartitionMap(bucket="b", revision=1, nodes=nodes, partitions=(Assignment("a"),))
        await server.partition_maps.set_map(0, first.encode())
        clustered_bucket = server.partition_maps._buckets["b"]
        change, is_changing, may_change = clustered_bucket._change, trio.Event(), trio.Event()

        async def change_later(changes: list[roles.RoleChange]) -> None:
            is_changing.set()
            await may_change.wait()
            await change(changes)

        monkeypatch.setattr(clustered_bucket, "_change", change_later)
        second = first.with_assignments({PartitionId(0): Assignment("b")})
        nursery.start_soon(server.partition_maps.set_map, 1, second.encode())
        await is_changing.wait()
        assert server.partition_maps.map_of("b") == second
        asked_at: list[float] = []

        async def dial(address: Address) -> trio.abc.Stream:
            asked_at.append(trio.current_time())
            if len(asked_at) == 3:
                may_change.set()
            return await dial_tcp(address)

        client = NodeClient(Address.parse(server.url("b")), dial=dial)
        try:
            status = await client.status_with_partitions()
        finally:
            may_change.set()
        assert len(asked_at) >= 3
        assert len(set(asked_at)) == len(asked_at), "it pauses in between"
        assert status.map == second
        assert status.partitions[0].state is PartitionState.DEAD


class OpeningClient:
    """A client that opens a bucket, as its handler sees it.

    Attributes:
        bucket: The bucket.
        sent: What it was sent.
        partition_maps: The server's maps.
    """

    def __init__(self, server: Server) -> None:
        self.bucket = server.catalog.bucket("b")
        self.sent: list[Message] = []
        self.partition_maps = server.partition_maps
        self.catalog = server.catalog
        self.credit = self.access = SimpleNamespace(
            open_bucket=lambda *_arguments: None, user_name=""
        )

    def open_bucket(self, bucket: Bucket) -> None:
        assert bucket is self.bucket

    def send(self, message: Message) -> None:
        self.sent.append(message)


async def test_a_node_that_applies_a_map_while_it_sends_partitions_sends_the_earlier_revision(
    autojump_clock: MockClock,
) -> None:
    """The node sends many partitions in steps, between which it may apply a map."""
    async with running_server(
        ServerConfig(listen="127.0.0.1:0", node="a"), SimulatedStore()
    ) as server:
        nodes = {"a": f"127.0.0.1:{server.port}"}
        assignments = (Assignment("a"),) * (FIRST_PARTITIONS + 1)
        first = PartitionMap(bucket="b", revision=1, nodes=nodes, partitions=assignments)
        await server.partition_maps.set_map(0, first.encode())
        client = OpeningClient(server)
        steps = open_bucket(cast("RequestContext", client), Open("b", opaque=1))
        assert steps is not None
        second = first.with_assignments({PartitionId(0): Assignment()})
        await server.partition_maps.set_map(1, second.encode())
        assert list(steps) == []
        *_, opened = client.sent
        assert isinstance(opened, Opened)
        assert opened.map_revision == 1


async def test_the_map_of_a_bucket_that_is_deleted_meanwhile_is_not_stored_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Both buckets have the same name, and the disk identifies a bucket by its name."""
    store = SimulatedStore()
    async with running_server(ServerConfig(listen="127.0.0.1:0", node="a"), store) as server:
        nodes = {"a": f"127.0.0.1:{server.port}", "b": "127.0.0.1:1"}
        first = PartitionMap(bucket="b", revision=1, nodes=nodes, partitions=(Assignment("a"),))
        await server.partition_maps.set_map(0, first.encode())
        replicators = server.partition_maps._buckets["b"].replicators
        stop_all_but = replicators.stop_all_but

        async def delete_meanwhile(*arguments: Any) -> None:
            await stop_all_but(*arguments)
            await server.catalog.delete_bucket("b")
            await server.catalog.create_bucket("b", 1, server.catalog.quota_bytes_default)

        monkeypatch.setattr(replicators, "stop_all_but", delete_meanwhile)
        second = first.with_assignments({PartitionId(0): Assignment("a", {"b": ""})})
        with pytest.raises(ServerError) as refusal:
            await server.partition_maps.set_map(1, second.encode())
        assert refusal.value.status is Status.NO_BUCKET
        assert server.partition_maps.map_of("b") is None
        log, _ = store.directory.disks["b"]
        assert not ChunkLog(log).load().partition_map


async def test_a_node_whose_disk_is_too_slow_for_a_hand_over_stays_active(
    autojump_clock: MockClock,
) -> None:
    """The next active node would rely on changes that a crash of this one loses."""
    store, partition_id = HeldStore(), PartitionId(0)
    config = ServerConfig(listen="127.0.0.1:0", node="a")
    async with running_server(config, store) as server, trio.open_nursery() as nursery:
        nodes = {"a": f"127.0.0.1:{server.port}", "b": "127.0.0.1:1"}
        assignments = (Assignment("a", {"b": ""}),)
        first = PartitionMap(bucket="b", revision=1, nodes=nodes, partitions=assignments)
        await server.catalog.create_bucket("b", 1, QUOTA_BYTES_MIN)
        await server.partition_maps.set_map(0, first.encode())
        (partition,) = server.catalog.bucket("b").partitions
        partition.mutate(batch_of(chunk_of_plain_sets([b"key"], [b"value"])), now=1.0)
        handing_over = Assignment(replicas={"b": ""}, handing_over="a")
        second = first.with_assignments({partition_id: handing_over})

        async def release_later() -> None:
            await trio.sleep(PROMPT_S)
            store.released.set()

        nursery.start_soon(release_later)
        with pytest.raises(DiskFullError, match="not on disk after"):
            await server.partition_maps.set_map(1, second.encode())
        assert not store.released.is_set()
        states = [partition.state]
        assert server.partition_maps.map_of("b") == first
        await store.released.wait()
        await server.partition_maps.set_map(1, second.encode())
        states.append(partition.state)
        assert states == [PartitionState.ACTIVE, PartitionState.PENDING]
        assert partition.manager.persistence.committed_seq == 1


async def test_a_partition_found_damaged_while_a_map_is_refused_stays_refused(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with active_node() as node:
        damaged, other = node.bucket.partitions[:2]
        clustered_bucket = node.server.partition_maps._buckets["b"]

        async def find_damage(_partitions: list[Partition]) -> None:
            await trio.lowlevel.checkpoint()
            damaged.refuse("a record is damaged")
            raise DiskFullError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(clustered_bucket, "_persist", find_damage)
            with pytest.raises(DiskFullError, match="no room"):
                await node.hand_over_all()
        assert [damaged.state, other.state] == [PartitionState.DEAD, PartitionState.ACTIVE]


@attrs.frozen
class ActiveNode:
    """A node that is active for all partitions of a bucket, by a map that names a second node."""

    server: Server
    map: PartitionMap

    @property
    def bucket(self) -> Bucket:
        return self.server.catalog.bucket(self.map.bucket)

    async def hand_over_all(self) -> None:
        assignments = {partition.id: Assignment("b") for partition in self.bucket.partitions}
        next_map = self.map.with_assignments(assignments)
        await self.server.partition_maps.set_map(self.map.revision, next_map.encode())


@asynccontextmanager
async def active_node(partition_count: int = LAST + 1) -> AsyncIterator[ActiveNode]:
    config = ServerConfig(listen="127.0.0.1:0", node="a")
    async with running_server(config, SimulatedStore()) as server:
        nodes = {"a": f"127.0.0.1:{server.port}", "b": "127.0.0.1:1"}
        assignments = (Assignment("a"),) * partition_count
        first_map = PartitionMap(bucket="b", revision=1, nodes=nodes, partitions=assignments)
        await server.catalog.create_bucket("b", len(assignments), QUOTA_BYTES_MIN)
        await server.partition_maps.set_map(0, first_map.encode())
        yield ActiveNode(server, first_map)


async def test_a_bucket_can_be_deleted_at_any_step_of_a_map(autojump_clock: MockClock) -> None:
    """The next bucket of the same name does not get the map: nobody has given it one."""
    step_count, is_applied = 0, False
    while not is_applied:
        async with active_node(2) as node, trio.open_nursery() as nursery:
            catalog, ended = node.server.catalog, trio.Event()

            async def apply(node: ActiveNode, ended: trio.Event) -> None:
                with suppress(ServerError):
                    await node.hand_over_all()
                ended.set()

            nursery.start_soon(apply, node, ended)
            for _ in range(step_count):
                await trio.lowlevel.checkpoint()
            is_applied = ended.is_set()
            await catalog.delete_bucket("b")
            await catalog.create_bucket("b", 1, QUOTA_BYTES_MIN)
            await ended.wait()
            assert node.server.partition_maps.map_of("b") is None
            assert node.bucket.partitions[0].state is PartitionState.ACTIVE
        step_count += 1
    assert step_count > 10


async def test_partitions_that_are_handed_over_forget_their_keys_in_steps(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """A node may have tens of millions of keys in memory."""
    monkeypatch.setattr(clustered_bucket, "FORGOTTEN_KEYS", 1)
    async with active_node() as node:
        partitions = node.bucket.partitions
        keys = [b"%d" % number for number in range(STEP_PARTITIONS)]
        for partition in partitions:
            partition.mutate(batch_of(chunk_of_plain_sets(keys, [b""] * len(keys))), now=1.0)
        largest_step = LargestStep(lambda: -sum(len(partition.table) for partition in partitions))
        trio.lowlevel.add_instrument(largest_step)
        await node.hand_over_all()
        trio.lowlevel.remove_instrument(largest_step)
        assert not any(len(partition.table) for partition in partitions)
        assert largest_step.added_count == len(keys)


async def test_partitions_that_are_handed_over_free_their_snapshots_in_steps(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    monkeypatch.setattr(clustered_bucket, "FREED_SEGMENTS", 1)
    async with active_node() as node:
        partitions = node.bucket.partitions
        for partition in partitions:
            for number in range(8):
                chunk = chunk_of_plain_sets([b"%d" % number], [b""])
                partition.mutate(batch_of(chunk), now=1.0)
                # A reader has a cursor between this snapshot and the next, so that they are not
                # collapsed.
                partition.manager.register("a reader", partition.high_seq)
                partition.snapshots.close(partition.snapshots.entries[-1])
        largest_step = LargestStep(
            lambda: -sum(partition.snapshots.segment_count for partition in partitions)
        )
        trio.lowlevel.add_instrument(largest_step)
        await node.hand_over_all()
        trio.lowlevel.remove_instrument(largest_step)
        assert not any(partition.snapshots.segment_count for partition in partitions)
        assert largest_step.added_count <= STEP_PARTITIONS


async def test_a_bucket_created_for_a_map_that_failed_does_not_become_active(
    autojump_clock: MockClock,
) -> None:
    """The node has lost its disk: only other nodes have the data of the partitions that the map
    assigns to it."""
    config = ServerConfig(listen="127.0.0.1:0", node="a")
    async with running_server(config, SimulatedStore()) as server:
        nodes = {"a": f"127.0.0.1:{server.port}", "b": "127.0.0.1:1"}
        partition_map = PartitionMap(
            bucket="b", revision=2, nodes=nodes, partitions=(Assignment("a", {"b": ""}),)
        )
        await server.create_dead_bucket("b", 1)
        await server.partition_maps.set_map(0, partition_map.encode())
        (partition,) = server.catalog.bucket("b").partitions
        assert partition.state is PartitionState.PENDING


async def test_what_a_node_has_reported_does_not_count_once_it_is_no_replica(
    autojump_clock: MockClock,
) -> None:
    """Its connection may still be open, but a failover would not use its copy."""
    config = ServerConfig(listen="127.0.0.1:0", node="a")
    async with running_server(config, SimulatedStore()) as server:
        nodes = {"a": f"127.0.0.1:{server.port}", "b": "127.0.0.1:1", "c": "127.0.0.1:2"}
        assignment = Assignment("a", {"b": "", "c": ""})
        first = PartitionMap(bucket="b", revision=1, nodes=nodes, partitions=(assignment,))
        await server.partition_maps.set_map(0, first.encode())
        (partition,) = server.catalog.bucket("b").partitions
        for removed in ({}, {"b": "c"}):
            partition.replicas.report("b", SeqNo(9), SeqNo(9))
            partition.replicas.report("c", SeqNo(5), SeqNo(5))
            revision = server.partition_maps.revision("b")
            next_map = first.with_assignments(
                {PartitionId(0): Assignment("a", {"c": "", **removed})}, revision + 1
            )
            await server.partition_maps.set_map(revision, next_map.encode())
            assert partition.state is PartitionState.ACTIVE
            assert partition.replicas.seq_reached_by(1) == 5
            assert partition.replicas.seq_reached_by(2) == 0


@pytest.mark.parametrize(
    "assignment",
    [Assignment("b", {"a": ""}), Assignment(replicas={"b": ""}, handing_over="a")],
    ids=["moved", "handing over"],
)
async def test_a_map_that_meets_a_damaged_record_is_applied_and_refuses_the_partition_alone(
    autojump_clock: MockClock, assignment: Assignment
) -> None:
    """If the map were refused, the partition could not be moved to another node."""
    store, damaged, other = SimulatedStore(), PartitionId(0), PartitionId(1)
    async with running_server(ServerConfig(listen="127.0.0.1:0", node="a"), store) as server:
        nodes = {"a": f"127.0.0.1:{server.port}", "b": "127.0.0.1:1"}
        assignments = (Assignment("a", {"b": ""}),) * 2
        first = PartitionMap(bucket="b", revision=1, nodes=nodes, partitions=assignments)
        await server.catalog.create_bucket("b", 2, QUOTA_BYTES_MIN)
        await server.partition_maps.set_map(0, first.encode())
        partitions = server.catalog.bucket("b").partitions
        for partition in partitions:
            partition.mutate(batch_of(chunk_of_plain_sets([b"key"], [b"value"])), now=1.0)
        disk = server.disk_of("b")
        assert disk is not None
        for partition in partitions:
            await disk.flusher.wait_until_persisted(partition, partition.high_seq)
        log, _ = store.directory.disks["b"]
        log.flip_bit(partition_key(PARTITION, damaged), 60)
        second = first.with_assignments({damaged: assignment, other: assignment})
        await server.partition_maps.set_map(1, second.encode())
        assert server.partition_maps.map_of("b") == second
        assert "mismatch" in partitions[damaged].damage
        assert partitions[damaged].state is PartitionState.DEAD
        assert not partitions[other].damage
        assert partitions[other].state is second.partitions[other].state_of("a")
        await trio.sleep(PROMPT_S)
        figures: Any = disk.statistics()["disk"]
        assert figures["damaged_partitions"] == [damaged]
        # The damaged copy stays refused, and later maps are applied in spite of it.
        third = second.with_assignments({damaged: Assignment("b"), other: Assignment("b")})
        await server.partition_maps.set_map(second.revision, third.encode())
        assert [partition.state for partition in partitions] == [PartitionState.DEAD] * 2
    stored_bucket = ChunkLog(log).load()
    assert PartitionMap.decode(stored_bucket.partition_map) == third
    assert [bool(partition.damage) for partition in stored_bucket.partitions] == [True, False]
    # If the record were readable again, its state and histories would be those of an older map.
    assert CLEAN_STOP not in log.keys()  # noqa: SIM118


async def test_a_replica_with_a_damaged_record_does_not_become_active(
    autojump_clock: MockClock,
) -> None:
    """The new history is not on disk. So the node writes no clean-stop marker either: the old
    record may be readable again at the next start."""
    store = SimulatedStore()
    async with running_server(ServerConfig(listen="127.0.0.1:0", node="b"), store) as server:
        nodes = {"a": "127.0.0.1:1", "b": f"127.0.0.1:{server.port}"}
        following = (Assignment("a", {"b": ""}),) * 2
        first = PartitionMap(bucket="b", revision=1, nodes=nodes, partitions=following)
        await server.partition_maps.set_map(0, first.encode())
        log, _ = store.directory.disks["b"]
        log.flip_bit(partition_key(PARTITION, 0), 60)
        active = Assignment("b", {"a": ""})
        second = first.with_assignments({PartitionId(0): active, PartitionId(1): active})
        await server.partition_maps.set_map(1, second.encode())
        states = [partition.state for partition in server.catalog.bucket("b").partitions]
        assert states == [PartitionState.DEAD, PartitionState.ACTIVE]
    assert CLEAN_STOP not in log.keys()  # noqa: SIM118
