"""A network of hosts whose links are slow, jittery, cut one way or both, and lose connections.

What TCP promises holds: the bytes of a connection come in order and whole, until it breaks.
Different connections overtake each other. A link that is cut holds back what is on its way until it
is mended, as retransmissions would.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Final

import attrs
import trio

from tests.simulation.bugs.patch import replaced
from tests.simulation.world import JumpingClock
from upr_protocol.chunk import Buffer
from upr_protocol.client import Address
from upr_protocol.client.trio import connection as client_end
from upr_protocol.transport import write_now
from upr_protocol.transport.socket_io import unsent
from upr_server.net import connection as server_end
from upr_server.net import connection_writer as server_writer

WINDOW_BYTES: Final = 64 * 1024
"""What a connection holds of each direction, sent and not yet received."""

ENDLESS: Final = 1 << 62

FAST_BYTES_PER_S: Final = 1e9

PORT: Final = 12000
"""Where every host listens that listens at all."""


@attrs.define(eq=False)
class Link:
    """The way from one host to another.

    Attributes:
        delay_s: How long bytes are under way, at least.
        jitter_s: What may come on top.
        bytes_per_s: How many get through; a trickle, if few.
        is_cut: Whether nothing gets through.
    """

    delay_s: float
    jitter_s: float
    bytes_per_s: float = FAST_BYTES_PER_S
    is_cut: bool = False
    _wait: list[trio.Event] = attrs.field(factory=list)
    _held_up: dict[Pipe, None] = attrs.field(factory=dict)

    def cut(self) -> None:
        """Nothing gets through any more."""
        self.is_cut = True

    def mend(self) -> None:
        """All is well, and fast; also for what is on its way."""
        self.is_cut, self.bytes_per_s = False, FAST_BYTES_PER_S
        held_up, self._held_up = self._held_up, {}
        for pipe in held_up:
            pipe.hurry()
        waiting, self._wait = self._wait, []
        for event in waiting:
            event.set()

    def holds_up(self, pipe: Pipe) -> None:
        """What `pipe` carries now takes long, until this is mended."""
        self._held_up[pipe] = None

    def when_mended(self, event: trio.Event) -> None:
        """Sets `event` when something gets through again."""
        self._wait.append(event)

    async def mended(self) -> None:
        """Waits until something gets through."""
        while self.is_cut:
            event = trio.Event()
            self.when_mended(event)
            await event.wait()


class Pipe:
    """One direction of a connection.

    Args:
        clock: Says when something has come.
        link: The way it takes.
        chance: For its jitter.
        bytes_max: After so many bytes the connection is reset.
        on_reset: Called then.
    """

    def __init__(
        self,
        clock: JumpingClock,
        link: Link,
        chance: Random,
        bytes_max: int,
        on_reset: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._link = link
        self._chance = chance
        self._left = bytes_max
        self._on_reset = on_reset
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._nbytes = 0
        self._due_at = 0.0
        # What who waits for: that there is a reason to look again, and room to send more.
        self._look = trio.Event()
        self._taken = trio.Event()
        self.is_broken = self.is_ended = self.is_dead = False

    def reset(self) -> None:
        """Both ends hear that the connection is gone, and what is on its way is lost."""
        self.is_broken = True
        self._pieces.clear()
        self._wake_all()

    def fall_silent(self) -> None:
        """The machine at one end is gone: nothing comes out any more, and nobody is told."""
        self.is_dead = True
        self._wake_all()

    def _wake_all(self) -> None:
        self._look.set()
        self._taken.set()

    def end(self) -> None:
        """The sender says no more."""
        if not (self.is_ended or self.is_broken):
            self.is_ended = True
            self._push(b"")

    def _push(self, data: bytes) -> None:
        link, now = self._link, self._clock.current_time()
        delay_s = link.delay_s + self._chance.random() * link.jitter_s
        self._due_at = max(self._due_at, now + delay_s) + len(data) / link.bytes_per_s
        self._pieces.append((self._due_at, data))
        self._nbytes += len(data)
        if link.bytes_per_s < FAST_BYTES_PER_S:
            link.holds_up(self)
        if self._due_at <= now:
            self._look.set()
        elif len(self._pieces) == 1:
            self._clock.set_at(self._due_at, self._look)

    def hurry(self) -> None:
        """What trickled comes at once: it has been sent long ago."""
        self._due_at = self._clock.current_time()
        self._pieces = deque((min(due_at, self._due_at), data) for due_at, data in self._pieces)
        self._look.set()

    async def send(self, data: bytes) -> None:
        """Waits for room, a window at a time."""
        await trio.lowlevel.checkpoint()
        sent_bytes = self.send_now(data)
        while sent_bytes < len(data):
            self._taken = trio.Event()
            await self._taken.wait()
            sent_bytes += self.send_now(data[sent_bytes:])

    def send_now(self, data: bytes) -> int:
        """Takes what there is room for; how much that is."""
        if self._left <= 0 and data:
            self._on_reset()
        if self.is_broken or self.is_ended:
            raise trio.BrokenResourceError("the simulated connection is gone")
        room = min(WINDOW_BYTES - self._nbytes, len(data), self._left)
        if room < min(WINDOW_BYTES // 2, len(data), self._left):
            return 0  # not in ever smaller pieces
        if room:
            self._left -= room
            self._push(data[:room])
        return room

    async def receive(self, bytes_max: int) -> bytes:
        """What has come; nothing at the end."""
        if self._is_there:
            await trio.lowlevel.checkpoint()
        while not self._is_there:
            self._look = trio.Event()
            if self._link.is_cut:
                self._link.when_mended(self._look)
            elif self._pieces and not self.is_dead:
                self._clock.set_at(self._pieces[0][0], self._look)
            await self._look.wait()
        return self._take(bytes_max)

    @property
    def _is_there(self) -> bool:
        """Whether something has come that nobody took yet."""
        if self.is_broken:
            raise trio.BrokenResourceError("the simulated connection was reset")
        return self._next_due_at <= self._clock.current_time()

    @property
    def _next_due_at(self) -> float:
        """When the next piece comes, as far as is known."""
        if self.is_dead or self._link.is_cut or not self._pieces:
            return math.inf
        return self._pieces[0][0]

    def _take(self, bytes_max: int) -> bytes:
        now, pieces = self._clock.current_time(), []
        # An end stays where it is, for whoever asks again.
        while self._pieces and bytes_max and self._pieces[0][0] <= now and self._pieces[0][1]:
            due_at, data = self._pieces.popleft()
            if len(data) > bytes_max:
                self._pieces.appendleft((due_at, data[bytes_max:]))
                data = data[:bytes_max]
            pieces.append(data)
            bytes_max -= len(data)
            self._nbytes -= len(data)
        self._taken.set()
        return b"".join(pieces)

    async def has_room(self) -> None:
        """Waits until something can be sent."""
        await trio.lowlevel.checkpoint()
        while self._nbytes >= WINDOW_BYTES and not self.is_broken:
            self._taken = trio.Event()
            await self._taken.wait()


class SimulatedStream(trio.abc.HalfCloseableStream):
    """One end of a connection."""

    def __init__(self, out: Pipe, back: Pipe) -> None:
        self._out = out
        self._back = back
        self._closed = False

    def _check(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("it was closed here")

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self._check()
        await self._out.send(bytes(data))

    def send_now(self, data: bytes) -> int:
        """Takes what there is room for, as a socket does; how much that is."""
        self._check()
        return self._out.send_now(data)

    async def wait_send_all_might_not_block(self) -> None:
        self._check()
        await self._out.has_room()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        self._check()
        return await self._back.receive(max_bytes or WINDOW_BYTES)

    async def send_eof(self) -> None:
        self._check()
        self._out.end()
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._out.end()
            # A side that goes on sending here is told. Nothing is waited for: most are closed by
            # those who are cancelled, and to be told so once more is a cancel scope each time.
            self._back.reset()


def _write_now(stream: trio.abc.SendStream, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
    if not isinstance(stream, SimulatedStream):
        return write_now(stream, buffers)
    return unsent(buffers, stream.send_now(b"".join(buffers)))


@contextmanager
def taken_at_once() -> Iterator[None]:
    """Has both ends of simulated connections go the way that they go with sockets: what there is
    room for is written at once, by whoever has it, and the rest by a task that waits."""
    with (
        replaced(client_end, "write_now", _write_now),
        replaced(server_end, "write_now", _write_now),
        replaced(server_writer, "write_now", _write_now),
    ):
        yield


@attrs.define(eq=False)
class Host:
    """A machine.

    Attributes:
        name: Its name.
        connections: Those that it is an end of.
    """

    name: str
    connections: dict[Connection, None] = attrs.field(factory=dict)
    listening: trio.MemorySendChannel[SimulatedStream] | None = None
    is_silent: bool = False


@attrs.define(eq=False)
class Connection:
    """Both directions of one, and the hosts at its ends."""

    hosts: tuple[Host, Host]
    pipes: list[Pipe] = attrs.field(factory=list)

    def reset(self) -> None:
        """It breaks, and both ends are told."""
        for pipe in self.pipes:
            pipe.reset()
        self.forget()

    def fall_silent(self) -> None:
        """It breaks, and nobody is told."""
        for pipe in self.pipes:
            pipe.fall_silent()

    def forget(self) -> None:
        """Nobody has to be told any more."""
        for host in self.hosts:
            host.connections.pop(self, None)


class SimulatedListener(trio.abc.Listener[SimulatedStream]):
    """Where a host takes connections."""

    def __init__(self, host: Host) -> None:
        self._host = host
        host.listening, self._waiting = trio.open_memory_channel[SimulatedStream](1000)

    async def accept(self) -> SimulatedStream:
        try:
            return await self._waiting.receive()
        except trio.EndOfChannel as error:
            raise trio.ClosedResourceError from error

    async def aclose(self) -> None:
        if self._host.listening is not None:
            self._host.listening.close()
            self._host.listening = None
        self._waiting.close()
        await trio.lowlevel.checkpoint()


class Network:
    """See the module.

    Args:
        clock: The world's.
        chance: For all that is drawn here.
        delay_s: What links delay, at least.
        jitter_s: What may come on top.

    Attributes:
        clock: See above.
        reset_chance: How likely a new connection is to be one that is reset after some bytes.
        resets: How many connections were.
    """

    def __init__(
        self, clock: JumpingClock, chance: Random, delay_s: float, jitter_s: float
    ) -> None:
        self.clock = clock
        self._chance = chance
        self._delay_s = delay_s
        self._jitter_s = jitter_s
        self._hosts: dict[str, Host] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self.reset_chance = 0.0
        self.resets = 0

    def host(self, name: str) -> Host:
        """The host of this name; made when it is asked for."""
        return self._hosts.setdefault(name, Host(name))

    def link(self, start: str, end: str) -> Link:
        """The way from one host to another."""
        link = self._links.get((start, end))
        if link is None:
            link = self._links[start, end] = Link(self._delay_s, self._jitter_s)
        return link

    def listen(self, name: str) -> SimulatedListener:
        """Has a host take connections."""
        return SimulatedListener(self.host(name))

    async def dial(self, start: str, address: Address) -> trio.abc.Stream:
        """Connects, as a `Dial` does for the host `start`."""
        here, there = self.host(start), self.host(address.host)
        out, back = self.link(start, there.name), self.link(there.name, start)
        await out.mended()
        await self.clock.sleep(out.delay_s + back.delay_s)
        await back.mended()
        if there.is_silent or here.is_silent:
            await trio.sleep_forever()
        if there.listening is None or address.port != PORT:
            raise ConnectionRefusedError(f"nobody listens at {address}")
        connection = Connection((here, there))

        def reset() -> None:
            self.resets += 1
            connection.reset()

        bytes_max = [ENDLESS, ENDLESS]
        if self._chance.random() < self.reset_chance:
            # Greetings take some hundred bytes, and are to be cut as often as what follows.
            bytes_max[self._chance.randrange(2)] = int(4 ** (self._chance.random() * 9))
        connection.pipes = [
            Pipe(self.clock, link, self._chance, most, reset)
            for link, most in zip((out, back), bytes_max, strict=True)
        ]
        for host in connection.hosts:
            host.connections[connection] = None
        there.listening.send_nowait(SimulatedStream(connection.pipes[1], connection.pipes[0]))
        return SimulatedStream(connection.pipes[0], connection.pipes[1])

    # What happens to machines.

    def crash(self, name: str, *, silently: bool) -> None:
        """A machine is gone: its connections break, and the others are told, or are not."""
        host = self.host(name)
        host.is_silent = silently
        for connection in list(host.connections):
            if silently:
                connection.fall_silent()
            else:
                connection.reset()

    def come_back(self, name: str) -> None:
        """It is there again, and knows nothing of the connections that it had."""
        host = self.host(name)
        host.is_silent = False
        for connection in list(host.connections):
            connection.reset()

    def break_all(self, chance: Random) -> None:
        """Resets some of the connections there are."""
        connections = dict.fromkeys(
            connection for host in self._hosts.values() for connection in host.connections
        )
        for connection in connections:
            if chance.random() < 0.5:
                self.resets += 1
                connection.reset()

    def break_between(self, name: str, other_names: Collection[str]) -> None:
        """Resets the connections of one host with some others."""
        for connection in list(self.host(name).connections):
            if any(host.name in other_names for host in connection.hosts):
                self.resets += 1
                connection.reset()

    def mend(self) -> None:
        """Every link is whole, and connections last."""
        self.reset_chance = 0.0
        for link in self._links.values():
            link.mend()
