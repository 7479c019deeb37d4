"""Messages that a step of a reader queues are written at the end of the step, without waking
writers."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import pytest
import trio
import trio.testing

from tests.server.connected_peer import Peer, connected, make_server, sets
from tests.server.recorded_writes import Recorder
from upr_protocol.ids import PartitionId
from upr_protocol.wire import Credit, CycleEnd, Go, Noop, PartitionSnapshot
from upr_server.app import Server
from upr_server.net.step_writes import DIRECT_BYTES, DIRECT_MAX, WOKEN_MAX, StepWrites


def test_each_connection_is_written_to_once_at_the_end_of_a_step() -> None:
    writes = StepWrites()
    connections = [Recorder(writes) for _ in range(DIRECT_MAX + 2)]
    writes.add(connections[0])
    assert connections[0].calls == ["woken"]
    writes.begin(connections[0])
    for connection in connections * 2:
        writes.add(connection)
    assert [len(connection.calls) for connection in connections[1:]] == [0] * (DIRECT_MAX + 1)
    writes.end(0.0)
    written = [connection.calls for connection in connections]
    assert written[0] == ["woken", "written", "woken"]
    assert written[1:DIRECT_MAX] == [["written", "woken"]] * (DIRECT_MAX - 1)
    assert written[DIRECT_MAX:] == [["woken"]] * 2
    # The connection whose step it is is always written to.
    writes.begin(connections[1])
    writes.end(0.0)
    written[1] += ["written", "woken"]
    assert [connection.calls for connection in connections] == written


def test_a_step_writes_a_bounded_number_of_bytes() -> None:
    writes = StepWrites()
    connections = [Recorder(writes, DIRECT_BYTES // 2) for _ in range(4)]
    writes.begin(connections[0])
    for connection in connections:
        writes.add(connection)
    writes.end(0.0)
    assert [connection.calls for connection in connections] == [["written", "woken"]] * 2 + [
        ["woken"]
    ] * 2


def test_a_connection_that_cannot_be_written_to_does_not_keep_others_waiting() -> None:
    writes = StepWrites()

    class Failing(Recorder):
        def flush_now(self, now: float) -> int:
            raise ValueError("a fault of this connection")

    connections = [Recorder(writes), Failing(writes), Recorder(writes)]
    writes.begin(connections[0])
    for connection in connections:
        writes.add(connection)
    writes.end(0.0)
    assert [connection.calls for connection in connections] == [
        ["written", "woken"],
        ["woken"],
        ["written", "woken"],
    ]


async def test_very_many_writers_are_woken_some_in_each_turn() -> None:
    writes = StepWrites()
    connections = [Recorder(writes) for _ in range(3 * WOKEN_MAX)]

    def woken_count() -> int:
        return sum(connection.calls == ["woken"] for connection in connections)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(writes.run)
        await trio.testing.wait_all_tasks_blocked()
        for connection in connections:
            writes.add(connection)
        counts = [woken_count()]
        while counts[-1] < len(connections):
            await trio.lowlevel.checkpoint()
            counts.append(woken_count())
        assert sorted(set(counts)) == [WOKEN_MAX, 2 * WOKEN_MAX, 3 * WOKEN_MAX]
        for connection in connections:
            writes.add(connection)
        nursery.cancel_scope.cancel()
    assert all(connection.calls == ["woken", "woken"] for connection in connections)


class StepCounter(trio.abc.Instrument):
    """Counts the steps of tasks, by the names of their functions."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.counts[".".join(task.name.rsplit(".", 2)[1:])] += 1


@asynccontextmanager
async def over_a_socket(server: Server) -> AsyncIterator[Peer]:
    own_end, peer_end = (trio.SocketStream(end) for end in trio.socket.socketpair())
    async with connected(server, (own_end, peer_end)) as peer:
        await peer.open()
        yield peer


@asynccontextmanager
async def a_consumer(server: Server) -> AsyncIterator[Peer]:
    """A peer whose streams have caught up."""
    async with over_a_socket(server) as peer:
        await peer.ask()
        await peer.send(Go())
        await peer.receive(CycleEnd)
        yield peer


READING: Final = "AcceptedConnection._read"
WRITING: Final = "AcceptedConnection.run"


async def test_a_mutation_reaches_its_consumer_without_a_step_of_a_writer(
    mock_clock: trio.testing.MockClock,
) -> None:
    server = make_server()
    async with connected(server) as first, over_a_socket(server) as publisher:
        await first.open()
        async with a_consumer(server) as consumer:
            # The first mutation causes more messages: credit, and the start of the first snapshot.
            await publisher.mutate(sets(b"k"))
            await publisher.receive(Credit)
            await consumer.receive(CycleEnd)
            await trio.testing.wait_all_tasks_blocked()
            counter = StepCounter()
            trio.lowlevel.add_instrument(counter)
            await publisher.mutate(sets(b"l"), PartitionId(0))
            await consumer.receive(PartitionSnapshot)
            await trio.testing.wait_all_tasks_blocked()
            assert (counter.counts[READING], counter.counts[WRITING]) == (1, 0)
            # A message from a consumer wakes no writer either.
            await consumer.send(Noop())
            await trio.testing.wait_all_tasks_blocked()
            assert (counter.counts[READING], counter.counts[WRITING]) == (2, 0)
            trio.lowlevel.remove_instrument(counter)


async def test_a_failed_write_to_a_consumer_ends_only_that_connection(
    mock_clock: trio.testing.MockClock,
) -> None:
    server = make_server()
    async with connected(server) as first, over_a_socket(server) as publisher:
        await first.open()
        async with a_consumer(server) as consumer:
            (*_, connection) = server.connections.connections
            stream = connection._stream
            assert isinstance(stream, trio.SocketStream)
            # As if the peer had reset the connection: the next write fails before a read does.
            stream.socket.shutdown(trio.socket.SHUT_WR)
            assert (await publisher.mutate(sets(b"k"))).runs[0].status == 0
            # The writer has received the error, and has closed the socket.
            await trio.testing.wait_all_tasks_blocked(0.01)
            with pytest.raises(trio.BrokenResourceError):
                await consumer.send(Noop())
        assert (await publisher.mutate(sets(b"l"))).runs[0].status == 0
