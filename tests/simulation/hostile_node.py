"""A host that plays a node of the cluster, and may not be one.

It may read the bucket, so that it gets as far as a consumer, and write keys that begin with `h/`.
It has no right to replicate, to write other keys, to operate and to change users. Again and again
it asks for a replica's streams and reports as one, gives nodes maps in which it is active, has them
join, asks for the users and sends some, and writes. That something of it is not refused breaks a
promise.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Final

import attrs
import trio
from msgspec.structs import replace

from tests.kit.checkers import BrokenPromiseError
from tests.kit.history import History, Said
from tests.simulation.bugs.patch import replaced
from tests.simulation.network import PORT, Network
from tests.simulation.node import BUCKET, Node
from upr_protocol.client import (
    Address,
    Credentials,
    NodeClient,
    Security,
    connect,
    consume_as_replica,
    open_node,
)
from upr_protocol.client.trio import connection as client_end
from upr_protocol.errors import BrokenError, ServerError, Status
from upr_protocol.ids import PartitionState
from upr_protocol.limits import SCRAM_ITERATIONS_MIN
from upr_protocol.scram import new_verifier
from upr_protocol.users import EVERYTHING, AddUser, Grant, Right, User, Users

HOST: Final = "h"

_ITERATIONS: Final = SCRAM_ITERATIONS_MIN
_EVERY_RIGHT: Final = tuple(Grant(right, EVERYTHING) for right in Right)

_FEW_RIGHTS: Final = (Grant(Right.READ, BUCKET), Grant(Right.WRITE, BUCKET, b"h/"))

TRUSTED: Final = Credentials("trusted", "pencil")
HOSTILE: Final = Credentials(HOST, "pen")

NODES: Final = Security(credentials=TRUSTED)
"""How the cluster's nodes log in to each other."""

USERS: Final = Users(
    1,
    {
        HOST: User(HOST, new_verifier("pen", b"s" * 16, _ITERATIONS), _FEW_RIGHTS),
        "trusted": User("trusted", new_verifier("pencil", b"t" * 16, _ITERATIONS), _EVERY_RIGHT),
    },
    b"secret",
)
"""Who may do everything, and the hostile node."""


@contextmanager
def logging_in() -> Iterator[None]:
    """Has every client that names no user log in as the one who may do everything."""

    def credentials_of(credentials: Credentials | None) -> Credentials:
        return credentials or TRUSTED

    with replaced(client_end, "resolve_credentials", credentials_of):
        yield


PAUSE_S: Final = 0.2
TIMEOUT_S: Final = 5.0


@attrs.define(eq=False)
class HostileNode:
    """See the module.

    Attributes:
        nodes: The cluster's nodes.
        network: The network.
        history: Where it is written down what was refused.
        chance: Draws what it does next.
        refused: How often it was refused.
    """

    nodes: dict[str, Node]
    network: Network
    history: History
    chance: Random
    refused: int = 0

    async def run(self) -> None:
        """Does something hostile again and again, for ever."""
        attempts: list[Callable[[Address], Awaitable[object]]] = [
            self._ask_users,
            self._send_users,
            self._send_map,
            self._have_join,
            self._replicate,
            self._write,
        ]
        while True:
            await trio.sleep(PAUSE_S * (1 + self.chance.random()))
            name, attempt = self.chance.choice(list(self.nodes)), self.chance.choice(attempts)
            security = Security(credentials=HOSTILE)
            address = Address.parse(f"upr://{name}:{PORT}/{BUCKET}", security)
            try:
                with trio.move_on_after(TIMEOUT_S) as scope:
                    await attempt(address)
            except ServerError as error:
                if error.status is Status.NOT_ALLOWED:
                    self.refused += 1
                    self.history.add(Said(HOST, f"{attempt.__name__} at {name} is refused"))
            except BrokenError:
                pass  # the node is down
            else:
                if not scope.cancelled_caught:
                    raise BrokenPromiseError(
                        "I14", f"{name} lets a node without the right to {attempt.__name__}"
                    )

    async def _dial(self, address: Address) -> trio.abc.Stream:
        return await self.network.dial(HOST, address)

    async def _ask_users(self, address: Address) -> None:
        async with open_node(address, dial=self._dial) as node:
            await node.users()

    async def _send_users(self, address: Address) -> None:
        change = AddUser("friend", None, _EVERY_RIGHT)
        async with connect(attrs.evolve(address, bucket=""), dial=self._dial) as client:
            await client.change_users(change)

    async def _send_map(self, address: Address) -> None:
        node = NodeClient(address, dial=self._dial)
        current = (await node.status()).map
        if current is None:
            raise BrokenError("it has no map yet")
        nodes = {**current.nodes, HOST: f"{HOST}:{PORT}"}
        own_partitions = tuple(
            replace(assignment, active=HOST, replicas={}) for assignment in current.partitions
        )
        new_map = replace(
            current, revision=current.revision + 1, nodes=nodes, partitions=own_partitions
        )
        await node.set_map(current.revision, new_map)

    async def _have_join(self, address: Address) -> None:
        await NodeClient(address, dial=self._dial).join(f"{HOST}:{PORT}")

    async def _replicate(self, address: Address) -> None:
        """It says that it is a node that is one, and to have all."""
        name = self.chance.choice(list(self.nodes))
        async with consume_as_replica(
            address,
            state=PartitionState.ACTIVE,
            identity=f"replica:{name}",
            retry_timeout_s=0.0,
            dial=self._dial,
        ) as consumer:
            async for _ in consumer:
                return
        raise BrokenError("every stream has ended")

    async def _write(self, address: Address) -> None:
        async with connect(address, dial=self._dial, retry_timeout_s=0.0) as client:
            await client.set(b"hostile", b"h")
