"""B3's other peer: a plain socket; this is its sending end."""

from __future__ import annotations

import socket

from benchmarks.kit.commands import Commands
from benchmarks.kit.processes import HOST

PIECE_BYTES = 1 << 20


def serve(commands: Commands) -> None:
    """Listens; each command sends so many `bytes` in pieces of 1 MiB, once asked for a byte."""
    piece = bytes(PIECE_BYTES)
    with socket.create_server((HOST, 0)) as listener:
        commands.answer(port=listener.getsockname()[1])
        connection, _ = listener.accept()
        with connection:
            for command in commands:
                left: int = command["bytes"]
                connection.recv(1)
                while left:
                    count = min(left, PIECE_BYTES)
                    connection.sendall(piece[:count] if count < PIECE_BYTES else piece)
                    left -= count
                commands.answer(sent=True)
