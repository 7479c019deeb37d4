"""Connections whose peers have gone are ended some in each turn of the loop."""

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

from tests.server.test_connection import Peer, connected, make_server
from upr_protocol.errors import Status, TlsError
from upr_protocol.limits import HANDSHAKE_TIMEOUT_S, IDLE_INTERVAL_S_DEFAULT
from upr_protocol.session import ServerSession
from upr_protocol.wire import Error, Noop
from upr_server.net import connection
from upr_server.net.connection_ends import ENDS_MAX, ConnectionEnds
from upr_server.net.turns import TURN_CONNECTIONS
from upr_server.runtime import TurnTimer

COUNT = 3 * ENDS_MAX + 1


async def test_thousands_that_leave_together_are_ended_some_in_each_turn() -> None:
    timer, ends = TurnTimer(), ConnectionEnds()
    timer.start()
    turns: dict[int, int] = {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ends.run)

        async def converse(number: int) -> None:
            with trio.CancelScope() as scope:
                await trio.lowlevel.checkpoint()
                ends.add(scope)
                await trio.sleep_forever()
            turns[number] = timer.turn_count

        async with trio.open_nursery() as connections:
            for number in range(COUNT):
                connections.start_soon(converse, number)
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


CROWD: Final = 100


class Happenings(trio.abc.Instrument):
    """What happens to the connections of a server, and how often in the same turn of the loop.

    Attributes:
        total: How often each happened.
        most: How often each happened in one turn at most.
    """

    def __init__(self) -> None:
        self.total = Counter[str]()
        self.most = Counter[str]()
        self._in_turn = Counter[str]()

    def note(self, happening: str) -> None:
        """It happens."""
        self.total[happening] += 1
        self._in_turn[happening] += 1
        self.most[happening] = max(self.most[happening], self._in_turn[happening])

    def before_io_wait(self, timeout: float) -> None:
        """A turn ends."""
        self._in_turn.clear()


class NotedStream(trio.abc.HalfCloseableStream):
    """A server's stream that notes its last word and its end.

    Args:
        stream: The stream.
        happenings: Where these are noted.
        make_error: Makes what is raised when the peer ends the connection; None for its end.
    """

    def __init__(
        self,
        stream: trio.abc.HalfCloseableStream,
        happenings: Happenings,
        make_error: Callable[[], Exception] | None,
    ) -> None:
        self._stream = stream
        self._happenings = happenings
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
        self._happenings.note("last word")
        await self._stream.send_eof()

    async def aclose(self) -> None:
        self._happenings.note("end")
        await self._stream.aclose()


@asynccontextmanager
async def crowd(
    *,
    make_error: Callable[[], Exception] | None = None,
    idle_interval_s: int = IDLE_INTERVAL_S_DEFAULT,
) -> AsyncIterator[tuple[Sequence[Peer], Happenings]]:
    """Peers of a server that ends some connections in each turn, and what happens to them."""
    server, happenings = make_server(connections_max=CROWD), Happenings()
    resources = server.connections.resources
    resources.turn_timer.start()
    trio.lowlevel.add_instrument(happenings)
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        nursery.start_soon(resources.connection_ends.run)
        nursery.start_soon(resources.step_writes.run)
        peers = []
        for _ in range(CROWD):
            own_end, peer_end = trio.testing.memory_stream_pair()
            pair = own_end, NotedStream(peer_end, happenings, make_error)
            peers.append(
                await stack.enter_async_context(
                    connected(server, pair, idle_interval_s=idle_interval_s)
                )
            )
        yield peers, happenings
        trio.lowlevel.remove_instrument(happenings)
        nursery.cancel_scope.cancel()


def leave_together(peers: Sequence[Peer]) -> None:
    """They end their connections in one step."""
    for peer in peers:
        assert isinstance(peer.stream, trio.StapledStream)
        peer.stream.send_stream.close()


async def test_handshakes_that_time_out_together_end_some_in_each_turn(
    autojump_clock: MockClock,
) -> None:
    """The peers hang up, too, as soon as they have heard so: in the same turn in the end."""
    async with crowd() as (peers, happenings):
        await trio.sleep(HANDSHAKE_TIMEOUT_S + 0.1)
        assert 0 < happenings.most["last word"] <= ENDS_MAX
        assert not happenings.most["end"]
        for peer in peers:
            await peer.hangs_up()
            (error,) = peer.heard
            assert isinstance(error, Error)
            assert error.status == Status.IDLE
        leave_together(peers)
        await trio.sleep(0.1)
        assert 0 < happenings.most["end"] <= 2 * TURN_CONNECTIONS


async def test_keep_alives_that_are_due_together_are_sent_some_in_each_turn(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with crowd(idle_interval_s=1) as (peers, happenings):
        tick = ServerSession.tick

        def noted_tick(session: ServerSession, now: float) -> bool:
            happenings.note("look")
            return tick(session, now)

        monkeypatch.setattr(ServerSession, "tick", noted_tick)
        for peer in peers:
            await peer.open()
        began_at = trio.current_time()
        await trio.sleep_until(began_at + 1.5)
        assert happenings.total["look"] == CROWD
        assert happenings.most["look"] <= 2 * TURN_CONNECTIONS
        for peer in peers:
            await peer.hear(Noop)
        assert trio.current_time() == pytest.approx(began_at + 1.5)


class NotedLines:
    """What stands in the log's place, and notes each line."""

    def __init__(self, happenings: Happenings) -> None:
        self.info = self.warning = lambda event, **_: happenings.note(event)


@pytest.mark.parametrize(
    ("make_error", "line"),
    [
        (None, ""),
        (trio.BrokenResourceError, "connection lost"),
        (partial(TlsError, "no certificate that is trusted here"), "TLS failed"),
    ],
)
async def test_connections_that_peers_leave_together_end_some_in_each_turn(
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    make_error: Callable[[], Exception] | None,
    line: str,
) -> None:
    """That a connection broke is logged once for each, when its turn to end has come."""
    async with crowd(make_error=make_error) as (peers, happenings):
        monkeypatch.setattr(connection, "log", NotedLines(happenings))
        for peer in peers:
            await peer.open()
        leave_together(peers)
        await trio.sleep(0.1)
        assert 0 < happenings.most["end"] <= ENDS_MAX
        assert happenings.total[line] == bool(line) * CROWD
        assert happenings.most[line] <= ENDS_MAX


class StepsOnceClosed(trio.abc.Instrument):
    """The steps of a connection that end with its socket closed.

    Attributes:
        count: How many there were.
    """

    def __init__(self, socket: trio.socket.SocketType) -> None:
        self.count = 0
        self._socket = socket

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """A step ends."""
        if task.name.endswith("AcceptedConnection.run") and self._socket.fileno() < 0:
            self.count += 1


async def test_the_step_that_closes_a_socket_is_the_last_of_its_connection() -> None:
    """To end thousands takes steps of each, in which others wait."""
    server = make_server()
    own_end, peer_end = map(trio.SocketStream, trio.socket.socketpair())
    steps = StepsOnceClosed(peer_end.socket)
    trio.lowlevel.add_instrument(steps)
    async with connected(server, (own_end, peer_end)) as peer:
        await peer.open()
        await own_end.aclose()
        while not steps.count:
            await trio.lowlevel.checkpoint()
    trio.lowlevel.remove_instrument(steps)
    assert steps.count == 1
