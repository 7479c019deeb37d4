"""What a replica's consumer asks for beside the changes."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from tests.client.trio.replica_consumers import URL, as_replica
from tests.kit.consuming import fill_one_partition, until_completed
from tests.kit.fake_net import FakeNet
from tests.kit.fake_server import FakeServer
from tests.kit.placed_keys import key_in
from upr_protocol.client import (
    AnswersReceived,
    ChunkReceived,
    Event,
    ReplicaConsumer,
    SnapshotEnd,
    SnapshotStart,
    StreamAccepted,
    consume,
)
from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import HistoryId, PartitionId, SeqNo
from upr_protocol.wire import Message, ReplicaAck, Stream

P = PartitionId(0)


async def test_answers_come_before_the_end_of_their_snapshot(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    fill_one_partition(server, 3)
    server.answers = ((bytes(16), 1, 3, b"answer"),)
    async with as_replica(net) as consumer:
        events = await until_completed(consumer)
        assert [type(event) for event in events[:-1]] == [
            StreamAccepted,
            SnapshotStart,
            ChunkReceived,
            AnswersReceived,
            SnapshotEnd,
        ]
        assert events[3] == AnswersReceived(P, server.answers)
    async with consume(URL, dial=net.dial) as consumer:
        events = await until_completed(consumer)
    assert not any(isinstance(event, AnswersReceived) for event in events)


async def test_reports_of_one_turn_leave_together_and_the_newest_counts(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    history, other_partition = HistoryId(1000), PartitionId(P + 1)
    async with as_replica(net) as consumer:
        await until_completed(consumer)
        for received in (SeqNo(1), SeqNo(2)):
            for partition in (P, other_partition):
                consumer.report(partition, history, received, SeqNo(0))
        await trio.sleep(1)
        rows = tuple((partition, history, SeqNo(2), SeqNo(0)) for partition in (P, other_partition))
        assert server.reports == [ReplicaAck(rows)]
        consumer.report(P, history, SeqNo(3), SeqNo(0))
        await trio.sleep(1)
        assert server.reports[1:] == [ReplicaAck(((P, history, SeqNo(3), SeqNo(0)),))]


async def test_reports_reach_the_server_while_there_is_a_connection(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    fill_one_partition(server, 3)
    async with as_replica(net) as consumer:
        await until_completed(consumer)
        consumer.report(P, HistoryId(1000), SeqNo(3), SeqNo(2))
        await trio.sleep(1)
        expected = ReplicaAck(((P, HistoryId(1000), SeqNo(3), SeqNo(2)),))
        assert server.reports == [expected]
        net.down = True
        net.cut()
        await trio.sleep(1)
        consumer.report(P, HistoryId(1000), SeqNo(3), SeqNo(3))
        net.down = False
        await trio.sleep(20)
        assert server.reports == [expected]


async def until_event(consumer: ReplicaConsumer, awaited: Event) -> None:
    with trio.fail_after(60):
        async for event in consumer:
            if event == awaited:
                break


async def test_a_stream_that_is_refused_does_not_interrupt_the_others(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    """Publishers wait for what the replica reports of these."""
    refused = PartitionId(P + 1)

    def refuse(message: Message) -> Status | None:
        is_refused = isinstance(message, Stream) and message.partition == refused
        return Status.WRONG_STATE if is_refused else None

    server.refuse = refuse
    key, refused_key = (key_in(partition, len(server.partitions)) for partition in (P, refused))
    server.put(key, b"v")
    server.put(refused_key, b"v")
    async with as_replica(net) as consumer:
        await until_event(consumer, SnapshotEnd(P, SeqNo(1)))
        # The node may refuse it for as long as it likes.
        await trio.sleep(20)
        figures = consumer.statistics()
        assert figures.unplaced_partitions == [refused]
        assert "told to" in figures.unplaced_reason
        server.put(key, b"w")
        await until_event(consumer, SnapshotEnd(P, SeqNo(2)))
        server.refuse = lambda _message: None
        await until_event(consumer, SnapshotEnd(refused, SeqNo(1)))
        assert not consumer.statistics().unplaced_partitions
    assert net.dialled == 1


async def test_a_stream_that_ends_does_not_interrupt_the_others(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    ended = PartitionId(P + 1)
    async with as_replica(net) as consumer:
        await until_event(consumer, StreamAccepted(ended, server.partitions[ended].log, SeqNo(0)))
        await trio.sleep(1)
        (connection,) = server.connections
        connection.end_stream(ended, Status.BACKFILL_FAILED)
        await until_event(consumer, StreamAccepted(ended, server.partitions[ended].log, SeqNo(0)))
        server.put(key_in(ended, len(server.partitions)), b"v")
        await until_event(consumer, SnapshotEnd(ended, SeqNo(1)))
    assert net.dialled == 1


async def test_a_connection_ends_when_all_of_its_streams_are_refused(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    server.refuse = lambda message: Status.WRONG_STATE if isinstance(message, Stream) else None
    async with as_replica(net) as consumer:
        with pytest.raises(ServerError, match="told to"):
            await until_completed(consumer)
    assert net.dialled > 1
