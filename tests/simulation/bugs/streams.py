"""Bugs in streams: where they start, resume and end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, Final

import msgspec

from tests.simulation.bugs.patch import replaced
from tests.simulation.bugs.planted_bug import planted
from tests.simulation.profiles import (
    ARRIVING_PARTITIONS,
    DIVERGED,
    FAILOVERS,
    MOVING_PARTITIONS,
    ROLLBACKS,
    SLOW_CONSUMERS,
)
from upr_protocol.chunk import Chunk
from upr_protocol.client.core import resume_state
from upr_protocol.client.core.delivery_tracker import DeliveryTracker
from upr_protocol.client.core.subscription import SubscriptionState
from upr_protocol.errors import Status
from upr_protocol.failover import FailoverLog, Position, RollBack, Start, StartReason, decide_start
from upr_protocol.ids import HistoryId, PartitionId, PartitionState, SeqNo
from upr_protocol.wire import Stream
from upr_server.engine.snapshots.cursor import BackfillNeeded, Cursor, SnapshotEndItem
from upr_server.net import ConnectionServer
from upr_server.net import stream_start as stream_starts
from upr_server.net import streamer as streamers
from upr_server.storage.online.partition_reader import PartitionReader


@planted(DIVERGED)
def never_roll_back() -> Iterator[None]:
    """The server never tells anyone to roll back."""

    def decide(*arguments: Any) -> Any:
        decision = decide_start(*arguments)
        if isinstance(decision, RollBack):
            _, high, _, client = arguments
            return Start(min(client.highest_received, high), SeqNo(0), decision.reason)
        return decision

    with replaced(stream_starts, "decide_start", decide):
        yield


@planted(DIVERGED)
def resume_inside_any_snapshot() -> Iterator[None]:
    """A consumer that was cut inside a snapshot resumes at the last row that it has, under any
    server and any history. The first snapshot that it gets then may end at any sequence number."""

    def decide(server: FailoverLog, high: SeqNo, purge: SeqNo, client: Position) -> Any:
        common = client.log.up_to(client.last_complete).current == server.current
        if client.partial is not None and common and client.highest_received <= high:
            return Start(client.highest_received, SeqNo(0), StartReason.PARTIAL_SNAPSHOT)
        return decide_start(server, high, purge, client)

    with replaced(stream_starts, "decide_start", decide):
        yield


@planted(SLOW_CONSUMERS)
def lose_rows_after_cursor_drop() -> Iterator[None]:
    """A slow consumer whose cursor was dropped gets only the last row of each chunk from disk."""
    read: Any = PartitionReader.next
    read_memory: Any = Cursor.next
    readers: list[PartitionReader] = []
    is_dropped = False

    def next_in_memory(self: Cursor) -> Any:
        nonlocal is_dropped
        item = read_memory(self)
        is_dropped |= isinstance(item, BackfillNeeded)
        return item

    def next_item(self: PartitionReader) -> Any:
        nonlocal is_dropped
        is_dropped = False
        item = read(self)
        if is_dropped:
            readers.append(self)
        elif self in readers and isinstance(item, Chunk):
            return Chunk.build(list(item)[-1:], item.start, item.end)
        elif self in readers and isinstance(item, SnapshotEndItem):
            readers.remove(self)
        return item

    with replaced(Cursor, "next", next_in_memory), replaced(PartitionReader, "next", next_item):
        yield


@planted(FAILOVERS)
def keep_streams_after_promotion() -> Iterator[None]:
    """Streams stay open when a replica becomes active, and continue in a history that their
    consumers do not know. The simulation found this fault."""
    end_streams: Any = ConnectionServer.end_streams

    def end_some(
        self: ConnectionServer, bucket: Any, partitions: Any, status: Status, **options: Any
    ) -> Iterator[None]:
        if status is not Status.STATE_CHANGED:
            yield from end_streams(self, bucket, partitions, status, **options)

    with replaced(ConnectionServer, "end_streams", end_some):
        yield


@planted(ROLLBACKS, seeds=20)
def omit_rollback_marker() -> Iterator[None]:
    """A consumer does not save that a rollback has begun. If it is killed before the rollback is
    reported, it resumes as if it still had what it undid."""
    with replaced(DeliveryTracker, "begin_rollback", lambda *_: None):
        yield


@planted(DIVERGED, seeds=16)
def complete_partial_snapshot() -> Iterator[None]:
    """A client resumes inside a snapshot as if it had all of the snapshot."""

    def received(
        position: Position, _history_id: HistoryId, _end: SeqNo, through: SeqNo
    ) -> Position:
        return Position(position.log, through, through, None)

    with replaced(resume_state, "position_after_chunk", received):
        yield


@planted(ARRIVING_PARTITIONS)
def end_at_any_copy() -> Iterator[None]:
    """A consumer that asks for `now` takes the end from any copy that a node has, even one that was
    left behind or is still being filled."""
    decide_bounds: Any = SubscriptionState.decide_bounds

    def decide_by_any_node(self: SubscriptionState, partition: PartitionId, handshake: Any) -> bool:
        partition_log = handshake.logs[partition]
        log = partition_log.log if partition_log.log.entries else FailoverLog.of_pairs([(1, 0)])
        believed = msgspec.structs.replace(
            partition_log, state=self.subscription.state, status=0, log=log
        )
        return bool(decide_bounds(self, partition, SimpleNamespace(logs={partition: believed})))

    with (
        replaced(SubscriptionState, "decide_bounds", decide_by_any_node),
        replaced(SubscriptionState, "confirm_end", lambda *_: True),
    ):
        yield


def _streaming(state: PartitionState) -> AbstractContextManager[None]:
    """A node streams partitions in `state` to all clients."""
    decide_before: Any = stream_starts.stream_start

    def decide(disk: Any, partition: Any, request: Stream) -> Any:
        decision = decide_before(disk, partition, request)
        if request.state is not state or partition.state is not state:
            return decision
        return decide_start(
            partition.failover_log, partition.high_seq, partition.purge_seq, request.position
        )

    return replaced(streamers, "stream_start", decide)


@planted(MOVING_PARTITIONS)
def stream_dead_partition() -> Iterator[None]:
    """A node streams a partition that a map took from it."""
    with _streaming(PartitionState.DEAD):
        yield


@planted(MOVING_PARTITIONS)
def stream_pending_partition() -> Iterator[None]:
    """A node streams a partition that it hands over to clients that are no replicas."""
    with _streaming(PartitionState.PENDING):
        yield


BUGS: Final = (
    stream_dead_partition,
    stream_pending_partition,
    never_roll_back,
    resume_inside_any_snapshot,
    lose_rows_after_cursor_drop,
    keep_streams_after_promotion,
    omit_rollback_marker,
    complete_partial_snapshot,
    end_at_any_copy,
)
