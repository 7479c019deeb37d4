"""A client that says what it is told to, right or wrong, and receives what comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, TypeVar

import trio

from upr_protocol.limits import WINDOW_BYTES_DEFAULT
from upr_protocol.wire import (
    VERSION,
    Credit,
    FrameBuffer,
    Header,
    Hello,
    HelloReply,
    Message,
    Noop,
    Open,
    Opened,
    PartitionLog,
    decode,
)
from upr_server.conformance.failure import ConformanceError, expect_message, what_was_done

M = TypeVar("M", bound=Message)


def _admit_all(_header: Header) -> None:
    """Takes every frame."""


ANSWER_TIMEOUT_S: Final = 20.0
"""A server that takes longer counts as hanging."""

IDLE_INTERVAL_S: Final = 60


class PlainClient:
    """One connection to a server, without a session that would know the rules.

    Args:
        stream: The connection.

    Attributes:
        logs: What the server told of the bucket's partitions, once the bucket is open.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self.logs: list[PartitionLog] = []
        self._stream = stream
        self._frames = FrameBuffer(_admit_all)
        self._opaque = 0

    def new_opaque(self) -> int:
        """An opaque that no request of this connection has had."""
        self._opaque += 1
        return self._opaque

    async def send(self, *messages: Message) -> None:
        """Sends messages, at once."""
        pieces = [bytes(piece) for message in messages for piece in message.frame_buffers()]
        await self.send_bytes(b"".join(pieces))

    async def send_bytes(self, data: bytes) -> None:
        """Sends bytes, whatever they are."""
        try:
            await self._stream.send_all(data)
        except trio.BrokenResourceError as error:
            raise ConformanceError("the server closed the connection without a word") from error

    async def receive(self) -> Message | None:
        """The next message; None when the server has closed the connection.

        Raises:
            ConformanceError: Nothing came for `ANSWER_TIMEOUT_S`.
        """
        with trio.move_on_after(ANSWER_TIMEOUT_S):
            await trio.lowlevel.checkpoint()
            while (frame := self._frames.next_frame()) is None:
                try:
                    data = await self._stream.receive_some()
                except trio.BrokenResourceError:
                    return None
                if not data:
                    return None
                self._frames.receive(bytes(data))
            return decode(*frame)
        raise ConformanceError(f"the server said nothing for {ANSWER_TIMEOUT_S:.0f} s")

    async def expect(self, kind: type[M]) -> M:
        """The next message of this kind; `Noop` and `Credit` may come before it.

        Raises:
            ConformanceError: Another message came, or the end.
        """
        return await expect_message("server", kind, self.receive, (Noop, Credit))

    async def greet(self, window_bytes: int = WINDOW_BYTES_DEFAULT) -> HelloReply:
        """Says `Hello`, and receives the answer."""
        await self.send(Hello("conformance", (VERSION,), 0, window_bytes, IDLE_INTERVAL_S))
        return await self.expect(HelloReply)

    async def open(self, bucket: str, partitions: tuple[int, ...] = ()) -> None:
        """Opens a bucket, names these partitions, and waits for the first credit."""
        await self.send(Open(bucket, partitions, opaque=self.new_opaque()))
        logs = self.logs
        while not isinstance(message := await self.expect(Message), Opened):
            if not isinstance(message, PartitionLog):
                raise ConformanceError(
                    f"expected PartitionLog or Opened; the server {what_was_done(message)}"
                )
            logs.append(message)
        await self.expect(Credit)


@asynccontextmanager
async def plain_client(host: str, port: int, bucket: str = "") -> AsyncIterator[PlainClient]:
    """A connection, for as long as the context; with a `bucket`, one that has opened it."""
    stream = await trio.open_tcp_stream(host, port)
    try:
        client = PlainClient(stream)
        if bucket:
            await client.greet()
            await client.open(bucket)
        yield client
    finally:
        await trio.aclose_forcefully(stream)
