"""Asking one node for a bucket's partition map and what it has of it, and giving it another."""

from __future__ import annotations

from functools import partial
from typing import Final, TypeVar

import attrs
import trio

from upr_protocol.address import Address
from upr_protocol.client.core.calls import Call, PartitionInfo, partition_infos
from upr_protocol.client.core.options import IDENTITY_DEFAULT
from upr_protocol.client.trio.connection import TrioOptions, open_connection
from upr_protocol.client.trio.request_channel import RequestChannel
from upr_protocol.errors import BrokenError, RemoteProtocolError, ServerError, Status
from upr_protocol.limits import IDLE_INTERVAL_S_DEFAULT, WINDOW_BYTES_DEFAULT
from upr_protocol.partition_map import PartitionMap, PartitionMapError
from upr_protocol.transport import Dial, dial_tcp
from upr_protocol.wire import GetMap, Join, MapReply, SetMap

T = TypeVar("T")


@attrs.frozen
class NodeMap:
    """What a node says of itself and of a bucket.

    Attributes:
        node: What maps call it.
        map: The bucket's map there; None when it holds the bucket alone.
        partitions: The bucket's partitions, as they were under this map; none if they were not
            asked for.
    """

    node: str
    map: PartitionMap | None
    partitions: tuple[PartitionInfo, ...] = ()


TIMEOUT_S: Final = 10.0
"""How long a node may take to answer, and to carry out a map."""


async def fetch_map(
    address: Address,
    *,
    identity: str = IDENTITY_DEFAULT,
    timeout_s: float = TIMEOUT_S,
    dial: Dial = dial_tcp,
) -> PartitionMap | None:
    """The partition map of the bucket that `address` names, as the node there has it; None when
    that node holds the bucket alone.

    Raises:
        BrokenError: There is no connection to be had, or no answer in time.
        ServerError: There is no such bucket.
        RemoteProtocolError: What is there is no map.
    """
    found = await ask_node(address.with_bucket(), identity=identity, timeout_s=timeout_s, dial=dial)
    return found.map


async def ask_node(
    address: Address,
    *,
    identity: str = IDENTITY_DEFAULT,
    timeout_s: float = TIMEOUT_S,
    dial: Dial = dial_tcp,
) -> NodeMap:
    """The name of the node at `address`, and its map of the bucket if the address names one.

    Raises:
        BrokenError: There is no connection to be had, or no answer in time.
        ServerError: There is no such bucket.
        RemoteProtocolError: What is there is no map.
    """
    nowhere = attrs.evolve(address, bucket="")
    return await _ask(nowhere, _map_call(address.bucket), identity, timeout_s, dial)


async def ask_on(asker: RequestChannel, bucket: str) -> NodeMap:
    """The same on a link that is there. Cancelled, the answer is waited for no more.

    Raises:
        BrokenError: The link is over.
        ServerError: There is no such bucket.
        RemoteProtocolError: What is there is no map.
    """
    return await asker.ask(_map_call(bucket))


async def look_at_node(
    address: Address,
    *,
    identity: str = IDENTITY_DEFAULT,
    timeout_s: float = TIMEOUT_S,
    dial: Dial = dial_tcp,
) -> NodeMap:
    """The same of a node that has the bucket, with its partitions.

    Raises:
        BrokenError: There is no connection to be had, or no answer in time.
        ServerError: There is no such bucket.
        RemoteProtocolError: What is there is no map.
    """
    options = map_options(identity, timeout_s, dial)
    with trio.move_on_after(timeout_s):
        while True:
            asker = RequestChannel(address, timeout_s)
            async with open_connection(address, options, asker) as link:
                found = await ask_on(asker, address.bucket)
                if link.handshake.map_revision == (found.map.revision if found.map else 0):
                    infos = partition_infos(link.handshake.logs.values())
                    return attrs.evolve(found, partitions=tuple(infos))
            # It was given another map meanwhile, and its partitions may be others, too.
    raise BrokenError(f"{address} did not answer in time")


