"""What a connection or a bucket held is freed when it ends, without Python's collector.

The server has the collector look only at young objects, because a look at all of them holds the
loop for long. What lives longer, and ends in a reference cycle, would never be freed.
"""

from __future__ import annotations

import gc
import socket
from collections import Counter
from contextlib import suppress
from typing import Final

import pytest
import trio
import trio.testing

from tests.kit.placed_keys import key_in
from tests.kit.reference_cycles import no_collections
from tests.server.connected_peer import Peer, make_server, sets
from tests.server.users import USERS
from upr_kernel import pack_header
from upr_protocol.chunk import Bundle, chunk_of_plain_sets
from upr_protocol.errors import Status
from upr_protocol.failover import NOTHING_YET
from upr_protocol.ids import Durability, PartitionId, PartitionState, SeqNo
from upr_protocol.scram import SCRAM, ScramClient
from upr_protocol.wire import (
    Await,
    Barrier,
    BarrierReply,
    CloseStream,
    ContinueLogIn,
    Error,
    Get,
    GetReply,
    Go,
    HelloReply,
    LogInChallenge,
    Mutate,
    MutateReply,
    Refusal,
    StartLogIn,
    Stream,
    StreamEnd,
    StreamReply,
)
from upr_server.app import Server
from upr_server.engine import batch_of

PARTITIONS: Final = 4
KEY: Final = key_in(0, PARTITIONS)

OF_A_CONNECTION: Final = (
    *("AcceptedConnection", "RequestContext", "ServerSession", "Streamer", "_Stream"),
    *("PartitionReader", "UnfinishedFrame", "PublisherCredit"),
    *("ConnectionWriter", "SilenceWatch", "MessageDispatcher"),
)
OF_A_STREAM: Final = ("_Stream", "PartitionReader", "Backfill", "Cursor")
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
    await peer.send(Get((KEY,), partition=PartitionId(0), opaque=peer.opaque()))
    await peer.receive(GetReply)
    await peer.ask_for_all(PARTITIONS)
    await peer.send(Go(), Barrier(b"all of it"))
    await peer.receive(BarrierReply)


async def end(peer: Peer, how: str) -> None:
    if how == "sends garbage":
        await peer.stream.send_all(bytes(100))
    elif how == "is out of turn":
        await peer.stream.send_all(b"".join(Go().frame_buffers()))
    elif how == "stops inside a frame":
        await peer.stream.send_all(pack_header(Mutate.opcode, 0, 0, 99, 1000, 0) + bytes(500))
    elif how == "closes its side":
        await peer.stream.send_eof()


async def serve(server: Server, how: str) -> None:
    """Serves one peer until its end."""
    own_end, peer_end = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.connections.serve, peer_end)
        peer = Peer(own_end)
        await converse(peer)
        await end(peer, how)
        await trio.testing.wait_all_tasks_blocked()
        with suppress(trio.BrokenResourceError):
            await own_end.aclose()


@pytest.mark.parametrize(
    "how",
    ["hangs up", "closes its side", "sends garbage", "is out of turn", "stops inside a frame"],
)
async def test_nothing_of_a_connection_is_left_when_the_peer(
    how: str, autojump_clock: trio.testing.MockClock
) -> None:
    server = make_server()
    async with server.recovered_buckets():
        await server.catalog.create_bucket("b", PARTITIONS, server.catalog.quota_bytes_default)
        with no_collections():
            before = alive(OF_A_CONNECTION)
            await serve(server, how)
            assert alive(OF_A_CONNECTION) == before


