"""Turns the messages of snapshots into deliveries, and moves the positions."""

from __future__ import annotations

from collections.abc import Iterable

from upr_protocol.chunk import Chunk
from upr_protocol.client.core import resume_state
from upr_protocol.client.core.delivery_tracker import Delivery, SavePriority
from upr_protocol.client.core.events import (
    AnswersReceived,
    ChunkReceived,
    SnapshotEnd,
    SnapshotStart,
)
from upr_protocol.client.core.resume_state import ResumeState
from upr_protocol.failover import Position
from upr_protocol.ids import HistoryId, PartitionId, SeqNo, SnapshotKind
from upr_protocol.wire import (
    HEADER_BYTES,
    Message,
    PartitionAnswers,
    PartitionChunk,
    PartitionEnd,
    PartitionSnapshot,
    PartitionStart,
)


class SnapshotDeliveries:
    """The deliveries that the snapshots of one node make.

    Args:
        resume_state: The positions, which they move.
        with_answers: Whether answers to publishers come before each snapshot's end. A stream that
            is cut after the last chunk then has to begin again before that chunk: a consumer that
            has the chunk would count the snapshot as complete, and not get the answers.
    """

    __slots__ = ("_resume_state", "_starts", "_with_answers")

    def __init__(self, resume_state: ResumeState, *, with_answers: bool = False) -> None:
        self._resume_state = resume_state
        self._with_answers = with_answers
        # By partition the start of its last snapshot. The session knows it too, but may be ahead:
        # it takes in everything that has arrived before any of that comes here.
        self._starts: dict[PartitionId, PartitionStart] = {}

    def receive(self, message: Message, connection: int) -> Iterable[Delivery]:
        """The deliveries of one of `SNAPSHOT_MESSAGES`, which came on a connection."""
        if isinstance(message, PartitionSnapshot):
            return self._whole_snapshot(message, connection)
        if isinstance(message, PartitionChunk):
            start = self._starts[message.partition]
            return (self._chunk(message.partition, message.chunk, start, start.end, connection),)
        if isinstance(message, PartitionStart):
            self._starts[message.partition] = message
            return (
                Delivery(
                    SnapshotStart(
                        message.partition,
                        message.history_id,
                        message.start,
                        message.end,
                        message.kind,
                        message.may_repeat,
                        message.purge_seq,
                    )
                ),
            )
        if isinstance(message, PartitionAnswers):
            return (Delivery(AnswersReceived(message.partition, message.rows)),)
        assert isinstance(message, PartitionEnd)
        return (self._end(message.partition, message.end),)

    def _whole_snapshot(
        self, message: PartitionSnapshot, connection: int
    ) -> tuple[Delivery, Delivery, Delivery]:
        partition, chunk = message.partition, message.chunk
        announcement = self._starts[partition]
        start = SnapshotStart(
            partition,
            announcement.history_id,
            chunk.start,
            chunk.end,
            SnapshotKind.MEMORY,
            False,
            announcement.purge_seq,
        )
        return (
            Delivery(start),
            self._chunk(partition, chunk, announcement, chunk.end, connection),
            self._end(partition, chunk.end),
        )

    def _chunk(
        self,
        partition: PartitionId,
        chunk: Chunk,
        start: PartitionStart,
        snapshot_end: SeqNo,
        connection: int,
    ) -> Delivery:
        position = self._resume_state.position(partition)
        if not (self._with_answers and chunk.end == snapshot_end):
            position = resume_state.position_after_chunk(
                position, start.history_id, snapshot_end, chunk.end
            )
        return Delivery(
            ChunkReceived(partition, chunk),
            self._set_position(partition, position),
            HEADER_BYTES + chunk.nbytes,
            connection,
        )

    def _end(self, partition: PartitionId, end: SeqNo) -> Delivery:
        position = resume_state.position_after_snapshot(self._resume_state.position(partition), end)
        return Delivery(
            SnapshotEnd(partition, end),
            self._set_position(partition, position),
            priority=SavePriority.COMPLETE,
        )

    def _set_position(
        self, partition: PartitionId, position: Position
    ) -> tuple[PartitionId, Position]:
        self._resume_state.positions[partition] = position
        return partition, position


def missing_end_deliveries(
    partition: PartitionId, history_id: HistoryId, end: SeqNo
) -> list[Delivery]:
    """The deliveries of a snapshot that lacked only its end."""
    start = SnapshotStart(partition, history_id, end, end, SnapshotKind.MEMORY, False)
    return [Delivery(start), Delivery(SnapshotEnd(partition, end), priority=SavePriority.COMPLETE)]
