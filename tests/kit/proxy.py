"""A TCP proxy that can delay, cut and lose data, as networks do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

PIECE_BYTES = 64 * 1024


class _Pair:
    """A connection through the proxy: two streams, and a task for each direction."""

    def __init__(self, near: trio.SocketStream, far: trio.SocketStream) -> None:
        self.near = near
        self.far = far
        self.carried_bytes = 0
        self.scope = trio.CancelScope()


class Proxy:
    """A proxy between clients and a server.

    Attributes:
        port: The port at which it listens, at 127.0.0.1.
        delay_s: How long each piece of up to 64 KiB is kept back, in both directions.
        budget_bytes: When a connection has carried so many bytes from the server, the pieces that
            follow are lost; None loses nothing.
        connections: How many connections were ever made through it.
        recorded: What went through it, in both directions; None records nothing.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self.port = 0
        self.delay_s = 0.0
        self.budget_bytes: int | None = None
        self.connections = 0
        self.recorded: bytearray | None = None
        self._pairs: set[_Pair] = set()
        self._open = trio.Event()
        self._open.set()

    def url(self, bucket: str = "") -> str:
        """`upr://HOST:PORT/bucket`."""
        return f"upr://127.0.0.1:{self.port}/{bucket}"

    def cut(self) -> int:
        """Breaks every connection; returns how many there were. New connections are accepted."""
        pairs, self._pairs = self._pairs, set()
        for pair in pairs:
            pair.scope.cancel()
        return len(pairs)

    def half_open(self) -> None:
        """From now on all data is lost, without an error at either end, as if a cable were
        pulled."""
        self._open = trio.Event()

    def heal(self) -> None:
        """Ends `half_open`."""
        self._open.set()

    async def _serve(self, near: trio.SocketStream) -> None:
        async with near:
            await self._open.wait()
            try:
                far = await trio.open_tcp_stream(*self._target)
            except OSError:
                return  # the server is not reachable, so close the connection
            async with far:
                self.connections += 1
                pair = _Pair(near, far)
                self._pairs.add(pair)
                with pair.scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._carry, near, far, pair)
                        nursery.start_soon(self._carry, far, near, pair)
                self._pairs.discard(pair)

    async def _carry(
        self, source: trio.SocketStream, target: trio.SocketStream, pair: _Pair
    ) -> None:
        try:
            while True:
                data = await source.receive_some(PIECE_BYTES)
                if self.delay_s:
                    await trio.sleep(self.delay_s)
                await self._open.wait()
                if not data:
                    await target.send_eof()
                    return
                if source is pair.far:
                    if self.budget_bytes is not None and pair.carried_bytes >= self.budget_bytes:
                        continue
                    pair.carried_bytes += len(data)
                if self.recorded is not None:
                    self.recorded += data
                await target.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pair.scope.cancel()


@asynccontextmanager
async def proxy_to(host: str, port: int) -> AsyncIterator[Proxy]:
    """A proxy to `host`:`port` that runs while the context lasts."""
    proxy = Proxy(host, port)
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    proxy.port = listener.socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, proxy._serve, [listener])
        try:
            yield proxy
        finally:
            nursery.cancel_scope.cancel()
