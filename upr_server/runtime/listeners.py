"""The addresses on which a process listens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import Final

import attrs
import trio

from upr_protocol.errors import UprError
from upr_server.runtime.settings import ConfigError

LOOPBACK: Final = "127.0.0.1"


class ListenError(UprError):
    """The address cannot be listened on."""


@attrs.frozen
class BoundListeners:
    """Listeners that accept connections, and the port they share.

    Attributes:
        listeners: Their streams can be half-closed.
        port: The port they listen on, never 0.
    """

    listeners: Sequence[trio.abc.Listener[trio.abc.HalfCloseableStream]]
    port: int


def parse_listen(listen: str) -> tuple[str, int]:
    """The host and port of the setting `listen`, which is `HOST:PORT`. Without a host, only this
    machine can connect: as nobody may have to log in, a wider address must be written out.

    Raises:
        ConfigError: It is something else.
    """
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"listen is {listen!r}; write HOST:PORT with a port from 0 to 65535")
    return host.strip("[]") or LOOPBACK, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


@asynccontextmanager
async def bind_tcp(listen: str) -> AsyncIterator[BoundListeners]:
    """Listens as `open_listeners` does, and tells the port; raises what it raises."""
    async with open_listeners(listen) as listeners:
        yield BoundListeners(listeners, listeners[0].socket.getsockname()[1])


@asynccontextmanager
async def open_listeners(listen: str) -> AsyncIterator[list[trio.SocketListener]]:
    """Listens at `HOST:PORT` for as long as the context: one listener for each address of the host.
    With port 0 the system chooses a port, and there is one listener.

    Raises:
        ConfigError: `listen` is not `HOST:PORT`.
        ListenError: The address cannot be listened on.
    """
    host, port = parse_listen(listen)
    try:
        listeners = list(await trio.open_tcp_listeners(port, host=host))
    except OSError as error:
        raise ListenError(
            f"cannot listen on {listen}: {error.strerror or error}; name another address with "
            "--listen"
        ) from error
    except UnicodeError as error:
        # The codec for host names raises its own error for labels too long or empty.
        raise ListenError(
            f"cannot listen on {listen}: {host!r} is not a valid host name; name another with "
            "--listen"
        ) from error
    if port == 0 and len(listeners) > 1:
        # Each address of the name has got a port of its own: keep one.
        for extra in listeners[1:]:
            await extra.aclose()
        del listeners[1:]
    try:
        yield listeners
    finally:
        with trio.CancelScope(shield=True):
            for listener in listeners:
                await listener.aclose()
