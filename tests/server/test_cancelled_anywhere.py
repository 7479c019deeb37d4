"""Every asynchronous operation of the server, cancelled at each of its steps in turn.

The simulated disks take a moment for each call, the network is in memory, and the clock is a mock
clock. After each cancellation no task is left, nothing is held, the disk and memory agree, and the
same operation succeeds. Tasks that run for ever are cancelled with their server, which then starts
again. The last test fails if no other test cancels an operation.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final, cast

import pytest
import trio
import trio.testing
from trio.testing import MockClock, memory_stream_pair

from tests.engine.helpers import new_bucket, put
from tests.kit.async_names import below, name_of
from tests.kit.cancellation import cancelled_at_each_step
from tests.kit.certificates import Certificates
from tests.kit.memory_network import HOST, PARTITIONS, MemoryNetwork, check, node
from tests.kit.process import children_of
from tests.server.modelled_partition import Model
from tests.server.recorded_replies import Reply, new_order
from tests.server.recorded_writes import Recorder
from tests.storage.log_model import record_of
from tests.storage.planes import BUCKET, create, some_write
from upr_protocol.address import Address
from upr_protocol.bucket_event import EventFilter
from upr_protocol.client import connect, consume, follow_events
from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import SEQ_MAX, Cas, Durability, HistoryId, PartitionId, SeqNo
from upr_protocol.partition_map import Assignment, PartitionMap
from upr_protocol.users import EVERYTHING, Grant, Right, User, Users
from upr_server.app import Server, running_server
from upr_server.buckets import BucketCatalog, Upkeep
from upr_server.config import ServerConfig
from upr_server.engine import QUOTA_BYTES_MIN, Bucket, FetchRequest, MutateResult
from upr_server.engine.mutate_result import pack_result
from upr_server.engine.publisher_answers import BATCHES_MAX, WriterToken
from upr_server.events import EventBus
from upr_server.events.feeds import EventFeeds
from upr_server.events.local_consumer import LocalConsumer
from upr_server.net import AcceptedConnection, ConnectionServer
from upr_server.net.backlog import REPLIES_BYTES_MAX, ConnectionBacklog
from upr_server.net.connection_ends import ENDS_MAX, ConnectionEnds
from upr_server.net.connection_writer import ConnectionWriter
from upr_server.net.frame_budget import FrameBudget, UnfinishedFrame
from upr_server.net.replies import STEP_REPLIES, ReplySteps
from upr_server.net.silence_watch import SilenceWatch
from upr_server.net.step_writes import WOKEN_MAX, StepWrites
from upr_server.net.turns import BudgetedTurns, NetworkQueue, NetworkTurns, Turns
from upr_server.replication import (
    CopyCompletion,
    MapExchange,
    PartitionMaps,
    UserExchange,
    copy_completion,
)
from upr_server.replication.bucket_replicators import BucketReplicators
from upr_server.replication.clustered_bucket import ClusteredBucket
from upr_server.replication.local_server import LocalServer, streams_ended
from upr_server.replication.map_exchange import ASK_INTERVAL_S
from upr_server.replication.node_connections import NodeConnections
from upr_server.replication.received_answers import add_answers, forget_answers
from upr_server.replication.replica_rollback import ReplicaRollback
from upr_server.replication.replica_writer import ReplicaWriter
from upr_server.replication.replicator import Replicator
from upr_server.runtime import (
    CertificateFiles,
    TurnTimer,
    bind_tcp,
    open_listeners,
    run_until_signal,
)
from upr_server.runtime import Certificates as DaemonCertificates
from upr_server.startup import serve, started_server
from upr_server.storage.api import Store
from upr_server.storage.calls import (
    Commit,
    DeleteAnswers,
    DeleteBucketFiles,
    DeleteIndexEntries,
    DeleteLeases,
    FindExpired,
    FindFirstSnapshotEnd,
    FindItems,
    FindSeqBefore,
    FindSnapshotEnd,
    LoadBuckets,
    Maintain,
    MarkCleanStop,
    MeasureRanges,
    PutLease,
    PutPartitionMap,
    ReadChunks,
    StartServing,
    StoreCall,
    Truncate,
)
from upr_server.storage.errors import CorruptionError
from upr_server.storage.online.bucket_disk import BucketDisk
from upr_server.storage.online.flusher import STEP_CALLS, Flusher
from upr_server.storage.online.index_lag import IndexLag
from upr_server.storage.online.leases import LAPSED_S, LeaseBook
from upr_server.storage.online.maintenance import Maintenance
from upr_server.storage.online.unsaved_answers import STEP_ANSWERS, take_answers
from upr_server.storage.processes import ProcessStore, open_store, send_in_steps
from upr_server.storage.records import LeaseRecord
from upr_server.storage.simulated import SimulatedDirectory, SimulatedStore
from upr_server.storage.stored_bucket import StoredAnswer
from upr_server.user_store import UserStore

Function = Callable[..., Any]

P0: Final = PartitionId(0)
CALL_S: Final = 0.001
PACKAGES: Final = (
    *("app", "startup", "buckets", "runtime", "events", "net", "replication", "storage"),
    "user_store",
)
TRIED: Final[set[Function]] = set()
"""The operations that the tests below cancel. Each test checks that it cancels its own."""


def tries(*functions: Function) -> tuple[Function, ...]:
    TRIED.update(functions)
    return functions


def slow_store(directory: SimulatedDirectory | None = None) -> SimulatedStore:
    return SimulatedStore(directory, lambda _: CALL_S)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> MemoryNetwork:
    return MemoryNetwork(monkeypatch)


@pytest.fixture
def directory() -> SimulatedDirectory:
    return SimulatedDirectory()


@pytest.fixture
async def server(
    network: MemoryNetwork, directory: SimulatedDirectory, autojump_clock: MockClock
) -> AsyncIterator[Server]:
    async with node("a", "b", store=slow_store(directory)) as server:
        yield server


def disk_of(server: Server) -> BucketDisk:
    disk = server.disk_of("b")
    assert disk is not None
    return disk


# Buckets.


async def _create_and_delete(server: Server) -> None:
    await server.catalog.create_bucket("c", 1, QUOTA_BYTES_MIN)
    await server.catalog.delete_bucket("c")


async def _hold_and_delete(server: Server) -> None:
    await server.create_dead_bucket("c", 1)
    await server.catalog.delete_bucket("c")


BUCKETS: Final[dict[Callable[[Server], Awaitable[None]], tuple[Function, ...]]] = {
    _create_and_delete: tries(
        BucketCatalog.create_bucket,
        BucketCatalog.delete_bucket,
        BucketDisk.abandon,
        Store.ask,
    ),
    _hold_and_delete: tries(BucketCatalog.create_dead_bucket, Server.create_dead_bucket),
}


@pytest.mark.parametrize("case", BUCKETS)
async def test_creating_and_deleting_a_bucket_can_be_cancelled(
    server: Server,
    directory: SimulatedDirectory,
    autojump_clock: MockClock,
    case: Callable[[Server], Awaitable[None]],
) -> None:
    """The bucket is on disk and in memory, or in neither."""

    def look() -> None:
        check(server)
        assert {bucket.name for bucket in server.catalog.buckets} == set(directory.names()) == {"b"}

    async def undo() -> None:
        names = {bucket.name for bucket in server.catalog.buckets}
        assert names == set(directory.names())
        if "c" in names:
            await server.catalog.delete_bucket("c")

    work = partial(case, server)
    steps = await cancelled_at_each_step(work, look, then=work, undo=undo)
    steps.check_inside(*BUCKETS[case])


# The disk.


async def _lease(disk: BucketDisk, numbers: Iterable[int]) -> None:
    for step in (
        lambda: disk.leases.acquire(5, "o", [(0, 0, SEQ_MAX)], 60),
        lambda: disk.leases.renew(5, 60),
        lambda: disk.leases.release(5),
    ):
        async with disk.maintenance.paused():
            await step()


async def _forget_leases(disk: BucketDisk, numbers: Iterable[int]) -> None:
    leases = disk.leases
    async with disk.maintenance.paused():
        await leases.acquire(6, "o", [(0, 0, SEQ_MAX)], 1)
        lease = leases.get_whole(6)
        leases._leases[6] = LeaseRecord(6, lease.owner, lease.ranges, 1, leases._time() - LAPSED_S)
        await leases.delete_lapsed()


async def _persist(disk: BucketDisk, numbers: Iterable[int]) -> None:
    partition = disk.bucket.partitions[0]
    put(partition, b"key-%d" % next(iter(numbers)))
    await disk.flusher.wait_until_persisted(partition, partition.high_seq)


async def _refuse(disk: BucketDisk, numbers: Iterable[int]) -> None:
    """Calls that are left after a cancellation are answered by the next commit."""
    partition, answers = disk.bucket.partitions[0], list[bool]()
    put(partition, b"key-%d" % next(iter(numbers)))
    for _ in range(STEP_CALLS + 1):
        disk.flusher.call_when_persisted(partition, partition.high_seq, answers.append)
    try:
        await disk.flusher.refuse_callbacks()
    finally:
        with trio.CancelScope(shield=True):
            await trio.sleep(5)
        assert len(answers) == STEP_CALLS + 1


async def _find(disk: BucketDisk, numbers: Iterable[int]) -> None:
    partition = disk.bucket.partitions[0]
    pin = partition.eviction.pin()
    try:
        rows = await disk.find_items(partition, [FetchRequest(b"key", 0, needs_value=True)])
        assert rows[b"key"] is not None
    finally:
        partition.eviction.unpin(pin)


async def _ask(disk: BucketDisk, numbers: Iterable[int]) -> None:
    assert await disk.ask(FindSeqBefore(disk.bucket.name, 0, 0)) == 0


async def _expire(disk: BucketDisk, numbers: Iterable[int]) -> None:
    await disk.expire_on_disk(2_000.0)


async def _truncate(disk: BucketDisk, numbers: Iterable[int]) -> None:
    async with disk.maintenance.paused():
        await disk.truncate(PartitionId(1), record_of(0), [])


DISK: Final[dict[Callable[[BucketDisk, Iterable[int]], Awaitable[None]], tuple[Function, ...]]] = {
    _lease: tries(
        Maintenance.paused,
        LeaseBook.acquire,
        LeaseBook.renew,
        LeaseBook.release,
        Store.ask,
    ),
    _forget_leases: tries(LeaseBook.delete_lapsed),
    _persist: tries(Flusher.wait_until_persisted),
    _refuse: tries(Flusher.refuse_callbacks),
    _find: tries(BucketDisk.find_items, Store.ask),
    _ask: tries(BucketDisk.ask, Store.ask),
    _expire: tries(BucketDisk.expire_on_disk, Store.ask),
    _truncate: tries(BucketDisk.truncate, Store.ask),
}


@pytest.mark.parametrize("case", DISK)
async def test_calls_to_a_buckets_disk_can_be_cancelled(
    server: Server,
    autojump_clock: MockClock,
    case: Callable[[BucketDisk, Iterable[int]], Awaitable[None]],
) -> None:
    disk, numbers = disk_of(server), count()
    put(disk.bucket.partitions[0], b"key")
    await trio.sleep(5)

    async def settle() -> None:
        await trio.sleep(5)

    def look() -> None:
        check(server)
        assert not disk.flusher._callbacks
        assert disk.flusher._waiters == 0

    work = partial(case, disk, numbers)
    steps = await cancelled_at_each_step(work, look, then=work, undo=settle)
    steps.check_inside(*DISK[case])


UNINDEXED: Final = tries(Maintenance.wait_until_indexed)


async def test_the_wait_for_the_key_index_can_be_cancelled(
    server: Server, autojump_clock: MockClock
) -> None:
    disk = disk_of(server)
    partition = disk.bucket.partitions[0]
    numbers = count()

    async def work() -> None:
        put(partition, b"key-%d" % next(numbers))
        partition.eviction.restored_seq = partition.high_seq
        await disk.maintenance.wait_until_indexed(partition)

    def look() -> None:
        check(server)
        assert not disk.maintenance._waiters

    async def settle() -> None:
        await trio.sleep(5)

    steps = await cancelled_at_each_step(work, look, then=work, undo=settle)
    steps.check_inside(*UNINDEXED)


STORE: Final = tries(Store.ask, SimulatedStore.execute, SimulatedStore.wait)


async def test_calls_to_a_store_can_be_cancelled(autojump_clock: MockClock) -> None:
    directory = SimulatedDirectory()
    name = BUCKET.name

    async def work() -> None:
        store = slow_store(directory)
        if (await store.ask(LoadBuckets())).buckets:
            await store.ask(DeleteBucketFiles(name))
        await create(store)
        await store.ask(StartServing(name, []))
        await store.ask(Commit(name, [some_write(0, 0), some_write(1, 0)]))
        await store.ask(PutPartitionMap(name, "a map", [(0, record_of(3))]))
        await store.ask(PutLease(name, LeaseRecord(5, "o", ((0, 0, 3),), 60, 1.0)))
        await store.ask(Maintain(name, urgent=True, leases=(), purge_before_cas=0))
        await store.ask(ReadChunks(name, 0, SeqNo(0), SeqNo(3), 1000))
        await store.ask(MeasureRanges(name, [(0, 0, 3)]))
        await store.ask(FindItems(name, 0, [FetchRequest(b"key 1", 0, needs_value=True)]))
        await store.ask(FindExpired(name, 100, b"", 10))
        await store.ask(FindSnapshotEnd(name, 1, SeqNo(3), SeqNo(0)))
        await store.ask(FindFirstSnapshotEnd(name, 1, SeqNo(1)))
        await store.ask(FindSeqBefore(name, 1, 7))
        await store.ask(DeleteIndexEntries(name, 1))
        await store.ask(Truncate(name, 1, record_of(0), []))
        await store.ask(DeleteAnswers(name, 1, [StoredAnswer(bytes(16), 1, b"")]))
        await store.ask(DeleteLeases(name, [5]))
        await store.ask(MarkCleanStop(name))
        assert not store._call_lock.locked()
        await store.ask(DeleteBucketFiles(name))

    steps = await cancelled_at_each_step(work, then=work)
    steps.check_inside(*STORE)


# Connections.

USERS: Final = tries(UserStore.load, UserStore.apply_change, UserStore.adopt_users)


async def test_changes_of_users_can_be_cancelled(autojump_clock: MockClock) -> None:
    directory = SimulatedDirectory()
    store = UserStore(slow_store(directory))
    names = count()

    def adding(users: Users) -> Users:
        grants = (Grant(Right.SECURE, EVERYTHING),)
        return users.with_user(User(f"user{next(names)}", grants=grants))

    async def change() -> None:
        await store.load()
        await store.apply_change(adding)
        await store.adopt_users(adding(store.users))

    def agree() -> None:
        data = directory.users.data
        on_disk = Users.from_json(data) if data else Users()
        assert store.users == on_disk

    (await cancelled_at_each_step(change, agree)).check_inside(*USERS)


EXCHANGE: Final = tries(UserExchange.run, NodeConnections.users)


async def test_asking_other_nodes_for_users_can_be_cancelled(
    server: Server, autojump_clock: MockClock
) -> None:
    port, store = 77, UserStore(SimulatedStore())
    await store.apply_change(
        lambda users: users.with_user(User("ada", None, (Grant(Right.SECURE, EVERYTHING),)))
    )
    await _name_replica(server, f"{HOST}:{port}")
    async with node("z", port=port) as second_server:
        await trio.sleep(10)  # the server's own questions have their connection by then

        async def work() -> None:
            with trio.move_on_after(1.2):
                await UserExchange(store, server.partition_maps).run()

        (await cancelled_at_each_step(work, lambda: check(second_server), then=work)).check_inside(
            *EXCHANGE
        )


BUDGET: Final = tries(
    FrameBudget.wait_for_turn, UnfinishedFrame.wait_for_turn, UnfinishedFrame.pause, FrameBudget.run
)


async def test_the_wait_for_room_for_a_frame_can_be_cancelled(autojump_clock: MockClock) -> None:
    budget = FrameBudget(10)

    async def hold() -> None:
        frame = UnfinishedFrame(budget, "192.0.2.1", lambda reason: None)
        frame.set_held_bytes(6, trio.current_time(), is_new=True)
        try:
            await frame.wait_for_turn()
            await frame.pause(0.1)
        finally:
            frame.release()

    async def work() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(budget.run)
            async with trio.open_nursery() as holders:
                for _ in range(3):
                    holders.start_soon(hold)
            nursery.cancel_scope.cancel()

    def look() -> None:
        assert budget.used_bytes == 0
        budget.check_invariants()

    (await cancelled_at_each_step(work, look, then=work)).check_inside(*BUDGET)


WAKING: Final = tries(StepWrites.run)


async def test_waking_writers_can_be_cancelled() -> None:
    """All writers are woken, also after a cancellation."""
    connections: list[Recorder] = []

    async def work() -> None:
        writes = StepWrites()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writes.run)
            await trio.lowlevel.checkpoint()
            connections[:] = [Recorder(writes) for _ in range(2 * WOKEN_MAX)]
            for connection in connections:
                writes.add(connection)
            for _ in range(3):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()

    def look() -> None:
        assert all(connection.calls == ["woken"] for connection in connections)

    (await cancelled_at_each_step(work, look, then=work)).check_inside(*WAKING)


ENDING: Final = tries(ConnectionEnds.run)


async def test_ending_connections_can_be_cancelled() -> None:
    """All connections are ended, also after a cancellation."""
    scopes: list[trio.CancelScope] = []

    async def work() -> None:
        ends = ConnectionEnds()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ends.run)
            await trio.lowlevel.checkpoint()
            scopes[:] = [trio.CancelScope() for _ in range(3 * ENDS_MAX)]
            for scope in scopes:
                ends.add(scope)
            for _ in range(3):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()

    def look() -> None:
        assert all(scope.cancel_called for scope in scopes)

    (await cancelled_at_each_step(work, look, then=work)).check_inside(*ENDING)


REPLYING: Final = tries(ReplySteps.run)


async def test_sending_replies_in_steps_can_be_cancelled() -> None:
    """All replies are sent in order, or none if they were cancelled first."""
    sent_numbers: list[int] = []
    reply_count = 3 * STEP_REPLIES

    async def work() -> None:
        steps = ReplySteps()
        sent_numbers.clear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(steps.run)
            await trio.lowlevel.checkpoint()
            order = new_order(steps)
            replies = [Reply(number, [0], sent_numbers) for number in range(reply_count)]
            for reply in replies:
                order.add(reply)
            for reply in reversed(replies):
                order.complete(reply)
            for _ in range(3):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()

    def look() -> None:
        assert sent_numbers in ([], list(range(reply_count)))

    (await cancelled_at_each_step(work, look, then=work)).check_inside(*REPLYING)


TAKING: Final = tries(take_answers)


async def test_taking_answers_to_publishers_in_steps_can_be_cancelled() -> None:
    partition = new_bucket().partitions[0]
    answers, counters = partition.repeated_batches.answers, count(1)
    answers.track_unsaved()

    async def work() -> None:
        put(partition, b"key")
        for writer in range(2 * STEP_ANSWERS // BATCHES_MAX + 1):
            for _ in range(BATCHES_MAX):
                token = WriterToken(writer.to_bytes(16, "little"), next(counters))
                answers.remember(token, b"done", partition.high_seq)
        await take_answers(partition, partition.high_seq)
        assert answers.take_unsaved(partition.high_seq) == (b"", 0)

    (await cancelled_at_each_step(work, answers.check_invariants, then=work)).check_inside(*TAKING)


RECEIVED: Final = tries(add_answers, forget_answers)


async def test_adding_answers_that_a_replica_received_can_be_cancelled() -> None:
    partition = new_bucket().partitions[0]
    answers, counters, seq = partition.repeated_batches.answers, count(1), SeqNo(1)
    answer = pack_result(MutateResult(HistoryId(1), seq, seq, Cas(1)))

    async def work() -> None:
        # A cancelled attempt may have left some answers, which are removed first.
        await forget_answers(partition, SeqNo(0))
        writers = range(2 * STEP_ANSWERS // BATCHES_MAX + 1)
        rows = [
            (writer.to_bytes(16, "little"), next(counters), seq, answer)
            for writer in writers
            for _ in range(BATCHES_MAX)
        ]
        await add_answers(partition, rows)
        assert len(answers) == len(writers)
        await forget_answers(partition, SeqNo(0))
        assert not len(answers)

    steps = await cancelled_at_each_step(work, answers.check_invariants, then=work)
    steps.check_inside(*RECEIVED)


TURNS: Final = tries(
    Turns.next_turn, BudgetedTurns.next_turn, BudgetedTurns.take_turn, NetworkTurns.next_turn
)


async def test_the_wait_for_a_turn_can_be_cancelled(autojump_clock: MockClock) -> None:
    turns, read_turns = Turns(), BudgetedTurns(TurnTimer(), 1000)
    queues = dict[str, NetworkQueue]()
    network_turns = NetworkTurns(read_turns, queues, "10.0.0.1")

    async def work() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(turns.next_turn)
                nursery.start_soon(read_turns.next_turn)
                nursery.start_soon(read_turns.take_turn, 1000)
                nursery.start_soon(network_turns.next_turn)

    def look() -> None:
        assert not queues

    (await cancelled_at_each_step(work, look, then=work)).check_inside(*TURNS)


BACKLOG: Final = tries(ConnectionBacklog.wait_for_reply_room, ConnectionBacklog.wait_until_not_full)


async def test_the_wait_until_a_peer_takes_its_replies_can_be_cancelled(
    server: Server, network: MemoryNetwork, autojump_clock: MockClock
) -> None:
    async with connect(server.url("b")):
        (connection,) = server.connections.connections
        backlog = connection.context.backlog

        async def relieve() -> None:
            await trio.sleep(1)
            backlog.end_write()

        async def work() -> None:
            for wait in (backlog.wait_for_reply_room, backlog.wait_until_not_full):
                backlog._being_written_bytes = REPLIES_BYTES_MAX + 1
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(relieve)
                    await wait()

        (await cancelled_at_each_step(work, then=work)).check_inside(*BACKLOG)


SERVED: Final = tries(
    ConnectionServer.serve, AcceptedConnection.run, ConnectionWriter.run, SilenceWatch.run
)


async def test_a_connection_can_be_cancelled(server: Server, autojump_clock: MockClock) -> None:
    """It reads a key from disk, streams from disk, acquires a lease, asks for events and sends a
    batch that waits for the disk."""
    disk = disk_of(server)
    bucket = disk.bucket
    model = Model(disk, bucket.partitions[0])
    model.write((b"key", b"v"))
    await model.persist()
    await trio.sleep(5)

    async def work() -> None:
        model.forget()
        async with trio.open_nursery() as nursery:

            async def dial(address: Address) -> trio.abc.Stream:
                ours, theirs = trio.testing.memory_stream_pair()
                theirs.socket = _Nowhere()  # type: ignore[attr-defined]
                nursery.start_soon(server.connections.serve, theirs)
                await trio.lowlevel.checkpoint()
                return ours

            async with connect(server.url("b"), dial=dial) as client:
                await client.get_from(0, [b"key"], model.partition.failover_log.current)
                await client.acquire_lease(
                    [(0, 0, SEQ_MAX)], time_to_live_s=60, owner="o", lease_id=5
                )
                await client.set("other", "v", durability=Durability.PERSISTED)
            async with consume(server.url("b"), dial=dial, end="now") as consumer:
                assert [event async for event in consumer]
            async with follow_events(server.url(), consumer="c", dial=dial) as feed:
                await anext(feed)

    def look() -> None:
        check(server)
        assert not server.connections.connections
        shares = server.connections.resources.credit_shares
        assert not shares._refused_publishers
        assert not shares._publishers[bucket]
        assert not disk.leases._backfills
        for partition in bucket.partitions:
            assert partition.manager.cursor_count == 1, "only the disk has a cursor"

    async def settle() -> None:
        await trio.sleep(5)

    (await cancelled_at_each_step(work, look, undo=settle)).check_inside(*SERVED)


class _Nowhere:
    """Takes the place of the socket of a stream that has no address."""

    def getpeername(self) -> tuple[str, int]:
        raise OSError


# The cluster.

ENDED: Final = tries(streams_ended)


class _ManyStreams:
    """A server that needs three steps to end streams."""

    notified = 0

    def end_streams(self, *_arguments: object) -> Iterator[None]:
        yield from (None,) * 3

    def streams_may_begin(self) -> None:
        self.notified += 1


async def test_streams_may_begin_again_after_ending_them_was_cancelled() -> None:
    ids = count(1)
    bucket = Bucket("b", new_history_id=lambda: HistoryId(next(ids)), partition_count=PARTITIONS)
    many_streams = _ManyStreams()

    async def work() -> None:
        notified = many_streams.notified
        server = cast("LocalServer", many_streams)
        try:
            async with streams_ended(server, bucket, bucket.partitions, Status.STATE_CHANGED):
                assert all(partition.begins_no_stream for partition in bucket.partitions)
                await trio.lowlevel.checkpoint()
        finally:
            assert many_streams.notified == notified + 1

    def look() -> None:
        assert not any(partition.begins_no_stream for partition in bucket.partitions)

    (await cancelled_at_each_step(work, look, then=work)).check_inside(*ENDED)


def _map(server: Server) -> PartitionMap:
    current = server.partition_maps.map_of("b")
    if current is not None:
        return current.with_assignments({})
    return PartitionMap.of_one_node("b", PARTITIONS, "a", f"{HOST}:{server.port}")


async def _give(server: Server) -> None:
    new_map = _map(server)
    await server.partition_maps.set_map(new_map.revision - 1, new_map.encode())


async def _adopt(server: Server) -> None:
    assert await server.partition_maps.adopt_map(_map(server))


async def _confirm(server: Server) -> None:
    partition_maps = server.partition_maps
    partition_maps._buckets["b"].is_confirmed = False
    await partition_maps.confirm_map("b", partition_maps.revision("b"))


MAPS: Final[dict[Callable[[Server], Awaitable[None]], tuple[Function, ...]]] = {
    _give: tries(PartitionMaps.set_map, ClusteredBucket.apply_map, ClusteredBucket.follow_map),
    _adopt: tries(PartitionMaps.adopt_map),
    _confirm: tries(PartitionMaps.confirm_map),
}


@pytest.mark.parametrize("case", MAPS)
async def test_changes_of_the_partition_map_can_be_cancelled(
    server: Server,
    directory: SimulatedDirectory,
    autojump_clock: MockClock,
    case: Callable[[Server], Awaitable[None]],
) -> None:
    """The map on disk equals the map in memory."""
    await _give(server)

    async def then() -> None:
        current = server.partition_maps.map_of("b")
        assert current is not None
        (stored_bucket,) = (await SimulatedStore(directory).ask(LoadBuckets())).buckets
        assert stored_bucket.partition_map == current.encode()
        await case(server)

    steps = await cancelled_at_each_step(partial(case, server), lambda: check(server), then=then)
    steps.check_inside(*MAPS[case])


async def _name_replica(server: Server, address: str) -> None:
    """Gives the server a map in which the node `z` is its replica."""
    assignment = Assignment(active="a", replicas={"z": ""})
    new_map = PartitionMap(
        bucket="b",
        revision=2,
        nodes={"a": f"{HOST}:{server.port}", "z": address},
        partitions=(assignment,) * PARTITIONS,
    )
    await _give(server)
    await server.partition_maps.set_map(1, new_map.encode())


JOIN: Final = tries(PartitionMaps.adopt_map_from)


async def test_adopting_a_map_from_a_node_can_be_cancelled(
    server: Server, autojump_clock: MockClock
) -> None:
    async with node("z", store=slow_store()) as second_server:
        there = f"{HOST}:{second_server.port}"
        await _name_replica(server, there)
        # By now one node has a connection on which it asks the other.
        await trio.sleep(2 * ASK_INTERVAL_S)

        async def work() -> None:
            await second_server.partition_maps.adopt_map_from("b", f"{HOST}:{server.port}")

        async def undo() -> None:
            if second_server.catalog.buckets.get("b") is not None:
                await second_server.catalog.delete_bucket("b")

        def look() -> None:
            check(server)
            check(second_server)

        steps = await cancelled_at_each_step(work, look, then=work, undo=undo)
        steps.check_inside(*JOIN)


WHOLE: Final = tries(
    running_server,
    BucketCatalog.recovered_buckets,
    Upkeep.run_collapsing,
    Upkeep.run_freeing,
    Upkeep.run_expiring,
    Upkeep.run_returning_memory,
    BucketDisk.run,
    BucketDisk.stop,
    Flusher.run,
    IndexLag.wait,
    Maintenance.run,
    EventBus.running,
    EventBus.restore,
    EventBus.save,
    LocalConsumer.run,
)


async def test_a_server_can_be_cancelled(network: MemoryNetwork, autojump_clock: MockClock) -> None:
    """A cancelled server starts again, and has everything that it reported as on disk."""
    directory, persisted = SimulatedDirectory(), list[bytes]()
    numbers = count()

    async def work() -> None:
        async with node("a", "b", store=slow_store(directory)) as server:
            (bucket,) = server.catalog.buckets
            partition = bucket.partitions[0]
            disk = disk_of(server)
            pin = partition.eviction.pin()
            try:
                wants = [FetchRequest(key, 0, needs_value=True) for key in persisted[-5:]]
                for key, row in (await disk.find_items(partition, wants)).items():
                    assert row is not None, f"{key!r} is lost"
            finally:
                partition.eviction.unpin(pin)
            key = b"key-%d" % next(numbers)
            put(partition, key)
            await disk.flusher.wait_until_persisted(partition, partition.high_seq)
            persisted.append(key)
            put(partition, b"more")
            check(server)

    steps = await cancelled_at_each_step(work, then=work)
    steps.check_inside(*WHOLE)


REPLICA: Final = tries(
    PartitionMaps.run,
    PartitionMaps.stop,
    BucketReplicators.stop_all_but,
    MapExchange.run,
    NodeConnections.status,
    Replicator.run,
    Replicator.stop,
    Replicator.write_logs,
    ReplicaWriter.run,
    ReplicaWriter.flush,
)


async def _follow(server: Server, replica: Server, key: bytes) -> None:
    """The replica follows, and has `key` in each partition."""
    if replica.catalog.buckets.get("b") is None:
        await replica.partition_maps.adopt_map_from("b", f"{HOST}:{server.port}")
    ours, theirs = server.catalog.bucket("b"), replica.catalog.bucket("b")
    for partition in ours.partitions:
        put(partition, key)
    ends = [partition.high_seq for partition in ours.partitions]
    with trio.fail_after(60):
        await trio.lowlevel.checkpoint()
        while [partition.high_seq for partition in theirs.partitions] != ends:  # noqa: ASYNC110
            await trio.sleep(0.05)
    check(replica)


async def test_a_replica_can_be_cancelled(server: Server, autojump_clock: MockClock) -> None:
    """A replica starts, follows and stops. After a cancellation it starts again on its disk, and
    receives everything."""
    port, directory = 77, SimulatedDirectory()
    await _name_replica(server, f"{HOST}:{port}")
    numbers = count()

    async def work() -> None:
        async with node("z", port=port, store=slow_store(directory)) as second_server:
            await _follow(server, second_server, b"key-%d" % next(numbers))
            await second_server.partition_maps.stop()

    steps = await cancelled_at_each_step(
        work, lambda: check(server), then=work, every=3, reaching=REPLICA
    )
    steps.check_inside(*REPLICA)


ROLLBACK: Final = tries(ReplicaRollback.roll_back, ReplicaWriter.note_refused)


class _DamagedStore(SimulatedStore):
    """A store that meets a damaged record when it looks for a snapshot's end, if `is_damaged`."""

    is_damaged = False

    async def wait(self, call: StoreCall[Any]) -> None:
        await super().wait(call)
        if self.is_damaged and isinstance(call, FindSnapshotEnd):
            raise CorruptionError("a flipped bit")


