"""One connection over a stream in memory: what it answers, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

import pytest
import trio
import trio.testing

from tests.kit.held_store import HeldStore
from tests.server.connected_peer import (
    P0,
    QUOTA_BYTES,
    Peer,
    connected,
    make_server,
    sets,
)
from upr_kernel import pack_header
from upr_protocol.chunk import Bundle, Chunk, Mutation
from upr_protocol.errors import Status
from upr_protocol.failover import FailoverLog, Position
from upr_protocol.ids import (
    Durability,
    HistoryId,
    Operation,
    PartitionId,
    PartitionState,
    SeqNo,
)
from upr_protocol.limits import (
    GET_KEYS_MAX,
    GET_REPLY_KEYS_MAX,
    HANDSHAKE_TIMEOUT_S,
    SEND_TIMEOUT_S,
)
from upr_protocol.wire import (
    VERSION,
    Await,
    AwaitReply,
    CloseStream,
    CreateBucket,
    Credit,
    CycleEnd,
    DeleteBucket,
    Error,
    FrameBuffer,
    Get,
    GetReply,
    Go,
    Hello,
    HelloReply,
    Lease,
    LeaseAction,
    ListBuckets,
    ListBucketsReply,
    Message,
    Mutate,
    Noop,
    Open,
    Opened,
    PartitionLog,
    Refusal,
    Seqnos,
    SeqnosReply,
    Stats,
    StatsReply,
    Stream,
    StreamEnd,
    StreamReply,
    decode,
)
from upr_server.net import connection as net_connection
from upr_server.net import server as net_server
from upr_server.net.connection import AcceptedConnection
from upr_server.net.credit import CREDIT_BYTES_MIN
from upr_server.net.frame_budget import BUDGET_BYTES, FRAME_TIMEOUT_S, UnfinishedFrame
from upr_server.net.handlers.streams import FIRST_PARTITIONS, SLICE_PARTITIONS
from upr_server.net.server import CONNECTIONS_TOLD_MAX


async def test_buckets_are_created_listed_and_deleted() -> None:
    async with connected(make_server()) as peer:
        await peer.send()
        await peer.receive(HelloReply)
        await peer.send(CreateBucket("c", 4, 2_000_000, opaque=peer.opaque()))
        await peer.send(ListBuckets(opaque=peer.opaque()))
        listed = await peer.receive(ListBucketsReply)
        assert listed.buckets[1] == ("c", 4, 2_000_000)
        for request, status in (
            (CreateBucket("c", opaque=50), Status.BUCKET_EXISTS),
            (CreateBucket("no/slash", opaque=51), Status.BAD_ARGUMENT),
            (CreateBucket("d", 1025, opaque=52), Status.BAD_ARGUMENT),
            (DeleteBucket("e", opaque=53), Status.NO_BUCKET),
            (Open("e", opaque=54), Status.NO_BUCKET),
        ):
            await peer.send(request)
            refusal = await peer.receive(Refusal)
            assert (refusal.status, refusal.opaque) == (status, request.opaque)
        await peer.send(DeleteBucket("c", opaque=60), ListBuckets(opaque=61))
        assert [name for name, _, _ in (await peer.receive(ListBucketsReply)).buckets] == ["b"]


async def test_a_batch_is_answered_and_read_back() -> None:
    async with connected(make_server()) as peer:
        await peer.open()
        reply = await peer.mutate(
            Chunk.build(
                [
                    Mutation(Operation.ADD, b"a", b"1"),
                    Mutation(Operation.ADD, b"a", b"2"),
                    Mutation(Operation.INCREMENT, b"a", (5).to_bytes(8, "little") + bytes(16)),
                    Mutation(Operation.DELETE, b"missing"),
                ],
                SeqNo(0),
                SeqNo(0),
            )
        )
        assert (reply.runs[0].first_seq, reply.runs[0].last_seq) == (1, 2)
        assert reply.failures == ((1, Status.EXISTS), (3, Status.NOT_FOUND))
        assert reply.counters == ((2, 6),)
        await peer.send(Get((b"a", b"missing"), partition=P0, opaque=peer.opaque()))
        get_reply = await peer.receive(GetReply)
        counter, missing = get_reply.chunk
        assert (counter.op, counter.value, counter.seq) == (Operation.SET, b"6", 2)
        assert (missing.op, missing.seq) == (Operation.DELETE, 0)
        assert get_reply.next_index == 2
        await peer.send(Seqnos(opaque=peer.opaque()))
        assert (await peer.receive(SeqnosReply)).rows == ((0, 1, 2, 0, 0),)


async def test_a_batch_of_failures_only_has_no_numbers() -> None:
    async with connected(make_server()) as peer:
        await peer.open()
        reply = await peer.mutate(
            Chunk.build([Mutation(Operation.DELETE, b"k")], SeqNo(0), SeqNo(0))
        )
        assert reply.runs[0][3:] == (
            0,
            0,
            0,
        )
        assert reply.failures == ((0, Status.NOT_FOUND),)


async def test_what_this_server_cannot_do_is_refused() -> None:
    async with connected(make_server()) as peer:
        await peer.open()
        await peer.mutate(sets(b"k"))
        ours, other_history = HistoryId(1), HistoryId(7)
        memory, persisted = Durability.MEMORY, Durability.PERSISTED
        replicated = Durability.REPLICATED

        def waiting(history_id: HistoryId, seq: int, durability: Durability) -> Await:
            opaque = peer.opaque()
            return Await(history_id, SeqNo(seq), 0, durability, partition=P0, opaque=opaque)

        for request, status in (
            (Get((), partition=P0, opaque=91), Status.BAD_ARGUMENT),
            (Get((b"k",) * (GET_KEYS_MAX + 1), partition=P0, opaque=92), Status.BAD_ARGUMENT),
            (Get((b"k",), other_history, partition=P0, opaque=93), Status.HISTORY_CHANGED),
            (waiting(ours, 1, replicated), Status.TOO_FEW_REPLICAS),
            (waiting(ours, 1, persisted), Status.TIMED_OUT),
            (waiting(other_history, 1, memory), Status.HISTORY_CHANGED),
            (waiting(ours, 2, memory), Status.BAD_ARGUMENT),
            (Lease(LeaseAction.ACQUIRE, 0, 1, "o", (), opaque=97), Status.BAD_ARGUMENT),
            (Stats("nope", opaque=98), Status.NO_BUCKET),
        ):
            await peer.send(request)
            refusal = await peer.receive(Refusal)
            assert (refusal.status, refusal.opaque) == (status, request.opaque), request
        for partition, durability, status in (
            (P0, replicated, Status.TOO_FEW_REPLICAS),
            (PartitionId(9), memory, Status.NOT_MY_PARTITION),
        ):
            bundle = Bundle.of_one_run(partition, sets(b"k"))
            await peer.send(Mutate(bundle, durability=durability, opaque=peer.opaque()))
            assert (await peer.receive(Refusal)).status == status
        await peer.send(waiting(ours, 1, memory))
        assert (await peer.receive(AwaitReply)).seq == 1
        await peer.send(Stats("b", opaque=100))
        assert '"items":1' in (await peer.receive(StatsReply)).json


async def test_a_bad_key_in_a_get_has_an_error_and_no_item() -> None:
    async with connected(make_server()) as peer:
        await peer.open()
        await peer.mutate(sets(b"k"))
        keys = (b"", b"k", b"l", b"k" * 251)
        await peer.send(Get(keys, partition=P0, opaque=peer.opaque()))
        reply = await peer.receive(GetReply)
        assert [(row.op, row.key, row.seq, row.flags) for row in reply.chunk] == [
            (Operation.DELETE, b"", 0, Status.BAD_KEY),
            (Operation.SET, b"k", 1, 0),
            (Operation.DELETE, b"l", 0, 0),
            (Operation.DELETE, b"k" * 251, 0, Status.BAD_KEY),
        ]


async def test_a_long_answer_is_cut_and_continued() -> None:
    async with connected(make_server()) as peer:
        await peer.open()
        keys = tuple(b"k%d" % index for index in range(5))
        await peer.mutate(sets(*keys, value=bytes(400_000)))
        position, sizes = 0, []
        while position < len(keys):
            await peer.send(Get(keys[position:], partition=P0, opaque=peer.opaque()))
            reply = await peer.receive(GetReply)
            assert [mutation.key for mutation in reply.chunk] == list(
                keys[position : position + reply.next_index]
            )
            sizes.append(reply.next_index)
            position += reply.next_index
        assert sizes == [2, 2, 1]


async def test_a_get_of_many_keys_is_answered_some_keys_at_a_time() -> None:
    async with connected(make_server()) as peer:
        await peer.open()
        keys = tuple(b"k%d" % index for index in range(GET_REPLY_KEYS_MAX + 1))
        await peer.mutate(sets(*keys))
        await peer.send(Get(keys, partition=P0, opaque=peer.opaque()))
        reply = await peer.receive(GetReply)
        assert reply.next_index == GET_REPLY_KEYS_MAX
        assert tuple(mutation.key for mutation in reply.chunk) == keys[:-1]


async def test_the_answer_to_open_says_what_is_on_disk_and_what_was_purged(
    autojump_clock: trio.testing.MockClock,
) -> None:
    server = make_server()
    async with connected(server) as writer, connected(server) as peer:
        await writer.open()
        await writer.mutate(sets(b"a", b"b"))
        await trio.sleep(1)
        server.catalog.bucket("b").partitions[P0].purge_seq = SeqNo(1)
        await writer.mutate(sets(b"c"))
        await peer.send()
        await peer.receive(HelloReply)
        await peer.send(Open("b", (0,), opaque=peer.opaque()))
        log = await peer.receive(PartitionLog)
        assert (log.high_seq, log.persisted_seq, log.purge_seq) == (3, 2, 1)


async def test_missing_partitions_are_answered_with_not_my_partition() -> None:
    async with connected(make_server()) as peer:
        await peer.send()
        await peer.receive(HelloReply)
        await peer.send(Open("b", (0, 7), opaque=1))
        assert (await peer.receive(PartitionLog)).status == Status.OK
        assert (await peer.receive(PartitionLog)).status == Status.NOT_MY_PARTITION
        await peer.receive(Opened)
        await peer.send(
            Stream(PartitionState.ACTIVE, Position(), partition=PartitionId(7), opaque=2)
        )
        assert (await peer.receive(StreamReply)).status == Status.NOT_MY_PARTITION
        await peer.send(Stream(PartitionState.REPLICA, Position(), partition=P0, opaque=3))
        assert (await peer.receive(StreamReply)).status == Status.WRONG_STATE


async def test_bytes_that_a_socket_did_not_take_go_before_later_messages() -> None:
    """An answer is longer than the socket's buffer, and the next request arrives at the same time:
    the event loop may run the reader or the writer first."""
    ends = [trio.SocketStream(end) for end in trio.socket.socketpair()]
    async with connected(make_server(), (ends[0], ends[1])) as peer:
        await peer.open()
        values = {key: key * 1_000_000 for key in (b"a", b"b")}
        for key, value in values.items():
            await peer.mutate(sets(key, value=value))
        for index in range(200):
            for key in values:
                await peer.send(Get((key,), partition=P0, opaque=peer.opaque()))
                for _ in range(index % 4):
                    await trio.lowlevel.checkpoint()
            for value in values.values():
                assert (await peer.receive(GetReply)).chunk.values() == [value]


async def test_a_client_that_sends_everything_at_once_has_greeted_too(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The server opens the bucket before it has answered the greeting. It must not wait for a
    `Hello` later."""
    async with connected(make_server(), idle_interval_s=3600) as peer:
        hello = b"".join(peer.session.take_outgoing(trio.current_time()))
        opens = b"".join(Open("b", (), opaque=1).frame_buffers())
        await peer.stream.send_all(hello + opens)
        await trio.sleep(2 * HANDSHAKE_TIMEOUT_S)
        await peer.stream.send_all(b"".join(ListBuckets(opaque=2).frame_buffers()))
        frames = FrameBuffer(lambda header: None)
        names: list[str] = []
        while "ListBucketsReply" not in names:
            data = await peer.stream.receive_some(65536)
            assert data, f"the server hung up after {names}"
            frames.receive(bytes(data))
            while (frame := frames.next_frame()) is not None:
                names.append(type(decode(*frame)).__name__)
        assert "Opened" in names


