"""A client that sends what a test tells it to, whether or not the protocol allows it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeVar

import trio

from upr_protocol.chunk import Chunk, ChunkBuilder
from upr_protocol.errors import Status
from upr_protocol.failover import NOTHING_YET
from upr_protocol.ids import Operation, PartitionId, PartitionState
from upr_protocol.limits import WINDOW_BYTES_DEFAULT
from upr_protocol.wire import (
    VERSION,
    Credit,
    Error,
    FrameBuffer,
    Go,
    Hello,
    HelloReply,
    Message,
    Noop,
    Open,
    Opened,
    PartitionLog,
    Stream,
    StreamReply,
    decode,
)

M = TypeVar("M", bound=Message)

ANSWER_TIMEOUT_S: Final = 60.0


class HungUpError(AssertionError):
    """The server closed the connection although an answer was expected."""


class Peer:
    """One end of a TCP connection to a server, without a session that would enforce the
    protocol.

    Attributes:
        stream: The connection.
        partition_count: The bucket's number of partitions, once it is open.
        credit: Bytes of `Mutate` frames that the server granted.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.partition_count = 0
        self.credit = 0
        self._frames = FrameBuffer(lambda header: None)
        self._opaque = 0

    def opaque(self) -> int:
        """An opaque number that no request has had yet."""
        self._opaque += 1
        return self._opaque

    async def send(self, *messages: Message) -> None:
        """Sends `messages`, valid or not."""
        await self.send_bytes(
            b"".join(piece for message in messages for piece in message.frame_buffers())
        )

    async def send_bytes(self, data: bytes) -> None:
        """Sends `data`, valid or not."""
        await self.stream.send_all(data)

    async def receive(self) -> Message | None:
        """The next message, or None when the server closed the connection."""
        with trio.move_on_after(ANSWER_TIMEOUT_S):
            while True:
                frame = self._frames.next_frame()
                if frame is not None:
                    return decode(*frame)
                data = await self.stream.receive_some()
                if not data:
                    return None
                self._frames.receive(bytes(data))
        raise AssertionError(f"the server said nothing for {ANSWER_TIMEOUT_S:.0f} s")

    async def expect(self, kind: type[M]) -> M:
        """The next message except `Noop` and `Credit`; it must be of this kind."""
        while True:
            message = await self.receive()
            if message is None:
                raise HungUpError(
                    f"the server closed the connection instead of saying {kind.__name__}"
                )
            if isinstance(message, Credit):
                self.credit += message.bytes
            if isinstance(message, kind):
                return message
            assert isinstance(message, Credit | Noop), message

    async def expect_error(self, status: Status, *, streaming: bool = False) -> Error:
        """Checks the answer to a violation of the protocol: an `Error` with this status, a sentence
        and advice, and then the end of the connection.

        Args:
            status: The code.
            streaming: Whether other messages may come before it.
        """
        while True:
            message = await self.receive()
            if message is None:
                raise HungUpError(
                    f"the server closed the connection instead of saying {status.name}"
                )
            if isinstance(message, Error):
                break
            assert streaming or isinstance(message, Credit | Noop), message
        assert message.status == status, message
        assert message.sentence, message
        assert message.advice, message
        await self.expect_end()
        return message

    async def expect_end(self) -> None:
        """Checks that the server closes the connection, and sends nothing before that."""
        assert await self.receive() is None

    # The steps of the handshake.

    async def greet(
        self,
        identity: str = "test:peer",
        *,
        idle_interval_s: int = 3600,
        window_bytes: int = WINDOW_BYTES_DEFAULT,
    ) -> HelloReply:
        """Sends `Hello`, and receives the answer."""
        await self.send(Hello(identity, (VERSION,), 0, window_bytes, idle_interval_s))
        return await self.expect(HelloReply)

    async def open(self, bucket: str) -> list[PartitionLog]:
        """Opens `bucket`, and waits for the first credit."""
        await self.send(Open(bucket, opaque=self.opaque()))
        logs = []
        while True:
            message = await self.receive()
            if isinstance(message, PartitionLog):
                logs.append(message)
                continue
            assert isinstance(message, Opened), message
            self.partition_count = message.partition_count
            self.credit += (await self.expect(Credit)).bytes
            return logs

    async def stream_all(self) -> None:
        """Requests a stream of every partition, and sends `Go`."""
        for partition in range(self.partition_count):
            await self.send(
                Stream(
                    PartitionState.ACTIVE,
                    NOTHING_YET,
                    partition=PartitionId(partition),
                    opaque=self.opaque(),
                )
            )
            reply = await self.expect(StreamReply)
            assert reply.status == Status.OK, reply
        await self.send(Go())


@asynccontextmanager
async def peer(
    host: str, port: int, bucket: str = "", *, greeted: bool = True, idle_interval_s: int = 3600
) -> AsyncIterator[Peer]:
    """A connected peer, after the answer to `Hello`, or after it has opened `bucket`."""
    stream = await trio.open_tcp_stream(host, port)
    try:
        connected = Peer(stream)
        if greeted:
            await connected.greet(idle_interval_s=idle_interval_s)
        if bucket:
            await connected.open(bucket)
        yield connected
    finally:
        await trio.aclose_forcefully(stream)


def sets(items: Sequence[tuple[bytes, bytes]]) -> Chunk:
    """A published chunk that sets `items`."""
    builder = ChunkBuilder()
    for key, value in items:
        builder.append(Operation.SET, key, value)
    return builder.build()
