"""A peer of a user who has the rights that a test grants."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from tests.protocol.session.kit import SAMPLES
from tests.server.connected_peer import Peer, connected, make_server
from upr_protocol.partition_map import PartitionMap
from upr_protocol.users import (
    EVERYTHING,
    Grant,
    Right,
    User,
    UserRole,
    Users,
)
from upr_protocol.wire import (
    CreateBucket,
    DeleteBucket,
    GetMap,
    HelloReply,
    Join,
    Message,
    Open,
    SetMap,
    Stats,
)
from upr_server.app import Server
from upr_server.net.access import Access
from upr_server.storage.simulated import SimulatedStore
from upr_server.user_store import UserStore

OWN, OTHER = "own", "other"
USER = "bob"
ROLE = "role"
ADMIN = User("ada", None, (Grant(Right.SECURE, EVERYTHING),))


def sample(name: str, bucket: str) -> Message:
    """A message of the kind that a line of the table names. If it names a bucket: `bucket`."""
    by_name: dict[str, Message] = {
        "Open": Open(bucket, opaque=1),
        "GetMap": GetMap(bucket, opaque=1),
        "CreateBucket": CreateBucket(bucket, opaque=1),
        "DeleteBucket": DeleteBucket(bucket, opaque=1),
        "Stats": Stats(bucket, opaque=1),
        "Join": Join(bucket, "host:1", opaque=1),
        "SetMap": SetMap(
            0, PartitionMap.of_one_node(bucket, 1, "node", "host:1").encode(), opaque=1
        ),
    }
    kind, _, variant = name.partition("/")
    if kind in by_name:
        return by_name[kind]
    message = SAMPLES[next(kind_ for kind_ in SAMPLES if kind_.__name__ == kind)]
    return (
        msgspec.structs.replace(message, with_answers=bool(variant))
        if kind == "Stream"
        else message
    )


def access_of(*grants: Grant, bucket: str = OWN, by_role: bool = False) -> Access:
    """The access of bob, who has these grants himself or through a role."""
    store = UserStore(SimulatedStore())
    roles = {ROLE: UserRole(ROLE, grants)} if by_role else {}
    bob = User(USER, None, () if by_role else grants, roles=tuple(roles))
    # Without a check of the grants: some tests try `secure` on one bucket, which is never granted.
    store.users = Users(1, {ADMIN.name: ADMIN, USER: bob}, roles=roles)
    access = Access(store)
    access.user_name = USER
    access.set_bucket(bucket)
    return access


@asynccontextmanager
async def logged_in(*grants: Grant) -> AsyncIterator[tuple[Server, Peer]]:
    """A server with a bucket `b`, and a connection of the user bob, who has these grants."""
    server = make_server()
    async with connected(server) as peer:
        # Before there are users, nobody has to log in.
        await peer.send()
        peer.received.insert(0, await peer.receive(HelloReply))
        (connection,) = server.connections.connections
        connection.context.access.user_name = USER
        bob = User(USER, None, grants)
        await server.users.apply_change(lambda users: users.with_user(ADMIN).with_user(bob))
        yield server, peer


async def revoke(server: Server, *grants: Grant) -> None:
    await server.users.apply_change(lambda users: users.revoking(USER, grants))
