"""A web socket whose peer sends a close frame, or pings."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Event, Ping, Request

from upr_protocol.client import Security
from upr_server.indexer.web_socket import OpenedWebSocket


async def opened() -> tuple[OpenedWebSocket, trio.abc.Stream, WSConnection]:
    """A web socket, the stream of its peer, and the peer."""
    stream, peer_stream = trio.testing.memory_stream_pair()
    socket, peer = OpenedWebSocket(stream), WSConnection(ConnectionType.SERVER)

    async def accept() -> None:
        while not any(isinstance(event, Request) for event in peer.events()):
            peer.receive_data(bytes(await peer_stream.receive_some(4096)))
        await peer_stream.send_all(peer.send(AcceptConnection()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        await socket.open("h:1", "/x?", Security())
    return socket, peer_stream, peer


def encoded(peer: WSConnection, *events: Event) -> bytes:
    return b"".join([peer.send(event) for event in events])


async def test_nothing_is_sent_after_the_peers_close_frame() -> None:
    """The reader has received the close frame, and the sender is not cancelled yet. The error must
    be one that ends the link only: the library's own error would end the whole node."""
    socket, peer_stream, peer = await opened()
    await peer_stream.send_all(encoded(peer, BytesMessage(b"last"), CloseConnection(code=1001)))
    assert await socket.receive_some(4096) == b"last"
    assert await socket.receive_some(4096) == b""
    with pytest.raises(trio.BrokenResourceError, match="closes the web socket"):
        await socket.send_all(b"question")


async def test_a_ping_is_answered() -> None:
    socket, peer_stream, peer = await opened()
    await peer_stream.send_all(encoded(peer, Ping(b"p"), BytesMessage(b"more")))
    assert await socket.receive_some(4096) == b"more"
    peer.receive_data(bytes(await peer_stream.receive_some(4096)))
    assert [type(event).__name__ for event in peer.events()] == ["Pong"]


async def test_a_ping_before_a_close_frame_may_stay_unanswered() -> None:
    socket, peer_stream, peer = await opened()
    await peer_stream.send_all(encoded(peer, Ping(b"p"), CloseConnection(code=1001)))
    assert await socket.receive_some(4096) == b""
