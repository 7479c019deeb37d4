"""What stands between a stream and an application that answers web sockets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

import trio
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    Event,
    RejectConnection,
    RejectData,
    Request,
)

Application = Callable[
    [Callable[[], Awaitable[dict[str, Any]]], Callable[[Any], Awaitable[None]]], Awaitable[None]
]


_EVENTS: Final[dict[str, Callable[[dict[str, Any]], Event]]] = {
    "websocket.accept": lambda _: AcceptConnection(),
    "websocket.send": lambda message: BytesMessage(message["bytes"]),
    "websocket.http.response.start": lambda message: RejectConnection(
        message["status"], message["headers"], has_body=True
    ),
    "websocket.http.response.body": lambda message: RejectData(message["body"]),
}


class _Server:
    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._socket = WSConnection(ConnectionType.SERVER)

    async def _next(self, kind: type[Event]) -> Event | None:
        while True:
            await trio.lowlevel.checkpoint()
            for event in self._socket.events():
                if isinstance(event, kind):
                    return event
            try:
                data = await self._stream.receive_some(4096)
            except trio.BrokenResourceError:
                return None
            if not data:
                return None
            self._socket.receive_data(bytes(data))

    async def receive(self) -> dict[str, Any]:
        event = await self._next(BytesMessage)
        if isinstance(event, BytesMessage):
            return {"type": "websocket.receive", "bytes": bytes(event.data)}
        return {"type": "websocket.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        # The other side may have gone.
        with suppress(trio.BrokenResourceError):
            await self._stream.send_all(self._socket.send(_EVENTS[message["type"]](message)))

    async def run(self, application: Application) -> None:
        if await self._next(Request) is None:
            return
        is_connected = False

        async def receive() -> dict[str, Any]:
            nonlocal is_connected
            if is_connected:
                return await self.receive()
            is_connected = True
            await trio.lowlevel.checkpoint()
            return {"type": "websocket.connect"}

        await application(receive, self.send)


async def serve_web_socket(stream: trio.abc.Stream, application: Application) -> None:
    """Serves one web socket, until the other side or the application has ended."""
    async with stream:
        await _Server(stream).run(application)
