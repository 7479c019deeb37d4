"""The chunk: mutations of one partition, held as columns.

Publishers send this layout, the server stores it in memory and on disk, consumers receive it, and
Arrow reads it without a copy. All integers are little-endian, every column starts at a multiple of
8, and offsets are laid out as Arrow lays them out (int32, one more than there are items)::

    head           count u32, key bytes u32, value bytes u32, reserved u32, start u64, end u64
    seqs           u64 * count
    cas            u64 * count
    expiries       u32 * count     seconds since 1970, 0 for never
    flags          u32 * count     the application's own
    key offsets    i32 * (count + 1)
    value offsets  i32 * (count + 1)
    operations     u8  * count
    keys           key bytes
    values         value bytes

A **stored** chunk has rising sequence numbers in (start, end], and every mutation of that range
that a reader needs. The next chunk starts at its end, so a reader notices a missing chunk. A
**published** chunk has no numbers yet: start, end and the sequence numbers are 0. Its CAS column
has the expected CAS of each row, or 0, and the value of an increment or decrement is a
`CounterDelta`. A **bundle** is a published chunk for several partitions: its rows are ordered by
partition, and the rows of one partition are a **run**.
"""

from upr_protocol.chunk.arrow import to_arrow
from upr_protocol.chunk.builder import ChunkBuilder
from upr_protocol.chunk.bundle import (
    RUN_BYTES,
    Bundle,
    BundlePart,
    BundleRun,
    decode_runs,
    encode_runs,
)
from upr_protocol.chunk.chunk import Chunk
from upr_protocol.chunk.layout import CHUNK_HEAD_BYTES, LARGE_BYTES, Buffer, encoded_bytes
from upr_protocol.chunk.mutation import COUNTER_DELTA_BYTES, CounterDelta, Mutation
from upr_protocol.chunk.published import chunk_of_plain_sets, published_chunk
from upr_protocol.chunk.shared import ChunkPieces, LargeRow, WidenedChunk

__all__ = [
    "CHUNK_HEAD_BYTES",
    "COUNTER_DELTA_BYTES",
    "LARGE_BYTES",
    "RUN_BYTES",
    "Buffer",
    "Bundle",
    "BundlePart",
    "BundleRun",
    "Chunk",
    "ChunkBuilder",
    "ChunkPieces",
    "CounterDelta",
    "LargeRow",
    "Mutation",
    "WidenedChunk",
    "chunk_of_plain_sets",
    "decode_runs",
    "encode_runs",
    "encoded_bytes",
    "published_chunk",
    "to_arrow",
]
