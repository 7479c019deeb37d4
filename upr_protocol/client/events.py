"""What a consumer is told."""

from __future__ import annotations

import msgspec

from upr_protocol.chunk import Chunk
from upr_protocol.client.core.key_lookup import Item
from upr_protocol.errors import Status
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import HistoryId, PartitionId, SeqNo, SnapshotKind


class SnapshotStart(msgspec.Struct, frozen=True):
    """A snapshot of one partition begins. A second one without an end between replaces the first.

    Attributes:
        partition: The partition.
        history_id: The history it belongs to.
        start: The number it begins behind. When a consumer resumes inside a snapshot this is what
            it had received, and the front of the snapshot came before.
        end: The last number it covers; `start` itself when only the snapshot's end was missing.
        kind: Where the server reads it from.
        may_repeat: Older versions of a key may appear before its newest.
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
    """Some of the snapshot's mutations, in the order of their numbers.

    Attributes:
        partition: The partition.
        chunk: The mutations; nothing lies in (chunk.start, chunk.end] but what it holds.
    """

    partition: PartitionId
    chunk: Chunk


class AnswersReceived(msgspec.Struct, frozen=True):
    """What publishers were answered to batches that are in the snapshot under way; comes before its
    end, and only when it was asked for.

    Attributes:
        partition: The partition.
        rows: Writer, batch, the partition's highest number then, and the answer as the server keeps
            it; oldest first.
    """

    partition: PartitionId
    rows: tuple[tuple[bytes, int, int, bytes], ...]


class SnapshotEnd(msgspec.Struct, frozen=True):
    """The snapshot is complete: only here is the partition consistent, at `end`."""

    partition: PartitionId
    end: SeqNo


class Completed(msgspec.Struct, frozen=True):
    """Every partition was streamed or had nothing new, once more. `cycle` counts from 1 in each
    connection.

    Where several nodes hold the bucket, each tells it of the partitions that are followed there.
    Whoever wants to know it of all of them sends a barrier."""

    cycle: int


class BarrierReached(msgspec.Struct, frozen=True):
    """A barrier came back: everything acknowledged before it was sent has been handed on.

    Attributes:
        cookie: The barrier's.
        ends: For each partition streamed its last complete snapshot's end.
    """

    cookie: bytes
    ends: dict[PartitionId, SeqNo]


class RolledBack(msgspec.Struct, frozen=True):
    """The server's history parted from what was received: the application must go back.

    Whatever it has of the partition above `to` is to be dropped; with `to` 0, all it has. The
    stream then goes on from `to`, also where it had started from "now". A consumer that was given
    an `Undo` has gone back already. Killed before the event is dealt with, it is told again.

    Attributes:
        partition: The partition.
        ceiling: The highest number that both have in common.
        to: The number the stream goes on from; 0 without an `Undo`.
        reason: Why, in the server's words.
    """

    partition: PartitionId
    ceiling: SeqNo
    to: SeqNo
    reason: str


class Undone(msgspec.Struct, frozen=True):
    """What must be put in the place of what the server never had, all at once: to deal with this
    event is to go back.

    With `to` 0 the application drops all it has of the partition. Otherwise it gives each key of
    `documents` the value that stands there, and keeps the rest.

    Attributes:
        partition: The partition.
        ceiling: The highest number that both have in common.
        to: The number the stream goes on from.
        settled: The partition is what the server had from the first `SnapshotEnd` at or above this
            number; no end below is told. When it is not above `to`, it is so already.
        reason: Why, in the server's words and ours.
        documents: By key its newest item, or None for one that is to be deleted.
    """

    partition: PartitionId
    ceiling: SeqNo
    to: SeqNo
    settled: SeqNo
    reason: str
    documents: dict[bytes, Item | None]


class StreamAccepted(msgspec.Struct, frozen=True):
    """The server accepted a stream; comes before any of its data, and only when it was asked for.

    Attributes:
        partition: The partition.
        log: The server's failover log.
    """

    partition: PartitionId
    log: FailoverLog


class StreamEnded(msgspec.Struct, frozen=True):
    """One partition's stream is over for good.

    Attributes:
        partition: The partition.
        reason: Why: `END_REACHED`, `STREAM_CLOSED` or `BUCKET_DELETED`.
    """

    partition: PartitionId
    reason: Status


Event = (
    ChunkReceived
    | AnswersReceived
    | SnapshotStart
    | SnapshotEnd
    | Completed
    | BarrierReached
    | RolledBack
    | StreamAccepted
    | StreamEnded
)
