"""Connections on which nodes ask each other for maps: kept while they are needed, replaced when
they break."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog
import trio
from trio.testing import MockClock

from tests.kit.memory_network import HOST, PARTITIONS, MemoryNetwork, node
from tests.kit.process import eventually
from upr_protocol.client import Address
from upr_protocol.errors import BrokenError, RemoteProtocolError, ServerError, Status
from upr_protocol.partition_map import Assignment, PartitionMap
from upr_protocol.transport import dial_tcp
from upr_protocol.wire import GetMap, Message
from upr_server.net import HANDLERS
from upr_server.replication.map_exchange import ASK_INTERVAL_S, MAPS_TOLD_AT_ONCE, MapExchange
from upr_server.replication.node_connections import ASK_TIMEOUT_S, NodeConnections
from upr_server.replication.partition_maps import PartitionMaps
from upr_server.runtime import System
from upr_server.storage.calls import PutPartitionMap, StoreCall
from upr_server.storage.errors import DiskFullError
from upr_server.storage.simulated import SimulatedDirectory, SimulatedStore

PORT = 77

THERE = Address(HOST, PORT, "b")


class Dials:
    """Counts connections."""

    def __init__(self) -> None:
        self.count = 0

    async def dial(self, address: Address) -> trio.abc.Stream:
        self.count += 1
        return await dial_tcp(address)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> MemoryNetwork:
    return MemoryNetwork(monkeypatch)


@pytest.fixture
def dials() -> Dials:
    return Dials()


@pytest.fixture
def connections(network: MemoryNetwork, dials: Dials, nursery: trio.Nursery) -> NodeConnections:
    return NodeConnections(nursery, "node:a", System(dial=dials.dial))


async def test_all_questions_use_one_connection(
    network: MemoryNetwork, connections: NodeConnections, dials: Dials, autojump_clock: MockClock
) -> None:
    async with node("z", "b", "c", port=PORT):
        for bucket in ("b", "c", "b"):
            status = await connections.status(Address(HOST, PORT, bucket))
            assert (status.node, status.map) == ("z", None)
            await trio.sleep(100.0)
        with pytest.raises(ServerError) as refusal:
            await connections.status(Address(HOST, PORT, "nowhere"))
        assert refusal.value.status is Status.NO_BUCKET
        assert (dials.count, network.open) == (1, 1)


async def test_a_node_that_was_restarted_is_asked_over_a_new_connection(
    connections: NodeConnections, dials: Dials, autojump_clock: MockClock
) -> None:
    async with node("z", "b", port=PORT):
        await connections.status(THERE)
    with pytest.raises(BrokenError, match="cannot connect"):
        await connections.status(THERE)
    async with node("y", "b", port=PORT):
        assert (await connections.status(THERE)).node == "y"
        assert dials.count == 3


async def test_a_connection_that_breaks_during_a_question_is_replaced(
    network: MemoryNetwork, connections: NodeConnections, dials: Dials, autojump_clock: MockClock
) -> None:
    async with node("z", "b", port=PORT):
        await connections.status(THERE)
        network.cut(PORT)
        # Neither node has noticed it yet.
        assert (await connections.status(THERE)).node == "z"
        assert (dials.count, network.open) == (2, 1)


async def test_a_question_without_an_answer_closes_its_connection(
    network: MemoryNetwork,
    connections: NodeConnections,
    dials: Dials,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: MockClock,
) -> None:
    async with node("z", "b", port=PORT) as server:
        await connections.status(THERE)
        silent: dict[type[Message], object] = {**HANDLERS, GetMap: lambda *_: None}
        with monkeypatch.context() as patch:
            (connection,) = server.connections.connections
            patch.setattr(connection._dispatcher, "_handlers", silent)
            with trio.move_on_after(2.0) as timeout:
                await connections.status(THERE)
            assert timeout.cancelled_caught
        await trio.sleep(1.0)
        assert network.open == 0
        assert (await connections.status(THERE)).node == "z"
        assert dials.count == 2


async def test_a_cancelled_attempt_to_connect_leaves_nothing(
    network: MemoryNetwork,
    connections: NodeConnections,
    autojump_clock: MockClock,
) -> None:
    async with node("z", "b", port=PORT):
        with trio.CancelScope() as timeout:
            timeout.cancel()
            await connections.status(THERE)
        await trio.sleep(5.0)
        assert network.open == 0


async def test_connections_to_nodes_that_the_map_does_not_name_any_more_are_closed(
    network: MemoryNetwork, connections: NodeConnections, dials: Dials, autojump_clock: MockClock
) -> None:
    other_address = Address(HOST, PORT + 1, "b")
    async with node("y", "b", port=PORT + 1), node("z", "b", port=PORT):
        await connections.status(THERE)
        await connections.status(other_address)
        connections.close_others([other_address])
        await trio.sleep(5.0)
        assert network.open == 1
        await connections.status(other_address)
        assert dials.count == 2


async def test_a_silent_node_is_waited_for_once_and_not_for_each_bucket(
    network: MemoryNetwork, autojump_clock: MockClock
) -> None:
    """A node that was restarted is active again as soon as another one has confirmed its maps."""
    buckets = [f"bucket-{index}" for index in range(10)]
    ports = {"a": PORT, "b": PORT + 1, "c": PORT + 2}
    addresses = {name: f"{HOST}:{port}" for name, port in ports.items()}
    assignment = Assignment("a", {"b": "", "c": ""})
    directory = SimulatedDirectory()
    async with node("c", port=ports["c"]) as other:
        store = SimulatedStore(directory)
        async with node("a", *buckets, port=ports["a"], store=store) as server:
            for bucket in buckets:
                partition_map = PartitionMap(
                    bucket=bucket,
                    revision=1,
                    nodes=addresses,
                    partitions=(assignment,) * PARTITIONS,
                )
                await server.partition_maps.set_map(0, partition_map.encode())
                await other.partition_maps.set_map(0, partition_map.encode())
        network.hang(ports["b"])
        store = SimulatedStore(directory)
        async with node("a", *buckets, port=ports["a"], store=store) as server:
            assert server.partition_maps.unconfirmed_buckets() == buckets
            with trio.fail_after(2 * ASK_TIMEOUT_S):
                await eventually(
                    lambda: not server.partition_maps.unconfirmed_buckets(), "all are confirmed"
                )


async def test_a_node_that_takes_no_maps_is_asked_about_other_buckets(
    network: MemoryNetwork, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """The node answers questions but refuses maps, perhaps for ever. Its other buckets must not
    wait for that, and it is sent few maps at a time."""
    told_count = 0

    async def send_refused_map(*_: object) -> None:
        nonlocal told_count
        told_count += 1
        await trio.sleep_forever()

    monkeypatch.setattr(MapExchange, "_tell_own_map", send_refused_map)
    lost = [f"bucket-{index}" for index in range(2 * MAPS_TOLD_AT_ONCE)]
    known = "known"
    ports = {"a": PORT, "c": PORT + 2}
    maps = {
        bucket: PartitionMap(
            bucket=bucket,
            revision=1,
            nodes={name: f"{HOST}:{port}" for name, port in ports.items()},
            partitions=(Assignment("a", {"c": ""}),) * PARTITIONS,
        ).encode()
        for bucket in (*lost, known)
    }
    directory = SimulatedDirectory()
    async with node("c", *lost, port=ports["c"]) as other:
        store = SimulatedStore(directory)
        async with node("a", *lost, known, port=ports["a"], store=store) as server:
            for document in maps.values():
                await server.partition_maps.set_map(0, document)
            await other.partition_maps.set_map(0, maps[known])
        store = SimulatedStore(directory)
        told_count = 0
        async with node("a", *lost, known, port=ports["a"], store=store) as server:
            with trio.fail_after(ASK_TIMEOUT_S):
                await eventually(
                    lambda: sorted(server.partition_maps.unconfirmed_buckets()) == sorted(lost),
                    "one is confirmed",
                )
            await trio.sleep(2.0)
            assert told_count == MAPS_TOLD_AT_ONCE


async def test_a_bucket_that_is_deleted_while_another_node_is_asked_stays_deleted(
    network: MemoryNetwork, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    partition_map = PartitionMap(
        bucket="b",
        revision=1,
        nodes={"a": f"{HOST}:{PORT}", "c": f"{HOST}:{PORT + 2}"},
        partitions=(Assignment("a", {"c": ""}),) * PARTITIONS,
    )
    async with node("a", "b", port=PORT) as server:

        async def answer_late(*_: object) -> PartitionMap:
            await server.catalog.delete_bucket("b")
            return partition_map

        monkeypatch.setattr(MapExchange, "_fetch", answer_late)
        await server.partition_maps.set_map(0, partition_map.encode())
        await trio.sleep(2 * ASK_INTERVAL_S)
        assert server.catalog.disk_of("b") is None


class FullStore(SimulatedStore):
    """A store that has no room for a partition map while `is_full`; each time it reports less
    room."""

    is_full = False
    refused_count = 0

    async def wait(self, call: StoreCall[Any]) -> None:
        await super().wait(call)
        if self.is_full and isinstance(call, PutPartitionMap):
            self.refused_count += 1
            raise DiskFullError(f"{1000 - self.refused_count} bytes are left")


async def test_a_map_that_finds_no_room_is_logged_once(
    network: MemoryNetwork, autojump_clock: MockClock
) -> None:
    first_map = PartitionMap(
        bucket="b",
        revision=1,
        nodes={"a": f"{HOST}:{PORT}", "c": f"{HOST}:{PORT + 2}"},
        partitions=(Assignment("c", {"a": ""}),) * PARTITIONS,
    )
    store = FullStore()
    async with node("c", "b", port=PORT + 2) as other, node("a", port=PORT, store=store) as server:
        for maps in (other.partition_maps, server.partition_maps):
            await maps.set_map(0, first_map.encode())
        store.is_full = True
        with structlog.testing.capture_logs() as lines:
            for revision in (2, 3):
                next_map = first_map.with_assignments({}, revision)
                await other.partition_maps.set_map(revision - 1, next_map.encode())
                await trio.sleep(5 * ASK_INTERVAL_S)
        assert store.refused_count > 4
        refusals = [line["error"] for line in lines if line["log_level"] == "error"]
        assert len(refusals) == 2, "once for each map"
        store.is_full = False
        await trio.sleep(2 * ASK_INTERVAL_S)
        assert server.partition_maps.revision("b") == 3


async def test_a_client_that_waits_for_a_failover_is_answered_once_the_map_is_applied(
    network: MemoryNetwork, autojump_clock: MockClock
) -> None:
    """A map that finds no room is applied again later, up to four times a second."""
    partition_map = PartitionMap(
        bucket="b",
        revision=2,
        nodes={"a": f"{HOST}:{PORT}", "c": f"{HOST}:{PORT + 2}"},
        partitions=(Assignment("a", {"c": ""}),),
    )
    store = FullStore()
    async with node("a", port=PORT, store=store) as server:
        await server.create_dead_bucket("b", 1)
        store.is_full = True
        with structlog.testing.capture_logs() as lines:
            for _ in range(3):
                with pytest.raises(DiskFullError):
                    await server.partition_maps.set_map(0, partition_map.encode())
            assert not lines
            store.is_full = False
            await server.partition_maps.set_map(0, partition_map.encode())
        assert [line["partitions"] for line in lines if line["log_level"] == "warning"] == [1]


async def test_a_node_that_was_removed_sends_its_map_to_no_node(
    network: MemoryNetwork, autojump_clock: MockClock
) -> None:
    """Its bucket was deleted on the other nodes, and created again."""
    addresses = {"a": f"{HOST}:{PORT}", "c": f"{HOST}:{PORT + 2}"}
    first_map = PartitionMap(
        bucket="b",
        revision=1,
        nodes=addresses,
        partitions=(Assignment("a", {"c": ""}),) * PARTITIONS,
    )
    last_map = PartitionMap(
        bucket="b",
        revision=2,
        nodes={"a": addresses["a"]},
        partitions=(Assignment("a"),) * PARTITIONS,
    )
    async with node("c", "b", port=PORT + 2) as server:
        await server.partition_maps.set_map(0, first_map.encode())
        await server.partition_maps.set_map(1, last_map.encode())
        async with node("a", "b", port=PORT) as other:
            await trio.sleep(3 * ASK_INTERVAL_S)
            assert other.partition_maps.map_of("b") is None


async def test_a_node_that_answers_with_the_map_of_another_bucket_changes_nothing(
    connections: NodeConnections, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Otherwise a client that makes a node ask for one bucket could make it accept any other bucket
    from there."""
    hostile = PartitionMap.of_one_node("secret", 2, "y", f"{HOST}:{PORT + 1}")
    async with (
        node("y", "b", "secret", port=PORT + 1) as attacked,
        node("z", "b", port=PORT) as attacker,
    ):
        monkeypatch.setattr(attacker.partition_maps, "map_of", lambda _: hostile)
        with pytest.raises(ServerError, match="sent that of 'secret'"):
            await attacked.partition_maps.adopt_map_from("b", f"{HOST}:{PORT}")
        with pytest.raises(RemoteProtocolError, match="sent that of 'secret'"):
            await connections.status(THERE)
        assert attacked.partition_maps.all_maps() == []


