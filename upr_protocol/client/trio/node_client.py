"""Asking one node what it knows of a bucket, and giving it the bucket's partition map."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, TypeVar

import attrs
import trio

from upr_protocol.address import Address
from upr_protocol.client.core.calls import Call, PartitionInfo, get_users, partition_infos
from upr_protocol.client.core.metadata import partition_map_in_steps
from upr_protocol.client.options import IDENTITY_DEFAULT
from upr_protocol.client.trio.connection import TrioOptions, open_connection
from upr_protocol.client.trio.request_channel import RequestChannel
from upr_protocol.concurrency import run_steps
from upr_protocol.errors import BrokenError, RemoteProtocolError, ServerError, Status
from upr_protocol.partition_map import PartitionMap
from upr_protocol.transport import Dial, dial_tcp
from upr_protocol.users import Users, UsersError
from upr_protocol.wire import GetMap, Join, MapReply, SetMap

T = TypeVar("T")

NODE_TIMEOUT_S: Final = 10.0
"""How long a node may take to answer, and to apply a map."""

_MAP_WAIT_S: Final = 0.05
"""How soon a node that is applying a map is asked again."""


@attrs.frozen
class NodeStatus:
    """What a node says of itself and of a bucket.

    Attributes:
        node: Its name in partition maps.
        map: Its partition map of the bucket; None if it holds the bucket alone.
        partitions: The bucket's partitions there; empty unless they were asked for.
    """

    node: str
    map: PartitionMap | None
    partitions: tuple[PartitionInfo, ...] = ()


@attrs.frozen
class NodeClient:
    """One node. Each call makes a connection of its own, to this node whatever its map says.

    Every call raises `BrokenError` if the node cannot be reached or does not answer in time, and
    `RemoteProtocolError` if it answers with something that is not a partition map of the bucket.
    Cancelling a call leaves it open whether the node carries it out.

    Attributes:
        timeout_s: How long one call may take.
        dial: How to reach an address, where that is not plain TCP.
    """

    address: Address
    identity: str = IDENTITY_DEFAULT
    timeout_s: float = NODE_TIMEOUT_S
    dial: Dial = dial_tcp

    async def status(self) -> NodeStatus:
        """The node's name, and its map of the bucket if the address names one.

        Raises:
            ServerError: There is no such bucket.
        """
        reply = await self._ask(map_call(self.address.bucket), "")
        return await node_status(reply, self.address.bucket)

    async def requires_log_in(self) -> bool:
        """Whether the node has users, so that its clients must log in. The address needs no
        credentials for this."""
        address = attrs.evolve(self.address, bucket="")
        channel = RequestChannel(address, self.timeout_s)
        try:
            async with open_connection(address, self._options, channel) as connection:
                server = connection.handshake.hello_reply
                return server is not None and bool(server.mechanisms)
        except ServerError as error:
            if error.status not in (Status.LOG_IN_NEEDED, Status.LOG_IN_FAILED):
                raise
            return True

    async def status_with_partitions(self) -> NodeStatus:
        """The node's name, its map of the bucket, and the bucket's partitions under this map.

        Raises:
            ServerError: There is no such bucket.
        """
        with trio.move_on_after(self.timeout_s):
            while True:
                channel = RequestChannel(self.address, self.timeout_s)
                async with open_connection(self.address, self._options, channel) as connection:
                    reply = await channel.ask(map_call(self.address.bucket))
                    status = await node_status(reply, self.address.bucket)
                    revision = 0 if status.map is None else status.map.revision
                    if connection.handshake.map_revision == revision:
                        infos = partition_infos(connection.handshake.logs.values())
                        return attrs.evolve(status, partitions=tuple(infos))
                # The node took another map between the handshake, which has the partitions, and its
                # answer, or is applying one; the partitions may differ under the new map.
                await trio.sleep(_MAP_WAIT_S)
        raise self._timeout()

    async def set_map(self, expected_revision: int, partition_map: PartitionMap) -> None:
        """Replaces the node's map. The node has applied the new one when this returns.

        A node that does not have the bucket yet asks the others that the map names; one of them
        must have been given the map before.

        Args:
            expected_revision: The revision of the map that the node has; 0 for no map.
            partition_map: The map to apply. Its bucket counts, not the address's.

        Raises:
            BrokenError: The node may have applied the map, or may do so later.
            ServerError: The node refused; with `REVISION_CONFLICT` if it has another map than
                expected.
        """
        document = partition_map.encode()
        call = Call(partial(SetMap, expected_revision, document), lambda _: None)
        try:
            await self._ask(call, partition_map.bucket)
        except ServerError as error:
            if error.status is not Status.NO_BUCKET or expected_revision:
                raise
            await self._join_any(partition_map)

    async def join(self, source: str) -> PartitionMap | None:
        """Tells the node to ask another node, at `source`, for the bucket's map, and to apply it.

        Returns:
            The map that the node has then.

        Raises:
            ServerError: The node refused, or could not ask.
        """
        return await self._join(self.address.bucket, source)

    async def _join(self, bucket: str, source: str) -> PartitionMap | None:
        # The node does not have the bucket, so the connection does not open it.
        reply = await self._ask(Call(partial(Join, bucket, source), _map_reply), "")
        return await run_steps(partition_map_in_steps(reply, bucket))

    async def _join_any(self, partition_map: PartitionMap) -> None:
        """Has a node without the bucket ask the other nodes in turn."""
        own_address = f"{self.address.host}:{self.address.port}"
        for source in partition_map.nodes.values():
            if source == own_address:
                continue
            try:
                joined_map = await self._join(partition_map.bucket, source)
            except ServerError:
                continue
            if joined_map is not None and joined_map.revision >= partition_map.revision:
                return
        raise ServerError(
            Status.NO_BUCKET,
            f"{own_address} does not have the bucket {partition_map.bucket!r}, and none of the "
            f"other nodes gave it revision {partition_map.revision} of the partition map",
        )

    async def _ask(self, call: Call[T], bucket: str) -> T:
        """The answer to `call`, over a connection that opens `bucket`; none if it is empty."""
        address = attrs.evolve(self.address, bucket=bucket)
        channel = RequestChannel(address, self.timeout_s)
        with trio.move_on_after(self.timeout_s):
            async with open_connection(address, self._options, channel):
                return await channel.ask(call)
        raise self._timeout()

    @property
    def _options(self) -> TrioOptions:
        return node_options(self.identity, self.timeout_s, self.dial)

    def _timeout(self) -> BrokenError:
        return BrokenError(f"{self.address} did not answer in time")


class NodeConnection:
    """A connection to one node that serves many requests; `open_node` makes one."""

    def __init__(self, channel: RequestChannel) -> None:
        self._channel = channel

    @property
    def certificate_name(self) -> str:
        """The name in the node's certificate; empty if it showed none."""
        return self._channel.connection.certificate_name

    @property
    def is_channel_bound(self) -> bool:
        """Whether the node has proved to know the password, and the proof is bound to its
        certificate."""
        return self._channel.connection.handshake.is_channel_bound

    async def status(self, bucket: str) -> NodeStatus:
        """The node's name, and its map of `bucket`. Cancelling it drops the answer.

        Raises:
            BrokenError: The connection was lost.
            ServerError: There is no such bucket.
            RemoteProtocolError: The answer is not a partition map of the bucket.
        """
        return await node_status(await self._channel.ask(map_call(bucket)), bucket)

    async def users(self, revision: int = 0, digest: bytes = b"") -> Users | None:
        """The users of the cluster, as the node has them; None if they are those that this side
        has, of this revision and digest, or older. Cancelling it drops the answer.

        Raises:
            BrokenError: The connection was lost.
            ServerError: `NOT_ALLOWED`: only nodes may ask.
            RemoteProtocolError: The answer is not a cluster's users.
        """
        document = await self._channel.ask(get_users(revision, digest))
        if not document:
            return None
        try:
            return await run_steps(Users.from_json_in_steps(document))
        except UsersError as error:
            raise RemoteProtocolError(str(error)) from error

    async def wait_ended(self) -> None:
        """Waits until the connection is over."""
        await self._channel.connection.ended.wait()


