"""Peers that break the rules, or keep them and do harm: each gets the answer that is documented,
the server's memory stays bounded, and others go on as if nothing had happened.

A real server, real sockets. Beside every bad peer a publisher and a consumer are at work
(`tests/kit/good_clients.py`), which notice nothing; and the server's log reports no fault of its
own.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import count
from struct import pack
from typing import Any, Final

import pytest
import trio
from crc32c import crc32c

from tests.kit.effort import effort
from tests.kit.good_clients import good_clients
from tests.kit.longest_step import check_longest_step, runs_again_if_long
from tests.kit.mirror import Mirror, assert_same, server_contents
from tests.kit.peer import Peer, peer, sets
from tests.kit.placed_keys import key_in
from tests.kit.process import ServerProcess, eventually, many_descriptors, server_process
from tests.kit.proxy import proxy_to
from tests.kit.shared_server import SharedServer
from tests.kit.threaded import trio_thread
from upr_kernel import pack_header
from upr_protocol.chunk import Buffer, Bundle, ChunkBuilder, CounterDelta
from upr_protocol.client import connect, consume, publisher
from upr_protocol.errors import ADVICE, ServerError, Status
from upr_protocol.failover import NOTHING_YET, FailoverLog, Position
from upr_protocol.hashing import partition_of
from upr_protocol.ids import Operation, PartitionId, PartitionState, SeqNo
from upr_protocol.limits import FRAME_BODY_BYTES_MAX, OPEN_BARRIERS_MAX, WINDOW_BYTES_MIN
from upr_protocol.wire import (
    HEADER_BYTES,
    VERSION,
    Ack,
    Barrier,
    BarrierReply,
    CreateBucket,
    Credit,
    Error,
    Get,
    GetReply,
    Go,
    Hello,
    HelloReply,
    Message,
    Mutate,
    MutateReply,
    Open,
    PartitionChunk,
    PartitionEnd,
    Refusal,
    Seqnos,
    Stats,
    StatsReply,
    Stream,
)

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
    runs_again_if_long,
]

MIB: Final = 1024 * 1024
LONGEST_TURN_S: Final = 2.0
LONGEST_STEP_S: Final = effort(0.03, 0.01)
"""In seconds of the processor. On a machine with five times as much work as it can do, steps of up
to 4 ms were measured. The sample leaves room for a processor of a third of the speed."""

MANY_END_STEP_S: Final = effort(0.05, 0.02)
"""The same where thousands of connections end together: Python's collector takes up to 11 ms."""

BUCKET: Final = "attacked"
PARTITIONS: Final = 2
P0: Final = PartitionId(0)

DEADLINES: Final = {"UPR_SERVER_SEND_TIMEOUT_S": "2"}
"""What is true after two seconds is true after the minute that is usual."""

GOOD_CLIENT_CONNECTIONS: Final = 3
SEND_TIMEOUT: Final = "send timeout; closing connection"


@pytest.fixture(scope="module")
def shared_server() -> Iterator[SharedServer]:
    with trio_thread() as thread:
        server = SharedServer(thread, DEADLINES)
        yield server
        server.stop()


@asynccontextmanager
async def attacked(
    shared_server: SharedServer | None = None,
    *,
    grows_at_most: int = 32 * MIB,
    items: int = 0,
    value_bytes: int = 0,
    descriptors_max: int | None = None,
    step_max_s: float = LONGEST_STEP_S,
) -> AsyncIterator[ServerProcess]:
    """A server with a bucket, and good clients at work. However it is treated, it must not take
    `grows_at_most` bytes more than when it began; and that is seen at its worst moment.

    Args:
        shared_server: The server that tests share, if this one needs none of its own.
        grows_at_most: Bytes.
        items: How many items are in the bucket: `key-0`, and so on.
        value_bytes: How long their values are.
        descriptors_max: How many descriptors the server may have.
        step_max_s: How long a task may hold the loop, in seconds of the processor.
    """
    server_context = (
        server_process(descriptors_max=descriptors_max, variables=DEADLINES)
        if shared_server is None
        else shared_server.use()
    )
    async with server_context as server:
        async with connect(server.url()) as client:
            await client.create_bucket(BUCKET, PARTITIONS)
        async with publisher(server.url(BUCKET)) as sink:
            for index in range(items):
                await sink.set(b"key-%d" % index, bytes(value_bytes))
        async with good_clients(server):
            before = server.resident_bytes
            server.forget_peak()
            yield server
            async with connect(server.url()) as client:
                figures = await check_longest_step(client, step_max_s)
            # A turn serves thousands of peers, each for some milliseconds.
            longest_turn_s = figures["longest_turn_s"]
            assert longest_turn_s < LONGEST_TURN_S, f"the loop was held for {longest_turn_s:.1f} s"
        grown = server.peak_bytes - before
        assert grown < grows_at_most, f"it grew by {grown / MIB:.1f} MiB"
        if shared_server is not None:
            await leave_nothing(server)


