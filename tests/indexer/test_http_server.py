"""Connections whose clients send what the library of HTTP does not expect."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Final

import pytest
import structlog
import trio
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import Event, ResponseReceived, StreamEnded
from trio.testing import MockClock

from tests.indexer.kit import until
from upr_server.indexer import http_server
from upr_server.indexer.http_server import IDLE_S, answering_over_http
from upr_server.runtime import open_listeners

RECEIVE_BYTES: Final = 4096

REQUEST: Final = b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n"

LAST_REQUEST: Final = b"GET /v1/status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"

PATH: Final = [(b":path", b"/"), (b":scheme", b"http"), (b":authority", b"x")]


async def refuse(_scope: Any, _receive: Any, send: Any) -> None:
    """An application that answers each request before it has read its body."""
    headers = [(b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def a_port(application: Any = refuse) -> AsyncIterator[int]:
    async with (
        open_listeners("127.0.0.1:0") as listeners,
        answering_over_http(application, listeners),
    ):
        yield listeners[0].socket.getsockname()[1]


async def read_to_end(stream: trio.SocketStream) -> bytes:
    """Everything that the other side sends until it closes the connection."""
    received = bytearray()
    try:
        while data := await stream.receive_some(RECEIVE_BYTES):
            received += data
    except trio.BrokenResourceError:
        pass
    return bytes(received)


async def answer_to(stream: trio.SocketStream) -> bytes:
    """The head of the answer to `REQUEST`."""
    await stream.send_all(REQUEST)
    head = b""
    while b"\r\n\r\n" not in head:
        data = await stream.receive_some(RECEIVE_BYTES)
        assert data, head
        head += data
    return head


def over_http_2() -> H2Connection:
    """A client that checks nothing of what it sends."""
    settings = H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False)
    connection = H2Connection(settings)
    connection.initiate_connection()
    return connection


def request_over_http_2(*headers: tuple[bytes, bytes]) -> bytes:
    connection = over_http_2()
    connection.send_headers(1, headers, end_stream=True)
    return connection.data_to_send()


UPGRADE: Final = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade"

WRONG_REQUESTS: Final = {
    "settings of HTTP/2 that are not base64": UPGRADE
    + b", HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: a\r\n\r\n",
    "a path that is not ASCII": request_over_http_2(
        (b":method", b"GET"), (b":path", b"/\xff"), *PATH[1:]
    ),
    "a tunnel, which has no path": request_over_http_2(
        (b":method", b"CONNECT"), (b":authority", b"x")
    ),
    "a frame of a web socket that is not accepted": UPGRADE
    + b"\r\nUpgrade: websocket\r\nSec-WebSocket-Key: a\r\nSec-WebSocket-Version: 13\r\n\r\n"
    + b"\x81\x05hello",
}


@pytest.mark.parametrize("request_bytes", WRONG_REQUESTS.values(), ids=WRONG_REQUESTS)
async def test_a_wrong_request_ends_its_own_connection_only(request_bytes: bytes) -> None:
    """Each of them ended the server, and so the indexer."""
    async with (
        a_port() as port,
        await trio.open_tcp_stream("127.0.0.1", port) as other,
    ):
        assert b" 401 " in await answer_to(other)
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(request_bytes)
            await read_to_end(stream)
        assert b" 401 " in await answer_to(other)
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            assert b" 401 " in await answer_to(stream)


@pytest.mark.parametrize(
    "request_bytes",
    [
        UPGRADE + b"\r\nUpgrade: websocket\r\n\r\n",
        WRONG_REQUESTS["a frame of a web socket that is not accepted"],
        over_http_2().data_to_send(),
        b"GET /",
    ],
    ids=["half a web socket", "an early frame", "the beginning of HTTP/2", "half a request"],
)
async def test_a_connection_without_a_request_is_closed(
    request_bytes: bytes, autojump_clock: MockClock
) -> None:
    """Nobody has to log in to have one. Those of one host stayed for ever, up to the limit."""
    later_answer = b""
    async with (
        a_port() as port,
        await trio.open_tcp_stream("127.0.0.1", port) as stream,
    ):
        with trio.fail_after(3 * IDLE_S):
            await stream.send_all(request_bytes)
            await read_to_end(stream)
        async with await trio.open_tcp_stream("127.0.0.1", port) as other:
            later_answer = await answer_to(other)
    # Outside: if the server is cancelled with the connection, so is the body of its context.
    assert b" 401 " in later_answer


async def sleep_and_refuse(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers late."""
    await trio.sleep(10 * IDLE_S)
    await refuse(scope, receive, send)


