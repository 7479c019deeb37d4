"""Nodes that log in to each other, and a node without the right to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec.structs import replace

from tests.kit.certificates import Certificates
from tests.kit.process import eventually
from upr_protocol.client import Address, NodeClient, connect, consume_as_replica
from upr_protocol.concurrency import background_nursery
from upr_protocol.errors import ServerError, UprError
from upr_protocol.ids import PartitionState
from upr_protocol.limits import SCRAM_ITERATIONS_MIN
from upr_protocol.partition_map import Assignment, PartitionMap
from upr_protocol.scram import new_verifier
from upr_protocol.security import Credentials, Security
from upr_protocol.users import EVERYTHING, Grant, Right, User, Users
from upr_server.app import Server, running_server
from upr_server.config import BucketConfig, ServerConfig
from upr_server.replication.user_exchange import UserExchange
from upr_server.storage.simulated import SimulatedStore

OPERATOR: Final = Credentials("operator", "pencil")
VERIFIER: Final = new_verifier("pencil", b"sixteen bytes...", SCRAM_ITERATIONS_MIN)
NOTHING: Final[Mapping[str, Any]] = {}
EVERY_GRANT: Final = tuple(Grant(right, EVERYTHING) for right in Right)


def users_with(*more_users: User) -> Users:
    every = (User("operator", VERIFIER, EVERY_GRANT), *more_users)
    return Users(1, {user.name: user for user in every}, b"secret")


@asynccontextmanager
async def two_nodes(
    users: Users, *, of_b: Mapping[str, Any] = NOTHING, **settings: Any
) -> AsyncIterator[tuple[Server, Server]]:
    """Node a with a bucket, and node b, which is to replicate it and may have other settings."""
    config = {"listen": "127.0.0.1:0", "shutdown_deadline_s": 0.5, **settings}
    buckets = (BucketConfig("b", 1),)
    async with (
        running_server(ServerConfig(node="a", buckets=buckets, **config), SimulatedStore()) as a,
        running_server(ServerConfig(node="b", **{**config, **of_b}), SimulatedStore()) as b,
    ):
        for server in (a, b):
            server.users.users = users
        yield a, b


def bucket_of(server: Server, security: Security) -> Address:
    return Address.parse(server.url("b"), security)


async def give_map(a: Server, b: Server, security: Security) -> None:
    addresses = {server.partition_maps.node: f"127.0.0.1:{server.port}" for server in (a, b)}
    partition_map = PartitionMap(
        bucket="b", revision=1, nodes=addresses, partitions=(Assignment("a", {"b": ""}),)
    )
    for server in (a, b):
        node = NodeClient(bucket_of(server, security))
        await node.set_map(server.partition_maps.revision("b"), partition_map)
    async with connect(bucket_of(a, security)) as client:
        await client.set("k", "v")


def has_it(server: Server) -> bool:
    bucket = server.catalog.buckets.get("b")
    return bucket is not None and bucket.partitions[0].high_seq == 1


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text("pencil\n")
    path.chmod(0o600)
    return path


def troubles(server: Server) -> list[str]:
    statistics: Any = server.partition_maps.statistics("b")
    return [row["trouble"] for row in statistics["follows"]]


async def test_a_node_logs_in_with_its_password(password_file: Path) -> None:
    node = User("nodes", VERIFIER, (Grant(Right.REPLICATE, EVERYTHING),))
    settings: dict[str, Any] = {"node_user": "nodes", "node_password_file": str(password_file)}
    security = Security(credentials=OPERATOR)
    async with two_nodes(users_with(node), **settings) as (a, b):
        await give_map(a, b, security)
        await eventually(lambda: has_it(b), "the replica has the change")
        names = {connection.context.access.user_name for connection in a.connections.connections}
        assert "nodes" in names


async def test_a_node_logs_in_with_its_certificate(certificates: Certificates) -> None:
    node = User("localhost", None, (Grant(Right.REPLICATE, EVERYTHING),))
    settings = {
        **certificates.server_settings(),
        "tls_client_ca": str(certificates.authority.ca),
    }
    tls = certificates.security_of(certificates.client).tls
    security = Security(tls, OPERATOR)
    async with two_nodes(users_with(node), **settings) as (a, b):
        await give_map(a, b, security)
        await eventually(lambda: has_it(b), "the replica has the change")
        names = {connection.context.access.user_name for connection in a.connections.connections}
        assert "localhost" in names


async def test_a_node_that_may_not_replicate_gets_nothing(password_file: Path) -> None:
    """The node does not log in, or has a wrong password, or its user lacks the right."""
    reader = User("reader", VERIFIER, (Grant(Right.READ, EVERYTHING),))
    wrong = password_file.with_name("wrong")
    wrong.write_text("pen\n")
    wrong.chmod(0o600)
    security = Security(credentials=OPERATOR)
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({}, "the server wants its clients to log in"),
        ({"node_user": "reader", "node_password_file": str(wrong)}, "the password is wrong"),
        ({"node_user": "reader", "node_password_file": str(password_file)}, "right replicate"),
    )
    for settings, sentence in cases:
        async with two_nodes(users_with(reader), **settings) as (a, b):
            a.connections.resources.log_ins.failure_delay_s = 0
            # Every user of a bucket may read its map; others may not even do that.
            if "replicate" not in sentence:
                with pytest.raises(ServerError, match="none of the other nodes gave it"):
                    await give_map(a, b, security)
            await b.catalog.create_dead_bucket("b", 1)
            await give_map(a, b, security)
            await eventually(lambda: any(troubles(b)), "the replica says why it has nothing")
            assert sentence in troubles(b)[0]
            assert not has_it(b)
            # The node still serves its clients.
            async with connect(Address.parse(b.url(), security)) as client:
                await client.stats()


async def test_a_node_that_an_operator_names_makes_no_users(certificates: Certificates) -> None:
    """An operator of one bucket puts a node of their own into its map. The authority that nodes
    trust has signed the node's certificate, but no user with the right to replicate has it. So the
    users that this node sends do not count."""
    node = User("nodes", None, (Grant(Right.REPLICATE, EVERYTHING),))
    hostile = User("localhost", None, (Grant(Right.READ, "b"), Grant(Right.REPLICATE, "b")))
    authority = certificates.authority
    # Its own certificate proves that the first node is one.
    cert = authority.sign("node-cert", common_name="nodes")
    settings = {"tls_ca": str(authority.ca), "tls_client_ca": str(authority.ca)}
    security = Security(certificates.security_of(certificates.client).tls, OPERATOR)
    settings |= cert.settings()
    users = users_with(node, hostile)
    for server_certificate, is_believed in ((certificates.server, False), (cert, True)):
        async with two_nodes(users, of_b=server_certificate.settings(), **settings) as (a, b):
            await give_map(a, b, security)
            await b.users.apply_change(
                lambda users: users.with_user(User("eve", VERIFIER, EVERY_GRANT))
            )
            exchange = UserExchange(a.users, a.partition_maps)
            refusals = exchange._refusals
            async with background_nursery() as nursery:
                nursery.start_soon(exchange.run)
                if is_believed:
                    await eventually(lambda: a.users.users == b.users.users, "it is believed")
                else:
                    await eventually(partial(bool, refusals), "it is not believed")
                    (refusal,) = refusals.values()
                    assert "no user of this name has the right replicate on *" in refusal
                    assert a.users.users == users


@pytest.mark.parametrize("is_bound", [True, False])
async def test_a_node_takes_users_by_password_only_if_the_proof_is_bound(
    certificates: Certificates,
    password_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_bound: bool,
) -> None:
    """If the proof is not bound to the encrypted connection, the node may be passing on what
    another node proves."""
    monkeypatch.setattr("upr_server.replication.node_connections.is_loopback", lambda _host: False)
    if not is_bound:
        monkeypatch.setattr("upr_server.net.log_in._binding", lambda _stream: b"")
    node = User("nodes", VERIFIER, (Grant(Right.REPLICATE, EVERYTHING),))
    settings: dict[str, Any] = {
        **certificates.server_settings(),
        "tls_ca": str(certificates.authority.ca),
        "node_user": "nodes",
        "node_password_file": str(password_file),
    }
    users = users_with(node)
    async with two_nodes(users, **settings) as (a, b):
        await give_map(a, b, Security(certificates.security().tls, OPERATOR))
        await b.users.apply_change(
            lambda users: users.with_user(User("eve", VERIFIER, EVERY_GRANT))
        )
        exchange = UserExchange(a.users, a.partition_maps)
        async with background_nursery() as nursery:
            nursery.start_soon(exchange.run)
            if is_bound:
                await eventually(lambda: a.users.users == b.users.users, "it is believed")
            else:
                await eventually(partial(bool, exchange._refusals), "it is not believed")
                assert a.users.users == users


async def test_a_hostile_node_cannot_join_send_a_map_or_replicate(
    certificates: Certificates,
) -> None:
    """The node has a certificate of an unknown authority, or one that no user has, or logs in as a
    user without the right to replicate. Over real sockets, encrypted."""
    node = User("localhost", None, (Grant(Right.REPLICATE, EVERYTHING),))
    reader = User("reader", VERIFIER, (Grant(Right.READ, "b"),))
    authority = certificates.authority
    settings = {**certificates.server_settings(), "tls_client_ca": str(authority.ca)}
    tls = certificates.security_of(certificates.client).tls
    as_reader = Security(tls, Credentials("reader", "pencil"))
    async with two_nodes(users_with(node, reader), **settings) as (a, b):
        a.connections.resources.log_ins.failure_delay_s = 0
        await give_map(a, b, Security(tls, OPERATOR))
        current = a.partition_maps.map_of("b")
        assert current is not None
        foreign_map = replace(current, revision=2, nodes={**current.nodes, "h": "127.0.0.1:1"})
        for security, sentence in (
            (certificates.security_of(certificates.unknown), "does not trust the authority"),
            # The user `alice` does not exist.
            (certificates.security_of(certificates.client), "no user has the name"),
            (as_reader, "needs the right"),
        ):
            address = bucket_of(a, security)
            hostile = NodeClient(address)
            with pytest.raises(UprError, match=sentence):
                await hostile.set_map(1, foreign_map)
            with pytest.raises(UprError, match=sentence):
                await hostile.join("127.0.0.1:1")
            with pytest.raises(UprError, match=sentence):
                await _replicate(address)
        assert a.partition_maps.map_of("b") == current


async def _replicate(address: Address) -> None:
    """Requests the stream of the existing replica."""
    async with consume_as_replica(
        address, state=PartitionState.ACTIVE, identity="replica:b", retry_timeout_s=0
    ) as consumer:
        async for _ in consumer:
            return