async def test_other_tasks_run_while_frames_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer closes streams that it does not have, as many as fit into one read."""
    # As if each frame took so long that the step must end.
    monkeypatch.setattr(net_connection, "LONG_STEP_S", -1.0)
    monkeypatch.setattr(net_connection, "SLICE_S", -1.0)
    frame_count, turns = 200, 0
    async with connected(make_server()) as peer, trio.open_nursery() as nursery:
        await peer.open()

        async def take_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await trio.lowlevel.checkpoint()

        nursery.start_soon(take_turns)
        frame = b"".join(map(bytes, CloseStream(partition=P0, opaque=1).frame_buffers()))
        await peer.stream.send_all(frame_count * frame)
        await peer.send(Seqnos(opaque=peer.opaque()))
        await peer.receive(SeqnosReply)
        nursery.cancel_scope.cancel()
    assert turns > frame_count // 2


async def test_credit_is_topped_up_and_withheld_above_the_quota(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = HeldStore()
    server = make_server(store=store)
    async with connected(server) as peer, trio.open_nursery() as nursery:
        nursery.start_soon(server.upkeep.run_freeing)
        await server.catalog.create_bucket("small", 1, 8 * 1024 * 1024)
        await peer.open("small")
        assert peer.session.credit.remaining_bytes == CREDIT_BYTES_MIN
        sent_bytes = 0
        while peer.session.credit.is_open:
            await peer.mutate(sets(b"k%d" % sent_bytes, value=bytes(100_000)))
            sent_bytes += 1
            assert sent_bytes < 200, "credit never ran out"
        with trio.move_on_after(5) as patience:
            await peer.receive(Credit)
        assert patience.cancelled_caught, "credit came while the bucket was over its quota"
        # Once changes are on disk, they are freed from memory, and the missing credit is granted.
        store.released.set()
        await peer.receive(Credit)
        bucket = server.catalog.buckets.get("small")
        assert bucket is not None
        assert bucket.memory.total < bucket.memory_policy.high_bytes
        nursery.cancel_scope.cancel()


async def test_strangers_of_one_network_leave_as_many_places_as_they_take(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    server = make_server(connections_max=6)
    strangers = server.connections.resources.strangers
    async with trio.open_nursery() as nursery:

        async def arrive(network: str) -> Peer:
            own_end, peer_end = trio.testing.memory_stream_pair()
            monkeypatch.setattr(net_server, "_peer_of", lambda _stream: f"{network}:1")
            nursery.start_soon(server.connections.serve, peer_end)
            await trio.testing.wait_all_tasks_blocked()
            return Peer(own_end)

        async def greet(peer: Peer) -> None:
            await peer.send()
            await peer.receive(HelloReply)

        async def reason_of_refusal(network: str) -> str:
            error = await (await arrive(network)).receive(Error)
            assert error.status == Status.TOO_MANY
            return error.sentence

        first, *others = [await arrive("10.0.0.1") for _ in range(4)]
        assert "4 connections from 10.0.0.1" in await reason_of_refusal("10.0.0.1")
        # The remaining places are for other networks, whose peers are strangers until they greet.
        for _ in range(2):
            await greet(await arrive("10.0.0.2"))
        assert "there are 6 connections" in await reason_of_refusal("10.0.0.2")
        # A peer that leaves without a greeting no longer counts, nor does one that greets.
        await first.stream.send_all(b"nonsense, and more than a header")
        await first.receive(Error)
        assert strangers.count_of("10.0.0.1") == 4
        await first.stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert strangers.count_of("10.0.0.1") == 3
        assert "3 connections from 10.0.0.1" in await reason_of_refusal("10.0.0.1")
        for peer in others:
            await greet(peer)
        await greet(await arrive("10.0.0.1"))
        assert not strangers.count_of("10.0.0.1")
        nursery.cancel_scope.cancel()


async def test_silence_before_hello_is_ended(autojump_clock: trio.testing.MockClock) -> None:
    async with connected(make_server()) as peer:
        await peer.wait_for_end()
        (error,) = peer.received
        assert isinstance(error, Error)
        assert error.status == Status.IDLE
        assert trio.current_time() == pytest.approx(HANDSHAKE_TIMEOUT_S, abs=0.1)


async def test_an_idle_server_says_noop_and_a_dead_peer_is_dropped(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with connected(make_server(), idle_interval_s=3) as peer:
        await peer.send()
        began = trio.current_time()
        await peer.receive(Noop)
        assert trio.current_time() - began == pytest.approx(3, abs=0.1)
        await peer.wait_for_end()
        error = peer.received[-1]
        assert isinstance(error, Error)
        assert error.status == Status.IDLE
        assert trio.current_time() - began == pytest.approx(6, abs=0.1)


async def test_a_peer_that_reads_nothing_is_disconnected(
    autojump_clock: trio.testing.MockClock,
) -> None:
    server = make_server()
    ours, theirs = trio.testing.lockstep_stream_pair()
    peer = Peer(ours)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.connections.new_connection(theirs, "memory").run)
        began = trio.current_time()
        await peer.send()
    assert trio.current_time() - began == pytest.approx(SEND_TIMEOUT_S, abs=0.1)


async def test_a_peer_that_was_not_listened_to_is_not_called_silent(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """For five idle intervals other frames take all memory for frames, so the peer's frame is not
    read."""
    server = make_server()
    budget = server.connections.resources.frame_budget
    frames = [UnfinishedFrame(budget, "memory", lambda reason: None) for _ in range(256)]
    async with connected(server, idle_interval_s=1) as peer:
        await peer.open()
        for frame in frames:
            frame.set_held_bytes(BUDGET_BYTES // len(frames), trio.current_time(), is_new=True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer.mutate, sets(b"k", value=bytes(2_000_000)))
            await trio.sleep(5)
            assert budget.is_short
            for frame in frames:
                frame.release()


async def test_a_frame_that_stops_is_dropped_whatever_idle_interval_was_asked_for(
    autojump_clock: trio.testing.MockClock,
) -> None:
    server = make_server()
    budget = server.connections.resources.frame_budget
    async with connected(server, idle_interval_s=3600) as peer, trio.open_nursery() as nursery:
        nursery.start_soon(budget.run)
        await peer.open()
        await peer.stream.send_all(pack_header(Mutate.opcode, 0, 0, 99, 1024 * 1024, 0))
        await peer.stream.send_all(bytes(500_000))
        await trio.testing.wait_all_tasks_blocked()
        assert budget.used_bytes >= 500_000
        began_at = trio.current_time()
        error = await peer.receive(Error)
        assert error.status == Status.TOO_SLOW
        assert "524288 bytes" in error.sentence
        assert trio.current_time() - began_at <= FRAME_TIMEOUT_S + 10
        assert budget.used_bytes == 0
        nursery.cancel_scope.cancel()


async def test_other_tasks_run_while_a_bucket_of_many_partitions_is_opened() -> None:
    server = make_server()
    outgoing_bytes: list[int] = []
    async with connected(server) as peer, trio.open_nursery() as nursery:
        await server.catalog.create_bucket("wide", 1024, QUOTA_BYTES)
        await peer.send()
        await peer.receive(HelloReply)
        (connection,) = server.connections.connections

        async def watch() -> None:
            while True:
                outgoing_bytes.append(connection.session.outgoing_bytes)
                await trio.lowlevel.checkpoint()

        nursery.start_soon(watch)
        await peer.send(Open("wide", opaque=peer.opaque()))
        await peer.receive(Opened)
        nursery.cancel_scope.cancel()
    log_bytes = len(b"".join(PartitionLog(*_LOG, partition=P0, opaque=1).frame_buffers()))
    # How many slices are queued at once depends on the order in which Trio runs reader and writer.
    assert 0 < max(outgoing_bytes) <= 4 * SLICE_PARTITIONS * log_bytes < 1024 * log_bytes


_LOG: Final = (PartitionState.ACTIVE, SeqNo(0), SeqNo(0), SeqNo(0), FailoverLog.of_pairs([(1, 0)]))


async def test_a_client_is_refused_if_the_bucket_that_it_opens_is_deleted_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bucket of many partitions is opened in steps."""
    server, finish_handling = make_server(), AcceptedConnection._finish_handling

    async def delete_before(
        connection: AcceptedConnection, message: Message, steps: Iterator[None]
    ) -> None:
        if isinstance(message, Open):
            await server.catalog.delete_bucket("wide")
        await finish_handling(connection, message, steps)

    monkeypatch.setattr(AcceptedConnection, "_finish_handling", delete_before)
    async with connected(server) as peer:
        await server.catalog.create_bucket("wide", FIRST_PARTITIONS + 1, 8 * 1024 * 1024)
        await peer.send()
        await peer.receive(HelloReply)
        await peer.send(Open("wide", opaque=peer.opaque()))
        while isinstance(answer := await peer.receive(Message), PartitionLog):
            pass
        assert isinstance(answer, Refusal)
        assert answer.status == Status.NO_BUCKET