async def test_a_connection_is_not_closed_while_a_request_is_answered(
    autojump_clock: MockClock,
) -> None:
    async with (
        a_port(sleep_and_refuse) as port,
        await trio.open_tcp_stream("127.0.0.1", port) as stream,
    ):
        for _ in range(2):
            assert b" 401 " in await answer_to(stream)


async def test_data_of_a_request_that_has_its_answer_ends_its_own_connection_only() -> None:
    """A client may send its request's body before it has read that the request is refused."""
    async with (
        a_port() as port,
        await trio.open_tcp_stream("127.0.0.1", port) as other,
    ):
        assert b" 401 " in await answer_to(other)
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            connection = over_http_2()
            connection.send_headers(1, [(b":method", b"POST"), *PATH])
            await stream.send_all(connection.data_to_send())
            events: list[Event] = []
            while not any(isinstance(event, StreamEnded) for event in events):
                data = await stream.receive_some(RECEIVE_BYTES)
                events += connection.receive_data(bytes(data))
            statuses = [
                dict(event.headers)[b":status"]
                for event in events
                if isinstance(event, ResponseReceived)
            ]
            assert statuses == [b"505"], "a client of HTTP/2 may let its answers wait for ever"
            connection.send_data(1, b"body")
            await stream.send_all(connection.data_to_send())
            await read_to_end(stream)
        assert b" 401 " in await answer_to(other)


async def test_a_stop_waits_for_a_request_and_not_for_an_idle_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "STOP_S", 60)
    has_begun, may_answer = trio.Event(), trio.Event()

    async def answer_late(scope: Any, receive: Any, send: Any) -> None:
        has_begun.set()
        await may_answer.wait()
        await refuse(scope, receive, send)

    async def read_both(idle: trio.SocketStream, stream: trio.SocketStream) -> None:
        async with idle, stream:
            assert await read_to_end(idle) == b""
            may_answer.set()
            assert b" 401 " in await read_to_end(stream)

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery, a_port(answer_late) as port:
            idle = await trio.open_tcp_stream("127.0.0.1", port)
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            await stream.send_all(REQUEST)
            await has_begun.wait()
            nursery.start_soon(read_both, idle, stream)


async def test_a_request_that_does_not_end_is_cancelled_by_a_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "STOP_S", 0.01)

    async def never(_scope: Any, _receive: Any, _send: Any) -> None:
        has_begun.set()
        await trio.sleep_forever()

    has_begun = trio.Event()
    with trio.fail_after(20):
        async with a_port(never) as port:
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            await stream.send_all(REQUEST)
            await has_begun.wait()
        async with stream:
            assert await read_to_end(stream) == b""


async def is_served(port: int, host: str) -> bool:
    """Whether a connection from one of this machine's addresses is answered."""
    async with await trio.open_tcp_stream("127.0.0.1", port, local_address=host) as stream:
        try:
            await stream.send_all(LAST_REQUEST)
        except trio.BrokenResourceError:
            return False
        return b" 401 " in await read_to_end(stream)


async def test_connections_are_limited_and_those_of_one_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Strangers could take all files that the process may have open. Without one for its indexes
    it ends."""
    monkeypatch.setattr(http_server, "CONNECTIONS_MAX", 4)
    async with a_port() as port, AsyncExitStack() as stack:

        async def connection_from(host: str) -> trio.SocketStream:
            stream = await trio.open_tcp_stream("127.0.0.1", port, local_address=host)
            await stack.enter_async_context(stream)
            assert b" 401 " in await answer_to(stream)
            return stream

        first = await connection_from("127.0.0.1")
        await connection_from("127.0.0.1")
        with structlog.testing.capture_logs() as logs:
            assert not await is_served(port, "127.0.0.1")
            assert not await is_served(port, "127.0.0.1")
        assert [line["host"] for line in logs if "too many" in line["event"]] == ["127.0.0.1"]
        for _ in range(2):
            await connection_from("127.0.0.2")
        assert not await is_served(port, "127.0.0.3")
        assert b" 401 " in await answer_to(first)
        await first.aclose()
        await until(partial(is_served, port, "127.0.0.3"))


@pytest.mark.parametrize(("files", "connections"), [(1024, 256), (1 << 62, 1000)])
async def test_connections_leave_files_for_indexes(
    monkeypatch: pytest.MonkeyPatch, files: int, connections: int
) -> None:
    connections_max: list[int] = []

    class Acceptor(http_server._Acceptor):
        def __init__(self, serve: Any, limit: int) -> None:
            super().__init__(serve, limit)
            connections_max.append(limit)

    monkeypatch.setattr(http_server, "file_limit", lambda: files)
    monkeypatch.setattr(http_server, "_Acceptor", Acceptor)
    async with a_port():
        pass
    assert connections_max == [connections]
