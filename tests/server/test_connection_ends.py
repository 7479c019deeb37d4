"""When many peers close their connections at once, the server ends only some of them in each turn
of the event loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Final

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from tests.server.connected_peer import Peer, connected, make_server
from upr_protocol.errors import Status, TlsError
from upr_protocol.limits import HANDSHAKE_TIMEOUT_S, IDLE_INTERVAL_S_DEFAULT
from upr_protocol.session import ServerSession
from upr_protocol.wire import Error, Noop
from upr_server.net import connection
from upr_server.net.connection_ends import ENDS_MAX, ConnectionEnds
from upr_server.net.turns import TURN_CONNECTIONS
from upr_server.runtime import TurnTimer

COUNT = 3 * ENDS_MAX + 1


async def test_scopes_that_are_cancelled_together_end_in_several_turns() -> None:
    timer, ends = TurnTimer(), ConnectionEnds()
    timer.start()
    turns: dict[int, int] = {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ends.run)

        async def stay_connected(number: int) -> None:
            with trio.CancelScope() as scope:
                await trio.lowlevel.checkpoint()
                ends.add(scope)
                await trio.sleep_forever()
            turns[number] = timer.turn_count

        async with trio.open_nursery() as connections:
            for number in range(COUNT):
                connections.start_soon(stay_connected, number)
        nursery.cancel_scope.cancel()
    assert sorted(turns) == list(range(COUNT))
    assert max(Counter(turns.values()).values()) == ENDS_MAX


async def test_connections_end_at_once_while_the_task_that_ends_them_does_not_run() -> None:
    ends = ConnectionEnds()
    before, waiting, after = ([trio.CancelScope() for _ in range(COUNT)] for _ in range(3))
    for scope in before:
        ends.add(scope)
    assert all(scope.cancel_called for scope in before)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ends.run)
        await trio.testing.wait_all_tasks_blocked()
        for scope in waiting:
            ends.add(scope)
        assert not any(scope.cancel_called for scope in waiting)
        nursery.cancel_scope.cancel()
    assert all(scope.cancel_called for scope in waiting)
    for scope in after:
        ends.add(scope)
    assert all(scope.cancel_called for scope in after)


PEERS: Final = 100


class EventsPerTurn(trio.abc.Instrument):
    """Counts events at the connections of a server, in total and in each turn of the event loop.

    Attributes:
        total: How often each event happened.
        most: The most often that each event happened in one turn.
    """

    def __init__(self) -> None:
        self.total = Counter[str]()
        self.most = Counter[str]()
        self._in_turn = Counter[str]()

    def note(self, event: str) -> None:
        """Counts an event."""
        self.total[event] += 1
        self._in_turn[event] += 1
        self.most[event] = max(self.most[event], self._in_turn[event])

    def before_io_wait(self, timeout: float) -> None:
        """A turn of the event loop ends."""
        self._in_turn.clear()


class RecordingStream(trio.abc.HalfCloseableStream):
    """A server's stream that counts its `send_eof` and its close.

    Args:
        stream: The stream.
        events: Counts them.
        make_error: Makes the error to raise when the peer ends the connection; None for none.
    """

    def __init__(
        self,
        stream: trio.abc.HalfCloseableStream,
        events: EventsPerTurn,
        make_error: Callable[[], Exception] | None,
    ) -> None:
        self._stream = stream
        self._events = events
        self._make_error = make_error

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        data = await self._stream.receive_some(max_bytes)
        if self._make_error is not None and not data:
            raise self._make_error()
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        self._events.note("send_eof")
        await self._stream.send_eof()

    async def aclose(self) -> None:
        self._events.note("close")
        await self._stream.aclose()


@asynccontextmanager
async def many_connected_peers(
    *,
    make_error: Callable[[], Exception] | None = None,
    idle_interval_s: int = IDLE_INTERVAL_S_DEFAULT,
) -> AsyncIterator[tuple[Sequence[Peer], EventsPerTurn]]:
    """Many peers that are connected to a server, and the events at the server's connections."""
    server, events = make_server(connections_max=PEERS), EventsPerTurn()
    resources = server.connections.resources
    resources.turn_timer.start()
    trio.lowlevel.add_instrument(events)
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        nursery.start_soon(resources.connection_ends.run)
        nursery.start_soon(resources.step_writes.run)
        peers = []
        for _ in range(PEERS):
            own_end, peer_end = trio.testing.memory_stream_pair()
            pair = own_end, RecordingStream(peer_end, events, make_error)
            peers.append(
                await stack.enter_async_context(
                    connected(server, pair, idle_interval_s=idle_interval_s)
                )
            )
        yield peers, events
        trio.lowlevel.remove_instrument(events)
        nursery.cancel_scope.cancel()


