"""Servers in a thread of their own, for tests of clients that block their thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import trio

from tests.kit.fake_cluster import FakeCluster
from tests.kit.fake_net import ENDLESS
from tests.kit.fake_server import FakeServer
from upr_protocol.client import Address
from upr_protocol.partition_map import Assignment

T = TypeVar("T")


class TrioThread:
    """A thread that runs Trio.

    Attributes:
        token: For `trio.from_thread`.
        nursery: Runs tasks until the thread ends.
    """

    token: trio.lowlevel.TrioToken
    nursery: trio.Nursery

    def call(self, function: Callable[[], T]) -> T:
        """Calls `function` in the thread, and returns its result."""
        return trio.from_thread.run_sync(function, trio_token=self.token)

    def run(self, function: Callable[[], Awaitable[T]]) -> T:
        """Runs the asynchronous `function` in the thread, and returns its result."""
        return trio.from_thread.run(function, trio_token=self.token)


@contextmanager
def trio_thread() -> Iterator[TrioThread]:
    """Runs Trio in a thread while the context lasts."""
    new_thread = TrioThread()
    ready = threading.Event()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            new_thread.token = trio.lowlevel.current_trio_token()
            new_thread.nursery = nursery
            ready.set()
            await trio.sleep_forever()

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    ready.wait()
    try:
        yield new_thread
    finally:
        new_thread.call(new_thread.nursery.cancel_scope.cancel)
        thread.join()


class ThreadedFake:
    """A `FakeServer` in a thread, and connections to it.

    Attributes:
        server: The server. While a client uses it, access it only through
            `thread.call`.
        thread: The thread.
        budgets: For each future connection, how many bytes it carries from the server.
        down: Whether connections are refused.
        dialled: How many times a client has tried to connect.
    """

    def __init__(self, thread: TrioThread) -> None:
        self.server = FakeServer()
        self.thread = thread
        self.budgets: Iterator[int] = iter(())
        self.down = False
        self.dialled = 0

    def dial(self, address: object, timeout_s: float) -> socket.socket:
        self.dialled += 1
        if self.down:
            raise ConnectionRefusedError("the fake server is down")
        own_end, peer_end = socket.socketpair()
        peer_end.setblocking(False)
        budget = next(self.budgets, ENDLESS)
        self.thread.call(lambda: self._accept(peer_end, budget))
        return own_end

    def _accept(self, peer_end: socket.socket, budget: int) -> None:
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(peer_end))
        self.thread.nursery.start_soon(self.server.serve, ShortLived(stream, budget))

    def cut(self) -> None:
        """Ends every connection."""
        self.thread.call(self._cut)

    def _cut(self) -> None:
        for connection in self.server.connections:
            connection.scope.cancel()


class ShortLived(trio.abc.Stream):
    """A server's stream that closes after so many bytes to the client."""

    def __init__(self, stream: trio.abc.Stream, budget: int) -> None:
        self._stream = stream
        self._budget = budget

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        part = bytes(data)[: self._budget]
        self._budget -= len(part)
        await self._stream.send_all(part)
        if len(part) < len(data):
            await self._stream.aclose()
            raise trio.BrokenResourceError("the fake network cut the connection")

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return bytes(await self._stream.receive_some(max_bytes))

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._stream.aclose()


class ThreadedCluster:
    """A `FakeCluster` in a thread, and connections to it.

    Attributes:
        cluster: The cluster; change it only through `thread.call`.
        thread: The thread.
        down: Nodes whose connections are refused.
    """

    def __init__(self, thread: TrioThread, names: str, partition_count: int) -> None:
        self.cluster = FakeCluster(thread.nursery, names, partition_count)
        self.thread = thread
        self.down: set[str] = set()

    def dial(self, address: Address, timeout_s: float) -> socket.socket:
        if address.host in self.down or address.host not in self.cluster.nets:
            raise ConnectionRefusedError("nobody is there")
        own_end, peer_end = socket.socketpair()
        peer_end.setblocking(False)
        self.thread.call(lambda: self._accept(address.host, peer_end))
        return own_end

    def _accept(self, name: str, peer_end: socket.socket) -> None:
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(peer_end))
        self.thread.nursery.start_soon(self.cluster.server(name).serve, stream)

    def move(self, changed: dict[int, Assignment], *, tell: str | None = None) -> None:
        """Moves partitions, as `FakeCluster.move` does."""
        self.thread.call(lambda: self.cluster.move(changed, tell=tell))

    def kill(self, name: str) -> None:
        """Makes a node unreachable."""
        self.down.add(name)
        self.thread.call(lambda: self._cut(name))

    def _cut(self, name: str) -> None:
        for connection in self.cluster.server(name).connections:
            connection.scope.cancel()