async def test_a_rollback_of_a_replica_can_be_cancelled(
    server: Server, autojump_clock: MockClock
) -> None:
    """A rollback is completed, and so is the refusal of a partition with a damaged record."""
    port = 77
    await _name_replica(server, f"{HOST}:{port}")
    numbers = count()

    async def work() -> None:
        store = _DamagedStore(delay=lambda _: CALL_S)
        async with node("z", port=port, store=store) as second_server:
            await _follow(server, second_server, b"key-%d" % next(numbers))
            replicators = second_server.partition_maps._buckets["b"].replicators
            (replicator,) = replicators._replicators.values()
            rollback = replicator._rollback
            partition = second_server.catalog.bucket("b").partitions[P0]
            flusher = disk_of(second_server).flusher
            try:
                assert await rollback.roll_back(P0, SeqNo(0), "a new history") == 0
            finally:
                assert partition.high_seq == partition.manager.persistence.committed_seq
            answers: list[bool] = []
            for _ in range(STEP_CALLS):
                flusher.call_when_persisted(partition, SeqNo(1 << 40), answers.append)
            store.is_damaged = True
            with pytest.raises(ServerError, match="a flipped bit"):
                await rollback.roll_back(P0, SeqNo(0), "a new history")
            assert partition.damage
            assert answers == [False] * STEP_CALLS

    steps = await cancelled_at_each_step(
        work, lambda: check(server), then=work, every=3, reaching=ROLLBACK
    )
    steps.check_inside(*ROLLBACK)