def close_together(peers: Sequence[Peer]) -> None:
    """Closes the connections of all peers in one step."""
    for peer in peers:
        assert isinstance(peer.stream, trio.StapledStream)
        peer.stream.send_stream.close()


async def test_handshakes_that_time_out_together_end_in_several_turns(
    autojump_clock: MockClock,
) -> None:
    """Then the peers close their ends, too, all in the same turn."""
    async with many_connected_peers() as (peers, events):
        await trio.sleep(HANDSHAKE_TIMEOUT_S + 0.1)
        assert 0 < events.most["send_eof"] <= ENDS_MAX
        assert not events.most["close"]
        for peer in peers:
            await peer.wait_for_end()
            (error,) = peer.received
            assert isinstance(error, Error)
            assert error.status == Status.IDLE
        close_together(peers)
        await trio.sleep(0.1)
        assert 0 < events.most["close"] <= 2 * TURN_CONNECTIONS


async def test_keep_alives_that_are_due_together_are_sent_in_several_turns(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with many_connected_peers(idle_interval_s=1) as (peers, events):
        tick = ServerSession.tick

        def tick_and_count(session: ServerSession, now: float) -> bool:
            events.note("tick")
            return tick(session, now)

        monkeypatch.setattr(ServerSession, "tick", tick_and_count)
        for peer in peers:
            await peer.open()
        began_at = trio.current_time()
        await trio.sleep_until(began_at + 1.5)
        assert events.total["tick"] == PEERS
        assert events.most["tick"] <= 2 * TURN_CONNECTIONS
        for peer in peers:
            await peer.receive(Noop)
        assert trio.current_time() == pytest.approx(began_at + 1.5)


class CountingLog:
    """Replaces the log, and counts each line by its event."""

    def __init__(self, events: EventsPerTurn) -> None:
        self.info = self.warning = lambda event, **_: events.note(event)


@pytest.mark.parametrize(
    ("make_error", "line"),
    [
        (None, ""),
        (trio.BrokenResourceError, "connection lost"),
        (partial(TlsError, "no certificate that is trusted here"), "TLS failed"),
    ],
)
async def test_connections_that_peers_close_together_end_in_several_turns(
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    make_error: Callable[[], Exception] | None,
    line: str,
) -> None:
    """Each broken connection is logged once, in the turn in which it ends."""
    async with many_connected_peers(make_error=make_error) as (peers, events):
        monkeypatch.setattr(connection, "log", CountingLog(events))
        for peer in peers:
            await peer.open()
        close_together(peers)
        await trio.sleep(0.1)
        assert 0 < events.most["close"] <= ENDS_MAX
        assert events.total[line] == bool(line) * PEERS
        assert events.most[line] <= ENDS_MAX


class StepsAfterClose(trio.abc.Instrument):
    """Counts the steps of a connection after which its socket is closed.

    Attributes:
        count: How many there were so far: the step that closes it, and later ones.
    """

    def __init__(self, socket: trio.socket.SocketType) -> None:
        self.count = 0
        self._socket = socket

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """A step of a task ends."""
        if task.name.endswith("AcceptedConnection.run") and self._socket.fileno() < 0:
            self.count += 1


async def test_the_step_that_closes_a_socket_is_the_last_of_its_connection() -> None:
    """Otherwise, when thousands of connections end, each would need more steps, and other tasks
    would wait."""
    server = make_server()
    own_end, peer_end = map(trio.SocketStream, trio.socket.socketpair())
    steps = StepsAfterClose(peer_end.socket)
    trio.lowlevel.add_instrument(steps)
    async with connected(server, (own_end, peer_end)) as peer:
        await peer.open()
        await own_end.aclose()
        while not steps.count:
            await trio.lowlevel.checkpoint()
    trio.lowlevel.remove_instrument(steps)
    assert steps.count == 1
