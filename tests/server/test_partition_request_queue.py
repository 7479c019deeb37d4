"""Queues of requests for one partition: how many of a connection wait, in what order they are
answered, and until when. In memory, on simulated disks and a mock clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
import pytest
import trio
import trio.testing

from tests.server.connected_peer import P0, Peer, connected, sets
from tests.server.granted_peer import ADMIN
from tests.server.modelled_partition import HeldReads, Model
from tests.server.served_bucket import (
    BUCKET,
    MEMORY,
    PERSISTED,
    answer_to,
    increment,
    send,
    serving,
    speaking,
    status_of,
    value_of,
)
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.errors import Status
from upr_protocol.ids import Cas, HistoryId, Operation, PartitionState, SeqNo
from upr_protocol.users import Grant, Right, User
from upr_protocol.wire import (
    Credit,
    Get,
    GetReply,
    Lease,
    LeaseAction,
    LeaseReply,
    Message,
    MutateReply,
    Noop,
    Refusal,
)
from upr_server.app import Server
from upr_server.net import AcceptedConnection
from upr_server.net.backlog import QUEUED_BYTES_MAX, QUEUED_REQUESTS_MAX, REPLIES_BYTES_MAX
from upr_server.net.handlers.data import GET_REPLY_BYTES
from upr_server.net.handlers.leases import RANGE_BYTES
from upr_server.replication.replica_writer import move_to_record
from upr_server.storage.calls import Commit, FindExpired, FindItems, PutLease, StoreCall
from upr_server.storage.online.bucket_disk import BucketDisk
from upr_server.storage.partition_write import PartitionWrite
from upr_server.storage.records import PartitionRecord
from upr_server.storage.simulated import SimulatedStore

FETCH_S: Final = 0.01
COLD: Final = b"cold"


@asynccontextmanager
async def a_cold_key(
    store: SimulatedStore, value: bytes = b"v"
) -> AsyncIterator[tuple[Server, BucketDisk]]:
    """A server whose bucket has `COLD` on disk only."""
    async with serving(store, 1) as server:
        bucket = server.catalog.bucket(BUCKET)
        disk = server.catalog.disks[bucket]
        model = Model(disk, bucket.partitions[0])
        model.write((COLD, value))
        await model.persist()
        await trio.sleep(3)
        model.forget()
        yield server, disk


def fetches(disk: BucketDisk) -> object:
    figures = disk.statistics()["fetch"]
    assert isinstance(figures, dict)
    return figures["batches"]


def connection_of(server: Server, before: set[AcceptedConnection]) -> AcceptedConnection:
    (connection,) = server.connections.connections.keys() - before
    return connection


async def ask(peer: Peer, count: int) -> None:
    for _ in range(count):
        peer.session.send(Get((COLD,), partition=P0, opaque=peer.opaque()))
    await peer.send()


async def test_a_connection_with_many_queued_requests_is_not_read(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store, count = HeldReads(FindItems), 10 * QUEUED_REQUESTS_MAX
    async with a_cold_key(store) as (server, _), speaking(server) as peer:
        (connection,) = server.connections.connections
        store.released = trio.Event()
        await ask(peer, count)
        await trio.sleep(1)
        assert connection.context.backlog.queued_requests == QUEUED_REQUESTS_MAX
        store.released.set()
        for _ in range(count):
            await peer.receive(GetReply)
        backlog = connection.context.backlog
        assert backlog.queued_requests == backlog.queued_bytes == 0


async def test_a_connection_with_many_queued_bytes_is_not_read(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Their credit is paid back when they come, and no quota counts them."""
    store, batch, opaques = HeldReads(FindItems), sets(b"k", value=bytes(200_000)), []
    async with a_cold_key(store) as (server, disk), speaking(server) as peer:
        (connection,) = server.connections.connections
        store.released = trio.Event()
        await ask(peer, 1)
        with trio.move_on_after(1):
            for _ in range(100):
                while not peer.session.credit.is_open:
                    await peer.receive(Credit)
                opaques.append(await send(peer, batch, MEMORY))
        assert len(opaques) < 50
        assert (
            QUEUED_BYTES_MAX
            < connection.context.backlog.queued_bytes
            <= QUEUED_BYTES_MAX + batch.nbytes
        )
        store.released.set()
        for opaque in opaques:
            assert isinstance(await answer_to(peer, opaque), MutateReply)
        assert disk.bucket.partitions[0].high_seq == 1 + len(opaques)


