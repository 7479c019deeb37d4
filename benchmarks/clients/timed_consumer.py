"""B6's and B6c's consumer: how long after it was due did each mutation get here?"""

from __future__ import annotations

import time
from struct import Struct

from benchmarks.kit.commands import Commands
from benchmarks.kit.pacing import percentiles_us
from benchmarks.kit.raw import RawConnection
from benchmarks.kit.work import VALUE_BYTES
from upr_protocol.wire import HEADER_BYTES, PartitionChunk

_STAMP = Struct("<q")


def _consume(connection: RawConnection, count: int) -> list[int]:
    latencies: list[int] = []
    session = connection.session
    while len(latencies) < count:
        for message in connection.messages():
            if isinstance(message, PartitionChunk):
                chunk = message.chunk
                now, data = time.monotonic_ns(), chunk.value_bytes
                for index in range(chunk.count):
                    (due,) = _STAMP.unpack_from(data, VALUE_BYTES * index)
                    latencies.append(now - due)
                session.acknowledge(HEADER_BYTES + chunk.nbytes)
        connection.flush()
    return latencies


def serve(commands: Commands) -> None:
    """Each command waits for `count` mutations; those of the first `skip` are not counted."""
    arguments = commands.arguments
    target = arguments["port"], arguments["bucket"], arguments.get("certificate", "")
    with RawConnection(*target) as connection:
        connection.stream()
        commands.answer(ready=True)
        for command in commands:
            processor_s = time.process_time()
            latencies = _consume(connection, command["count"])
            commands.answer(
                latency=percentiles_us(latencies[command["skip"] :]),
                processor_s=time.process_time() - processor_s,
            )
