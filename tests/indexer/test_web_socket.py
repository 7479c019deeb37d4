"""A web socket whose other side says goodbye."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Event, Ping, Request

from upr_protocol.client import Security
from upr_server.indexer.web_socket import OpenedWebSocket


async def opened() -> tuple[OpenedWebSocket, trio.abc.Stream, WSConnection]:
    """A web socket, and its other side."""
    stream, other_stream = trio.testing.memory_stream_pair()
    socket, other_side = OpenedWebSocket(stream), WSConnection(ConnectionType.SERVER)

    async def accept() -> None:
        while not any(isinstance(event, Request) for event in other_side.events()):
            other_side.receive_data(bytes(await other_stream.receive_some(4096)))
        await other_stream.send_all(other_side.send(AcceptConnection()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        await socket.open("h:1", "/x?", Security())
    return socket, other_stream, other_side


def encoded(other_side: WSConnection, *events: Event) -> bytes:
    return b"".join([other_side.send(event) for event in events])


async def test_nothing_is_sent_after_a_goodbye() -> None:
    """The reader has got the goodbye, and the sender is not cancelled yet. An error of the library
    ended the whole node there."""
    socket, other_stream, other_side = await opened()
    await other_stream.send_all(
        encoded(other_side, BytesMessage(b"last"), CloseConnection(code=1001))
    )
    assert await socket.receive_some(4096) == b"last"
    assert await socket.receive_some(4096) == b""
    with pytest.raises(trio.BrokenResourceError, match="closes the web socket"):
        await socket.send_all(b"question")


async def test_a_ping_is_answered() -> None:
    socket, other_stream, other_side = await opened()
    await other_stream.send_all(encoded(other_side, Ping(b"p"), BytesMessage(b"more")))
    assert await socket.receive_some(4096) == b"more"
    other_side.receive_data(bytes(await other_stream.receive_some(4096)))
    assert [type(event).__name__ for event in other_side.events()] == ["Pong"]


async def test_a_ping_before_a_goodbye_may_go_unanswered() -> None:
    socket, other_stream, other_side = await opened()
    await other_stream.send_all(encoded(other_side, Ping(b"p"), CloseConnection(code=1001)))
    assert await socket.receive_some(4096) == b""
