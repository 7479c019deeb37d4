"""HTTP over connections of which none can end another, nor the indexer.

Hypercorn speaks HTTP/1.1, HTTP/2 and web sockets over each connection. It raises what it does not
expect of a client: a path that is not ASCII, settings of HTTP/2 that are not base64, data of a
request that has its answer. Its own server ends with the first connection that fails so, before
anybody had to log in. That is why connections are accepted and watched here.
"""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from math import inf
from typing import Any, Final

import hypercorn
import structlog
import trio
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ASGIFramework
from hypercorn.utils import wrap_app
from starlette.types import ASGIApp

from upr_protocol.concurrency import background_nursery, first_failure
from upr_server.indexer.host_limit import HostLimit
from upr_server.runtime import file_limit, network_of

SEND_TIMEOUT_S: Final = 10.0
"""A connection whose peer takes nothing for so long is closed. Its answer counts in the pool until
then, and a stop waits for it."""

HANDSHAKE_TIMEOUT_S: Final = 10.0
"""How long a handshake of TLS may take."""

IDLE_S: Final = 15.0
"""A connection on which no request was under way for so long is closed. Hypercorn closes idle ones
after 5 s, but not those on which it has refused a web socket itself, nor those that have sent only
the first bytes of HTTP/2."""

STOP_S: Final = 1.0
"""How long the requests under way may take at a stop."""

CONNECTIONS_MAX: Final = 1000
"""How many connections there may be, half of them from one host. Nobody has to log in to have one.
One more is closed at once."""

FILES_SHARE: Final = 4
"""Connections are at most this part of the files that the process may have open. The indexer ends
where none is left for its indexes."""

REFUSALS_LOG_S: Final = 60.0
"""The time between two lines of the log about connections that were closed."""

log = structlog.get_logger(__name__)


class _Settings(hypercorn.Config):
    """Hypercorn's settings of a connection."""

    ssl_handshake_timeout = HANDSHAKE_TIMEOUT_S
    errorlog = logging.getLogger("hypercorn.error")


@asynccontextmanager
async def answering_over_http(
    app: ASGIApp, listeners: Sequence[trio.SocketListener], tls: ssl.SSLContext | None = None
) -> AsyncIterator[None]:
    """Answers requests for as long as the context. After it, those under way have `STOP_S`.

    Args:
        app: The ASGI application that answers.
        listeners: Where connections come from. They are closed at the end.
        tls: What connections are encrypted with; None for none.
    """
    for listener in listeners:
        # Its connections inherit this. Hypercorn sends without a deadline of its own, and shielded
        # from cancellation.
        listener.socket.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SEND_TIMEOUT_S * 1000)
        )
    context = WorkerContext(None)
    settings = _Settings()
    wrapped_app = wrap_app(_without_http_2(app), settings.wsgi_max_body_size, "asgi")
    connections_max = min(CONNECTIONS_MAX, file_limit() // FILES_SHARE)
    acceptor = _Acceptor(
        partial(_serve_connection, wrapped_app, settings, context), connections_max
    )
    sources: list[trio.abc.Listener[Any]] = [
        # HTTP says itself where it ends, so many peers close without TLS's goodbye.
        listener if tls is None else trio.SSLListener(listener, tls, https_compatible=True)
        for listener in listeners
    ]
    async with trio.open_nursery() as connections:
        async with background_nursery() as accepting:
            accepting.start_soon(
                partial(trio.serve_listeners, acceptor.serve, sources, handler_nursery=connections)
            )
            yield
        # Idle connections end now.
        await context.terminated.set()
        connections.cancel_scope.deadline = trio.current_time() + STOP_S


def _without_http_2(app: ASGIApp) -> ASGIFramework:
    """Refuses HTTP/2, which Hypercorn offers to everybody. A client may say there that it takes no
    bytes for now: the connection is alive, and its answers would count in the pool for ever."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["http_version"] != "2":
            await app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-length", b"0")]
            status = HTTPStatus.HTTP_VERSION_NOT_SUPPORTED
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return answer


class _Acceptor:
    """Serves connections, as many at a time as there may be.

    Args:
        serve: Serves a connection.
        connections_max: How many there may be, half of them from one host.
    """

    def __init__(self, serve: Callable[[Any], Awaitable[None]], connections_max: int) -> None:
        self._serve = serve
        self._limit = HostLimit(connections_max)
        self._next_log_at = -inf

    async def serve(self, stream: Any) -> None:
        """Serves a connection; one too many is closed when this returns."""
        host = _host_of(stream)
        if self._limit.is_full or self._limit.is_full_for(host):
            self._log_refusal(host)
            return
        with self._limit.counted(host):
            await self._serve(stream)

    def _log_refusal(self, host: str) -> None:
        now = trio.current_time()
        if now >= self._next_log_at:
            self._next_log_at = now + REFUSALS_LOG_S
            log.warning(
                "too many connections; closing new ones", host=host, connections=len(self._limit)
            )


def _host_of(stream: Any) -> str:
    """Where a connection comes from; empty if it has gone already."""
    # With TLS the stream lies over another one.
    transport: trio.SocketStream = getattr(stream, "transport_stream", stream)
    try:
        host, port = transport.socket.getpeername()[:2]
    except OSError:
        return ""
    return network_of(f"{host}:{port}")


class _Requests:
    """The requests of one connection, and the links.

    Args:
        app: Answers them.
    """

    def __init__(self, app: AppWrapper) -> None:
        self._app = app
        self._under_way = 0
        self._idle_since = trio.current_time()

    async def __call__(
        self, scope: Any, receive: Any, send: Any, sync_spawn: Any, call_soon: Any
    ) -> None:
        """Answers one, as the application does."""
        self._under_way += 1
        try:
            await self._app(scope, receive, send, sync_spawn, call_soon)
        finally:
            self._under_way -= 1
            self._idle_since = trio.current_time()

    async def cancel_when_idle(self, scope: trio.CancelScope) -> None:
        """Cancels a scope when none was under way for `IDLE_S`, or up to twice as long."""
        is_idle = False
        while not is_idle:
            await trio.sleep(IDLE_S)
            is_idle = not self._under_way and trio.current_time() >= self._idle_since + IDLE_S
        scope.cancel()


async def _serve_connection(
    app: AppWrapper, settings: hypercorn.Config, context: WorkerContext, stream: Any
) -> None:
    """Answers the requests of a connection. What goes wrong with it ends it, and nothing else."""
    requests = _Requests(app)
    try:
        # The nursery raises again what ends its body: the scope must be outside.
        with trio.CancelScope() as scope:
            async with background_nursery() as nursery:
                nursery.start_soon(requests.cancel_when_idle, scope)
                await TCPServer(requests, settings, context, {}, stream).run()
    except* Exception as errors:  # noqa: BLE001
        # Without a traceback: a stranger could fill the log with them.
        log.warning("a connection has failed", failure=repr(first_failure(errors)))
