"""The turns of work that takes more than one step of the loop."""

from __future__ import annotations

from typing import Final, Protocol

import attrs
import trio

SLICE_S: Final = 0.001
"""How long one peer's requests are answered before others have their turn."""

LONG_STEP_S: Final = 0.0005
"""A step that takes at least this time counts as long. If hundreds of connections have long steps,
only some of them have one in each turn of the loop; other connections are answered in every
turn."""

TURN_READ_BYTES: Final = 2 * 1024 * 1024
"""Bytes after which no large read begins in the same turn of the loop. A MiB takes about a
millisecond."""

TURN_WRITE_BYTES: Final = 4 * 1024 * 1024
"""Bytes after which no large write begins in the same turn. A MiB takes half as long to write."""

WRITE_LANES: Final = 3
"""Writers that have their turn together: what they write comes to `TURN_WRITE_BYTES`."""


TURN_STEPS_S: Final = 0.006
"""Seconds in which connections answer requests in one turn of the loop, before those wait whose
last step took long."""

STEP_LANES: Final = 3
"""Connections with long steps that have their turn together: a step takes up to 2 ms."""


TURN_CONNECTIONS: Final = 16
"""Connections that say or end something in one turn of the loop because it is time, before others
wait: at some 100 µs each, 2 ms."""

CONNECTION_LANES: Final = 16
"""Such connections that have their turn together."""

TURN_HANDSHAKES_S: Final = 0.002
"""Seconds of TLS handshakes in one turn of the loop, before others wait. A step of one takes 0.3
ms with a key of an elliptic curve, and 0.6 with one of RSA of 2,048 bits."""

HANDSHAKE_LANES: Final = 2
"""Handshakes that have their turn together."""

HANDSHAKES_QUEUED_MAX: Final = 2 * HANDSHAKE_LANES
"""How many handshakes of one network wait in the queue of all: one for each lane, and the next
one."""


class TurnCounter(Protocol):
    """Counts the loop's turns."""

    turn_count: int


class Turns:
    """The turns of one kind of long work. Of all connections and partitions one has its turn in a
    step of the loop, so that together they hold up others no longer than one does."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = trio.StrictFIFOLock()

    @property
    def has_waiting(self) -> bool:
        """Whether somebody waits for a turn."""
        return self._lock.locked()

    async def next_turn(self) -> None:
        """Waits for a turn, behind those that wait already. It lasts until the next checkpoint."""
        async with self._lock:
            await trio.lowlevel.checkpoint()


class BudgetedTurns:
    """The turns of long work, for instance of large reads: any number of pieces in a turn of the
    loop, until they come to a budget; then one of each lane in each turn, until nobody waits. A few
    connections never wait, and hundreds of them hold up others no longer than a few do.

    Args:
        turn_counter: Counts the loop's turns. If it stands still, each piece waits once the budget
            is used up.
        budget: Bytes, seconds or connections, after which no further piece begins in the same turn.
        lanes: How many of those that wait have their turn together.
    """

    __slots__ = ("_budget", "_lanes", "_next_lane", "_turn", "_turn_counter", "_used_amount")

    def __init__(self, turn_counter: TurnCounter, budget: float, lanes: int = 1) -> None:
        self._turn_counter = turn_counter
        self._budget = budget
        self._lanes = tuple(Turns() for _ in range(lanes))
        self._next_lane = 0
        self._turn = -1
        self._used_amount = 0.0
        """What was used in that turn."""

    @property
    def may_begin(self) -> bool:
        """Whether a piece may begin now."""
        is_new_turn = self._turn != self._turn_counter.turn_count
        is_below = is_new_turn or self._used_amount < self._budget
        return is_below and not any(lane.has_waiting for lane in self._lanes)

    async def next_turn(self) -> None:
        """Waits until a piece may begin, behind those that wait already."""
        lane = self._lanes[self._next_lane]
        self._next_lane = (self._next_lane + 1) % len(self._lanes)
        await lane.next_turn()

    async def take_turn(self, amount: float) -> None:
        """Waits until a piece may begin, if it may not now, and counts it."""
        if not self.may_begin:
            await self.next_turn()
        self.note_used(amount)

    def note_used(self, amount: float) -> None:
        """Counts a piece, once it is done."""
        if self._turn != self._turn_counter.turn_count:
            self._turn, self._used_amount = self._turn_counter.turn_count, 0.0
        self._used_amount += amount


@attrs.define(eq=False)
class NetworkQueue:
    """The handshakes of one network that wait.

    Attributes:
        places: Their places in the queue of all.
        count: How many have one, or wait for one.
    """

    places: trio.CapacityLimiter = attrs.field(
        factory=lambda: trio.CapacityLimiter(HANDSHAKES_QUEUED_MAX)
    )
    count: int = 0


class NetworkTurns:
    """The turns of handshakes as a connection of one network has them. Only some of each network
    wait in the queue of all, and the others behind these. So networks have their turns one after
    the other, and nobody has to wait behind all connections that somebody else has opened.

    Args:
        turns: The turns of all.
        queues: The queues of the networks that wait, which all share.
        network: The network.
    """

    __slots__ = ("_network", "_queues", "_turns")

    def __init__(self, turns: BudgetedTurns, queues: dict[str, NetworkQueue], network: str) -> None:
        self._turns = turns
        self._queues = queues
        self._network = network

    @property
    def may_begin(self) -> bool:
        """Whether a piece may begin now."""
        return self._turns.may_begin

    async def next_turn(self) -> None:
        """Waits until a piece may begin."""
        queue = self._queues.get(self._network)
        if queue is None:
            queue = self._queues[self._network] = NetworkQueue()
        queue.count += 1
        try:
            async with queue.places:
                await self._turns.next_turn()
        finally:
            queue.count -= 1
            if not queue.count:
                del self._queues[self._network]

    def note_used(self, amount: float) -> None:
        """Counts a piece, once it is done."""
        self._turns.note_used(amount)