async def give_map(
    address: Address,
    expected_revision: int,
    given: PartitionMap,
    *,
    identity: str = IDENTITY_DEFAULT,
    timeout_s: float = TIMEOUT_S,
    dial: Dial = dial_tcp,
) -> None:
    """Has the node at `address` carry out a map, in place of that with `expected_revision`; 0 for
    none. It has when this returns.

    A node that does not have the bucket yet asks the others in the map for it: one of them must
    have been given it before.

    Raises:
        BrokenError: There is no connection to be had, or no answer in time: it may have carried it
            out, or yet do so.
        ServerError: It refused; with `REVISION_CONFLICT`, because it has another map than expected.
    """
    call = Call(
        lambda opaque: SetMap(expected_revision, given.encode(), opaque=opaque), lambda _: None
    )
    address = attrs.evolve(address, bucket=given.bucket)
    try:
        await _ask(address, call, identity, timeout_s, dial)
    except ServerError as error:
        if error.status is not Status.NO_BUCKET or expected_revision:
            raise
        await _join(address, given, identity, timeout_s, dial)


async def have_join(
    address: Address,
    source: str,
    *,
    identity: str = IDENTITY_DEFAULT,
    timeout_s: float = TIMEOUT_S,
    dial: Dial = dial_tcp,
) -> PartitionMap | None:
    """Has the node at `address` ask the one at `source` for the bucket's map, and carry it out.

    Returns:
        The map that it has then.

    Raises:
        BrokenError: There is no connection to be had, or no answer in time.
        ServerError: It refused, or could not ask.
    """
    call = Call(partial(_joining, address.bucket, source), map_of)
    return await _ask(attrs.evolve(address, bucket=""), call, identity, timeout_s, dial)


async def _join(
    address: Address, given: PartitionMap, identity: str, timeout_s: float, dial: Dial
) -> None:
    """Has a node that does not have the bucket yet ask the others for the map."""
    for there in given.nodes.values():
        if there == f"{address.host}:{address.port}":
            continue
        try:
            found = await have_join(
                address, there, identity=identity, timeout_s=timeout_s, dial=dial
            )
        except ServerError:
            continue
        if found is not None and found.revision >= given.revision:
            return
    raise ServerError(
        Status.NO_BUCKET,
        f"{address.host}:{address.port} does not have the bucket {given.bucket!r}, and none of the "
        "nodes that it was to ask for revision "
        f"{given.revision} of its map could tell it",
    )


def _joining(bucket: str, address: str, opaque: int) -> Join:
    return Join(bucket, address, opaque=opaque)


def map_options(identity: str, timeout_s: float, dial: Dial) -> TrioOptions:
    """How to connect to a node for what is asked and answered here."""
    return TrioOptions(identity, WINDOW_BYTES_DEFAULT, IDLE_INTERVAL_S_DEFAULT, timeout_s, dial)


def _map_call(bucket: str) -> Call[NodeMap]:
    return Call(lambda opaque: GetMap(bucket, opaque=opaque), _node_map)


def _node_map(reply: MapReply) -> NodeMap:
    return NodeMap(reply.node, map_of(reply))


def map_of(reply: MapReply) -> PartitionMap | None:
    """The map in a node's answer; None when the node holds the bucket alone.

    Raises:
        RemoteProtocolError: It is none.
    """
    if not reply.revision:
        return None
    try:
        return PartitionMap.decode(reply.document)
    except PartitionMapError as error:
        raise RemoteProtocolError(str(error)) from error


async def _ask(address: Address, call: Call[T], identity: str, timeout_s: float, dial: Dial) -> T:
    options = map_options(identity, timeout_s, dial)
    asker = RequestChannel(address, timeout_s)
    with trio.move_on_after(timeout_s):
        async with open_connection(address, options, asker):
            return await asker.ask(call)
    raise BrokenError(f"{address} did not answer in time")
