"""What one commit changes in one partition."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from upr_protocol.chunk import Chunk
from upr_protocol.ids import SeqNo
from upr_server.storage.records import PartitionRecord


class PartitionWrite(msgspec.Struct, frozen=True):
    """What a commit changes in one partition.

    Attributes:
        partition: The partition.
        record: Its record afterwards.
        chunks: The mutations that lead there. Each chunk begins where the one before ends.
        answers: Answers to publishers to store and to delete, the oldest change first: strings of
            rows, as `PublisherAnswers` gives what has changed.
        ends: Those of the chunks' ends at which a snapshot ends.
        purge_seq: Tombstones up to here may be missing from the chunks.
    """

    partition: int
    record: PartitionRecord
    chunks: Sequence[Chunk] = ()
    answers: Sequence[bytes] = ()
    ends: Sequence[SeqNo] = ()
    purge_seq: SeqNo = SeqNo(0)

    @property
    def answer_bytes(self) -> int:
        """The bytes of all answers. O(strings)."""
        return sum(map(len, self.answers))