@pytest.mark.parametrize("address", ["::1:12000", "[::1:12000", "a/b:1", "\u2100:1"])
async def test_a_map_with_an_invalid_address_is_refused(
    network: MemoryNetwork, autojump_clock: MockClock, address: str
) -> None:
    """The node asks all addresses of its maps every few seconds."""
    assignment = Assignment("a", {"z": ""})
    bad_map = PartitionMap(
        bucket="b",
        revision=1,
        nodes={"a": f"{HOST}:{PORT}", "z": address},
        partitions=(assignment,) * PARTITIONS,
    )
    async with node("a", "b", port=PORT) as server:
        with pytest.raises(ServerError) as refusal:
            await server.partition_maps.set_map(0, bad_map.encode())
        assert refusal.value.status is Status.BAD_ARGUMENT
        with pytest.raises(ServerError) as refusal:
            await server.partition_maps.adopt_map_from("b", address)
        assert refusal.value.status is Status.BAD_ARGUMENT
        await trio.sleep(10.0)
        assert not server.partition_maps.revision("b")


def test_each_node_is_listed_once_however_many_buckets_it_shares() -> None:
    """Parsing an address takes some microseconds, and a node may have hundreds of buckets."""
    nodes = {"b": "b:12000", "c": "c:12000"}
    maps = [
        PartitionMap(bucket=bucket, revision=1, nodes=nodes, partitions=(Assignment("b"),))
        for bucket in ("d", "e", "f")
    ]
    partition_maps = SimpleNamespace(
        all_maps=lambda: maps, other_nodes=lambda _bucket: nodes, system=System()
    )
    exchange = MapExchange(cast("PartitionMaps", partition_maps))
    assert list(exchange._other_nodes()) == [Address("b", 12000), Address("c", 12000)]
