"""The client of B3, B4 and B5: streams a bucket from its beginning, and touches all.

What touching means: of each chunk the key offsets and the value offsets are summed as numpy
columns, and the CRC32C of all key bytes and of all value bytes is computed. So every offset and
every byte is read once more after the client library is done with it.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import trio
from crc32c import crc32c

from benchmarks.kit.commands import Commands
from upr_protocol.chunk import Chunk
from upr_protocol.client import Address, ChunkReceived, consume
from upr_protocol.wire import HEADER_BYTES


class Touch:
    """What one pass over the stream has seen.

    Attributes:
        chunks: Chunks.
        mutations: Mutations in them.
        nbytes: Bytes of their frames.
        offsets: The sum of all offsets.
        checksum: Of all keys and all values.
    """

    def __init__(self) -> None:
        self.chunks = 0
        self.mutations = 0
        self.nbytes = 0
        self.offsets = 0
        self.checksum = 0

    def chunk(self, chunk: Chunk) -> None:
        """Touches every key and value."""
        keys = np.frombuffer(chunk.key_offsets, dtype=np.int32)
        values = np.frombuffer(chunk.value_offsets, dtype=np.int32)
        self.offsets += int(keys.sum(dtype=np.int64)) + int(values.sum(dtype=np.int64))
        self.checksum ^= crc32c(chunk.key_bytes) ^ crc32c(chunk.value_bytes)
        self.chunks += 1
        self.mutations += len(keys) - 1
        self.nbytes += HEADER_BYTES + chunk.nbytes


async def _stream(address: Address) -> dict[str, Any]:
    """One fresh consumer, from the beginning to where the server is when it connects.

    The clock runs from when it is connected; asking for the streams is part of it.
    """
    touch = Touch()
    async with consume(address, end="now", identity="bench:consumer") as consumer:
        started_at, processor_s = time.monotonic(), time.process_time()
        async for event in consumer:
            if isinstance(event, ChunkReceived):
                touch.chunk(event.chunk)
        ended_at = time.monotonic()
    return {
        "begun": started_at,
        "ended": ended_at,
        "seconds": ended_at - started_at,
        "processor_s": time.process_time() - processor_s,
        "chunks": touch.chunks,
        "mutations": touch.mutations,
        "bytes": touch.nbytes,
        "offsets": touch.offsets,
        "checksum": touch.checksum,
    }


def serve(commands: Commands) -> None:
    """Each command streams everything once, with a consumer of its own."""
    commands.answer(ready=True)
    for _ in commands:
        commands.answer(**trio.run(_stream, commands.target))
