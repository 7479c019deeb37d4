"""The frames of wrong input, right in all but one thing."""

from __future__ import annotations

from itertools import count
from typing import Any, Final

from crc32c import crc32c

from upr_kernel import pack_header
from upr_protocol.chunk import Bundle, Chunk, Mutation, chunk_of_plain_sets
from upr_protocol.failover import NOTHING_YET, FailoverLog, Position
from upr_protocol.hashing import partition_of
from upr_protocol.ids import (
    NO_PARTITION,
    HistoryId,
    Operation,
    PartitionId,
    PartitionState,
    SeqNo,
)
from upr_protocol.wire import VERSION, Hello, Message, Mutate, NextEvents, Stream
from upr_protocol.wire.frame import padding

PARTITION_COUNT: Final = 4
"""Partitions of the bucket that the cases are played in."""

P0: Final = PartitionId(0)
P1: Final = PartitionId(1)
MISSING: Final = PartitionId(PARTITION_COUNT)
OPAQUE: Final = 1000
"""The first opaque of a case; those below are used on the way to it."""

BUCKET: Final = "conformance"
UNKNOWN_HISTORY: Final = HistoryId(0x0BAD_0BAD_0BAD_0BAD)


def key_in(partition: int, prefix: str = "key") -> bytes:
    """A key of this partition."""
    for suffix in count():
        key = f"{prefix}-{suffix}".encode()
        if partition_of(key, PARTITION_COUNT) == partition:
            return key
    raise AssertionError


KEY: Final = key_in(0)
TEXT_KEY: Final = key_in(0, "text")
"""A key that the player stores before each case, with the value `text`."""


def encoded(*messages: Message) -> bytes:
    """The frames of messages."""
    return b"".join(bytes(piece) for message in messages for piece in message.frame_buffers())


def frame_of(kind: type[Message], body: bytes, *, opaque: int = OPAQUE) -> bytes:
    """A frame that is about no partition, with right checksums around any body."""
    body += padding(len(body))
    return pack_header(kind.opcode, 0, NO_PARTITION, opaque, len(body), crc32c(body)) + body


def changed(frame: bytes, offset: int, value: int, *, mend: bool = True) -> bytes:
    """A frame with another byte in its header; the header's checksum is right if `mend`."""
    data = bytearray(frame)
    data[offset] = value
    if mend:
        data[20:24] = crc32c(bytes(data[:20])).to_bytes(4, "little")
    return bytes(data)


def stream(
    state: PartitionState = PartitionState.ACTIVE,
    position: Position = NOTHING_YET,
    *,
    partition: PartitionId = P0,
    opaque: int = OPAQUE,
    **fields: Any,
) -> Stream:
    """A request for a stream."""
    return Stream(state, position, partition=partition, opaque=opaque, **fields)


def mutate(*rows: Mutation, partition: PartitionId = P0, **fields: Any) -> Mutate:
    """A bundle of one run."""
    chunk = Chunk.build(rows, SeqNo(0), SeqNo(0))
    counter, chain = fields.pop("counter", 0), fields.pop("chain", 0)
    fields.setdefault("opaque", OPAQUE)
    return Mutate(Bundle.of_one_run(partition, chunk, counter, chain), **fields)


def set_row(key: bytes = KEY, value: bytes = b"v") -> Mutation:
    """A `SET` as a row."""
    return Mutation(Operation.SET, key, value)


def bundle(runs: list[tuple[int, int]], chunk: bytes | None = None) -> bytes:
    """A `Mutate` whose runs are (partition, row count), right or wrong."""
    rows = sum(row_count for _, row_count in runs)
    if chunk is None:
        chunk = bytes(chunk_of_plain_sets([KEY] * rows, [b""] * rows))
    directory = b"".join(
        partition.to_bytes(4, "little") + row_count.to_bytes(4, "little") + bytes(16)
        for partition, row_count in runs
    )
    return frame_of(Mutate, bytes(16 + 8 + 4) + len(runs).to_bytes(4, "little") + directory + chunk)


def altered(chunk: Chunk, offset: int, data: bytes) -> bytes:
    """A bundle of one run whose chunk has other bytes at `offset`."""
    encoded_chunk = bytes(chunk)
    altered = encoded_chunk[:offset] + data + encoded_chunk[offset + len(data) :]
    return bundle([(0, chunk.count)], altered)


HELLO: Final = Hello("conformance", (VERSION,), 0, 1 << 20, 20)
ONE_ROW: Final = Chunk.build([set_row()], SeqNo(0), SeqNo(0))
TWO_ROWS: Final = Chunk.build([set_row(), set_row()], SeqNo(0), SeqNo(0))
WRITER: Final = b"conformance test"


def hello_of(**fields: Any) -> bytes:
    """A `Hello` with other fields."""
    defaults = {
        "identity": "conformance",
        "versions": (VERSION,),
        "features": 0,
        "window_bytes": 1 << 20,
        "idle_interval_s": 20,
    }
    return encoded(Hello(**{**defaults, **fields}))


def runs_of_one_writer() -> bytes:
    """65 runs of one writer, and the first again."""
    frames = [
        encoded(mutate(set_row(), writer=WRITER, counter=counter, opaque=OPAQUE + counter))
        for counter in range(1, 66)
    ]
    return b"".join([*frames, encoded(mutate(set_row(), writer=WRITER, counter=1))])


def position_in(history: HistoryId, seq: int) -> Position:
    """A position in a history that began at 0."""
    return Position(FailoverLog.of_pairs([(history, 0)]), SeqNo(seq), SeqNo(seq), None)


def text_row(operation: Operation) -> Mutation:
    """An operation on `TEXT_KEY`."""
    return Mutation(operation, TEXT_KEY, b"v")


def wrong_durability() -> bytes:
    """A bundle with an unknown durability."""
    body = bytearray(b"".join(map(bytes, mutate(set_row()).body_buffers())))
    body[24] = 9
    return frame_of(Mutate, bytes(body))


def wrong_kinds() -> bytes:
    """A `NextEvents` with an unknown kind."""
    body = bytearray(b"".join(map(bytes, NextEvents("c").body_buffers())))
    body[16] = 16
    return frame_of(NextEvents, bytes(body))
