"""Bugs in streams, and where they go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

import msgspec

from tests.simulation.bugs.patch import replaced
from upr_protocol.chunk import Chunk
from upr_protocol.client.core import resume_state
from upr_protocol.client.core.delivery_tracker import DeliveryTracker
from upr_protocol.client.core.subscription_state import SubscriptionState
from upr_protocol.errors import Status
from upr_protocol.failover import FailoverLog, Position, Reason, RollBack, Start, decide_start
from upr_protocol.ids import HistoryId, PartitionId, SeqNo
from upr_server.net import ConnectionServer
from upr_server.net import streamer as streamers
from upr_server.storage.online.backfill import Backfill
from upr_server.storage.online.partition_reader import PartitionReader


@contextmanager
def goes_on_where_the_histories_parted() -> Iterator[None]:
    """Nobody is told to roll back."""

    def decide(*arguments: Any) -> Any:
        found = decide_start(*arguments)
        if isinstance(found, RollBack):
            _, high, _, client = arguments
            return Start(min(client.highest_received, high), SeqNo(0), found.reason)
        return found

    with replaced(streamers, "decide_start", decide):
        yield


@contextmanager
def takes_the_larger_without_its_conditions() -> Iterator[None]:
    """Who was cut in a snapshot goes on behind what he has of it: whoever it was that sent it,
    however far the server has come, and whatever ends the first snapshot that is sent."""

    def decide(server: FailoverLog, high: SeqNo, purge: SeqNo, client: Position) -> Any:
        common = client.log.up_to(client.last_complete).current == server.current
        if client.partial is not None and common and client.highest_received <= high:
            return Start(client.highest_received, SeqNo(0), Reason.PARTIAL_SNAPSHOT)
        return decide_start(server, high, purge, client)

    with replaced(streamers, "decide_start", decide):
        yield


@contextmanager
def drops_a_cursor_and_says_nothing() -> Iterator[None]:
    """Who was slow, and was dropped, goes on with what memory has: of all that was freed it is
    given the last change."""
    read: Any = PartitionReader._from_memory
    take: Any = Backfill.take
    of_dropped: list[Backfill] = []

    def from_memory(self: PartitionReader) -> Any:
        is_following = self._cursor is not None
        item = read(self)
        if is_following and self._backfill is not None:
            of_dropped.append(self._backfill)
        return item

    def take_the_last(self: Backfill) -> Any:
        item = take(self)
        if isinstance(item, Chunk) and any(self is one for one in of_dropped):
            return Chunk.build(list(item)[-1:], item.start, item.end)
        return item

    with (
        replaced(PartitionReader, "_from_memory", from_memory),
        replaced(Backfill, "take", take_the_last),
    ):
        yield


@contextmanager
def leaves_streams_open_when_it_becomes_active() -> Iterator[None]:
    """Streams go on in a history that their consumers have not heard of; found by the
    simulation."""
    end_streams: Any = ConnectionServer.end_streams

    def end_some(
        self: ConnectionServer, bucket: Any, partition: Any, status: Status, **options: Any
    ) -> None:
        if status is not Status.STATE_CHANGED:
            end_streams(self, bucket, partition, status, **options)

    with replaced(ConnectionServer, "end_streams", end_some):
        yield


@contextmanager
def forgets_that_it_is_going_back() -> Iterator[None]:
    """An application that is killed when it has gone back, and before it could say so, is taken to
    have what it had."""
    with replaced(DeliveryTracker, "begin_rollback", lambda *_: None):
        yield


@contextmanager
def takes_a_part_for_a_whole() -> Iterator[None]:
    """A client resumes behind what it has of a snapshot as if that was all of it."""

    def received(
        position: Position, _history_id: HistoryId, _end: SeqNo, through: SeqNo
    ) -> Position:
        return Position(position.log, through, through, None)

    with replaced(resume_state, "chunk_received", received):
        yield


@contextmanager
def takes_any_copy_for_now() -> Iterator[None]:
    """What a node said of a partition when it greeted is "now", whatever it was for it then: a copy
    that was left behind, or had yet to be filled."""
    decide_bounds: Any = SubscriptionState.decide_bounds

    def decide_by_any_node(self: SubscriptionState, partition: PartitionId, handshake: Any) -> bool:
        told = handshake.logs[partition]
        log = told.log if told.log.entries else FailoverLog.of([(1, 0)])
        believed = msgspec.structs.replace(told, state=self.subscription.state, status=0, log=log)
        return bool(decide_bounds(self, partition, SimpleNamespace(logs={partition: believed})))

    with (
        replaced(SubscriptionState, "decide_bounds", decide_by_any_node),
        replaced(SubscriptionState, "confirm_end", lambda *_: True),
    ):
        yield


BUGS: Final = (
    goes_on_where_the_histories_parted,
    takes_the_larger_without_its_conditions,
    drops_a_cursor_and_says_nothing,
    leaves_streams_open_when_it_becomes_active,
    forgets_that_it_is_going_back,
    takes_a_part_for_a_whole,
    takes_any_copy_for_now,
)
