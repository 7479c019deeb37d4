"""Where a daemon listens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from upr_protocol.errors import UprError
from upr_server.daemon.settings import ConfigError


class ListenError(UprError):
    """The address cannot be listened on."""


def parse_listen(listen: str) -> tuple[str, int]:
    """The host and port of the setting `listen`, which is `HOST:PORT`.

    Raises:
        ConfigError: It is not.
    """
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"listen is {listen!r}; write HOST:PORT with a port from 0 to 65535")
    return host.strip("[]") or "0.0.0.0", int(port)


@asynccontextmanager
async def listening(listen: str) -> AsyncIterator[list[trio.SocketListener]]:
    """Listens for as long as the context: at `HOST:PORT`, one listener for each address of the
    host, or for one of them when port 0 has any free port taken.

    Raises:
        ConfigError: It is no `HOST:PORT`.
        ListenError: The address cannot be listened on.
    """
    host, port = parse_listen(listen)
    try:
        listeners = list(await trio.open_tcp_listeners(port, host=host))
    except OSError as error:
        raise ListenError(f"cannot listen on {listen}: {error.strerror or error}") from error
    except UnicodeError as error:
        # The codec for host names has opinions of its own.
        raise ListenError(f"cannot listen on {listen}: {host!r} is no host name") from error
    if port == 0 and len(listeners) > 1:
        # A name with several addresses would take a free port for each.
        for extra in listeners[1:]:
            await extra.aclose()
        del listeners[1:]
    try:
        yield listeners
    finally:
        with trio.CancelScope(shield=True):
            for listener in listeners:
                await listener.aclose()
