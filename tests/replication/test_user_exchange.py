"""When a change of users on one node takes effect on the other nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import pytest
import trio
from trio.testing import MockClock

from tests.kit.memory_network import HOST, MemoryNetwork
from upr_protocol.client import Address, Credentials, Security, connect, consume
from upr_protocol.errors import ServerError, Status
from upr_protocol.partition_map import Assignment, PartitionMap
from upr_protocol.scram import new_verifier
from upr_protocol.users import EVERYTHING, Grant, Right, User, UserRole, Users, Verifier
from upr_server.app import Server, running_server
from upr_server.config import BucketConfig, ServerConfig
from upr_server.runtime.log_in_pauses import PAUSE_MAX_S
from upr_server.storage.simulated import SimulatedStore

PASSWORD: Final = "pencil"
VERIFIER: Final = new_verifier(PASSWORD, b"sixteen bytes...", 4096)
READ: Final = Grant(Right.READ, "b")
USERS: Final = Users(
    7,
    {
        "ada": User("ada", None, (Grant(Right.SECURE, EVERYTHING),)),
        "bob": User("bob", VERIFIER, (READ,)),
        "node": User("node", VERIFIER, (Grant(Right.REPLICATE, EVERYTHING),)),
    },
)
PORTS: Final = {"a": 71, "z": 72}
WITHIN_S: Final = 1.0


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> MemoryNetwork:
    return MemoryNetwork(monkeypatch)


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text(PASSWORD)
    path.chmod(0o600)
    return path


@asynccontextmanager
async def secured(name: str, password_file: Path, users: Users = USERS) -> AsyncIterator[Server]:
    store = SimulatedStore()
    store.directory.users.data = users.to_json().encode()
    config = ServerConfig(
        listen=f"{HOST}:{PORTS[name]}",
        node=name,
        buckets=(BucketConfig("b", 1),) if name == "a" else (),
        node_user="node",
        node_password_file=str(password_file),
        shutdown_deadline_s=0.1,
    )
    async with running_server(config, store) as server:
        yield server


@asynccontextmanager
async def two_nodes(
    password_file: Path, users: Users = USERS, host: str = HOST, others: Mapping[str, int] = {}
) -> AsyncIterator[tuple[Server, Server]]:
    """Two nodes with one bucket. Each knows the other from the bucket's map, at `host`. The map
    also names `others`, with the given ports."""
    async with (
        secured("a", password_file, users) as first,
        secured("z", password_file, users) as second,
    ):
        ports = {**PORTS, **others}
        nodes = {name: f"{host}:{port}" for name, port in ports.items()}
        partition_map = PartitionMap(
            bucket="b",
            revision=1,
            nodes=nodes,
            partitions=(Assignment(active="a", replicas=dict.fromkeys(("z", *others), "")),),
        )
        await first.partition_maps.set_map(0, partition_map.encode())
        await second.partition_maps.adopt_map_from("b", nodes["a"])
        yield first, second


def as_bob(server: Server, bucket: str = "") -> Address:
    security = Security(credentials=Credentials("bob", PASSWORD))
    return Address.parse(f"upr://{HOST}:{server.port}/{bucket}", security)


def _setting(event: trio.Event) -> Iterator[None]:
    event.set()
    yield


async def test_a_change_on_one_node_counts_on_the_other_within_a_second(
    network: MemoryNetwork, password_file: Path, autojump_clock: MockClock
) -> None:
    async with two_nodes(password_file) as (first, second):
        for here, there in ((first, second), (second, first)):
            await trio.sleep(10)
            async with connect(as_bob(there)) as client:
                await client.list_buckets()
                name = f"joe{here.port}"
                await here.users.apply_change(partial(_with_user, name=name))
                began = trio.current_time()
                changed = trio.Event()
                there.users.call_on_change(partial(_setting, changed))
                await changed.wait()
                assert trio.current_time() - began < WITHIN_S
                assert there.users.users == here.users.users
        await second.users.apply_change(lambda users: users.without_user("bob"))
        await trio.sleep(WITHIN_S)
        with pytest.raises(ServerError):
            async with connect(as_bob(first)):
                pass


async def test_nodes_that_hang_do_not_hold_up_a_change(
    network: MemoryNetwork, password_file: Path, autojump_clock: MockClock
) -> None:
    hung_nodes = {f"hung{port}": port for port in range(73, 78)}
    for port in hung_nodes.values():
        network.hang(port)
    async with two_nodes(password_file, others=hung_nodes) as (first, second):
        for number in range(10):
            await trio.sleep(10.3)
            await first.users.apply_change(partial(_with_user, name=f"joe{number}"))
            await trio.sleep(WITHIN_S)
            assert second.users.users == first.users.users


async def test_a_change_of_a_role_counts_on_the_other_node_within_a_second(
    network: MemoryNetwork, password_file: Path, autojump_clock: MockClock
) -> None:
    """This includes streams that the role allowed."""
    users = USERS.without_user("bob").with_user(User("bob", VERIFIER))
    users = users.with_role(UserRole("readers", (READ,))).assigning("bob", ("readers",))
    async with two_nodes(password_file, users) as (first, second):
        await trio.sleep(10)
        async with consume(as_bob(first, "b")) as consumer:
            await trio.sleep(1)
            began = trio.current_time()
            await second.users.apply_change(
                lambda users: users.revoking_from_role("readers", (READ,))
            )
            with pytest.raises(ServerError, match="right revoked") as caught:
                async for _ in consumer:
                    pass
            assert caught.value.status is Status.RIGHT_REVOKED
            assert trio.current_time() - began < WITHIN_S
        assert first.users.users == second.users.users


def _with_user(users: Users, name: str) -> Users:
    return users.with_user(User(name))


async def test_nodes_in_the_clear_take_no_users_from_other_machines(
    network: MemoryNetwork, password_file: Path, autojump_clock: MockClock
) -> None:
    """Without encryption, any host that a map names could forward the log-in to a real node, and
    invent users."""
    async with two_nodes(password_file, host="10.0.0.2") as (first, second):
        await first.users.apply_change(partial(_with_user, name="joe"))
        await trio.sleep(10)
        assert second.users.users == USERS


async def test_two_changes_at_the_same_moment_end_in_one(
    network: MemoryNetwork, password_file: Path, autojump_clock: MockClock
) -> None:
    async with two_nodes(password_file) as (first, second):
        await trio.sleep(10)
        await first.users.apply_change(partial(_with_user, name="joe"))
        await second.users.apply_change(partial(_with_user, name="eve"))
        await trio.sleep(2 * WITHIN_S)
        assert first.users.users == second.users.users
        assert first.users.users.revision == USERS.revision + 1


async def test_a_node_without_the_right_to_replicate_is_told_nothing(
    network: MemoryNetwork, password_file: Path, autojump_clock: MockClock
) -> None:
    async with two_nodes(password_file) as (first, second):
        await first.users.apply_change(
            lambda users: users.revoking("node", (Grant(Right.REPLICATE, EVERYTHING),))
        )
        await first.users.apply_change(partial(_with_user, name="joe"))
        await trio.sleep(10)
        assert second.users.users == USERS
        # Among the older users of the second node, `node` still has the right; among the newer ones
        # nobody has it.
        await second.users.apply_change(partial(_with_user, name="eve"))
        await trio.sleep(10)
        assert first.users.users.get("eve") is None


async def test_a_node_with_a_wrong_password_leaves_log_in_attempts_to_others(
    network: MemoryNetwork, password_file: Path, autojump_clock: MockClock
) -> None:
    """The node tries less and less often; its exchange of users and its replication share one
    pause."""
    async with two_nodes(password_file) as (first, second):
        await trio.sleep(10)
        failures = first.connections.resources.log_ins.failures
        assert not failures.failure_count
        new_password = new_verifier("another", b"sixteen bytes...", 4096)
        await first.users.apply_change(lambda users: users.with_verifier("node", new_password))
        await trio.sleep(10)
        network.cut(first.port)
        await trio.sleep(120)
        assert failures.failure_count in range(4, 12)
        assert not failures.refusal_count
        await first.users.apply_change(lambda users: users.with_verifier("node", VERIFIER))
        await trio.sleep(PAUSE_MAX_S + 2)
        assert second.users.users == first.users.users


async def test_a_node_that_was_down_receives_the_changes_that_it_missed(
    network: MemoryNetwork, password_file: Path, autojump_clock: MockClock
) -> None:
    async with two_nodes(password_file) as (first, second):
        network.away.add(first.port)
        network.cut(first.port)
        network.away.add(second.port)
        network.cut(second.port)
        await first.users.apply_change(partial(_with_user, name="joe"))
        await trio.sleep(10)
        assert second.users.users == USERS
        network.away.clear()
        await trio.sleep(10)
        assert second.users.users == first.users.users


async def test_a_consumer_goes_on_while_a_changed_password_spreads(
    network: MemoryNetwork, password_file: Path, autojump_clock: MockClock
) -> None:
    """The consumer reads the new password before the node to which it connects has received it."""
    async with two_nodes(password_file) as (first, second):
        await trio.sleep(10)
        own_file = password_file.with_name("bob")
        own_file.write_text(PASSWORD)
        own_file.chmod(0o600)
        security = Security(credentials=Credentials("bob", password_file=str(own_file)))
        address = Address.parse(f"upr://{HOST}:{first.port}/b", security)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_consume, address)
            await trio.sleep(1)
            own_file.write_text("another")
            new_password = new_verifier("another", b"sixteen bytes...", 4096)
            network.away.add(second.port)
            network.cut(second.port)
            await second.users.apply_change(partial(_with_verifier, verifier=new_password))
            network.cut(first.port)
            await trio.sleep(0.5)
            network.away.clear()
            await trio.sleep(10)
            names = [row.context.access.user_name for row in first.connections.connections]
            assert "bob" in names
            nursery.cancel_scope.cancel()
        # The log-in of the consumer, and that of its request for the partition map.
        assert 1 <= first.connections.resources.log_ins.failures.failure_count <= 2


async def _consume(address: Address) -> None:
    async with consume(address) as consumer:
        async for _ in consumer:
            pass


def _with_verifier(users: Users, verifier: Verifier) -> Users:
    return users.with_verifier("bob", verifier)
