"""Ports for servers that listen later, or again, at the same port."""

from __future__ import annotations

import itertools
import os
import socket
from contextlib import suppress
from typing import Final

# Below those that systems give to whoever asks for any port, or connects. Each process begins
# elsewhere.
_PORTS: Final = range(10_000, 30_000)
_next_port = itertools.count(os.getpid() * 64)


def free_ports(count: int) -> list[int]:
    """Ports that are free, and that nothing else takes before the test listens at them."""
    return [free_port() for _ in range(count)]


def free_port() -> int:
    """Like `free_ports`, for one port."""
    for _ in _PORTS:
        port = _PORTS[next(_next_port) % len(_PORTS)]
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")
