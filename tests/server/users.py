"""A server with users, for tests of log-ins and rights."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from upr_protocol.client import Address
from upr_protocol.limits import SCRAM_ITERATIONS_DEFAULT
from upr_protocol.scram import new_verifier
from upr_protocol.security import Credentials, Security
from upr_protocol.users import (
    Grant,
    Right,
    User,
    Users,
)
from upr_server.app import Server, running_server
from upr_server.config import BucketConfig, ServerConfig
from upr_server.storage.simulated import SimulatedStore

RIGHTS: Final = tuple(Grant(right, "*") for right in Right)
VERIFIER: Final = new_verifier("pencil", b"sixteen bytes...", SCRAM_ITERATIONS_DEFAULT)
USERS: Final = Users(
    1,
    {
        "alice": User("alice", None, RIGHTS),
        "bob": User("bob", VERIFIER, RIGHTS),
    },
)
BOB: Final = Credentials("bob", "pencil")


@asynccontextmanager
async def server_with_users(users: Users = USERS, **settings: Any) -> AsyncIterator[Server]:
    """A server that listens, with these users and a bucket `b`."""
    config = ServerConfig(
        listen="127.0.0.1:0", buckets=(BucketConfig("b", 4),), shutdown_deadline_s=0.5, **settings
    )
    async with running_server(config, SimulatedStore()) as server:
        server.users.users = users
        server.connections.resources.log_ins.failure_delay_s = 0.01
        yield server


def address_of(server: Server, credentials: Credentials | None = BOB) -> Address:
    """The address of the server's bucket for a client that logs in with `credentials`."""
    return Address.parse(server.url("b"), Security(credentials=credentials))
