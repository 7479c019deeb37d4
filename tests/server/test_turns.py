"""Long work takes turns: large reads and writes, handshakes, and requests of several steps."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack
from typing import Final

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.engine.helpers import put
from tests.kit.steps import LargestStep
from tests.server.connected_peer import QUOTA_BYTES, connected, make_server, sets
from upr_protocol.failover import NOTHING_YET
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.limits import PARTITIONS_MAX
from upr_protocol.wire import Barrier, BarrierReply, CycleEnd, Go, HelloReply, Open, Opened, Stream
from upr_server.net.streamer import STEP_STREAMS
from upr_server.net.turns import (
    HANDSHAKE_LANES,
    HANDSHAKES_QUEUED_MAX,
    BudgetedTurns,
    NetworkQueue,
    NetworkTurns,
)
from upr_server.runtime import TurnTimer

BYTES_MAX: Final = 1000
HALF: Final = BYTES_MAX // 2


class CountedTurns:
    """Turns of the event loop that the test itself counts."""

    turn_count = 0


@given(st.lists(st.one_of(st.none(), st.integers(1, BYTES_MAX))))
def test_the_amount_of_work_in_a_turn_is_bounded(reads: list[int | None]) -> None:
    """In the list, a number is the bytes of a read, and None the end of a turn."""
    counter = CountedTurns()
    turns, nbytes = BudgetedTurns(counter, BYTES_MAX), 0
    for read_bytes in reads:
        if read_bytes is None:
            counter.turn_count += 1
            nbytes = 0
        assert turns.may_begin == (nbytes < BYTES_MAX)
        if read_bytes is not None and turns.may_begin:
            turns.note_used(read_bytes)
            nbytes += read_bytes


@pytest.mark.parametrize("lanes", [1, 3])
async def test_many_readers_share_the_loops_turns(lanes: int) -> None:
    timer = TurnTimer()
    timer.start()
    turns, bytes_by_turn, reads_by_reader = (
        BudgetedTurns(timer, BYTES_MAX, lanes),
        Counter[int](),
        Counter[int](),
    )

    async def read(reader: int) -> None:
        for _ in range(5):
            await trio.lowlevel.checkpoint()
            if not turns.may_begin:
                await turns.next_turn()
            turns.note_used(HALF)
            bytes_by_turn[timer.turn_count] += HALF
            reads_by_reader[reader] += 1

    async with trio.open_nursery() as nursery:
        for reader in range(20):
            nursery.start_soon(read, reader)
    # A read that begins below the bound may end above it, and so may those that had waited.
    assert max(bytes_by_turn.values()) <= BYTES_MAX + (1 + lanes) * HALF
    assert all(reads_by_reader[reader] == 5 for reader in range(20))


async def test_networks_have_their_turns_one_after_the_other() -> None:
    """A later connection from another network does not wait behind all connections of one
    network."""
    timer = TurnTimer()
    timer.start()
    turns, queues = BudgetedTurns(timer, 1, HANDSHAKE_LANES), dict[str, NetworkQueue]()
    order: list[str] = []

    async def greet(network: str) -> None:
        await NetworkTurns(turns, queues, network).next_turn()
        order.append(network)

    async with trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(greet, "many")
        while not order:
            await trio.lowlevel.checkpoint()
        nursery.start_soon(greet, "one")
    assert Counter(order) == {"many": 100, "one": 1}
    assert order.index("one") < 5 * HANDSHAKES_QUEUED_MAX
    assert not queues


class RecordingTurns(BudgetedTurns):
    """Records each piece of work, and how often a task had to wait.

    Attributes:
        pieces: How many pieces were done in each turn.
        waits: How often a task waited for a turn.
    """

    __slots__ = ("pieces", "waits")

    def __init__(self, timer: TurnTimer, budget: float) -> None:
        super().__init__(timer, budget)
        self.pieces: Counter[int] = Counter()
        self.waits = 0

    async def next_turn(self) -> None:
        self.waits += 1
        await super().next_turn()

    def note_used(self, amount: float) -> None:
        super().note_used(amount)
        self.pieces[self._turn] += 1


PEERS: Final = 20


async def test_large_requests_of_several_peers_are_answered_in_turns(
    autojump_clock: MockClock,
) -> None:
    """Answering for 1,024 partitions takes nine steps."""
    server = make_server(connections_max=PEERS + 1)
    resources = server.connections.resources
    resources.turn_timer.start()
    turns = resources.step_turns = RecordingTurns(resources.turn_timer, 0.0)
    async with connected(server), AsyncExitStack() as stack:
        await server.catalog.create_bucket("wide", PARTITIONS_MAX, QUOTA_BYTES)
        peers = [await stack.enter_async_context(connected(server)) for _ in range(PEERS)]
        for peer in peers:
            await peer.send()
            await peer.receive(HelloReply)
        turns.pieces.clear()
        for peer in peers:
            await peer.send(Open("wide", opaque=peer.opaque()))
        for peer in peers:
            await peer.receive(Opened)
        assert turns.waits > 7 * PEERS
        pieces = turns.pieces.values()
        assert max(pieces) <= 3
        assert sum(pieces) > 7 * PEERS


async def test_a_consumer_with_many_bytes_to_receive_waits_for_its_turn(
    autojump_clock: MockClock,
) -> None:
    server = make_server()
    resources = server.connections.resources
    turns = resources.write_turns = RecordingTurns(resources.turn_timer, 0.0)
    async with connected(server) as peer:
        await peer.open()
        await peer.ask()
        await peer.send(Go())
        await peer.receive(CycleEnd)
        await peer.mutate(sets(b"small"))
        await peer.receive(CycleEnd)
        assert not turns.waits
        for number in range(5):
            await peer.mutate(sets(b"%d" % number, value=bytes(1_000_000)))
        assert turns.waits


@pytest.mark.parametrize("closes_receiving", [False, True])
async def test_the_streams_of_a_consumer_that_disconnects_are_closed_in_several_steps(
    autojump_clock: MockClock, *, closes_receiving: bool
) -> None:
    """Changes that arrive meanwhile are not sent on its streams, even those that are still open."""
    server, count = make_server(), 500
    async with connected(server) as first:
        await first.open()
        await server.catalog.create_bucket("wide", count, QUOTA_BYTES)
        partitions = server.catalog.bucket("wide").partitions
        async with connected(server) as peer:
            await peer.open("wide")
            await peer.ask_for_all(count)
            await peer.send(Go())
            await peer.receive(CycleEnd)
            (*_, connection) = server.connections.connections
            streams = connection.context.streamer._streams
            largest_step = LargestStep(lambda: -len(streams))
            trio.lowlevel.add_instrument(largest_step)
            if closes_receiving:
                assert isinstance(peer.stream, trio.StapledStream)
                await peer.stream.receive_stream.aclose()
            else:
                await peer.stream.send_eof()
            while streams:
                await trio.lowlevel.checkpoint()
                put(partitions[0], b"key")
            trio.lowlevel.remove_instrument(largest_step)
        assert largest_step.added_count == STEP_STREAMS
        # Only the flusher's cursor is left.
        assert all(len(partition.manager.snapshots.cursors) == 1 for partition in partitions)


async def test_snapshots_of_many_partitions_are_sent_in_several_steps(
    autojump_clock: MockClock,
) -> None:
    server, count = make_server(), 500
    async with connected(server) as first:
        await first.open()
        await server.catalog.create_bucket("wide", count, QUOTA_BYTES)
        async with connected(server) as peer:
            await peer.open("wide")
            for number in range(count):
                request = Stream(
                    PartitionState.ACTIVE,
                    NOTHING_YET,
                    partition=PartitionId(number),
                    opaque=peer.opaque(),
                )
                await peer.send(request)
            await peer.send(Go())
            await peer.receive(CycleEnd)
            for partition in server.catalog.bucket("wide").partitions:
                put(partition, b"key")
            (*_, connection) = server.connections.connections
            largest_step = LargestStep(lambda: connection._writer.bytes_out)
            trio.lowlevel.add_instrument(largest_step)
            sent_before = connection._writer.bytes_out
            await peer.send(Barrier(b"all"))
            await peer.receive(BarrierReply)
            trio.lowlevel.remove_instrument(largest_step)
            # A step sends 1 MiB, and counts each item as 8 KiB: that is 128 of 500 items.
            assert largest_step.added_count < (connection._writer.bytes_out - sent_before) / 3