COMPLETION: Final = tries(CopyCompletion.run)


async def test_asking_active_nodes_how_far_they_are_can_be_cancelled(
    server: Server, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`z` follows `y`, which is down, and the copies of `z` may lack what `z` acknowledged."""
    port = 77
    # The node's own task does not ask meanwhile.
    monkeypatch.setattr(copy_completion, "ASK_INTERVAL_S", math.inf)
    new_map = PartitionMap(
        bucket="b",
        revision=2,
        nodes={"a": f"{HOST}:{server.port}", "y": f"{HOST}:78", "z": f"{HOST}:{port}"},
        partitions=(Assignment(active="a", replicas={"y": "", "z": "y"}),) * PARTITIONS,
    )
    await _give(server)
    await server.partition_maps.set_map(1, new_map.encode())
    async with node("z", port=port) as second_server:
        await second_server.partition_maps.adopt_map_from("b", f"{HOST}:{server.port}")
        await trio.sleep(10)  # the nodes' own questions have their connections by then
        for partition in second_server.catalog.bucket("b").partitions:
            partition.is_incomplete = True

        async def work() -> None:
            with trio.move_on_after(1.2):
                await CopyCompletion(second_server.partition_maps).run()

        steps = await cancelled_at_each_step(work, lambda: check(second_server), then=work)
        steps.check_inside(*COMPLETION)


# Events.

BUS: Final = tries(EventBus.next_events, EventFeeds.next_batch)


async def test_asking_for_events_can_be_cancelled(autojump_clock: MockClock) -> None:
    """A cancelled question loses no event: the next one receives all."""
    ids, incarnations = count(1), count(1)
    bus = EventBus(SimulatedStore(), time=trio.current_time, new_id=lambda: next(ids))
    acknowledged = created = received = 0

    async def next_events() -> None:
        nonlocal acknowledged, received
        acknowledged, must_look, events = await bus.next_events(
            "c", EventFilter(), timeout_s=30, acknowledged=acknowledged, wait_s=1
        )
        assert not must_look
        received += len(events)

    async def work() -> None:
        nonlocal created
        created += 1
        incarnation = next(incarnations)
        bus.producer.bucket_created(_Bucket(f"b{incarnation}", incarnation))  # type: ignore[arg-type]
        while received < created:
            await next_events()
        # There are no more events, so this question waits.
        await next_events()
        assert received == created

    def look() -> None:
        assert bus.statistics()["asking"] == 0

    async with bus.running():
        acknowledged, must_look, _ = await bus.next_events(
            "c", EventFilter(), timeout_s=30, acknowledged=0, wait_s=1
        )
        assert must_look
        (await cancelled_at_each_step(work, look, then=work)).check_inside(*BUS)


class _Bucket:
    """A bucket as the producer of events needs it."""

    def __init__(self, name: str, incarnation: int) -> None:
        self.name = name
        self.incarnation = incarnation


# Processes.

tries(open_store, ProcessStore.execute, ProcessStore.watch)


async def test_a_store_of_two_processes_can_be_cancelled(tmp_path: Path) -> None:
    """After a cancellation no process is left, and the directory can be used at once."""
    before = set(children_of(os.getpid()))

    every = 24

    async def work() -> None:
        async with open_store(tmp_path / "data", bytes_max=1 << 30) as store:
            await store.ask(LoadBuckets())
            # At least one cancellation takes place while the store is open.
            for _ in range(every):
                await trio.lowlevel.checkpoint()

    def look() -> None:
        assert set(children_of(os.getpid())) == before

    steps = await cancelled_at_each_step(work, look, every=every)
    steps.check_inside(open_store, ProcessStore.watch)
    async with open_store(tmp_path / "data", bytes_max=1 << 30) as store:

        async def ask() -> None:
            await store.ask(LoadBuckets())

        steps = await cancelled_at_each_step(ask, then=ask)
    steps.check_inside(ProcessStore.execute)


SENDING: Final = tries(send_in_steps)


async def test_sending_a_call_in_steps_can_be_cancelled() -> None:
    near, _ = memory_stream_pair()

    async def work() -> None:
        await send_in_steps(near, [bytes(10)])

    (await cancelled_at_each_step(work, then=work)).check_inside(*SENDING)


SIGNALS: Final = tries(serve, started_server, run_until_signal)


async def test_the_daemon_can_be_cancelled(tmp_path: Path) -> None:
    config = ServerConfig(listen=f"{HOST}:0", data_dir=str(tmp_path / "data"))

    def on_listening(server: Server) -> None:
        signal.raise_signal(signal.SIGTERM)

    async def work() -> None:
        await serve(config, on_listening)

    (await cancelled_at_each_step(work, every=100, reaching=SIGNALS)).check_inside(*SIGNALS)


LISTENING: Final = tries(open_listeners, bind_tcp)


async def test_opening_listeners_can_be_cancelled() -> None:
    async def work() -> None:
        async with open_listeners(f"{HOST}:0") as listeners, bind_tcp(f"{HOST}:0"):
            assert listeners

    (await cancelled_at_each_step(work, then=work)).check_inside(*LISTENING)


CERTIFICATES: Final = tries(DaemonCertificates.watch, DaemonCertificates.reload_at)


async def test_renewing_certificates_can_be_cancelled(certificates: Certificates) -> None:
    server = certificates.server
    renewed = DaemonCertificates(CertificateFiles(str(server.cert), str(server.key)))

    async def work() -> None:
        hangups, signals = trio.open_memory_channel[int](1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(renewed.watch)
            nursery.start_soon(renewed.reload_at, signals)
            old_context = renewed.context
            await hangups.send(signal.SIGHUP)
            for _ in range(5):
                await trio.lowlevel.checkpoint()
            assert renewed.context is not old_context
            nursery.cancel_scope.cancel()

    (await cancelled_at_each_step(work, then=work)).check_inside(*CERTIFICATES)


# All operations.


def test_every_operation_is_cancelled_by_a_test() -> None:
    there = below(*(f"upr_server.{package}" for package in PACKAGES))
    assert {name_of(function) for function in TRIED} == there