async def test_a_partition_named_twice_is_refused() -> None:
    """The answer would have a row for each mention, and might not fit into its frame."""
    async with connected(make_server()) as peer:
        await peer.open()
        await peer.send(Seqnos((0,) * 2000, opaque=peer.opaque()))
        assert (await peer.receive(Refusal)).status == Status.BAD_ARGUMENT
    async with connected(make_server()) as peer:
        await peer.send()
        await peer.receive(HelloReply)
        await peer.send(Open("b", (0,) * 1000, opaque=peer.opaque()))
        assert (await peer.receive(Refusal)).status == Status.BAD_ARGUMENT


async def test_statistics_list_a_limited_number_of_connections_and_count_the_rest() -> None:
    server = make_server()
    other_count = 7000
    longest = b"".join(Hello("\\" * 200, (VERSION,), 0, 1 << 20, 20).frame_buffers())
    async with connected(server) as peer:
        await peer.send()
        await peer.receive(HelloReply)
        _, stream = trio.testing.memory_stream_pair()
        for _ in range(other_count):
            connection = server.connections.new_connection(stream, "192.0.2.123:12345")
            connection.session.receive(longest, 0.0)
            assert list(connection.session.messages())
            server.connections.connections[connection] = None
        await peer.send(Stats(opaque=1))
        figures = json.loads((await peer.receive(StatsReply)).json)
        assert len(figures["connections"]) == CONNECTIONS_TOLD_MAX
        assert figures["connections_left_out"] == other_count + 1 - CONNECTIONS_TOLD_MAX
        assert figures["server"]["connections"] == other_count + 1
        server.connections.connections.clear()


