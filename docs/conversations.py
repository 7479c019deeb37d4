"""Records the document's conversations: a client and this project's server, over a real connection.

The server has a clock that stands still and random numbers that are not random, so that a
conversation is the same whenever it is recorded. docs/vectors/conversations.json holds them, and
the document shows them.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import attrs
import trio
from structlog.testing import capture_logs

from upr_kernel import pack_header
from upr_protocol.chunk import Bundle, Chunk, CounterDelta, Mutation
from upr_protocol.failover import NOTHING_YET, FailoverLog, PartialSnapshot, Position
from upr_protocol.ids import (
    SEQ_MAX,
    Durability,
    HistoryId,
    Operation,
    PartitionId,
    PartitionState,
    SeqNo,
)
from upr_protocol.limits import WINDOW_BYTES_MIN
from upr_protocol.wire import (
    HEADER_BYTES,
    VERSION,
    Ack,
    Barrier,
    BarrierReply,
    Close,
    Credit,
    CycleEnd,
    Error,
    FrameBuffer,
    Get,
    GetReply,
    Go,
    Header,
    Hello,
    HelloReply,
    Message,
    Mutate,
    MutateReply,
    Open,
    Opened,
    PartitionChunk,
    PartitionEnd,
    PartitionLog,
    PartitionSnapshot,
    PartitionStart,
    Refusal,
    Stream,
    StreamEnd,
    StreamReply,
    decode,
)
from upr_server.app import Server, running_server
from upr_server.config import BucketConfig, ServerConfig
from upr_server.runtime import System
from upr_server.storage.simulated import SimulatedDirectory, SimulatedStore

NOW: Final = 1_800_000_000.0
SEED: Final = 7
P5: Final = PartitionId(5)
BUCKET: Final = "flights"
KEY: Final = b"N14228"
NEIGHBOUR: Final = b"N14003"
"""Keys of partition 5, as those below are."""

PARTITION_COUNT: Final = 8
COUNTER: Final = b"n6"


@attrs.define
class Conversation:
    """What two sides said.

    Attributes:
        title: What it shows.
        about: The same in a sentence or two.
        frames: Who said it, and the frame, in order.
        shown_from: The first frame that the document shows; those before are as in the first
            conversation.
    """

    title: str
    about: str
    frames: list[tuple[str, bytes]] = attrs.field(factory=list)
    shown_from: int = 0


class Recorder:
    """A client's end of a connection that writes down what is said.

    Args:
        stream: The connection.
        conversation: Where it goes.
    """

    def __init__(self, stream: trio.SocketStream, conversation: Conversation) -> None:
        self._stream = stream
        self._conversation = conversation
        self._frames = FrameBuffer(_admit_all)

    async def say(self, *messages: Message) -> None:
        """Says messages, one frame after the other."""
        frames = [b"".join(map(bytes, message.frame_buffers())) for message in messages]
        self._conversation.frames += [("client", frame) for frame in frames]
        await self._stream.send_all(b"".join(frames))

    async def hear(self, *kinds: type[Message]) -> Message:
        """Hears messages of these kinds, in this order; gives the last."""
        message: Message | None = None
        for kind in kinds:
            while (frame := self._frames.next_frame()) is None:
                data = await self._stream.receive_some()
                assert data, f"the server closed the connection; expected {kind.__name__}"
                self._frames.receive(bytes(data))
            header, body = frame
            fields = (header.status, header.partition, header.opaque, header.length)
            packed = pack_header(header.opcode, *fields, header.body_crc) + bytes(body)
            self._conversation.frames.append(("server", packed))
            message = decode(header, body)
            assert type(message) is kind, f"expected {kind.__name__}, heard {message}"
        assert message is not None
        return message

    async def open(self) -> None:
        """The way to an open bucket."""
        await self.say(Hello("example:docs", (VERSION,), 0, WINDOW_BYTES_MIN, 20))
        await self.hear(HelloReply)
        await self.say(Open(BUCKET, (P5,), opaque=1))
        await self.hear(PartitionLog, Opened, Credit)
        self._conversation.shown_from = len(self._conversation.frames)

    async def stream(self, position: Position, end: int = SEQ_MAX, opaque: int = 2) -> Message:
        """Asks for partition 5, and hears the answer."""
        state = PartitionState.ACTIVE
        await self.say(Stream(state, position, SeqNo(end), partition=P5, opaque=opaque))
        return await self.hear(StreamReply)


def _admit_all(_header: Header) -> None:
    """Takes every frame."""


def _batch(*rows: Mutation) -> Chunk:
    return Chunk.build(rows, SeqNo(0), SeqNo(0))


async def _first(client: Recorder) -> None:
    await client.stream(NOTHING_YET)
    await client.say(Go())
    await client.hear(PartitionStart)
    chunk = await client.hear(PartitionChunk)
    assert isinstance(chunk, PartitionChunk)
    await client.hear(PartitionEnd, CycleEnd)
    await client.say(Ack(HEADER_BYTES + chunk.chunk.nbytes), Barrier(b"first"))
    await client.hear(BarrierReply)
    rows = _batch(Mutation(Operation.INCREMENT, COUNTER, CounterDelta(1).encode()))
    bundle = Bundle.of_one_run(P5, rows, counter=1, chain=rows.chained_crc(0))
    await client.say(Mutate(bundle, b"writer of docs!!", opaque=3))
    await client.hear(Credit, MutateReply, PartitionSnapshot, CycleEnd)
    await client.say(Close())


async def _resume(client: Recorder, log: FailoverLog) -> None:
    partial = PartialSnapshot(log.current, SeqNo(0), SeqNo(3))
    await client.stream(Position(log, SeqNo(0), SeqNo(2), partial), end=3)
    await client.say(Go())
    await client.hear(PartitionStart, PartitionChunk, PartitionEnd, StreamEnd, CycleEnd)
    await client.say(Close())


async def _roll_back(client: Recorder, log: FailoverLog) -> None:
    elsewhere = FailoverLog.of_pairs([(0x0BAD_0BAD_0BAD_0BAD, 3), *log.pairs()])
    await client.stream(Position(elsewhere, SeqNo(7), SeqNo(7), None))
    await client.stream(Position(elsewhere.up_to(SeqNo(3)), SeqNo(3), SeqNo(3), None), opaque=3)
    await client.say(Close())


async def _get(client: Recorder) -> None:
    await client.say(Get((KEY, b"N14015"), partition=P5, opaque=2))
    await client.hear(GetReply)
    await client.say(Close())


async def _refuse(client: Recorder) -> None:
    await client.say(Get((KEY,), HistoryId(0x0BAD_0BAD_0BAD_0BAD), partition=P5, opaque=2))
    await client.hear(Refusal)
    await client.say(Close())


async def _break(client: Recorder) -> None:
    await client.say(Barrier(b"too early"))
    await client.hear(Error)


async def _read_disk(client: Recorder) -> None:
    await client.stream(NOTHING_YET, end=3)
    await client.say(Go())
    await client.hear(PartitionStart, PartitionChunk, PartitionEnd, StreamEnd, CycleEnd)
    await client.say(Close())


def conversations() -> list[Conversation]:
    """All of them, recorded now."""
    # The server's log is not part of the record.
    with capture_logs():
        return trio.run(_record)


async def _record() -> list[Conversation]:
    recorded: list[Conversation] = []
    directory = SimulatedDirectory()

    async def record(
        server: Server, title: str, about: str, play: Callable[[Recorder], Awaitable[None]]
    ) -> None:
        conversation = Conversation(title, about)
        # The client is told how much is on disk: that must not depend on how fast this machine is.
        partition = server.catalog.bucket(BUCKET).partitions[P5]
        disk = server.catalog.disks[server.catalog.bucket(BUCKET)]
        await disk.flusher.wait_until_persisted(partition, partition.high_seq)
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        async with stream:
            client = Recorder(stream, conversation)
            await client.open()
            await play(client)
        recorded.append(conversation)

    async with _server(directory) as (server, log):
        await record(
            server,
            "A consumer and publisher",
            "A client sends `Hello`, opens a bucket, gets its partitions' histories, asks for a "
            "stream, and sends `Go`. It receives a snapshot, acknowledges it, sends a barrier and "
            "gets it back. Then it publishes an increment, and receives the new value as a "
            "snapshot in one frame.",
            _first,
        )
        recorded[0].shown_from = 0
        await record(
            server,
            "Resuming inside a snapshot, and the end of a stream",
            "The client lost its connection after it had received the snapshot (0, 3] up to number "
            "2. It asks for no more than this snapshot. The server sends the snapshot's rest, and "
            "ends the stream.",
            lambda client: _resume(client, log),
        )
        await record(
            server,
            "A rollback",
            "The client followed another server up to 7. The history of that server began at 3. "
            "This server tells the client to roll back to 3. The client undoes the changes above "
            "3, and asks again. The entry of the other history is not above 3, so it remains in "
            "the client's log until the answer `OK` replaces the log.",
            lambda client: _roll_back(client, log),
        )
        await record(server, "Reading keys", "One of the two requested keys is missing.", _get)
        await record(
            server,
            "A refusal",
            "The client reads in a history that the server does not have. The connection remains.",
            _refuse,
        )
        await record(
            server,
            "An error",
            "The client sends a barrier before `Go`. The server answers with `Error`, and closes "
            "the connection.",
            _break,
        )
    async with _server(directory) as (server, _):
        await record(
            server,
            "A snapshot from disk",
            "The server has restarted, and has nothing in memory. So it reads the client's "
            "snapshot from disk.",
            _read_disk,
        )
    return recorded


@asynccontextmanager
async def _server(directory: SimulatedDirectory) -> AsyncIterator[tuple[Server, FailoverLog]]:
    """A server, and the log of partition 5. A new one's bucket has two keys, one set twice."""
    config = ServerConfig(
        listen="127.0.0.1:0",
        identity="upr-server",
        events=False,
        buckets=(BucketConfig(BUCKET, PARTITION_COUNT),),
    )
    system = System(time=lambda: NOW, random_bits=random.Random(SEED).getrandbits)
    store = SimulatedStore(directory)
    async with running_server(config, store, system) as server:
        partition = server.catalog.bucket(BUCKET).partitions[P5]
        if not partition.high_seq:
            stream = await trio.open_tcp_stream("127.0.0.1", server.port)
            async with stream:
                writer = Recorder(stream, Conversation("", ""))
                await writer.open()
                rows = _batch(
                    Mutation(Operation.SET, KEY, b'{"dep":"JFK"}'),
                    Mutation(Operation.SET, NEIGHBOUR, b"{}"),
                    Mutation(Operation.SET, KEY, b'{"dep":"EWR"}'),
                )
                bundle = Bundle.of_one_run(P5, rows)
                await writer.say(Mutate(bundle, durability=Durability.PERSISTED, opaque=2))
                await writer.hear(Credit, MutateReply)
        yield server, partition.failover_log
