"""What a replica's consumer asks for beside the changes."""

from __future__ import annotations

import random
from contextlib import AbstractAsyncContextManager

import trio
from trio.testing import MockClock

from tests.kit.consuming import fill_one_partition, until_completed
from tests.kit.fake_net import FakeNet
from tests.kit.fake_server import FakeServer
from upr_protocol.client import (
    AnswersReceived,
    ChunkReceived,
    ReplicaConsumer,
    SnapshotEnd,
    SnapshotStart,
    StreamAccepted,
    consume,
    consume_as_replica,
)
from upr_protocol.ids import HistoryId, PartitionId, PartitionState, SeqNo
from upr_protocol.wire import ReplicaAck

URL = "upr://fake/b"
P = PartitionId(0)


def as_replica(net: FakeNet) -> AbstractAsyncContextManager[ReplicaConsumer]:
    return consume_as_replica(
        URL,
        state=PartitionState.ACTIVE,
        identity="replica:n",
        retry_timeout_s=60,
        dial=net.dial,
        draw=random.Random(1).random,
    )


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