async def leave_nothing(server: ServerProcess) -> None:
    """The next test finds neither buckets nor connections of this one."""
    async with connect(server.url()) as client:
        for bucket in await client.list_buckets():
            await client.delete_bucket(bucket.name)
    await until_gone(server, 0)


async def connections(server: ServerProcess) -> int:
    """How many connections the server has, without the one that asks."""
    async with connect(server.url()) as client:
        stats = await client.stats()
    connections: int = stats["server"]["connections"]
    return connections - 1


async def until_gone(
    server: ServerProcess, connections_left: int = GOOD_CLIENT_CONNECTIONS
) -> None:
    """Waits until the server has no more than `connections_left` connections."""
    with trio.fail_after(60):
        while True:
            if await connections(server) <= connections_left:
                break


async def send_what_goes(bad: Peer, data: bytes, times: int = 1) -> None:
    """Sends `data` as long as the server takes it."""
    with suppress(trio.BrokenResourceError):
        for _ in range(times):
            await bad.send_bytes(data)


# Bytes that are no message.


async def test_random_bytes_are_refused_as_no_frame(shared_server: SharedServer) -> None:
    draw = random.Random(1)
    async with attacked(shared_server) as server:
        for opened in [False, True] * 50:
            garbage = draw.randbytes(draw.choice((24, 100, 5_000, 300_000)))
            bucket = BUCKET if opened else ""
            async with (
                peer(server.host, server.port, bucket, greeted=opened) as bad,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(send_what_goes, bad, garbage)
                await bad.expect_error(Status.BAD_MAGIC)


async def test_a_damaged_byte_of_a_frame_is_noticed(shared_server: SharedServer) -> None:
    """Every byte of a frame but the magic is covered by one of its checksums."""
    frame = b"".join(Hello("test:peer", (VERSION,), 0, MIB, 3600).frame_buffers())
    async with attacked(shared_server) as server:
        for offset in range(2, len(frame)):
            async with peer(server.host, server.port, greeted=False) as bad:
                await bad.send_bytes(
                    frame[:offset] + bytes((frame[offset] ^ 0x10,)) + frame[offset + 1 :]
                )
                await bad.expect_error(Status.BAD_CHECKSUM)


async def test_frames_of_an_unknown_message_are_refused(shared_server: SharedServer) -> None:
    async with attacked(shared_server) as server:
        for opcode in (0x00, 0x03, 0x7F, 0x80, 0xFE):
            async with peer(server.host, server.port) as bad:
                await bad.send_bytes(pack_header(opcode, 0, 0, 0, 0, 0))
                await bad.expect_error(Status.UNKNOWN_MESSAGE)


async def test_a_client_of_another_protocol_hears_what_to_do(shared_server: SharedServer) -> None:
    """What a browser would hear."""
    async with (
        attacked(shared_server) as server,
        peer(server.host, server.port, greeted=False) as bad,
    ):
        await bad.send_bytes(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert (await bad.expect_error(Status.BAD_MAGIC)).advice == ADVICE[Status.BAD_MAGIC]


async def test_a_client_of_another_version_hears_which_are_spoken(
    shared_server: SharedServer,
) -> None:
    async with attacked(shared_server) as server:
        async with peer(server.host, server.port, greeted=False) as bad:
            await bad.send(Hello("test:peer", (VERSION + 1, 200), 0, MIB, 20))
            error = await bad.expect_error(Status.BAD_VERSION)
            assert "the client speaks" in error.sentence
            assert "2, 200" in error.sentence
        async with peer(server.host, server.port, greeted=False) as bad:
            head = pack("<HBBHHIII", 0x5055, VERSION + 1, Hello.opcode, 0, 0, 0, 0, 0)
            await bad.send_bytes(head + pack("<I", crc32c(head)))
            await bad.expect_error(Status.BAD_VERSION)


# Frames that are too long: the header says so, and nothing more is waited for.


async def test_lengths_of_up_to_4_gib(shared_server: SharedServer) -> None:
    async with attacked(shared_server) as server:
        for length in (0xFFFF_FFF8, FRAME_BODY_BYTES_MAX + 8):
            for kind in (Hello, Open, Mutate, Get, Barrier):
                for _ in range(10):
                    bucket = "" if kind in (Hello, Open) else BUCKET
                    greeted = kind is not Hello
                    async with peer(server.host, server.port, bucket, greeted=greeted) as bad:
                        if kind is Barrier:
                            await bad.stream_all()
                        await bad.send_bytes(pack_header(kind.opcode, 0, 0, 99, length, 0))
                        await bad.expect_error(Status.FRAME_TOO_LONG, streaming=kind is Barrier)


async def test_a_stranger_gets_no_more_than_4_kib(shared_server: SharedServer) -> None:
    async with (
        attacked(shared_server) as server,
        peer(server.host, server.port, greeted=False) as bad,
    ):
        await bad.send_bytes(pack_header(Hello.opcode, 0, 0, 0, 4096 + 8, 0))
        await bad.expect_error(Status.FRAME_TOO_LONG)


async def test_large_frames_that_never_end() -> None:
    """Forty peers announce 30 MiB each and send all but the last byte, 1.2 GiB. The server takes as
    much of it as its budget for unfinished frames allows, and drops those that stop."""
    length = 30 * MIB
    dropped = 0
    async with attacked(grows_at_most=400 * MIB) as server, trio.open_nursery() as nursery:

        async def begin() -> None:
            nonlocal dropped
            async with peer(server.host, server.port, BUCKET) as bad:
                await bad.send_bytes(pack_header(Mutate.opcode, 0, 0, 99, length, 0))
                piece = bytes(64 * 1024)
                with suppress(trio.BrokenResourceError):
                    for _ in range(length // len(piece) - 1):
                        await bad.send_bytes(piece)
                    await bad.receive()
                dropped += 1

        for _ in range(40):
            nursery.start_soon(begin)
        await eventually(lambda: dropped >= 32, "those above the budget were dropped")
        nursery.cancel_scope.cancel()


# Frames out of turn.

OUT_OF_TURN: Final[dict[str, tuple[bool, Message]]] = {
    "a bucket opened before Hello": (False, Open(BUCKET, opaque=1)),
    "Go before Hello": (False, Go()),
    "a second Hello": (True, Hello("test:peer", (VERSION,), 0, MIB, 20)),
    "Go before a bucket is open": (True, Go()),
    "a read before a bucket is open": (True, Get((b"key",), partition=P0, opaque=1)),
    "a write before a bucket is open": (
        True,
        Mutate(Bundle.of_one_run(P0, sets([(b"key", b"value")])), opaque=1),
    ),
    "a barrier before Go": (True, Barrier(b"cookie")),
    "an acknowledgement before Go": (True, Ack(8)),
    "what only the server says": (True, PartitionEnd(SeqNo(1), partition=P0)),
    "an answer": (True, HelloReply(VERSION, 0, 20, 4096, 64, 64, "test:server")),
    "credit": (True, Credit(8)),
}


async def test_frames_out_of_turn(shared_server: SharedServer, subtests: pytest.Subtests) -> None:
    async with attacked(shared_server) as server:
        for case, (greeted, message) in OUT_OF_TURN.items():
            with subtests.test(case):
                async with peer(server.host, server.port, greeted=greeted) as bad:
                    await bad.send(message)
                    await bad.expect_error(Status.OUT_OF_TURN)


def _stream(position: Position = NOTHING_YET, opaque: int = 100) -> Stream:
    return Stream(PartitionState.ACTIVE, position, partition=P0, opaque=opaque)


MORE_COMPLETE_THAN_RECEIVED: Final = Position(FailoverLog(), SeqNo(9), SeqNo(3), None)

IN_AN_OPEN_BUCKET: Final[dict[str, tuple[Status, Sequence[Message]]]] = {
    "Go twice": (Status.OUT_OF_TURN, (Go(), Go())),
    "a second bucket": (Status.OUT_OF_TURN, (Open(BUCKET, opaque=100),)),
    "more acknowledged than sent": (Status.FLOW_CONTROL, (Go(), Ack(8))),
    "a cookie of no bytes": (Status.MALFORMED, (Go(), Barrier(b""))),
    "a cookie of 65 bytes": (Status.MALFORMED, (Go(), Barrier(bytes(65)))),
    "a position that cannot be": (Status.MALFORMED, (_stream(MORE_COMPLETE_THAN_RECEIVED),)),
    "a stream twice": (Status.OUT_OF_TURN, (_stream(), _stream(opaque=101))),
    "an opaque that a stream has": (
        Status.OPAQUE_IN_USE,
        (_stream(), Get((b"key",), partition=P0, opaque=100)),
    ),
}


async def test_messages_that_an_open_bucket_does_not_allow_are_refused(
    shared_server: SharedServer, subtests: pytest.Subtests
) -> None:
    async with attacked(shared_server) as server:
        for case, (status, messages) in IN_AN_OPEN_BUCKET.items():
            with subtests.test(case):
                async with peer(server.host, server.port, BUCKET) as bad:
                    await bad.send(*messages)
                    await bad.expect_error(status, streaming=True)


async def test_too_many_barriers(shared_server: SharedServer) -> None:
    """Barriers stay open while the window is shut: the 65th is one too many, and none may be sent
    again."""
    cookies = [b"%d" % index for index in range(OPEN_BARRIERS_MAX + 1)]
    async with attacked(shared_server, items=1000, value_bytes=1000) as server:
        for status, message in (
            (Status.TOO_MANY, cookies),
            (Status.COOKIE_IN_USE, [b"twice", b"twice"]),
        ):
            async with peer(server.host, server.port, greeted=False) as bad:
                await bad.greet(window_bytes=WINDOW_BYTES_MIN)
                await bad.open(BUCKET)
                await bad.stream_all()
                await bad.send(*map(Barrier, message))
                await bad.expect_error(status, streaming=True)


# Peers that are silent, or gone without a word.


async def test_a_half_open_connection(shared_server: SharedServer) -> None:
    """The cable is pulled. The server gives the peer up after two idle intervals; the client too,
    and connects again once there is a cable, and misses nothing."""
    async with (
        attacked(shared_server) as server,
        proxy_to(server.host, server.port) as proxy,
        publisher(server.url(BUCKET)) as sink,
        connect(server.url(BUCKET)) as client,
        consume(proxy.url(BUCKET), idle_interval_s=1) as consumer,
        trio.open_nursery() as nursery,
    ):
        mirror = Mirror()

        async def follow() -> None:
            async for event in consumer:
                mirror.apply(event)

        nursery.start_soon(follow)
        written = {}

        async def write(numbers: range) -> None:
            for change in numbers:
                key, value = b"key-%d" % (change % 100), b"%d" % change
                await sink.set(key, value)
                written[key] = value
            await sink.flush()

        await write(range(500))
        await consumer.barrier()
        before = await connections(server)
        proxy.half_open()
        await write(range(500, 1000))
        await until_gone(server, before - 1)
        await eventually(lambda: not consumer.statistics().is_connected, "the client gave up")
        proxy.heal()
        await consumer.barrier()
        assert consumer.statistics().connections == 2
        assert_same(mirror.contents, written, PARTITIONS)
        assert_same(await server_contents(client, written), written, PARTITIONS)
        nursery.cancel_scope.cancel()


async def test_a_peer_that_falls_silent(shared_server: SharedServer) -> None:
    async with (
        attacked(shared_server) as server,
        peer(server.host, server.port, BUCKET, idle_interval_s=1) as bad,
    ):
        await bad.stream_all()
        await bad.expect_error(Status.IDLE, streaming=True)


async def test_peers_that_never_send_hello(shared_server: SharedServer) -> None:
    hello = b"".join(Hello("test:peer", (VERSION,), 0, MIB, 3600).frame_buffers())
    async with attacked(shared_server) as server, trio.open_nursery() as nursery:

        async def say(data: bytes) -> None:
            async with peer(server.host, server.port, greeted=False) as bad:
                await bad.send_bytes(data)
                await bad.expect_error(Status.IDLE)

        for data in (b"", b"UP", hello[:-1]):
            nursery.start_soon(say, data)


# Peers that do not read.

LARGE: Final = 10 * MIB


KEYS_OF_ONE_PARTITION: Final = tuple(
    key for key in (b"key-%d" % n for n in range(4096)) if partition_of(key, PARTITIONS) == P0
)


def _get(*keys: bytes) -> Message:
    return Get(keys, partition=partition_of(keys[0], PARTITIONS), opaque=1)


@pytest.mark.parametrize(
    ("items", "value_bytes", "question", "grows_at_most"),
    [
        # One answer for each of the eight peers, and the next in the making.
        pytest.param(2, LARGE, _get(b"key-1"), 8 * LARGE + 96 * MIB, id="large-values"),
        pytest.param(4096, 100, _get(*KEYS_OF_ONE_PARTITION), 64 * MIB, id="many-values"),
        pytest.param(0, 0, _get(b"nothing"), 64 * MIB, id="missing-values"),
        pytest.param(0, 0, Seqnos(opaque=1), 64 * MIB, id="numbers"),
        pytest.param(0, 0, Stats(opaque=1), 64 * MIB, id="statistics"),
    ],
)
async def test_floods_of_requests_from_peers_that_do_not_read(
    shared_server: SharedServer, items: int, value_bytes: int, question: Message, grows_at_most: int
) -> None:
    """Eight peers ask, at once and on and on, and leave the answers lying. They are let go once
    they have taken nothing for too long."""
    frame = b"".join(question.frame_buffers())
    questions = frame * (256 * 1024 // len(frame) + 1)
    async with attacked(
        None if items else shared_server,
        grows_at_most=grows_at_most,
        items=items,
        value_bytes=value_bytes,
    ) as server:
        before = len(server.events(SEND_TIMEOUT))

        async def flood() -> None:
            async with peer(server.host, server.port, BUCKET) as bad:
                await send_what_goes(bad, questions, 1_000_000)

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(flood)
        await until_gone(server)
        assert len(await server.logged(SEND_TIMEOUT, before + 8)) == before + 8


async def test_consumers_that_do_not_read() -> None:
    """Their windows are as wide as can be said, 4 GiB; 64 MiB are there for each of the eight."""
    async with attacked(grows_at_most=128 * MIB, items=640, value_bytes=100_000) as server:

        async def stall() -> None:
            async with peer(server.host, server.port, greeted=False) as bad:
                await bad.greet(window_bytes=0xFFFF_FFFF)
                await bad.open(BUCKET)
                await bad.stream_all()
                await eventually(
                    lambda: len(server.events(SEND_TIMEOUT)) == 8, "all are disconnected"
                )

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(stall)
        await until_gone(server)


async def test_a_consumer_that_acknowledges_nothing(shared_server: SharedServer) -> None:
    """It gets its window and the rest of one chunk. It may still ask, and is answered. When it does
    acknowledge, the rest comes; and its barrier, though the window is shut again by then."""
    items = 500
    async with (
        attacked(shared_server, items=items, value_bytes=10_000) as server,
        peer(server.host, server.port, greeted=False) as bad,
    ):
        await bad.greet(window_bytes=WINDOW_BYTES_MIN)
        await bad.open(BUCKET)
        await bad.stream_all()
        sizes: list[int] = []
        mutation_count = 0

        async def hear(*kinds: type[Message]) -> Message:
            nonlocal mutation_count
            while True:
                message = await bad.receive()
                assert not isinstance(message, Error | None), message
                if isinstance(message, PartitionChunk):
                    sizes.append(HEADER_BYTES + message.chunk.nbytes)
                    mutation_count += message.chunk.count
                if isinstance(message, kinds):
                    return message

        for _ in range(10):
            await bad.send(Get((b"key-1",), partition=P0, opaque=1000))
            await hear(GetReply)
        assert WINDOW_BYTES_MIN <= sum(sizes) < WINDOW_BYTES_MIN + max(sizes)
        assert mutation_count < items
        await bad.send(Barrier(b"there?"))
        while mutation_count < items:
            await bad.send(Ack(sum(sizes)))
            sizes.clear()
            await hear(PartitionChunk)
        await hear(BarrierReply)


# Publishers.


def _batch(opaque: int, value_bytes: int) -> Message:
    chunk = sets([(b"key-%d" % opaque, bytes(value_bytes))])
    return Mutate(Bundle.of_one_run(P0, chunk), opaque=opaque)


async def _create_small(server: ServerProcess) -> None:
    async with connect(server.url()) as client:
        await client.create_bucket("small", 1, 32 * MIB)


async def test_a_publisher_that_ignores_its_credit() -> None:
    """It gets its credit back as it is answered, and sends on and on, without looking."""
    async with attacked(grows_at_most=96 * MIB) as server:
        await _create_small(server)
        async with (
            peer(server.host, server.port, "small") as bad,
            trio.open_nursery() as nursery,
        ):

            async def send() -> None:
                with suppress(trio.BrokenResourceError):
                    for index in range(1, 1025):
                        await bad.send(_batch(index, MIB))

            nursery.start_soon(send)
            while not isinstance(error := await bad.receive(), Error):
                assert isinstance(error, MutateReply | Credit), error
            assert error.status == Status.FLOW_CONTROL
            nursery.cancel_scope.cancel()


async def test_publishers_fill_a_bucket_and_no_more() -> None:
    """Fifty of them share what there is, each as far as its credit goes, and the bucket is never
    far over its quota. The disk takes from it meanwhile: a fast one could go on with that for ever,
    so they stop when all of them together have sent five times the quota."""
    batch_bytes = MIB // 8
    async with attacked(grows_at_most=96 * MIB) as server, AsyncExitStack() as stack:
        await _create_small(server)
        peers = [
            await stack.enter_async_context(peer(server.host, server.port, "small"))
            for _ in range(50)
        ]
        numbers, bytes_left, most = count(1), 5 * 32 * MIB, 0
        client = await stack.enter_async_context(connect(server.url()))
        while bytes_left > 0 and any(good.credit > 0 for good in peers):
            bytes_left -= batch_bytes * sum(good.credit > 0 for good in peers)
            for good in peers:
                if good.credit > 0:
                    batch = _batch(next(numbers), batch_bytes)
                    good.credit -= sum(map(len, batch.frame_buffers()))
                    await good.send(batch)
                    assert (await good.expect(MutateReply)).failures == ()
            memory = (await client.stats("small"))["memory"]
            most = max(most, sum(memory.values()))
        assert 0.6 * 32 * MIB < most < 1.5 * 32 * MIB + 50 * batch_bytes


# Damaged chunks.


def _published() -> bytes:
    builder = ChunkBuilder()
    key = key_in(0, PARTITIONS, b"a-key")
    builder.append(Operation.SET, key, b"a value")
    builder.append(Operation.DELETE, key_in(0, PARTITIONS, b"another-key"))
    builder.append(
        Operation.INCREMENT, key_in(0, PARTITIONS, b"a-counter"), CounterDelta(3, 5).encode()
    )
    builder.append(Operation.APPEND, key, b" and more")
    builder.append(Operation.TOUCH, key, b"", 0, 0, 0, 2_000_000_000)
    return bytes(builder.build())


def _spoilt(whole: bytes, draw: random.Random) -> bytes:
    spoilt = bytearray(whole)
    for _ in range(draw.choice((1, 1, 2, 8))):
        spoilt[draw.randrange(len(spoilt))] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, 0x20))
    if draw.random() < 0.2:
        del spoilt[draw.randrange(len(spoilt)) :]
    if draw.random() < 0.1:
        spoilt += draw.randbytes(draw.randrange(64))
    return bytes(spoilt)


def _framed(chunk: Buffer, opaque: int) -> bytes:
    row_count = int.from_bytes(chunk[:4], "little")
    body = pack("<16sQBB2xIIIQI4x", bytes(16), 0, 0, 0, 1, 0, row_count, 0, 0) + bytes(chunk)
    body += bytes(-len(body) % 8)
    return pack_header(Mutate.opcode, 0, 0, opaque, len(body), crc32c(body)) + body


async def test_a_damaged_chunk_is_applied_refused_or_malformed(shared_server: SharedServer) -> None:
    """A valid chunk with some bytes changed, cut or added, in a frame whose checksums are right: it
    is done, refused or called malformed, and that is all that can happen."""
    draw = random.Random(3)
    whole = _published()
    replies: Counter[type[Message]] = Counter()
    async with attacked(shared_server) as server, AsyncExitStack() as stack:
        bad: Peer | None = None
        for opaque in range(1, 1001):
            if bad is None:
                bad = await stack.enter_async_context(peer(server.host, server.port, BUCKET))
            await bad.send_bytes(_framed(_spoilt(whole, draw), opaque))
            answer = await bad.receive()
            while isinstance(answer, Credit):
                answer = await bad.receive()
            assert answer is not None
            replies[type(answer)] += 1
            if isinstance(answer, MutateReply | Refusal):
                assert answer.opaque == opaque
                assert answer.status in (Status.OK, Status.BAD_ARGUMENT)
            else:
                assert isinstance(answer, Error)
                assert answer.status == Status.MALFORMED
                await bad.expect_end()
                bad = None
    assert replies.keys() == {MutateReply, Refusal, Error}
    assert min(replies.values()) > 50, replies


async def test_names_that_are_too_long_to_be_repeated(shared_server: SharedServer) -> None:
    """A refusal names what it refuses, as far as it has room."""
    name = "\x01" * 4000
    async with attacked(shared_server) as server, peer(server.host, server.port) as bad:
        for request, status in (
            (Open(name, opaque=1), Status.NO_BUCKET),
            (CreateBucket(name, opaque=2), Status.BAD_ARGUMENT),
            (Stats(name, opaque=3), Status.NO_BUCKET),
        ):
            await bad.send(request)
            assert (await bad.expect(Refusal)).status == status
        await bad.send(Stats(opaque=4))
        await bad.expect(StatsReply)


# Very many peers.


async def test_thousands_of_idle_connections() -> None:
    """As many as descriptors allow, and 2,000 at most. None of them costs more than 48 KiB."""
    with many_descriptors() as limit:
        peers = min(2000, limit // 2 - 100)
        async with (
            attacked(
                grows_at_most=peers * 48 * 1024 + 8 * MIB, step_max_s=MANY_END_STEP_S
            ) as server,
            AsyncExitStack() as stack,
        ):
            for index in range(peers):
                bucket = BUCKET if index % 4 == 0 else ""
                await stack.enter_async_context(peer(server.host, server.port, bucket))
            assert await connections(server) == peers + GOOD_CLIENT_CONNECTIONS
            await stack.aclose()
            await until_gone(server)


async def test_one_connection_more_than_allowed() -> None:
    """It is told so."""
    async with (
        server_process(variables={"UPR_SERVER_CONNECTIONS_MAX": "10"}) as server,
        AsyncExitStack() as stack,
    ):
        first, *_ = [
            await stack.enter_async_context(peer(server.host, server.port)) for _ in range(10)
        ]
        for _ in range(200):
            async with peer(server.host, server.port, greeted=False) as bad:
                await bad.expect_error(Status.TOO_MANY)
        await trio.aclose_forcefully(first.stream)
        with trio.fail_after(60):
            while True:
                await trio.lowlevel.checkpoint()
                with suppress(ServerError):
                    assert await connections(server) == 9
                    break


async def test_running_out_of_descriptors() -> None:
    """The server may have 64, and says at its start that these are few; 200 peers come. Those who
    were in stay in; others are refused or wait, unheard, and are heard once there is room."""
    async with attacked(descriptors_max=64) as server, AsyncExitStack() as stack:

        def warnings() -> list[dict[str, Any]]:
            return [event for event in server.events() if "open_files" in event]

        await eventually(lambda: bool(warnings()), "it warns")
        (few,) = warnings()
        assert "ulimit -Hn" in few["event"]
        assert (few["connections"], few["connections_max"], few["open_files"]) == (32, 10_000, 64)
        strangers = []
        for _ in range(200):
            stream = await trio.open_tcp_stream(server.host, server.port)
            stack.push_async_callback(trio.aclose_forcefully, stream)
            strangers.append(stream)
        await eventually(
            lambda: any("EMFILE" in event["event"] for event in server.events()),
            "the server said that it ran out of descriptors",
        )
        for stream in strangers[:-1]:
            await trio.aclose_forcefully(stream)
        late = Peer(strangers[-1])
        await late.greet()
        await late.open(BUCKET)
        await until_gone(server, GOOD_CLIENT_CONNECTIONS + 1)