async def test_other_tasks_run_while_statistics_are_collected() -> None:
    server = make_server()
    async with connected(server) as peer:
        await peer.send()
        await peer.receive(HelloReply)
        for index in range(20):
            await server.catalog.create_bucket(f"b{index}", 1, QUOTA_BYTES)
        turns = 0

        async def take_turns() -> None:
            nonlocal turns
            while True:
                await trio.lowlevel.checkpoint()
                turns += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(take_turns)
            await peer.send(Stats(opaque=1))
            figures = json.loads((await peer.receive(StatsReply)).json)
            nursery.cancel_scope.cancel()
        assert len(figures["buckets"]) == 21
        assert turns > 20


async def test_an_internal_error_is_reported_to_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    server = make_server()

    def fault(bucket: str) -> None:
        raise RuntimeError(bucket)

    monkeypatch.setattr(server.connections.resources, "statistics_of", fault)
    async with connected(server) as peer:
        await peer.send()
        await peer.receive(HelloReply)
        await peer.send(Stats("a secret", opaque=1))
        error = await peer.receive(Error)
        assert error.status == Status.INTERNAL
        assert error.sentence == "internal error in Stats; the server's log has the cause"
        assert await peer.wait_for_end()


async def test_a_connection_ends_without_an_error_when_its_peer_leaves() -> None:
    server = make_server()
    async with connected(server):
        ours, theirs = trio.testing.memory_stream_pair()
        connection = server.connections.new_connection(theirs, "memory")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.run)
            await Peer(ours).open()
            await ours.aclose()


async def test_invalid_bytes_are_answered_with_an_error_and_the_connection_is_closed() -> None:
    async with connected(make_server()) as peer:
        await peer.stream.send_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await peer.wait_for_end()
        (error,) = peer.received
        assert isinstance(error, Error)
        assert error.status == Status.BAD_MAGIC
        assert error.advice


async def test_a_shutdown_ends_every_stream_and_connection_with_the_reason() -> None:
    server = make_server()
    async with connected(server) as peer:
        await peer.open()
        await peer.ask()
        await peer.send(Go())
        await peer.receive(CycleEnd)
        for _ in server.connections.shut_down():
            pass
        assert (await peer.receive(StreamEnd)).status == Status.SHUTTING_DOWN
        assert (await peer.receive(Error)).status == Status.SHUTTING_DOWN
        assert await peer.wait_for_end()
