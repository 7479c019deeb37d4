"""Marks: how far an index is in one partition, as a stability timestamp."""

from __future__ import annotations

from struct import Struct
from typing import Final

import attrs

from upr_protocol.client import ResumeState
from upr_protocol.failover import NOTHING_YET, Position
from upr_protocol.ids import HistoryId, PartitionId, SeqNo

_HEAD: Final = Struct(">QQQ")


@attrs.frozen
class Mark:
    """How far an index is in one partition.

    Attributes:
        position: What of the stream the index has.
        settles_at: After a rollback the partition equals a state of the server again from the first
            snapshot end at or above this number.
    """

    position: Position = NOTHING_YET
    settles_at: SeqNo = SeqNo(0)

    @property
    def seq(self) -> SeqNo:
        """The highest sequence number that the index has."""
        return self.position.highest_received

    @property
    def history_id(self) -> HistoryId:
        """The history of that number; 0 if nothing was ever streamed."""
        return self.position.log.current

    @property
    def is_settled(self) -> bool:
        """Whether the partition equals the server's state at `seq`."""
        return self.position.partial is None and self.seq >= self.settles_at

    def has_change(self, history_id: HistoryId, seq: SeqNo) -> bool:
        """Whether the index has the change with this number in `history_id`."""
        return self.position.last_complete >= seq and self.position.log.contains(history_id, seq)

    def has_lost(self, history_id: HistoryId, seq: SeqNo) -> bool:
        """Whether the server's history left `history_id` below this number, so that the change is
        lost."""
        return self.knows_history(history_id) and not self.position.log.contains(history_id, seq)

    def knows_history(self, history_id: HistoryId) -> bool:
        """Whether the server's history went through `history_id`, as far as the index has it."""
        return any(entry.history_id == history_id for entry in self.position.log)

    def encode(self, bucket: str, partition: PartitionId) -> bytes:
        """The mark as it is stored."""
        state = ResumeState(bucket, {partition: self.position})
        return _HEAD.pack(self.history_id, self.seq, self.settles_at) + state.encode()

    @classmethod
    def decode(cls, bucket: str, partition: PartitionId, data: bytes) -> Mark:
        """The reverse of `encode`.

        Raises:
            ResumeStateError: The data is not a mark, or of another bucket.
        """
        _, _, settles_at = _HEAD.unpack_from(data)
        state = ResumeState.decode(data[_HEAD.size :])
        state.check_bucket(bucket)
        return cls(state.position(partition), SeqNo(settles_at))


NO_MARK: Final = Mark()


def decode_timestamp(data: bytes) -> tuple[HistoryId, SeqNo]:
    """History and number of an encoded mark, without the rest."""
    history_id, seq, _ = _HEAD.unpack_from(data)
    return HistoryId(history_id), SeqNo(seq)
