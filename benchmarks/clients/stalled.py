"""B8's consumer: sees so many mutations, and then reads nothing any more.

Its cursors stay where they stand, and keep what came before from being collapsed with what comes.
"""

from __future__ import annotations

from benchmarks.kit.commands import Commands
from benchmarks.kit.raw import RawConnection
from upr_protocol.limits import WINDOW_BYTES_MIN
from upr_protocol.wire import HEADER_BYTES, PartitionChunk


def serve(commands: Commands) -> None:
    """Reads until it has seen as many `mutations`."""
    port, bucket = commands.arguments["port"], commands.arguments["bucket"]
    with RawConnection(port, bucket, window_bytes=WINDOW_BYTES_MIN) as connection:
        connection.stream()
        commands.answer(ready=True)
        for command in commands:
            chunk_count = 0
            while chunk_count < command["mutations"]:
                for message in connection.messages():
                    if isinstance(message, PartitionChunk):
                        chunk_count += message.chunk.count
                        connection.session.acknowledge(HEADER_BYTES + message.chunk.nbytes)
                connection.flush()
            commands.answer(seen=chunk_count)
