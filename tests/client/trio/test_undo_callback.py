"""Rollbacks that the application undoes in its own callback."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from tests.kit.consuming import fill_one_partition, until_completed
from tests.kit.fake_net import FakeNet
from tests.kit.fake_server import FakeServer
from upr_protocol.client import (
    ChunkReceived,
    Consumer,
    CycleCompleted,
    Event,
    MemoryStore,
    ResumeState,
    RolledBack,
    SaveLimits,
    SnapshotEnd,
    SnapshotStart,
    StreamAccepted,
    consume,
)
from upr_protocol.client.core.delivery_tracker import Delivery
from upr_protocol.client.core.resume_state import ROLLBACK_PENDING
from upr_protocol.failover import Position
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.wire import Go, Stream

URL = "upr://fake/b"
P = PartitionId(0)
AT_ONCE = SaveLimits(math.inf, math.inf, math.inf)
"""Nothing is saved but what must not be forgotten."""


class Undoing:
    """Undoes down to a multiple of ten.

    Attributes:
        asked: What it was asked.
        free: Unset, it does not come to an end.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.free = trio.Event()
        self.free.set()

    async def __call__(self, partition: PartitionId, ceiling: SeqNo, reason: str) -> SeqNo:
        assert "diverge" in reason
        self.asked.append((partition, ceiling))
        await self.free.wait()
        return SeqNo(ceiling // 10 * 10)


async def test_the_stream_continues_where_the_application_rolled_back_to(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    fill_one_partition(server, 30)
    undo = Undoing()
    async with consume(URL, dial=net.dial, undo=undo) as consumer:
        await until_completed(consumer)
        net.cut()
        server.partitions[0].fail_over(77, 24)
        server.put(b"new", b"v")
        rollback, start, chunk, end, *_ = await until_completed(consumer)
        assert undo.asked == [(0, 24)]
        assert isinstance(rollback, RolledBack)
        assert (rollback.partition, rollback.ceiling, rollback.to) == (0, 24, 20)
        assert isinstance(start, SnapshotStart)
        assert (start.history_id, start.start, start.end) == (77, 20, 25)
        assert isinstance(chunk, ChunkReceived)
        assert list(chunk.chunk.seqs) == [21, 22, 23]
        assert consumer.statistics().rollbacks == 1
        assert isinstance(end, ChunkReceived)


async def test_no_connection_requests_the_stream_before_the_rollback_is_undone(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    fill_one_partition(server, 30)
    undo = Undoing()
    positions: list[Position] = []
    events: list[Event] = []

    async def follow(consumer: Consumer) -> None:
        events.extend(await until_completed(consumer))

    async with consume(URL, dial=net.dial, undo=undo) as consumer, trio.open_nursery() as nursery:
        await until_completed(consumer)
        server.refuse = lambda m: positions.append(m.position) if isinstance(m, Stream) else None
        undo.free = trio.Event()
        server.partitions[0].fail_over(77, 24)
        net.cut()
        nursery.start_soon(follow, consumer)
        await trio.sleep(10)
        assert [position.highest_received for position in positions] == [30]
        net.cut()
        await trio.sleep(10)
        (connection,) = server.connections
        assert connection.counts[Stream] == connection.counts[Go] == 0
        undo.free.set()
        await trio.sleep(10)
        assert [position.highest_received for position in positions] == [30, 20]
        assert undo.asked == [(0, 24)]
    assert [type(event) for event in events[:2]] == [RolledBack, SnapshotStart]


async def test_a_cancelled_undo_callback_is_called_again(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    fill_one_partition(server, 30)
    undo = Undoing()
    async with consume(URL, dial=net.dial, undo=undo) as consumer:
        await until_completed(consumer)
        undo.free = trio.Event()
        server.partitions[0].fail_over(77, 24)
        net.cut()
        with trio.move_on_after(60):
            await anext(consumer)
        undo.free.set()
        assert isinstance(await anext(consumer), RolledBack)
        assert undo.asked == [(0, 24)] * 2


async def test_a_rollback_target_above_the_ceiling_is_refused(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    async def undo(partition: PartitionId, ceiling: SeqNo, reason: str) -> SeqNo:
        await trio.lowlevel.checkpoint()
        return SeqNo(ceiling + 1)

    fill_one_partition(server, 30)
    async with consume(URL, dial=net.dial, undo=undo) as consumer:
        await until_completed(consumer)
        server.partitions[0].fail_over(77, 24)
        net.cut()
        with pytest.raises(ValueError, match="rolled back to 25, above its ceiling 24"):
            await until_completed(consumer)


async def test_the_log_is_saved_before_any_data_and_after_a_rollback(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    steps: list[object] = []

    class Store(MemoryStore):
        async def save(self, state: ResumeState) -> None:
            await trio.lowlevel.checkpoint()
            await super().save(state)
            position = state.position(P)
            steps.append((position.log.pairs(), position.highest_received))

    async def say_until_completed(consumer: Consumer) -> None:
        async for event in consumer:
            steps.append(type(event))
            if isinstance(event, CycleCompleted):
                break

    fill_one_partition(server, 3)
    server.chunk_mutations = 30
    async with consume(
        URL, dial=net.dial, resume=Store(), save_limits=AT_ONCE, undo=Undoing()
    ) as consumer:
        await say_until_completed(consumer)
        assert steps[:2] == [([(1000, 0)], 0), SnapshotStart]
        for index in range(30):
            server.put(b"%d" % index, b"v")
        await say_until_completed(consumer)
        steps.clear()
        server.partitions[0].fail_over(77, 24)
        net.cut()
        server.put(b"new", b"v")
        await say_until_completed(consumer)
        assert steps == [
            ([(ROLLBACK_PENDING, 24), (1000, 0)], 33),
            RolledBack,
            ([(1000, 0)], 20),
            ([(77, 24), (1000, 0)], 20),
            SnapshotStart,
            ChunkReceived,
            SnapshotEnd,
            CycleCompleted,
        ]


async def test_the_rollback_event_precedes_events_that_came_during_the_undo(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    """Of another node's partition, for instance. The application stands further back already: no
    state that it could keep with that may say otherwise."""
    fill_one_partition(server, 30)
    steps: list[tuple[type, int]] = []

    async def undo(partition: PartitionId, ceiling: SeqNo, reason: str) -> SeqNo:
        await trio.sleep(1)
        consumer._streams.queue.put(Delivery(CycleCompleted(99)))
        return SeqNo(20)

    async with consume(URL, dial=net.dial, undo=undo) as consumer:
        await until_completed(consumer)
        net.cut()
        server.partitions[0].fail_over(77, 24)
        async for event in consumer:
            steps.append((type(event), consumer.resume_state.position(P).highest_received))
            if event == CycleCompleted(99):
                break
    assert steps == [(RolledBack, 20), (CycleCompleted, 20)]


class _KilledError(Exception):
    """The process has died."""


@pytest.mark.parametrize("undoes", [True, False])
async def test_an_application_killed_during_a_rollback_is_asked_again(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock, *, undoes: bool
) -> None:
    """Though it asks a server then that has all it had."""
    fill_one_partition(server, 30)
    store, not_parted = MemoryStore(), deepcopy(server.partitions[0])

    def is_pending_on_disk() -> bool:
        return store.state is not None and store.state.is_rollback_pending(P)

    async def undo(partition: PartitionId, ceiling: SeqNo, reason: str) -> SeqNo:
        assert is_pending_on_disk(), "a kill may come now"
        await trio.sleep(1)
        raise _KilledError

    async def until_killed() -> None:
        async with consume(
            URL, dial=net.dial, resume=store, undo=undo if undoes else None
        ) as consumer:
            await until_completed(consumer)
            net.cut()
            server.partitions[0].fail_over(77, 24)
            async for event in consumer:
                if isinstance(event, RolledBack):
                    assert is_pending_on_disk(), "a kill may come now"
                    raise _KilledError

    with pytest.raises(_KilledError):
        await until_killed()
    assert store.state is not None
    assert store.state.position(P).highest_received == 30
    server.partitions[0] = not_parted
    undoing = Undoing()
    async with consume(
        URL, dial=net.dial, resume=store, undo=undoing if undoes else None
    ) as consumer:
        event, *_ = await until_completed(consumer)
        assert isinstance(event, RolledBack)
        assert (event.ceiling, event.to) == (24, 20 if undoes else 0)
    assert store.state.position(P) == Position(not_parted.log, SeqNo(30), SeqNo(30), None)


async def test_accepted_streams_are_events_if_logs_are_asked_for(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    fill_one_partition(server, 3)
    async with consume(URL, dial=net.dial, with_logs=True) as consumer:
        accepted = await anext(consumer)
        assert accepted == StreamAccepted(P, server.partitions[0].log, SeqNo(3))
        assert isinstance(await anext(consumer), SnapshotStart)
