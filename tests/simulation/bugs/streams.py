"""Bugs in streams, and where they go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from tests.simulation.bugs.patch import replaced
from upr_protocol.client import resume
from upr_protocol.errors import Status
from upr_protocol.failover import Position, RollBack, Start, decide_start
from upr_protocol.ids import HistoryId, SeqNo
from upr_server.net import streamer as streamers
from upr_server.net.service import Service


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
def leaves_streams_open_when_it_becomes_active() -> Iterator[None]:
    """Streams go on in a history that their consumers have not heard of; found by the
    simulation."""
    end_streams: Any = Service.end_streams

    def end_some(
        self: Service, bucket: Any, partition: Any, status: Status, **options: Any
    ) -> None:
        if status is not Status.STATE_CHANGED:
            end_streams(self, bucket, partition, status, **options)

    with replaced(Service, "end_streams", end_some):
        yield


@contextmanager
def takes_a_part_for_a_whole() -> Iterator[None]:
    """A client resumes behind what it has of a snapshot as if that was all of it."""

    def received(
        position: Position, _history_id: HistoryId, _end: SeqNo, through: SeqNo
    ) -> Position:
        return Position(position.log, through, through, None)

    with replaced(resume, "received", received):
        yield


BUGS: Final = (
    goes_on_where_the_histories_parted,
    leaves_streams_open_when_it_becomes_active,
    takes_a_part_for_a_whole,
)
