"""Connections to other nodes, on which they are asked again and again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

import attrs
import trio

from upr_protocol.client import Address, NodeConnection, NodeStatus, open_node
from upr_protocol.errors import BrokenError, ServerError, Status, UprError
from upr_protocol.users import EVERYTHING, SERVER, Right, Users
from upr_server.runtime import System, is_loopback

T = TypeVar("T")

ASK_TIMEOUT_S: Final = 2.0


@attrs.frozen(eq=False)
class _OpenConnection:
    """A connection, and how to close it."""

    node: NodeConnection
    close: Callable[[], None]


class NodeConnections:
    """Connections to other nodes, kept from one question to the next. A node asks the others every
    few seconds, for each bucket: to connect would be more work for both than to answer.

    Args:
        nursery: Where the connections' tasks run.
        identity: What this node calls itself to the others.
        system: How to reach an address.
    """

    def __init__(self, nursery: trio.Nursery, identity: str, system: System) -> None:
        self._nursery = nursery
        self._identity = identity
        self._dial = system.dial
        self._log_in_pauses = system.log_in_pauses
        self._connections: dict[Address, _OpenConnection] = {}

    async def status(self, address: Address) -> NodeStatus:
        """What the node at `address` says of itself and of the bucket that the address names. When
        this is cancelled it closes the connection: a node that does not answer in time may be gone.

        Raises:
            BrokenError: The node cannot be reached, or the connection was lost.
            ServerError: There is no such bucket, or this node may not ask.
            RemoteProtocolError: The answer is not a partition map of the bucket.
        """
        return await self._ask(address, lambda node: node.status(address.bucket))

    async def users(self, address: Address, own_users: Users, digest: bytes) -> Users | None:
        """The users of the cluster as the node at `address` has them; None if they are this
        node's, or older. Cancelled as `status`.

        A user who changes a bucket's partition map says which nodes there are. So a node is
        believed only if it proves that it is one: by the password with which this one logs in,
        which it must know, too; or by a certificate for a user who may have the users. In the clear
        a node that was named could pass on the proof of a real node, and then claim what it likes.
        So the password proves something only where the proof is bound to the certificate, or on
        this machine.

        Args:
            address: The node.
            own_users: The users that this node has.
            digest: Their digest.

        Raises:
            BrokenError: The node cannot be reached, or the connection was lost.
            ServerError: This node may not ask, or the other one proves nothing.
            RemoteProtocolError: The answer is not a cluster's users.
        """
        has_password = address.security.credentials is not None
        is_here = is_loopback(address.host)

        async def question(node: NodeConnection) -> Users | None:
            name = node.certificate_name
            if not (
                node.is_channel_bound
                or (has_password and is_here)
                or own_users.allows(name, Right.REPLICATE, SERVER)
            ):
                if address.security.tls is None:
                    raise ServerError(
                        Status.NOT_ALLOWED,
                        "it could pass the log-in on to another node in the clear, so what it says "
                        "of users does not count; give all nodes certificates",
                    )
                raise ServerError(
                    Status.NOT_ALLOWED,
                    f"it shows a certificate for {name!r}, and no user of this name has the right "
                    f"{Right.REPLICATE.value} on {EVERYTHING}",
                )
            return await node.users(own_users.revision, digest)

        return await self._ask(address, question)

    async def _ask(self, address: Address, question: Callable[[NodeConnection], Awaitable[T]]) -> T:
        address = attrs.evolve(address, bucket="")
        connection = self._connections.get(address)
        if connection is not None:
            try:
                return await self._answer(connection, question)
            except BrokenError:
                pass  # the node may have been stopped and started since it was asked last
        self._log_in_pauses.check(address)
        try:
            connection = await self._nursery.start(self._hold, address)
        except UprError as error:
            self._log_in_pauses.note_error(address, error)
            raise
        self._log_in_pauses.note_success(address)
        return await self._answer(connection, question)

    async def _answer(
        self, connection: _OpenConnection, question: Callable[[NodeConnection], Awaitable[T]]
    ) -> T:
        try:
            return await question(connection.node)
        except trio.Cancelled:
            connection.close()
            raise

    def close_others(self, addresses: Iterable[Address]) -> None:
        """Closes the connections to all nodes but these."""
        kept_addresses = {attrs.evolve(address, bucket="") for address in addresses}
        for address in self._connections.keys() - kept_addresses:
            self._connections[address].close()

    async def _hold(self, address: Address, task_status: trio.TaskStatus[_OpenConnection]) -> None:
        with trio.CancelScope() as scope:
            async with open_node(
                address, identity=self._identity, timeout_s=ASK_TIMEOUT_S, dial=self._dial
            ) as node:
                connection = self._connections[address] = _OpenConnection(node, scope.cancel)
                task_status.started(connection)
                try:
                    await node.wait_ended()
                finally:
                    # It may have been replaced by then.
                    if self._connections.get(address) is connection:
                        del self._connections[address]