async def test_nothing_of_a_connection_is_left_whose_log_in_failed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Strangers can have as many of these as they like."""
    server = make_server()
    async with server.recovered_buckets():
        server.users.users = USERS
        with no_collections():
            before = alive((*OF_A_CONNECTION, "LogInExchange"))
            await _fail_to_log_in(server)
            assert alive((*OF_A_CONNECTION, "LogInExchange")) == before


async def _fail_to_log_in(server: Server) -> None:
    own_end, peer_end = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.connections.serve, peer_end)
        peer, client = Peer(own_end), ScramClient("bob", "a wrong password", "nonce")
        await peer.send()
        await peer.receive(HelloReply)
        await peer.send(StartLogIn(SCRAM, client.client_first()))
        challenge = await peer.receive(LogInChallenge)
        await peer.send(ContinueLogIn(client.client_final(challenge.data)))
        assert (await peer.receive(Error)).status == Status.LOG_IN_FAILED
        await own_end.aclose()


@pytest.mark.parametrize("is_on_disk", [False, True])
@pytest.mark.parametrize("status", [Status.STREAM_CLOSED, Status.STATE_CHANGED])
async def test_nothing_of_a_stream_is_left_when_it_ends_before_its_connection(
    status: Status, is_on_disk: bool, autojump_clock: trio.testing.MockClock
) -> None:
    server = make_server()
    async with server.recovered_buckets():
        await server.catalog.create_bucket("b", PARTITIONS, server.catalog.quota_bytes_default)
        bucket = server.catalog.bucket("b")
        partition = bucket.partitions[0]
        own_end, peer_end = trio.testing.memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.connections.serve, peer_end)
            peer = Peer(own_end)
            await peer.open()
            await peer.mutate(sets(KEY))
            if is_on_disk:
                await trio.sleep(10)
                assert partition.manager.free_oldest()
            request = Stream(
                PartitionState.ACTIVE, NOTHING_YET, partition=partition.id, opaque=peer.opaque()
            )
            await peer.send(Go())
            await trio.testing.wait_all_tasks_blocked()
            # What the connection itself has left is none of the stream's.
            with no_collections():
                await peer.send(request)
                await peer.receive(StreamReply)
                while is_on_disk and not server.catalog.disks[bucket].backfills:
                    await trio.lowlevel.checkpoint()
                if status is Status.STATE_CHANGED:
                    for _ in server.end_streams(bucket, {partition.id}, status):
                        pass
                else:
                    await peer.send(CloseStream(partition=partition.id, opaque=request.opaque))
                assert (await peer.receive(StreamEnd)).status == status
                await trio.testing.wait_all_tasks_blocked()
                assert not alive(OF_A_STREAM)
                assert gc.collect() == 0
            await own_end.aclose()


@pytest.mark.parametrize("key", [KEY, key_in(1, PARTITIONS)])
async def test_nothing_of_a_bundle_is_left_once_it_is_answered(
    key: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    """Also when its only run is refused: the second key does not belong to the partition."""
    server = make_server()
    async with server.recovered_buckets():
        await server.catalog.create_bucket("b", PARTITIONS, server.catalog.quota_bytes_default)
        own_end, peer_end = trio.testing.memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.connections.serve, peer_end)
            peer = Peer(own_end)
            await peer.open()
            with no_collections():
                request = Mutate(Bundle.of_one_run(PartitionId(0), sets(key)), opaque=peer.opaque())
                await peer.send(request)
                await peer.receive(MutateReply if key == KEY else Refusal)
                assert not alive(("_BundleRequest", "MutationBatch", "CheckedChunk"))
            await own_end.aclose()


def connected() -> tuple[trio.SocketStream, trio.SocketStream]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends = (socket.create_connection(listener.getsockname()), listener.accept()[0])
    own_end, peer_end = (trio.SocketStream(trio.socket.from_stdlib_socket(end)) for end in ends)
    return own_end, peer_end


@pytest.mark.parametrize("questions", [1, 4])
async def test_nothing_of_a_connection_is_left_that_is_reset_while_answers_wait(
    questions: int,
) -> None:
    """The writer meets the error while the reader waits: for more, or until the peer has taken
    enough of the answers."""
    server = make_server()
    async with server.recovered_buckets():
        await server.catalog.create_bucket("b", PARTITIONS, server.catalog.quota_bytes_default)
        with no_collections():
            before = alive(OF_A_CONNECTION)
            await _reset_while_answers_wait(server, questions)
            assert alive(OF_A_CONNECTION) == before


async def _reset_while_answers_wait(server: Server, questions: int) -> None:
    bucket = server.catalog.bucket("b")
    large = chunk_of_plain_sets([KEY], [bytes(8 * 1024 * 1024)])
    bucket.partitions[0].mutate(batch_of(large), now=1.0)
    own_end, peer_end = connected()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.connections.serve, peer_end)
        peer = Peer(own_end)
        await peer.open()
        for _ in range(questions):
            await peer.send(Get((KEY,), partition=PartitionId(0), opaque=peer.opaque()))
        (connection,) = server.connections.connections
        # The socket's buffers take some of it; the rest waits for the peer.
        await trio.testing.wait_all_tasks_blocked()
        assert connection._writer._unwritten
        del connection
        await trio.aclose_forcefully(own_end)


async def test_nothing_of_a_bucket_is_left_when_it_is_deleted(
    autojump_clock: trio.testing.MockClock,
) -> None:
    server = make_server()
    async with server.recovered_buckets():
        with no_collections():
            before = alive(OF_A_BUCKET)
            await server.catalog.create_bucket("b", PARTITIONS, server.catalog.quota_bytes_default)
            await serve(server, "hangs up")
            await trio.sleep(1)
            assert alive(OF_A_BUCKET) != before
            await server.catalog.delete_bucket("b")
            assert alive(OF_A_BUCKET) == before


async def test_nothing_of_a_bucket_is_left_that_connections_had_open(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """They go on, and one has waited for a number of the bucket."""
    server = make_server()
    async with server.recovered_buckets(), trio.open_nursery() as nursery:
        own_end, peer_end = trio.testing.memory_stream_pair()
        nursery.start_soon(server.connections.serve, peer_end)
        peer = Peer(own_end)
        with no_collections():
            before = alive(OF_A_BUCKET)
            await server.catalog.create_bucket("b", PARTITIONS, server.catalog.quota_bytes_default)
            await converse(peer)
            history_id = server.catalog.bucket("b").partitions[0].failover_log.current
            request = Await(
                history_id,
                SeqNo(1),
                0,
                Durability.PERSISTED,
                partition=PartitionId(0),
                opaque=peer.opaque(),
            )
            await peer.send(request)
            assert (await peer.receive(Refusal)).status == Status.TIMED_OUT
            await trio.sleep(1)
            assert alive(OF_A_BUCKET) != before
            await server.catalog.delete_bucket("b")
            await trio.sleep(1)
            assert alive(OF_A_BUCKET) == before
        await own_end.aclose()