async def test_a_peer_that_reads_no_answers_has_few_prepared_and_delays_no_other(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store, value = HeldReads(FindItems), bytes(900_000)
    async with a_cold_key(store, value) as (server, disk), speaking(server) as good:
        before = set(server.connections.connections)
        async with speaking(server) as bad:
            connection = connection_of(server, before)
            connection._stream.send_stream.send_all_hook = trio.sleep_forever  # type: ignore[attr-defined]
            await ask(bad, 400)
            await trio.sleep(3)
            assert (
                REPLIES_BYTES_MAX
                < connection.context.backlog.unsent_bytes
                <= REPLIES_BYTES_MAX + GET_REPLY_BYTES
            )
            assert 0 < connection.context.backlog.queued_requests <= QUEUED_REQUESTS_MAX
            for _ in range(3):
                await ask(good, 1)
                with trio.fail_after(1):
                    await good.receive(GetReply)
            # It holds nothing back in memory either.
            assert not disk.bucket.partitions[0].eviction.pin_count


async def test_nothing_is_read_from_disk_for_a_closed_connection(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = HeldReads(FindItems)
    async with a_cold_key(store) as (server, disk):
        store.released = trio.Event()
        for _ in range(3):
            async with speaking(server) as peer:
                await ask(peer, 100)
                await trio.sleep(0.1)
        before = fetches(disk)
        store.released.set()
        await trio.sleep(1)
        assert fetches(disk) == before
        assert not disk.bucket.partitions[0].eviction.pin_count
        async with speaking(server) as peer:
            await ask(peer, 1)
            await peer.receive(GetReply)


class SlowFinds(SimulatedStore):
    """Each item that is read takes its time."""

    async def wait(self, call: StoreCall[Any]) -> None:
        if isinstance(call, FindItems):
            await trio.sleep(FETCH_S)
        else:
            await super().wait(call)


async def test_connections_take_turns(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with (
        a_cold_key(SlowFinds()) as (server, _),
        speaking(server) as many,
        speaking(server) as few,
    ):
        await ask(many, 4000)
        await trio.lowlevel.checkpoint()
        began = trio.current_time()
        opaque = await send(few, sets(b"hot"), MEMORY)
        assert isinstance(await answer_to(few, opaque), MutateReply)
        await ask(few, 1)
        await few.receive(GetReply)
        assert trio.current_time() - began < 5 * FETCH_S


async def test_a_connection_whose_request_is_queued_is_not_taken_for_silent(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The server does not count as silent either, though it does not read the peer for five idle
    intervals."""
    store = HeldReads(FindItems)
    async with a_cold_key(store) as (server, _), connected(server, idle_interval_s=1) as peer:
        await peer.open(BUCKET)
        store.released = trio.Event()
        await ask(peer, 2 * QUEUED_REQUESTS_MAX)
        messages: list[Message] = []
        with trio.move_on_after(5):
            while True:
                messages.append(await peer.receive(Message))
        assert [type(message) for message in messages] == [Noop] * 4
        store.released.set()
        for _ in range(2 * QUEUED_REQUESTS_MAX):
            await peer.receive(GetReply)


class SlowLeases(SimulatedStore):
    """Each lease that is put on disk takes its time."""

    async def wait(self, call: StoreCall[Any]) -> None:
        if isinstance(call, PutLease):
            await trio.sleep(FETCH_S)
        else:
            await super().wait(call)


async def test_lease_requests_of_a_connection_are_answered_one_at_a_time(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The disk has one writer: whoever waits for `persisted` would wait for all of them."""
    async with (
        a_cold_key(SlowLeases()) as (server, _),
        speaking(server) as many,
        speaking(server) as few,
    ):
        acquire = Lease(LeaseAction.ACQUIRE, 0, 60, "x", ((0, 0, 1),), opaque=many.opaque())
        await many.send(acquire)
        lease_id = (await many.receive(LeaseReply)).lease_id
        for _ in range(1000):
            many.session.send(Lease(LeaseAction.RENEW, lease_id, 60, "", (), opaque=many.opaque()))
        await many.send()
        await trio.lowlevel.checkpoint()
        began = trio.current_time()
        opaque = await send(few, sets(b"k"), PERSISTED)
        assert isinstance(await answer_to(few, opaque), MutateReply)
        assert trio.current_time() - began < 50 * FETCH_S


@pytest.mark.parametrize("ranges", [1, 1000])
async def test_a_connection_with_many_requests_that_are_answered_in_order_is_not_read(
    ranges: int, autojump_clock: trio.testing.MockClock
) -> None:
    """They would be kept in memory, 4,096 of them, and freed in one step when the peer leaves."""
    async with serving(SlowLeases(), 1024) as server:
        before = set(server.connections.connections)
        async with speaking(server) as peer:
            connection = connection_of(server, before)
            rows = tuple((partition, 0, 0) for partition in range(ranges))
            for lease_id in range(1, 61):
                acquire = Lease(LeaseAction.ACQUIRE, lease_id, 60, "x", rows, opaque=peer.opaque())
                peer.session.send(acquire)
            most, most_bytes = 0, 0
            async with trio.open_nursery() as nursery:
                nursery.start_soon(peer.send)
                for _ in range(60):
                    await peer.receive(LeaseReply)
                    backlog = connection.context.backlog
                    most = max(most, backlog.queued_requests)
                    most_bytes = max(most_bytes, backlog.queued_bytes)
            assert most <= QUEUED_REQUESTS_MAX
            assert most_bytes <= QUEUED_BYTES_MAX + RANGE_BYTES * ranges
            assert (most == QUEUED_REQUESTS_MAX) == (ranges == 1)


async def test_a_batch_that_waits_for_the_disk_is_refused_after_a_handover(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """It deletes nothing that has expired either: the partition gives no number any more."""
    store = HeldReads(FindItems)
    async with a_cold_key(store, b"5") as (server, disk), speaking(server) as peer:
        partition = disk.bucket.partitions[0]
        store.released = trio.Event()
        gone = Chunk.build([Mutation(Operation.SET, b"gone", b"v", expiry=1)])
        await answer_to(peer, await send(peer, gone, MEMORY))
        opaque = await send(peer, increment(COLD, 1), MEMORY)
        await trio.testing.wait_all_tasks_blocked()
        last_seq = partition.high_seq
        partition.change_state(PartitionState.PENDING, partition.failover_log)
        store.released.set()
        assert status_of(await answer_to(peer, opaque)) is Status.NOT_MY_PARTITION
        assert partition.high_seq == last_seq


class LateAnswers(SimulatedStore):
    """The disk is read, and the answer waits while `released` is not set."""

    def __init__(self, kind: type[StoreCall[Any]]) -> None:
        super().__init__()
        self.released = trio.Event()
        self.released.set()
        self._kind = kind

    async def execute(self, call: StoreCall[Any]) -> Any:
        answer = await super().execute(call)
        if isinstance(call, self._kind):
            await self.released.wait()
        return answer


async def replicate(disk: BucketDisk, row: Mutation, *, undoes_all: bool = False) -> None:
    """The node becomes a replica, receives a change, and becomes active again."""
    partition = disk.bucket.partitions[0]
    log = partition.failover_log
    partition.change_state(PartitionState.REPLICA, log)
    if undoes_all:
        empty = PartitionRecord(PartitionState.REPLICA, tuple(log.pairs()), SeqNo(0), 0)
        async with disk.maintenance.paused():
            await disk.truncate(partition.id, empty, [])
            partition.truncate(SeqNo(0))
    else:
        partition.restart_at(partition.high_seq)
    start, cas = partition.high_seq, Cas(partition.last_cas + 1)
    row = msgspec.structs.replace(row, seq=SeqNo(start + 1), cas=cas)
    record = PartitionRecord(PartitionState.REPLICA, tuple(log.pairs()), row.seq, cas)
    chunk = Chunk.build([row], start, row.seq)
    write = PartitionWrite(partition.id, record, [chunk], ends=[row.seq])
    await disk.store.ask(Commit(BUCKET, [write]))
    move_to_record(partition, record)
    partition.change_state(PartitionState.ACTIVE, log.with_branch(HistoryId(99), row.seq))


async def test_what_was_read_from_disk_does_not_count_once_the_node_was_a_replica(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Another node has changed the key meanwhile, and the table does not know it."""
    store = LateAnswers(FindItems)
    async with a_cold_key(store, b"5") as (server, disk), speaking(server) as peer:
        partition = disk.bucket.partitions[0]
        store.released = trio.Event()
        opaque = await send(peer, increment(COLD, 1), MEMORY)
        await ask(peer, 1)
        await trio.testing.wait_all_tasks_blocked()
        await replicate(disk, Mutation(Operation.SET, COLD, b"7"))
        store.released.set()
        assert status_of(await answer_to(peer, opaque)) is Status.OK
        (row,) = (await peer.receive(GetReply)).chunk
        assert row.value == b"8"
        assert not partition.eviction.pin_count


async def test_an_item_that_had_expired_on_disk_is_not_deleted_once_the_node_was_a_replica(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """It undid all that it had, and the key has the same number in another history."""
    store = LateAnswers(FindExpired)
    async with serving(store, 1) as server, speaking(server) as peer:
        (disk,) = server.catalog.disks.values()
        partition = disk.bucket.partitions[0]
        early = [Mutation(Operation.SET, key, b"v", expiry=1500) for key in (COLD, b"other")]
        await answer_to(peer, await send(peer, Chunk.build(early), PERSISTED))
        await trio.sleep(3)
        store.released = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(disk.expire_on_disk, 2000.0)
            await trio.testing.wait_all_tasks_blocked()
            await replicate(disk, Mutation(Operation.SET, COLD, b"lasts"), undoes_all=True)
            await trio.sleep(3)
            assert partition.eviction.is_index_ready
            store.released.set()
        assert partition.high_seq == 1
        assert await value_of(peer, COLD) == b"lasts"
        assert not partition.eviction.pin_count


async def test_items_expire_again_when_the_request_that_held_them_is_done(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = HeldReads(FindItems)
    async with a_cold_key(store) as (server, disk), speaking(server) as peer:
        partition = disk.bucket.partitions[0]
        expiry = int(server.connections.resources.time()) + 2
        row = Mutation(Operation.SET, b"short-lived", b"v", expiry=expiry)
        await answer_to(peer, await send(peer, Chunk.build([row]), MEMORY))
        store.released = trio.Event()
        await ask(peer, 1)
        await trio.testing.wait_all_tasks_blocked()
        # As an evaluation does that has begun again.
        partition.hold_expiry()
        await trio.sleep(5)
        now = server.connections.resources.time()
        assert not partition.may_expire(now)
        assert not partition.expire(now)
        store.released.set()
        await peer.receive(GetReply)
        await trio.testing.wait_all_tasks_blocked()
        assert partition.may_expire(now)
        assert partition.expire(now) == 1


@pytest.mark.parametrize("are_revoked", [True, False])
async def test_a_request_that_waits_for_the_disk_needs_its_right_then(
    autojump_clock: trio.testing.MockClock, *, are_revoked: bool
) -> None:
    """The first waits for the disk, and the others behind it."""
    grants = (Grant(Right.READ, BUCKET), Grant(Right.WRITE, BUCKET))
    bob = User("bob", None, grants)
    store = HeldReads(FindItems)
    async with a_cold_key(store, b"1") as (server, disk), speaking(server) as peer:
        (connection,) = server.connections.connections
        connection.context.access.user_name = bob.name
        await server.users.apply_change(lambda users: users.with_user(ADMIN).with_user(bob))
        store.released = trio.Event()
        await ask(peer, 1)
        opaques = [await send(peer, increment(COLD, 1), MEMORY) for _ in range(2)]
        await trio.sleep(1)
        await server.users.apply_change(
            lambda users: (
                users.revoking(bob.name, grants)
                if are_revoked
                else users.granting(bob.name, (Grant(Right.INDEX, BUCKET),))
            )
        )
        store.released.set()
        status = Status.NOT_ALLOWED if are_revoked else Status.OK
        assert status_of(await peer.receive(Refusal if are_revoked else GetReply)) == status
        for opaque in opaques:
            assert status_of(await answer_to(peer, opaque)) == status
        assert disk.bucket.partitions[0].high_seq == (1 if are_revoked else 3)
