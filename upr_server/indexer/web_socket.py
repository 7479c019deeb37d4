"""A web socket as a stream of bytes: where it is opened, and where it is accepted."""

from __future__ import annotations

from base64 import b64encode
from typing import Final
from urllib.parse import urlsplit

import msgspec
import trio
from starlette.types import Receive, Scope, Send
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Ping,
    Pong,
    RejectConnection,
    RejectData,
    Request,
)
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from upr_protocol.client import Security, TlsSettings
from upr_protocol.errors import BrokenError, UprError
from upr_protocol.transport import encrypted_to_server

RECEIVE_BYTES: Final = 64 * 1024

REFUSAL_BYTES_MAX: Final = 64 * 1024
"""What is read of the reason for a refusal."""


class WebSocketRefusedError(UprError):
    """The other side does not open a web socket, and says why."""


class _Failure(msgspec.Struct, frozen=True):
    message: str


class _Failures(msgspec.Struct, frozen=True):
    error: _Failure


async def open_web_socket(url: str, security: Security) -> OpenedWebSocket:
    """Opens a web socket.

    Args:
        url: Where, `http://HOST:PORT/PATH` or `https://…`.
        security: Which certificates count, and as whom to log in. Its password is sent: to a host
            that has proved its name, or to this machine.

    Raises:
        OSError: The host cannot be reached.
        WebSocketRefusedError: It refuses.
        TlsError: It is not trusted, or does not trust this side.
        BrokenError: The connection is gone, or something else than HTTP came.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 0
    stream: trio.abc.Stream = await trio.open_tcp_stream(host, port)
    try:
        if parts.scheme == "https":
            stream = await encrypted_to_server(stream, security.tls or TlsSettings(), host)
        socket = OpenedWebSocket(stream)
        await socket.open(parts.netloc, f"{parts.path}?{parts.query}", security)
    except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
        await trio.aclose_forcefully(stream)
        raise BrokenError(f"{parts.netloc} has closed the connection") from error
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return socket


class OpenedWebSocket:
    """A web socket that this side has opened, as a stream of bytes.

    One task may read while another one writes.

    Args:
        stream: What carries it. It is closed with it.
    """

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._socket = WSConnection(ConnectionType.CLIENT)
        # The answer to a ping is sent by who reads.
        self._sending = trio.Lock()
        self._has_ended = False
        """Whether the other side has said goodbye."""

    async def open(self, host: str, target: str, security: Security) -> None:
        """Asks for the web socket, and waits until it is there.

        Raises:
            WebSocketRefusedError: The other side refuses.
            BrokenError: Something else than HTTP came.
            trio.BrokenResourceError: The connection is gone.
        """
        headers = []
        if (credentials := security.credentials) is not None:
            pair = f"{credentials.user}:{credentials.password}"
            headers.append((b"Authorization", b"Basic " + b64encode(pair.encode())))
        request = Request(host=host, target=target, extra_headers=headers)
        await self._stream.send_all(self._socket.send(request))
        refusal, status = b"", 0
        while True:
            data = await self._stream.receive_some(RECEIVE_BYTES)
            self._feed(bytes(data))
            for event in self._socket.events():
                if isinstance(event, AcceptConnection):
                    return
                if isinstance(event, RejectConnection):
                    status = event.status_code
                if isinstance(event, RejectData):
                    refusal += bytes(event.data)
                is_whole = isinstance(event, RejectData) and event.body_finished
                if is_whole or len(refusal) > REFUSAL_BYTES_MAX:
                    raise WebSocketRefusedError(_sentence(status, refusal))
            if not data:
                if status:
                    raise WebSocketRefusedError(_sentence(status, refusal))
                raise trio.BrokenResourceError

    def _feed(self, data: bytes) -> None:
        try:
            self._socket.receive_data(data)
        except RemoteProtocolError as error:
            raise BrokenError(f"not a web socket: {error}") from error

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Sends bytes.

        Raises:
            trio.BrokenResourceError: The connection is gone.
        """
        await self._send(BytesMessage(bytes(data)))

    async def _send(self, event: BytesMessage | Pong) -> None:
        async with self._sending:
            try:
                data = self._socket.send(event)
            except LocalProtocolError as error:
                # The reader has got the other side's goodbye, and may not have returned yet.
                raise trio.BrokenResourceError("the other side closes the web socket") from error
            await self._stream.send_all(data)

    async def receive_some(self, max_bytes: int) -> bytes:
        """Bytes that came, possibly more than `max_bytes`; none at the end.

        Raises:
            trio.BrokenResourceError: The connection is gone, or something else came.
        """
        while True:
            received_bytes = bytearray()
            try:
                for event in self._socket.events():
                    if isinstance(event, BytesMessage):
                        received_bytes += event.data
                    elif isinstance(event, Ping):
                        await self._send(event.response())
                    elif isinstance(event, CloseConnection):
                        self._has_ended = True
            except RemoteProtocolError as error:
                raise trio.BrokenResourceError(str(error)) from error
            if received_bytes or self._has_ended:
                await trio.lowlevel.checkpoint()
                return bytes(received_bytes)
            data = await self._stream.receive_some(max_bytes)
            if not data:
                return b""
            try:
                self._socket.receive_data(bytes(data))
            except RemoteProtocolError as error:
                raise trio.BrokenResourceError(str(error)) from error

    async def aclose(self) -> None:
        """Closes the connection, without a goodbye."""
        await self._stream.aclose()


def _sentence(status: int, body: bytes) -> str:
    """Why the other side refuses."""
    try:
        return msgspec.json.decode(body, type=_Failures).error.message
    except (msgspec.DecodeError, UnicodeDecodeError):
        return f"HTTP {status}"


class AcceptedWebSocket:
    """A web socket that came to an ASGI application, as a stream of bytes.

    Args:
        receive: Gives what comes.
        send: Sends.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Sends bytes; nothing happens if the other side has gone."""
        await self._send({"type": "websocket.send", "bytes": bytes(data)})

    async def receive_some(self, _max_bytes: int) -> bytes:
        """Bytes that came, possibly more than `max_bytes`; none at the end."""
        while True:
            message = await self._receive()
            if message["type"] != "websocket.receive":
                return b""
            data: bytes = message.get("bytes") or b""
            if data:
                return data


async def accept_web_socket(receive: Receive, send: Send) -> AcceptedWebSocket:
    """Accepts a web socket."""
    await receive()
    await send({"type": "websocket.accept"})
    return AcceptedWebSocket(receive, send)


async def refuse_web_socket(
    scope: Scope, receive: Receive, send: Send, status: int, body: bytes
) -> None:
    """Refuses a web socket, with a status and JSON."""
    await receive()
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close"})
        return
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "websocket.http.response.start", "status": status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})
