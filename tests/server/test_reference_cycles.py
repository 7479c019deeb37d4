"""What a connection or a bucket held is freed when it ends, without Python's collector.

The server has the collector look only at young objects, because a look at all of them holds the
loop for long. What lives longer, and ends in a reference cycle, would never be freed.
"""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import suppress
from typing import Final

import pytest
import trio
import trio.testing

from tests.kit.placed_keys import key_in
from tests.kit.reference_cycles import no_collections
from tests.server.test_connection import Peer, make_server, sets
from upr_protocol.failover import NOTHING_YET
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.wire import (
    Barrier,
    BarrierReply,
    Get,
    GetReply,
    Go,
    Mutate,
    Stream,
    StreamReply,
)
from upr_protocol.wire.frame import pack_header
from upr_server.app import Server

PARTITIONS: Final = 4
KEY: Final = key_in(0, PARTITIONS)

OF_A_CONNECTION: Final = (
    *("AcceptedConnection", "RequestContext", "ServerSession", "Streamer", "_Stream"),
    *("PartitionReader", "UnfinishedFrame", "PublisherCredit"),
)
OF_A_BUCKET: Final = (
    *("Bucket", "BucketDisk", "Flusher", "Maintenance", "Partition", "MutationManager"),
    *("SnapshotList", "HashTable", "OpenSnapshot", "PersistenceCursor"),
)


def alive(names: tuple[str, ...]) -> Counter[str]:
    """How many objects of the classes with these names there are."""
    kinds = [type(thing).__name__ for thing in gc.get_objects()]
    return Counter(kind for kind in kinds if kind in names)


async def converse(peer: Peer) -> None:
    """Opens the bucket, writes, reads, and streams all of it."""
    await peer.open()
    await peer.mutate(sets(KEY))
    await peer.say(Get((KEY,), partition=PartitionId(0), opaque=peer.opaque()))
    await peer.hear(GetReply)
    for partition in range(PARTITIONS):
        request = Stream(
            PartitionState.ACTIVE,
            NOTHING_YET,
            partition=PartitionId(partition),
            opaque=peer.opaque(),
        )
        await peer.say(request)
        await peer.hear(StreamReply)
    await peer.say(Go(), Barrier(b"all of it"))
    await peer.hear(BarrierReply)


async def end(peer: Peer, how: str) -> None:
    if how == "sends garbage":
        await peer.stream.send_all(bytes(100))
    elif how == "is out of turn":
        await peer.stream.send_all(b"".join(Go().frame()))
    elif how == "stops inside a frame":
        await peer.stream.send_all(pack_header(Mutate.opcode, 0, 0, 99, 1000, 0) + bytes(500))
    elif how == "closes its side":
        await peer.stream.send_eof()


async def serve(server: Server, how: str) -> None:
    """Serves one peer until its end."""
    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.connections.serve, theirs)
        peer = Peer(ours)
        await converse(peer)
        await end(peer, how)
        await trio.testing.wait_all_tasks_blocked()
        with suppress(trio.BrokenResourceError):
            await ours.aclose()


@pytest.mark.parametrize(
    "how",
    ["hangs up", "closes its side", "sends garbage", "is out of turn", "stops inside a frame"],
)
async def test_nothing_of_a_connection_is_left_when_the_peer(
    how: str, autojump_clock: trio.testing.MockClock
) -> None:
    server = make_server()
    async with server.recovered():
        await server.catalog.create_bucket("b", PARTITIONS, server.catalog.quota_bytes_default)
        with no_collections():
            before = alive(OF_A_CONNECTION)
            await serve(server, how)
            assert alive(OF_A_CONNECTION) == before


async def test_nothing_of_a_bucket_is_left_when_it_is_deleted(
    autojump_clock: trio.testing.MockClock,
) -> None:
    server = make_server()
    async with server.recovered():
        with no_collections():
            before = alive(OF_A_BUCKET)
            await server.catalog.create_bucket("b", PARTITIONS, server.catalog.quota_bytes_default)
            await serve(server, "hangs up")
            await trio.sleep(1)
            assert alive(OF_A_BUCKET) != before
            await server.catalog.delete_bucket("b")
            assert alive(OF_A_BUCKET) == before
