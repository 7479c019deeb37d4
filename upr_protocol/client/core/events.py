"""The events of a consumer."""

from __future__ import annotations

import msgspec

from upr_protocol.chunk import Chunk
from upr_protocol.client.core.key_lookup import Item
from upr_protocol.errors import Status
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import HistoryId, PartitionId, SeqNo, SnapshotKind


class SnapshotStart(msgspec.Struct, frozen=True):
    """A snapshot of one partition begins. A second one before an end replaces the first.

    Attributes:
        history_id: The history that the snapshot belongs to.
        start: The sequence number after which the snapshot begins. If the consumer resumes inside a
            snapshot, this is the last number that it had received, and the front came before.
        end: The last sequence number of the snapshot; `start` itself if only the end was missing.
        kind: Where the server reads the snapshot from.
        may_repeat: Whether older versions of a key may come before its newest.
        purge_seq: Deletions at or below it may be gone at the server.
    """

    partition: PartitionId
    history_id: HistoryId
    start: SeqNo
    end: SeqNo
    kind: SnapshotKind
    may_repeat: bool
    purge_seq: SeqNo = SeqNo(0)


class ChunkReceived(msgspec.Struct, frozen=True):
    """Some of the snapshot's mutations, by ascending sequence number: all there are in
    (chunk.start, chunk.end]."""

    partition: PartitionId
    chunk: Chunk


class AnswersReceived(msgspec.Struct, frozen=True):
    """What the server answered to publishers whose batches are in the snapshot under way. Comes
    before the snapshot's end, and only to a `ReplicaConsumer`.

    Attributes:
        rows: Writer, batch, the partition's highest number then, and the answer as the server keeps
            it; oldest first.
    """

    partition: PartitionId
    rows: tuple[tuple[bytes, int, int, bytes], ...]


class SnapshotEnd(msgspec.Struct, frozen=True):
    """The snapshot is complete. Only here is the partition consistent, at sequence number `end`."""

    partition: PartitionId
    end: SeqNo


class CycleCompleted(msgspec.Struct, frozen=True):
    """A connection has streamed every partition once more, or found nothing new. `cycle` counts
    from 1 on each connection.

    If several nodes hold the bucket, each sends this for the partitions that it streams. To know
    it of all partitions, send a barrier."""

    cycle: int


class BarrierReached(msgspec.Struct, frozen=True):
    """A barrier came back: every change acknowledged before the barrier was sent has come. `ends`
    has by streamed partition the end of its last complete snapshot."""

    cookie: bytes
    ends: dict[PartitionId, SeqNo]


class RolledBack(msgspec.Struct, frozen=True):
    """The server's history parted from what was received: the application must roll back.

    It must drop what it has of the partition above `to`; with `to` 0, all that it has. The stream
    then goes on from `to`, also if it had started from "now". With an undo callback, the callback
    has rolled back already. An application that is killed before it has processed this event gets
    it again.

    Attributes:
        ceiling: The highest sequence number that both histories have in common.
        to: The sequence number that the stream goes on from; 0 without an undo callback.
    """

    partition: PartitionId
    ceiling: SeqNo
    to: SeqNo
    reason: str


class Undone(msgspec.Struct, frozen=True):
    """Everything to undo after a failover, at once: to process this event is to roll back.

    With `to` 0 the application drops all that it has of the partition. Otherwise it sets each key
    of `documents` to its value there, and keeps the rest. It comes before anything of the stream
    that goes on from `to`. An application that skips changes by their number skips those up to its
    last `SnapshotEnd`, or to `to` if that is lower.

    Attributes:
        ceiling: The highest sequence number that both histories have in common.
        to: The sequence number that the stream goes on from.
        consistent_from: The partition equals a state of the server from the first `SnapshotEnd` at
            or above this number; ends below are left out. If it is not above `to`, that holds
            already. `SEQ_MAX` if the server began yet another history while the documents were
            read: they are of that one, and another `Undone` comes before its stream.
        reason: The server's reason, and the client's.
        documents: By key its newest item, or None for a key to delete.
    """

    partition: PartitionId
    ceiling: SeqNo
    to: SeqNo
    consistent_from: SeqNo
    reason: str
    documents: dict[bytes, Item | None]


class StreamAccepted(msgspec.Struct, frozen=True):
    """The server accepted a stream. Comes before any of its data, and only if asked for.

    Attributes:
        log: The server's failover log.
        high_seq: The highest sequence number that the server had when the connection was made; None
            if it did not tell.
    """

    partition: PartitionId
    log: FailoverLog
    high_seq: SeqNo | None = None


class StreamEnded(msgspec.Struct, frozen=True):
    """One partition's stream has ended for good: `END_REACHED`, `STREAM_CLOSED` or
    `BUCKET_DELETED`."""

    partition: PartitionId
    reason: Status


Event = (
    ChunkReceived
    | AnswersReceived
    | SnapshotStart
    | SnapshotEnd
    | CycleCompleted
    | BarrierReached
    | RolledBack
    | StreamAccepted
    | StreamEnded
)
