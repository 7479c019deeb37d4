"""A peer that is connected to a server by streams in memory, and says what a test tells it to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from typing import Final, TypeVar

import trio
import trio.testing

from upr_protocol.chunk import Bundle, Chunk, chunk_of_plain_sets
from upr_protocol.failover import NOTHING_YET, Position
from upr_protocol.ids import (
    SEQ_MAX,
    PartitionId,
    PartitionState,
    SeqNo,
)
from upr_protocol.limits import (
    IDLE_INTERVAL_S_DEFAULT,
    WINDOW_BYTES_DEFAULT,
)
from upr_protocol.partition_map import Assignment, PartitionMap
from upr_protocol.session import ClientSession
from upr_protocol.wire import (
    Credit,
    HelloReply,
    Message,
    Mutate,
    MutateReply,
    Open,
    Opened,
    Stream,
    StreamReply,
)
from upr_server.app import Server
from upr_server.config import ServerConfig
from upr_server.runtime import System
from upr_server.storage.api import Store
from upr_server.storage.simulated import SimulatedStore

M = TypeVar("M", bound=Message)
P0 = PartitionId(0)


class Peer:
    """A client that sends the messages that a test gives it, and returns those that it receives."""

    def __init__(
        self,
        stream: trio.abc.HalfCloseableStream,
        *,
        identity: str = "test:peer",
        window_bytes: int = WINDOW_BYTES_DEFAULT,
        idle_interval_s: int = IDLE_INTERVAL_S_DEFAULT,
    ) -> None:
        self.stream = stream
        self.session = ClientSession(
            identity,
            window_bytes=window_bytes,
            idle_interval_s=idle_interval_s,
            now=trio.current_time(),
        )
        self.received: list[Message] = []

    async def send(self, *messages: Message) -> None:
        for message in messages:
            self.session.send(message)
        await self.stream.send_all(b"".join(self.session.take_outgoing(trio.current_time())))

    async def receive(self, kind: type[M]) -> M:
        """The next message of `kind`; earlier messages are dropped."""
        while True:
            while self.received:
                message = self.received.pop(0)
                if isinstance(message, kind):
                    return message
            data = await self.stream.receive_some(65536)
            assert data, f"the server hung up; expected {kind.__name__}"
            self.session.receive(bytes(data), trio.current_time())
            self.received += self.session.messages()

    async def wait_for_end(self) -> bool:
        while data := await self.stream.receive_some(65536):
            self.session.receive(bytes(data), trio.current_time())
            self.received += self.session.messages()
        return True

    def opaque(self) -> int:
        return self.session.new_opaque()

    async def open(self, bucket: str = "b", *partitions: int) -> None:
        await self.send()
        await self.receive(HelloReply)
        await self.send(Open(bucket, partitions, opaque=self.opaque()))
        await self.receive(Opened)
        await self.receive(Credit)

    async def mutate(self, chunk: Chunk, partition: PartitionId = P0) -> MutateReply:
        await self.send(Mutate(Bundle.of_one_run(partition, chunk), opaque=self.opaque()))
        return await self.receive(MutateReply)

    async def ask(
        self,
        position: Position = NOTHING_YET,
        end_seq: SeqNo = SEQ_MAX,
        *,
        partition: PartitionId = P0,
        with_answers: bool = False,
    ) -> StreamReply:
        """Asks for a stream of a partition, by default from its beginning and without an end."""
        request = Stream(
            PartitionState.ACTIVE,
            position,
            end_seq,
            with_answers=with_answers,
            partition=partition,
            opaque=self.opaque(),
        )
        await self.send(request)
        return await self.receive(StreamReply)

    async def ask_for_all(self, partition_count: int) -> None:
        """Asks for the streams of all partitions, one after the other."""
        for partition in range(partition_count):
            await self.ask(partition=PartitionId(partition))


def sets(*keys: bytes, value: bytes = b"v") -> Chunk:
    """A published chunk that sets these keys."""
    return chunk_of_plain_sets(keys, [value] * len(keys))


QUOTA_BYTES: Final = 64 * 1024 * 1024


def make_server(
    store: Store | None = None,
    connections_max: int = 10,
    ids: Iterator[int] | None = None,
    node: str = "",
) -> Server:
    """A server that does not listen; its history IDs are 1, 2, 3 and so on."""
    numbers = count(1) if ids is None else ids
    config = ServerConfig(
        identity="test-server", quota_bytes=QUOTA_BYTES, connections_max=connections_max, node=node
    )
    system = System(
        time=lambda: 1000.0 + trio.current_time(), random_bits=lambda _bits: next(numbers)
    )
    return Server(config, SimulatedStore() if store is None else store, system)


async def name_replica(server: Server) -> None:
    """Makes the node `a` active for the bucket's only partition, with `r` as its replica."""
    nodes = {"a": "127.0.0.1:1", "r": "127.0.0.1:2"}
    assignments = (Assignment("a", {"r": ""}),)
    partition_map = PartitionMap(bucket="b", revision=1, nodes=nodes, partitions=assignments)
    await server.partition_maps.set_map(0, partition_map.encode())


StreamPair = tuple[trio.abc.HalfCloseableStream, trio.abc.HalfCloseableStream]


@asynccontextmanager
async def connected(
    server: Server,
    streams: StreamPair | None = None,
    *,
    identity: str = "test:peer",
    **options: int,
) -> AsyncIterator[Peer]:
    """A peer of a server with a bucket `b` of one partition, which is created if none is there."""
    ours, theirs = streams or trio.testing.memory_stream_pair()
    async with AsyncExitStack() as stack:
        if not server.catalog.disks:
            await stack.enter_async_context(server.recovered_buckets())
            await server.catalog.create_bucket("b", 1, server.catalog.quota_bytes_default)
        async with trio.open_nursery() as nursery:
            connection = server.connections.new_connection(theirs, "memory")
            server.connections.connections[connection] = None
            nursery.start_soon(connection.run)
            yield Peer(ours, identity=identity, **options)
            await ours.aclose()
            nursery.cancel_scope.cancel()
