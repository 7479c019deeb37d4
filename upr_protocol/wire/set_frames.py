"""Frames that each publish one plain `SET`, read and answered many at a time.

Single operations come as `Mutate` frames of one row. A message, a bundle and a reply of its own for
each costs several times what the mutation itself does. So those that have come together are read as
one chunk, with no object for each but a tuple; and their answers are written as one piece of bytes.
`Mutate` and `MutateReply` say what the same bytes mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final, NamedTuple

from crc32c import crc32c

from upr_kernel import join_sets
from upr_protocol.chunk import Chunk
from upr_protocol.ids import NO_PARTITION, Cas, HistoryId, PartitionId, SeqNo
from upr_protocol.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from upr_protocol.wire.frame import pack_header
from upr_protocol.wire.publishing import MutateReply

FRAMES_MAX: Final = 64
"""Frames that are read together. They hold the loop for about a millisecond."""

_REPLY: Final = Struct("<QQIIQQQQQQ")


class SetFrame(NamedTuple):
    """One frame.

    Attributes:
        end: Where it ends in what was received.
        opaque: Its opaque.
        partition: The partition.
        writer: The publisher's ID; zeros for none.
        counter: The run's counter.
    """

    end: int
    opaque: int
    partition: PartitionId
    writer: bytes
    counter: int


class SetFrames(NamedTuple):
    """Frames that follow one another, each with one row of the chunk.

    Attributes:
        chunk: A published chunk of `SET`s that expect no CAS, checked. Each key belongs to its
            frame's partition.
        frames: The frames, in the order in which they came.
        start: Where the first begins in what was received.
    """

    chunk: Chunk
    frames: Sequence[SetFrame]
    start: int

    def nbytes(self, count: int) -> int:
        """The bytes of the first `count` frames, with their headers; at least one."""
        return self.frames[count - 1].end - self.start


class SetResult(NamedTuple):
    """The answer to a frame whose `SET` succeeded.

    Attributes:
        opaque: The frame's opaque.
        partition: The partition.
        history_id: The history that the number belongs to.
        seq: The sequence number.
        cas: The CAS.
    """

    opaque: int
    partition: PartitionId
    history_id: HistoryId
    seq: SeqNo
    cas: Cas


def read_sets(data: bytes, offset: int, partition_count: int) -> SetFrames | None:
    """The frames from `offset` on that each publish one plain `SET`; None if the first does not.

    Args:
        data: What was received.
        offset: Where the first frame begins.
        partition_count: How many partitions the bucket has.
    """
    joined = join_sets(data, offset, FRAMES_MAX, partition_count, KEY_BYTES_MAX, VALUE_BYTES_MAX)
    if joined is None:
        return None
    chunk, frames = joined
    return SetFrames(Chunk(chunk), list(map(SetFrame._make, frames)), offset)


def encode_set_replies(results: Sequence[SetResult]) -> bytes:
    """The `MutateReply` frames of these results, one behind the other."""
    pieces: list[bytes] = []
    for opaque, partition, history_id, seq, cas in results:
        body = _REPLY.pack(0, 1, partition, 0, history_id, seq, seq, cas, 0, 0)
        header = pack_header(MutateReply.opcode, 0, NO_PARTITION, opaque, len(body), crc32c(body))
        pieces += header, body
    return b"".join(pieces)
