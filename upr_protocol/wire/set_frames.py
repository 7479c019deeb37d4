"""Frames that each publish one plain `SET`, read many at a time; and answers that are written so.

Single operations come as `Mutate` frames of one row. A message and a bundle for each costs several
times what the mutation itself does. So those that have come together are read as one chunk, with no
object for each. The answers to bundles of which every run succeeded are written from the lines that
the kernel makes. `Mutate` and `MutateReply` say what the same bytes mean.
"""

from __future__ import annotations

from array import array
from typing import Final

import msgspec

from upr_kernel import encode_replies, join_sets
from upr_protocol.chunk import RUN_BYTES
from upr_protocol.ids import DESIGN_PREFIX, WRITER_BYTES
from upr_protocol.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from upr_protocol.wire.publishing import RESULT_BYTES

FRAMES_MAX: Final = 64
"""Frames that are read together. They hold the loop for about a millisecond."""


class SetFrames(msgspec.Struct, frozen=True):
    """Frames that follow one another, each with one row of the chunk.

    Attributes:
        chunk: A published chunk of `SET`s that expect no CAS, encoded and checked. Each key belongs
            to its run's partition. It may have more rows than there are frames.
        flags: What `Chunk.published_flags` would say of it, but for `SEQS_RISE`.
        directory: The run of each frame, as in the directory of a bundle.
        writers: The publisher's ID of each frame, or one ID that all have; zeros for none.
        opaques: The opaque of each frame, of 4 bytes.
        ends: Where each frame ends in what was received, of 4 bytes.
        start: Where the first begins there.
    """

    chunk: bytes
    flags: int
    directory: bytes
    writers: bytes
    opaques: bytes
    ends: bytes
    start: int

    @property
    def frame_count(self) -> int:
        """Frames; at least one."""
        return len(self.directory) // RUN_BYTES

    def nbytes(self, count: int) -> int:
        """The bytes of the first `count` frames, with their headers; at least one."""
        end: int = memoryview(self.ends).cast("I")[count - 1]
        return end - self.start

    def first(self, count: int) -> SetFrames:
        """The first `count` of them; at least one."""
        writers = self.writers
        if len(writers) > WRITER_BYTES:
            writers = writers[: WRITER_BYTES * count]
        return SetFrames(
            self.chunk,
            self.flags,
            self.directory[: RUN_BYTES * count],
            writers,
            self.opaques[: 4 * count],
            self.ends[: 4 * count],
            self.start,
        )


def read_sets(data: bytes, offset: int, partition_count: int) -> SetFrames | None:
    """The frames from `offset` on that each publish one plain `SET`; None if the first does not.

    Args:
        data: What was received.
        offset: Where the first frame begins.
        partition_count: How many partitions the bucket has.
    """
    joined = join_sets(
        data, offset, FRAMES_MAX, partition_count, KEY_BYTES_MAX, VALUE_BYTES_MAX, DESIGN_PREFIX
    )
    return None if joined is None else SetFrames(*joined, offset)


def encode_set_replies(sets: SetFrames, lines: bytes) -> bytes:
    """The `MutateReply` frames that answer the first frames of `sets`, one behind the other.

    Args:
        sets: The frames.
        lines: What became of each, `RESULT_BYTES` long.
    """
    return encode_replies(sets.opaques[: 4 * (len(lines) // RESULT_BYTES)], lines)


def encode_reply(opaque: int, lines: bytes) -> bytes:
    """The `MutateReply` frame of a bundle of which every run succeeded.

    Args:
        opaque: The request's opaque.
        lines: What became of each run, `RESULT_BYTES` long.
    """
    return encode_replies(array("I", (opaque,)).tobytes(), lines)