@asynccontextmanager
async def open_node(
    address: Address,
    *,
    identity: str = IDENTITY_DEFAULT,
    timeout_s: float = NODE_TIMEOUT_S,
    dial: Dial = dial_tcp,
) -> AsyncIterator[NodeConnection]:
    """A connection to the node at `address`, for as long as the context. It opens no bucket.

    Raises:
        BrokenError: The node cannot be reached, or did not answer within `timeout_s`.
        RemoteProtocolError: What answered does not speak the protocol.
    """
    address = attrs.evolve(address, bucket="")
    channel = RequestChannel(address, timeout_s)
    async with open_connection(address, node_options(identity, timeout_s, dial), channel):
        yield NodeConnection(channel)


def node_options(identity: str, timeout_s: float, dial: Dial) -> TrioOptions:
    """How to connect to a node for requests about partition maps."""
    return TrioOptions(identity, connect_timeout_s=timeout_s, dial=dial)


def map_call(bucket: str) -> Call[MapReply]:
    """Asks a node for its name and its map of a bucket."""
    return Call(partial(GetMap, bucket), _map_reply)


def _map_reply(reply: MapReply) -> MapReply:
    return reply


async def node_status(reply: MapReply, bucket: str) -> NodeStatus:
    """What a node's answer to `map_call` says. It is read in steps, between which others have their
    turn: nodes ask each other every few seconds, and a map of 1,024 partitions takes 2 to 7 ms.

    Raises:
        RemoteProtocolError: The answer is not a partition map of the bucket.
    """
    return NodeStatus(reply.node, await run_steps(partition_map_in_steps(reply, bucket)))
