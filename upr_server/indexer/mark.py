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

    def shared_seq(self, newer: Mark) -> SeqNo:
        """Up to which number the index has what a stream has that is at `newer`: less than `seq` if
        the stream's history has left the index's below. A consumer may be given changes of a new
        history before it is told to undo those of the old one: keys that have to be read again
        cannot be while the server goes from one history to the next. O(entries of both logs)."""
        log, newer_log = self.position.log, newer.position.log
        own_histories = {entry.history_id for entry in log}
        if not newer_log.entries or newer_log.current in own_histories:
            # The same history, or one that the index has left since.
            return self.seq
        newer_histories = {entry.history_id for entry in newer_log}
        for entry in log:
            if entry.history_id in newer_histories:
                end = min(log.end_of(entry.history_id), newer_log.end_of(entry.history_id))
                return min(self.seq, end)
        return SeqNo(0)

    def complete_seq(self, newer: Mark) -> SeqNo:
        """Up to which number the index lacks nothing that a stream has that is at `newer`. Of a
        snapshot that it has in part, it may lack a change below the highest number that it has: the
        snapshot left out what was superseded at its end. The next one may end before that, or be of
        a history that lost it. O(entries of both logs)."""
        return min(self.shared_seq(newer), self.position.last_complete)

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
