"""The peer of B3, B4 and B5: a plain socket; this is its sending end."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from benchmarks.kit.commands import Commands
from benchmarks.kit.processes import HOST

PIECE_BYTES = 1 << 20

_PIECE = bytes(PIECE_BYTES)


def _send(nbytes: int, connection: socket.socket) -> None:
    """Sends so many bytes in pieces of 1 MiB, once asked for by a byte."""
    connection.recv(1)
    while nbytes:
        count = min(nbytes, PIECE_BYTES)
        connection.sendall(_PIECE[:count] if count < PIECE_BYTES else _PIECE)
        nbytes -= count


def serve(commands: Commands) -> None:
    """Listens for as many `receivers` as it is told, one if not; each command sends so many `bytes`
    to each, with a thread for each: copying into a socket needs no interpreter."""
    receivers = commands.arguments.get("receivers", 1)
    with socket.create_server((HOST, 0)) as listener, ThreadPoolExecutor(receivers) as pool:
        commands.answer(port=listener.getsockname()[1])
        connections = [listener.accept()[0] for _ in range(receivers)]
        for command in commands:
            list(pool.map(partial(_send, command["bytes"]), connections))
            commands.answer(sent=True)
        for connection in connections:
            connection.close()
