"""The peer of B3, B4 and B5: a plain socket; this is its receiving end."""

from __future__ import annotations

import socket
import time

from benchmarks.clients.socket_sender import PIECE_BYTES
from benchmarks.kit.commands import Commands
from benchmarks.kit.processes import HOST


def serve(commands: Commands) -> None:
    """Connects; each command asks for so many `bytes` and receives them into one buffer."""
    buffer = bytearray(PIECE_BYTES)
    with socket.create_connection((HOST, commands.arguments["port"])) as connection:
        commands.answer(ready=True)
        for command in commands:
            bytes_left: int = command["bytes"]
            started_at, processor_s = time.monotonic(), time.process_time()
            connection.sendall(b"!")
            while bytes_left:
                bytes_left -= connection.recv_into(buffer)
            ended_at = time.monotonic()
            commands.answer(
                begun=started_at,
                ended=ended_at,
                seconds=ended_at - started_at,
                processor_s=time.process_time() - processor_s,
            )
