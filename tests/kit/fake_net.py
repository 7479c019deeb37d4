"""A network in memory to a fake server, whose connections can break at any byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import trio
import trio.testing

from tests.kit.fake_server import FakeServer

ENDLESS: Final = 1 << 60


class FakeNet:
    """Connects clients to a `FakeServer`; clients connect with `dial`.

    Attributes:
        server: The server.
        budgets: For each future connection, how many bytes it carries to the server and from it
            before it breaks. When the list is empty, connections do not break.
        down: Whether connections are refused.
        dialled: How many times a client has tried to connect.
        open: How many connections the clients have not closed.
        nursery: Runs the server, and what else a test starts in it.
    """

    def __init__(self, nursery: trio.Nursery, server: FakeServer) -> None:
        self.server = server
        self.budgets: Iterator[tuple[int, int]] = iter(())
        self.down = False
        self.dialled = 0
        self._ends: list[CuttableStream] = []
        self.nursery = nursery

    async def dial(self, address: object) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        self.dialled += 1
        if self.down:
            raise ConnectionRefusedError("the fake server is down")
        own_end, peer_end = trio.testing.memory_stream_pair()
        self.nursery.start_soon(self.server.serve, peer_end)

        def close() -> None:
            own_end.send_stream.close()
            own_end.receive_stream.close()

        end = CuttableStream(own_end, close, *next(self.budgets, (ENDLESS, ENDLESS)))
        self._ends.append(end)
        return end

    @property
    def open(self) -> int:
        return sum(not end.closed for end in self._ends)

    def forget(self) -> None:
        """Forgets all connections: `cut` does not break them any more."""
        self._ends.clear()

    def cut(self) -> None:
        """Breaks all connections."""
        for end in self._ends:
            end.cut()


class CuttableStream(trio.abc.Stream):
    """A stream that breaks after so many bytes in one direction, or at `cut`.

    `close` closes the underlying stream at once.
    """

    def __init__(
        self,
        stream: trio.abc.Stream,
        close: Callable[[], None],
        out_bytes: int = ENDLESS,
        back_bytes: int = ENDLESS,
    ) -> None:
        self.closed = False
        self._stream = stream
        self._close = close
        self._out_bytes = out_bytes
        self._back_bytes = back_bytes

    def cut(self) -> None:
        self._close()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        part = bytes(data)[: self._out_bytes]
        self._out_bytes -= len(part)
        try:
            if part:
                await self._stream.send_all(part)
        except trio.ClosedResourceError as error:
            raise _broken() from error
        if len(part) < len(data):
            self.cut()
            raise _broken()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if self._back_bytes <= 0:
            self.cut()
            raise _broken()
        try:
            data = await self._stream.receive_some(min(max_bytes or 65536, self._back_bytes))
        except trio.ClosedResourceError as error:
            raise _broken() from error
        self._back_bytes -= len(data)
        return bytes(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        self.closed = True
        await self._stream.aclose()


def _broken() -> trio.BrokenResourceError:
    return trio.BrokenResourceError("the fake network cut the connection")
