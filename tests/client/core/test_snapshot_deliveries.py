"""Snapshots turned into deliveries, against a naive model that looks at the events alone."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.effort import effort
from upr_protocol.chunk import Chunk, ChunkBuilder
from upr_protocol.client.core.delivery_tracker import Delivery, SavePriority
from upr_protocol.client.core.events import ChunkReceived, SnapshotEnd, SnapshotStart
from upr_protocol.client.core.resume_state import ResumeState
from upr_protocol.client.core.snapshot_deliveries import SnapshotDeliveries
from upr_protocol.ids import HistoryId, Operation, PartitionId, SeqNo, SnapshotKind
from upr_protocol.wire import (
    HEADER_BYTES,
    Message,
    PartitionChunk,
    PartitionEnd,
    PartitionSnapshot,
    PartitionStart,
)

PARTITION = PartitionId(3)
HISTORY = HistoryId(77)
CONNECTION = 5


@attrs.frozen
class Snapshot:
    """One snapshot of a stream.

    Attributes:
        sizes: How many numbers each of its chunks spans.
        is_whole: Whether it comes in one message, if it may.
    """

    sizes: tuple[int, ...]
    is_whole: bool


snapshots = st.builds(
    Snapshot, st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple), st.booleans()
)


@attrs.frozen
class Connected:
    """What arrives on one connection before it is cut.

    Attributes:
        snapshots: What it sends.
        messages_max: After so many messages it is cut.
    """

    snapshots: Sequence[Snapshot]
    messages_max: int


connections = st.builds(
    Connected,
    st.lists(snapshots, min_size=1, max_size=4),
    st.integers(0, 12),
)


def chunk(start: int, end: int) -> Chunk:
    builder = ChunkBuilder()
    for seq in range(start + 1, end + 1):
        builder.append(Operation.SET, b"k%d" % seq, b"v", SeqNo(seq))
    return builder.build(SeqNo(start), SeqNo(end))


def messages_of(connected: Connected, start: int) -> list[Message]:
    """What a server sends, from the number `start`."""
    messages: list[Message] = []
    for snapshot in connected.snapshots:
        end = start + sum(snapshot.sizes)
        if snapshot.is_whole and messages:
            messages.append(PartitionSnapshot(chunk(start, end), partition=PARTITION))
            start = end
            continue
        messages.append(
            PartitionStart(
                HISTORY, SeqNo(start), SeqNo(end), SeqNo(0), SnapshotKind.MEMORY, False,
                partition=PARTITION,
            )
        )  # fmt: skip
        for size in snapshot.sizes:
            messages.append(PartitionChunk(chunk(start, start + size), partition=PARTITION))
            start += size
        messages.append(PartitionEnd(SeqNo(end), partition=PARTITION))
    return messages


class Model:
    """How far an application is that has applied the events so far."""

    def __init__(self) -> None:
        self.complete = 0
        self.highest = 0

    def apply(self, delivery: Delivery) -> None:
        event = delivery.event
        if isinstance(event, SnapshotStart):
            assert delivery.position is None
            assert delivery.nbytes == 0
            return
        if isinstance(event, ChunkReceived):
            assert delivery.nbytes == HEADER_BYTES + event.chunk.nbytes
            assert delivery.connection_number == CONNECTION
            self.highest = int(event.chunk.end)
        else:
            assert isinstance(event, SnapshotEnd)
            assert delivery.priority is SavePriority.COMPLETE
            self.complete = self.highest = int(event.end)
        assert delivery.position is not None
        partition, position = delivery.position
        assert partition == PARTITION
        assert (position.last_complete, position.highest_received) == (self.complete, self.highest)
        if self.highest == self.complete:
            assert position.partial is None
        else:
            assert position.partial is not None
            assert position.partial.start == self.complete
            assert position.partial.end >= self.highest


def test_with_answers_a_stream_begins_again_before_a_last_chunk_without_its_end() -> None:
    """The answers come between the two."""
    received = ResumeState("b")
    deliveries = SnapshotDeliveries(received, with_answers=True)
    start = PartitionStart(
        HISTORY, SeqNo(0), SeqNo(4), SeqNo(0), SnapshotKind.MEMORY, False, partition=PARTITION
    )
    highest: list[SeqNo] = []
    for message in (
        start,
        PartitionChunk(chunk(0, 2), partition=PARTITION),
        PartitionChunk(chunk(2, 4), partition=PARTITION),
        PartitionEnd(SeqNo(4), partition=PARTITION),
    ):
        list(deliveries.receive(message, CONNECTION))
        highest.append(received.position(PARTITION).highest_received)
    assert highest == [0, 2, 2, 4]


@settings(max_examples=effort(80, 5000))
@given(st.lists(connections, max_size=6))
def test_positions_follow_from_the_events_however_streams_are_cut(
    arriving: list[Connected],
) -> None:
    received, model = ResumeState("b"), Model()
    for connected in arriving:
        deliveries = SnapshotDeliveries(received)
        for message in messages_of(connected, model.highest)[: connected.messages_max]:
            for delivery in deliveries.receive(message, CONNECTION):
                model.apply(delivery)
        position = received.position(PARTITION)
        assert (position.last_complete, position.highest_received) == (
            model.complete,
            model.highest,
        )
        assert (position.partial is None) == (model.highest == model.complete)
