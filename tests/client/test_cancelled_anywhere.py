"""Every asynchronous operation of the clients, cancelled at each of its steps in turn.

A real server on a network in memory, so that each run takes the same steps. After each cancellation
no task and no connection is left, the server's invariants hold, both ends agree about credit, and
the same operation succeeds. The last test fails if no other test cancels an operation.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest
import trio
from trio.testing import MockClock

import upr_protocol.client
import upr_protocol.client.operator
from tests.engine.helpers import put
from tests.kit.async_names import exported, name_of
from tests.kit.cancellation import cancelled_at_each_step
from tests.kit.memory_network import HOST, PARTITIONS, MemoryNetwork, check, node
from upr_protocol.chunk import Chunk, chunk_of_plain_sets
from upr_protocol.client import (
    Address,
    ChunkReceived,
    Client,
    Consumer,
    CycleCompleted,
    EventFeed,
    FileStore,
    LocalCopyFollower,
    MemoryStore,
    NodeClient,
    NodeConnection,
    Publisher,
    ResumeState,
    RollbackConsumer,
    connect,
    consume,
    consume_as_replica,
    consume_with_rollback,
    follow_events,
    keep_local_copy,
    open_node,
    publisher,
)
from upr_protocol.client.core.batcher import BUNDLE_MUTATIONS
from upr_protocol.client.core.key_operations import KeyOperations
from upr_protocol.client.operator import (
    Operator,
    ReplicaLag,
    add_replicas,
    fail_over,
    remove_replicas,
    take_over,
    wait_caught_up,
)
from upr_protocol.errors import ServerError
from upr_protocol.hashing import partition_of
from upr_protocol.ids import SEQ_MAX, Durability, PartitionId, PartitionState
from upr_protocol.partition_map import Assignment, PartitionMap
from upr_protocol.transport import dial_tcp
from upr_protocol.users import RemoveUser
from upr_server.app import Server
from upr_server.replication.map_exchange import ASK_INTERVAL_S

KEYS: Final = [b"key-%d" % index for index in range(20)]
KEYS_OF_PARTITION_0: Final = [key for key in KEYS if partition_of(key, PARTITIONS) == 0]


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> MemoryNetwork:
    return MemoryNetwork(monkeypatch)


@pytest.fixture
async def server(network: MemoryNetwork) -> AsyncIterator[Server]:
    async with node("a", "b") as server:
        bucket = server.catalog.bucket("b")
        for key in KEYS:
            put(bucket.partitions[partition_of(key, PARTITIONS)], key)
        yield server


def operator_at(server: Server) -> Operator:
    return Operator(Address.parse(server.url("b")))


async def add(server: Server, second_server: Server) -> None:
    """Makes `second_server`, which is the node `z`, a replica of all partitions of `server`."""
    operator = operator_at(server)
    new_partitions = await add_replicas(operator, "z", f"{HOST}:{second_server.port}")
    with trio.fail_after(60):
        await wait_caught_up(operator, "z", new_partitions, ReplicaLag())
    # Waits until each node has opened its link to the other: the tasks of the links stay.
    await trio.sleep(2 * ASK_INTERVAL_S)


@asynccontextmanager
async def two_nodes(server: Server) -> AsyncIterator[list[Server]]:
    """`server`, and a second one that is active for partition 1."""
    async with node("z") as second_server:
        await add(server, second_server)
        await take_over(operator_at(server), to="z", partitions=[1])
        yield [server, second_server]


# Requests of clients.

ClientCase = Callable[[Client, int], Awaitable[object]]


async def _delete(client: Client, suffix: int) -> None:
    await client.set(f"d{suffix}", "v")
    await client.delete(f"d{suffix}")


async def _delete_bucket(client: Client, suffix: int) -> None:
    await client.create_bucket(f"d{suffix}", 1)
    await client.delete_bucket(f"d{suffix}")


async def _acquire(client: Client, suffix: int) -> None:
    await client.acquire_lease([(0, 0, SEQ_MAX)], time_to_live_s=60, owner="o", lease_id=5)


async def _renew(client: Client, suffix: int) -> None:
    await _acquire(client, suffix)
    await client.renew_lease(5, time_to_live_s=60)


async def _release(client: Client, suffix: int) -> None:
    await _acquire(client, suffix)
    await client.release_lease(5)


async def _await_durable(client: Client, suffix: int) -> None:
    write_result = await client.set("k", "v")
    await client.await_durable(write_result, Durability.PERSISTED)


async def _get_from(client: Client, suffix: int) -> None:
    await client.get_from(0, KEYS_OF_PARTITION_0, client.partitions()[0].log.current)


async def _change_users(client: Client, suffix: int) -> None:
    # A server without users refuses it.
    with suppress(ServerError):
        await client.change_users(RemoveUser("bob"))


KEY_OPERATIONS: Final = {
    function for name, function in vars(KeyOperations).items() if not name.startswith("_")
}
"""These are no coroutine functions: they return the coroutine of `Client._change`."""

CLIENT: Final[dict[Callable[..., object], ClientCase]] = {
    Client.get: lambda client, _: client.get(KEYS[0]),
    Client.get_many: lambda client, _: client.get_many(KEYS),
    Client.get_from: _get_from,
    Client.set: lambda client, _: client.set("k", "v"),
    Client.add: lambda client, suffix: client.add(f"a{suffix}", "v"),
    Client.replace: lambda client, _: client.replace(KEYS[0], "v"),
    Client.delete: _delete,
    Client.increment: lambda client, _: client.increment("counter"),
    Client.decrement: lambda client, _: client.decrement("counter"),
    Client.append: lambda client, _: client.append(KEYS[0], "v"),
    Client.prepend: lambda client, _: client.prepend(KEYS[0], "v"),
    Client.touch: lambda client, _: client.touch(KEYS[0], 0),
    Client.create_bucket: lambda client, suffix: client.create_bucket(f"c{suffix}", 1),
    Client.delete_bucket: _delete_bucket,
    Client.list_buckets: lambda client, _: client.list_buckets(),
    Client.stats: lambda client, _: client.stats("b"),
    Client.list_users: lambda client, _: client.list_users(),
    Client.change_users: _change_users,
    Client.seqnos: lambda client, _: client.seqnos(),
    Client.seqnos_at_time: lambda client, _: client.seqnos_at_time(0),
    Client.resume_state_at_time: lambda client, _: client.resume_state_at_time(0),
    Client.acquire_lease: _acquire,
    Client.renew_lease: _renew,
    Client.release_lease: _release,
    Client.await_durable: _await_durable,
}


@pytest.mark.parametrize("function", CLIENT)
async def test_a_request_can_be_cancelled(
    network: MemoryNetwork,
    server: Server,
    autojump_clock: MockClock,
    function: Callable[..., object],
) -> None:
    await try_request(network, [server], function)


async def test_requests_to_two_nodes_can_be_cancelled(
    network: MemoryNetwork, server: Server, autojump_clock: MockClock
) -> None:
    async with two_nodes(server) as servers:
        for function in CLIENT:
            await try_request(network, servers, function)


async def try_request(
    network: MemoryNetwork, servers: list[Server], function: Callable[..., object]
) -> None:
    numbers, identity = count(), "test:requests"
    async with connect(servers[0].url("b"), identity=identity) as client:

        async def work() -> None:
            await CLIENT[function](client, next(numbers))

        def look() -> None:
            credit = 0
            for server in servers:
                check(server)
                for connection in server.connections.connections:
                    if connection.session.client_identity == identity:
                        credit += connection.session.credit.remaining_bytes
            statistics = client.statistics()
            assert (statistics.open_requests, statistics.credit_left) == (0, credit)

        async def delete() -> None:
            for server in servers:
                for name in [
                    bucket.name for bucket in server.catalog.buckets if bucket.name != "b"
                ]:
                    await server.catalog.delete_bucket(name)

        steps = await cancelled_at_each_step(work, look, then=work, undo=delete)
    steps.check_inside(Client._change if function in KEY_OPERATIONS else function)


# Publishers.

PublisherCase = Callable[[Publisher], Awaitable[object]]


def _chunk() -> Chunk:
    return chunk_of_plain_sets(KEYS_OF_PARTITION_0, [b"v"] * len(KEYS_OF_PARTITION_0))


async def _wait_for_room(sink: Publisher) -> None:
    sink.publish_nowait([(PartitionId(0), _chunk())])
    await sink.wait_for_room()


async def _flush(sink: Publisher) -> None:
    await sink.set("k", "v")
    await sink.flush()


async def _publish(sink: Publisher) -> None:
    # With so many operations `publish` has a checkpoint.
    keys = KEYS_OF_PARTITION_0[:1] * BUNDLE_MUTATIONS
    await sink.publish(PartitionId(0), chunk_of_plain_sets(keys, keys))


async def _delete_key(sink: Publisher) -> None:
    await sink.set("k", "v")
    await sink.delete("k")


PUBLISHER: Final[dict[Callable[..., object], PublisherCase]] = {
    Publisher.apply: lambda sink: sink.set("k", "v"),
    Publisher.set: lambda sink: sink.set("k", "v"),
    Publisher.delete: _delete_key,
    Publisher.increment: lambda sink: sink.increment("counter"),
    Publisher.decrement: lambda sink: sink.decrement("counter"),
    Publisher.publish: _publish,
    Publisher.publish_and_wait: lambda sink: sink.publish_and_wait(PartitionId(0), _chunk()),
    Publisher.wait_for_room: _wait_for_room,
    Publisher.flush: _flush,
}


@pytest.mark.parametrize("function", PUBLISHER)
async def test_publishing_can_be_cancelled(
    network: MemoryNetwork,
    server: Server,
    autojump_clock: MockClock,
    function: Callable[..., object],
) -> None:
    await try_publishing(network, [server], function)


async def test_publishing_to_two_nodes_can_be_cancelled(
    network: MemoryNetwork, server: Server, autojump_clock: MockClock
) -> None:
    async with two_nodes(server) as servers:
        for function in PUBLISHER:
            await try_publishing(network, servers, function)


async def try_publishing(
    network: MemoryNetwork, servers: list[Server], function: Callable[..., object]
) -> None:
    async with publisher(servers[0].url("b"), batch_mutations=1) as sink:

        async def work() -> None:
            await PUBLISHER[function](sink)

        def look() -> None:
            for server in servers:
                check(server)
            statistics = sink.statistics()
            assert (statistics.unanswered_batches, statistics.unanswered_bytes) == (0, 0)

        steps = await cancelled_at_each_step(work, look, then=work)
        statistics = sink.statistics()
        assert (statistics.resent_batches, statistics.failed_mutations) == (0, 0)
        assert statistics.connections == len(servers)
    steps.check_inside(function)


# Consumers.


class Store(MemoryStore):
    """A store whose operations take ten steps. Threads shift the count of steps from run to run, so
    a single step might never be the one at which the work is cancelled."""

    async def load(self) -> ResumeState | None:
        await _some_steps()
        return await super().load()

    async def save(self, state: ResumeState) -> None:
        await _some_steps()
        await super().save(state)


async def _some_steps() -> None:
    for _ in range(10):
        await trio.lowlevel.checkpoint()


class Reader:
    """Writes at the servers and reads with a consumer, and checks that it receives all new keys in
    their order, whatever was cancelled before."""

    def __init__(
        self, servers: list[Server], consumer: Consumer | RollbackConsumer | LocalCopyFollower
    ) -> None:
        self._servers = servers
        self._consumer = consumer
        self._numbers = count()
        self._written: dict[PartitionId, list[bytes]] = {}
        self._read: dict[PartitionId, list[bytes]] = {}

    def write(self) -> bytes:
        """Sets a new key, and returns it."""
        key = b"new-%d" % next(self._numbers)
        partition_id = PartitionId(partition_of(key, PARTITIONS))
        (active,) = (
            partition
            for server in self._servers
            for partition in server.catalog.bucket("b").partitions
            if partition.id == partition_id and partition.state is PartitionState.ACTIVE
        )
        put(active, key)
        self._written.setdefault(partition_id, []).append(key)
        return key

    async def follow(self, until: bytes = b"") -> None:
        """Reads until a key comes."""
        async for event in self._consumer:
            if isinstance(event, ChunkReceived):
                keys = [row.key for row in event.chunk if row.key.startswith(b"new")]
                self._read.setdefault(event.partition, []).extend(keys)
                if until in keys:
                    return

    async def anext(self) -> None:
        await self.follow(self.write())

    async def barrier(self) -> None:
        assert not isinstance(self._consumer, LocalCopyFollower)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.follow)
            self.write()
            await self._consumer.barrier()
            nursery.cancel_scope.cancel()
        self.check()

    async def save(self) -> None:
        await self.anext()
        await self._consumer.save()

    @property
    def count(self) -> int:
        return sum(map(len, self._written.values()))

    def check(self) -> None:
        assert self._read == self._written


@pytest.mark.parametrize("function", [Consumer.__anext__, Consumer.barrier, Consumer.save])
async def test_a_consumer_can_be_cancelled(
    network: MemoryNetwork,
    server: Server,
    autojump_clock: MockClock,
    function: Callable[..., object],
) -> None:
    await try_consuming([server], function)
    assert network.open == 0


async def test_a_consumer_of_two_nodes_can_be_cancelled(
    network: MemoryNetwork, server: Server, autojump_clock: MockClock
) -> None:
    async with two_nodes(server) as servers:
        await try_consuming(servers, Consumer.__anext__, Consumer.barrier, Consumer.save)


async def try_consuming(servers: list[Server], *functions: Callable[..., object]) -> None:
    def look() -> None:
        for server in servers:
            check(server)

    async with consume(servers[0].url("b"), resume=Store()) as consumer:
        reader = Reader(servers, consumer)
        for function in functions:
            work = getattr(reader, function.__name__.strip("_"))
            (await cancelled_at_each_step(work, look, then=work)).check_inside(function)
        await reader.barrier()
        assert consumer.statistics().connections == len(servers)


@pytest.mark.parametrize(
    "function", [RollbackConsumer.__anext__, RollbackConsumer.barrier, RollbackConsumer.save]
)
async def test_a_consumer_that_can_roll_back_can_be_cancelled(
    network: MemoryNetwork, server: Server, function: Callable[..., object], tmp_path: Path
) -> None:
    async with consume_with_rollback(
        server.url("b"), tmp_path / "received-keys", resume=Store()
    ) as consumer:
        reader = Reader([server], consumer)
        work = getattr(reader, function.__name__.strip("_"))
        steps = await cancelled_at_each_step(work, lambda: check(server), then=work)
        await reader.barrier()
        assert consumer.statistics().connections == 1
    steps.check_inside(function)
    assert network.open == 0


LOCAL_COPY: Final = (
    LocalCopyFollower.__anext__,
    LocalCopyFollower.save,
    LocalCopyFollower.get,
    LocalCopyFollower.count,
)


@pytest.mark.parametrize("function", LOCAL_COPY)
async def test_a_local_copy_can_be_cancelled(
    network: MemoryNetwork, server: Server, function: Callable[..., object], tmp_path: Path
) -> None:
    async with keep_local_copy(server.url("b"), tmp_path / "local-copy") as copy:
        reader = Reader([server], copy)
        key = reader.write()
        await reader.follow(key)
        work: dict[Callable[..., object], Callable[[], Awaitable[object]]] = {
            LocalCopyFollower.__anext__: reader.anext,
            LocalCopyFollower.save: copy.save,
            LocalCopyFollower.get: lambda: copy.get(key),
            LocalCopyFollower.count: copy.count,
        }
        steps = await cancelled_at_each_step(
            work[function], lambda: check(server), then=reader.anext
        )
        reader.check()
        assert await copy.count() == len(KEYS) + reader.count
    steps.check_inside(function)
    assert network.open == 0


async def test_loading_and_saving_a_resume_file_can_be_cancelled(tmp_path: Path) -> None:
    store, state = FileStore(tmp_path / "state"), ResumeState("b")

    async def save() -> None:
        await store.save(state)

    async def load() -> None:
        loaded = await store.load()
        assert loaded is not None
        assert loaded.encode() == state.encode()

    (await cancelled_at_each_step(save, then=save)).check_inside(FileStore.save)
    (await cancelled_at_each_step(load, then=load)).check_inside(FileStore.load)


WITHOUT_CHECKPOINT: Final = (MemoryStore.load, MemoryStore.save)


def test_memory_stores_have_no_checkpoint_to_cancel_at() -> None:
    store = MemoryStore()
    for coroutine in (store.save(ResumeState("b")), store.load()):
        with pytest.raises(StopIteration):
            coroutine.send(None)


# Contexts.


async def _connect(server: Server, folder: Path) -> None:
    async with connect(server.url("b")) as client:
        assert await client.get(KEYS[0]) is not None


async def _publisher(server: Server, folder: Path) -> None:
    async with publisher(server.url("b"), batch_mutations=2) as sink:
        for key in KEYS[:5]:
            await sink.set(key, "v")


async def _consume(server: Server, folder: Path) -> None:
    async with consume(server.url("b"), resume=Store(), end="now") as consumer:
        assert [event async for event in consumer]


async def _consume_with_rollback(server: Server, folder: Path) -> None:
    path = folder / "received-keys"
    async with consume_with_rollback(server.url("b"), path, resume=Store(), end="now") as consumer:
        assert [event async for event in consumer]


async def _consume_as_replica(server: Server, folder: Path) -> None:
    async with consume_as_replica(
        server.url("b"),
        state=PartitionState.ACTIVE,
        resume=Store(),
        identity="replica:z",
        retry_timeout_s=60,
        dial=dial_tcp,
        draw=random.Random(1).random,
    ) as consumer:
        async for event in consumer:
            if isinstance(event, CycleCompleted):
                break


async def _keep_local_copy(server: Server, folder: Path) -> None:
    async with keep_local_copy(server.url("b"), folder / "map", end="now") as copy:
        async for _ in copy:
            pass
        assert await copy.count() == len(KEYS)


async def _follow_events(server: Server, folder: Path) -> None:
    async with follow_events(server.url(), consumer="c") as feed:
        await anext(feed)


async def _node_status(server: Server, folder: Path) -> None:
    await NodeClient(Address.parse(server.url("b"))).status()


async def _node_status_with_partitions(server: Server, folder: Path) -> None:
    await NodeClient(Address.parse(server.url("b"))).status_with_partitions()


async def _open_node(server: Server, folder: Path) -> None:
    async with open_node(Address.parse(server.url("b"))) as connection:
        await connection.status("b")
        await connection.users()
        with trio.move_on_after(0.05):
            await connection.wait_ended()


async def _wants_log_in(server: Server, folder: Path) -> None:
    assert not await NodeClient(Address.parse(server.url("b"))).requires_log_in()


async def _set_map(server: Server, folder: Path) -> None:
    node = NodeClient(Address.parse(server.url("b")))
    current = server.partition_maps.map_of("b")
    if current is None:
        own = f"{HOST}:{server.port}"
        await node.set_map(0, PartitionMap.of_one_node("b", PARTITIONS, "a", own))
    else:
        await node.set_map(current.revision, current.with_assignments({}))


async def _join(server: Server, folder: Path) -> None:
    # The node asks itself, and its bucket is on no other node.
    with pytest.raises(ServerError, match="has no map of 'b'"):
        await NodeClient(Address.parse(server.url("b"))).join(f"{HOST}:{server.port}")


CONTEXTS: Final[dict[Callable[[Server, Path], Awaitable[None]], tuple[Callable[..., Any], ...]]] = {
    _connect: (connect,),
    _publisher: (publisher,),
    _consume: (consume,),
    _consume_with_rollback: (consume_with_rollback,),
    _keep_local_copy: (keep_local_copy,),
    _follow_events: (follow_events, EventFeed.__anext__, EventFeed.run),
    _node_status: (NodeClient.status,),
    _node_status_with_partitions: (NodeClient.status_with_partitions,),
    _open_node: (
        *(open_node, NodeConnection.status, NodeConnection.users, NodeConnection.wait_ended),
    ),
    _wants_log_in: (NodeClient.requires_log_in,),
    _set_map: (NodeClient.set_map,),
    _join: (NodeClient.join,),
}


@pytest.mark.parametrize("context", CONTEXTS)
async def test_a_context_can_be_cancelled_from_its_beginning_to_its_end(
    network: MemoryNetwork,
    server: Server,
    context: Callable[[Server, Path], Awaitable[None]],
    tmp_path: Path,
) -> None:
    async def work() -> None:
        await context(server, tmp_path)

    def look() -> None:
        check(server)
        assert network.open == 0
        assert not server.connections.connections

    steps = await cancelled_at_each_step(work, look)
    assert steps.times > 10
    steps.check_inside(*CONTEXTS[context])


async def test_a_consumer_as_a_replica_can_be_cancelled(
    network: MemoryNetwork, server: Server, tmp_path: Path, autojump_clock: MockClock
) -> None:
    partition_map = PartitionMap(
        bucket="b",
        revision=1,
        nodes={"a": f"{HOST}:{server.port}", "z": f"{HOST}:65535"},
        partitions=(Assignment(active="a", replicas={"z": ""}),) * PARTITIONS,
    )
    await NodeClient(Address.parse(server.url("b"))).set_map(0, partition_map)
    # The server asks the replica's node for its map, in vain, for as long as it runs.
    await trio.sleep(2 * ASK_INTERVAL_S)

    async def work() -> None:
        await _consume_as_replica(server, tmp_path)

    steps = await cancelled_at_each_step(work, lambda: check(server))
    assert steps.times > 10
    steps.check_inside(consume_as_replica)


# Operators. Their commands take so many steps that only some are tried.


def check_together(servers: list[Server]) -> None:
    """Checks each server, and that no two are active for a partition in the same history."""
    for server in servers:
        check(server)
    for partition in range(PARTITIONS):
        buckets = [server.catalog.buckets.get("b") for server in servers]
        active = [
            bucket.partitions[partition].failover_log.current
            for bucket in buckets
            if bucket is not None and bucket.partitions[partition].state is PartitionState.ACTIVE
        ]
        assert len(set(active)) == len(active), "two nodes are active in one history"


SURVEY: Final = (
    Operator.node_status,
    Operator.node_report,
    Operator.node_reports,
    Operator.first_report,
    Operator.survey,
)


async def test_a_survey_of_the_nodes_can_be_cancelled(
    network: MemoryNetwork, server: Server, autojump_clock: MockClock
) -> None:
    async with node("z") as second_server:
        operator = operator_at(server)
        await add(server, second_server)

        async def work() -> None:
            survey = await operator.survey()
            assert survey.map == (await operator.node_status(operator.address)).map

        steps = await cancelled_at_each_step(
            work, lambda: check_together([server, second_server]), every=3, reaching=SURVEY
        )
        steps.check_inside(*SURVEY)


async def test_adding_and_removing_replicas_can_be_cancelled(
    network: MemoryNetwork, server: Server, autojump_clock: MockClock
) -> None:
    async with node("z") as second_server:
        operator, servers = operator_at(server), [server, second_server]

        async def add_second_server() -> None:
            await add(server, second_server)

        async def remove() -> None:
            await remove_replicas(operator, "z")

        async def remove_again() -> None:
            if "z" in (await operator.survey()).require_map().nodes:
                await remove()

        await add_second_server()
        await remove()
        # From now on the second server has the bucket, with old data on its disk.
        steps = await cancelled_at_each_step(
            add_second_server,
            lambda: check_together(servers),
            then=add_second_server,
            undo=remove_again,
            every=47,
            reaching=(add_replicas, wait_caught_up),
        )
        steps.check_inside(add_replicas, wait_caught_up)
        await add_second_server()
        steps = await cancelled_at_each_step(
            remove,
            lambda: check_together(servers),
            then=add_second_server,
            every=47,
            reaching=[remove_replicas],
        )
        steps.check_inside(remove_replicas)


async def test_a_takeover_can_be_cancelled(
    network: MemoryNetwork, server: Server, autojump_clock: MockClock
) -> None:
    async with node("z") as second_server:
        operator, servers = operator_at(server), [server, second_server]
        await add(server, second_server)

        async def work() -> None:
            await take_over(operator, to="z", all_of="a")

        async def then() -> None:
            survey = await operator.survey()
            if any(assignment.active != "z" for assignment in survey.require_map().partitions):
                await take_over(operator, to="z", partitions=range(PARTITIONS))
            check_together(servers)
            await take_over(operator, to="a", partitions=range(PARTITIONS))

        steps = await cancelled_at_each_step(
            work, lambda: check_together(servers), then=then, every=47, reaching=[take_over]
        )
        steps.check_inside(take_over)


async def test_a_failover_can_be_cancelled(
    network: MemoryNetwork, server: Server, autojump_clock: MockClock
) -> None:
    async with node("z") as second_server:
        servers = [server, second_server]
        await add(server, second_server)
        await caught_up(servers)
        network.away.add(server.port)
        network.cut(server.port)
        operator = operator_at(second_server)

        async def work() -> None:
            await fail_over(operator, partitions=range(PARTITIONS), to="z")

        async def then() -> None:
            survey = await operator.survey()
            if any(assignment.active != "z" for assignment in survey.require_map().partitions):
                await work()
            check_together(servers)
            network.away.discard(server.port)
            await caught_up(servers)
            await take_over(operator, to="a", partitions=range(PARTITIONS))
            await caught_up(servers)
            network.away.add(server.port)
            network.cut(server.port)

        steps = await cancelled_at_each_step(
            work, lambda: check_together(servers), then=then, every=47, reaching=[fail_over]
        )
        steps.check_inside(fail_over)


async def caught_up(servers: list[Server]) -> None:
    """Waits until both servers have the same map and the same histories."""

    def same() -> bool:
        maps = [server.partition_maps.map_of("b") for server in servers]
        logs = [
            [partition.failover_log for partition in server.catalog.bucket("b").partitions]
            for server in servers
        ]
        return maps[0] == maps[1] and logs[0] == logs[1]

    with trio.fail_after(60):
        await trio.lowlevel.checkpoint()
        while not same():  # noqa: ASYNC110  servers tell nobody
            await trio.sleep(0.1)


COMMANDS: Final = (add_replicas, remove_replicas, wait_caught_up, take_over, fail_over)


def test_every_operation_is_cancelled_by_a_test() -> None:
    operations: set[Callable[..., object]] = {
        *CLIENT,
        *PUBLISHER,
        *(Consumer.__anext__, Consumer.barrier, Consumer.save),
        *(RollbackConsumer.__anext__, RollbackConsumer.barrier, RollbackConsumer.save),
        *LOCAL_COPY,
        *(FileStore.load, FileStore.save),
        *WITHOUT_CHECKPOINT,
        *(function for functions in CONTEXTS.values() for function in functions),
        consume_as_replica,
        *SURVEY,
        *COMMANDS,
    }
    expected_names = exported(upr_protocol.client) | exported(upr_protocol.client.operator)
    expected_names |= {name_of(function) for function in KEY_OPERATIONS}
    assert {name_of(function) for function in operations} == expected_names
