"""One connection to each node that is needed, after the partition map.

The first connection goes to the address that the user gave. A node there that holds the bucket
alone has all partitions. Otherwise it is asked for the map, and from then on each partition is with
the node that the map names. When a node does not take what is asked of it, or is away, every node
that is known is asked for its map, and the newest counts; while there is no node for a partition
they are asked again and again, less and less often. A node to which there is a connection is asked
on it, and the others on connections that are kept while there is a reason to ask: a failover makes
every client ask, and each connection is work for the nodes that are left.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import Final, Generic, Protocol, TypeVar

import attrs
import trio

from upr_protocol.address import Address
from upr_protocol.client.core.backoff import Backoff
from upr_protocol.client.core.metadata import ClusterMetadata
from upr_protocol.client.core.retry import RetryPolicy
from upr_protocol.client.trio.connection import (
    Connection,
    ConnectionHandler,
    TrioOptions,
    open_connection,
)
from upr_protocol.client.trio.map_connection import MapConnection
from upr_protocol.client.trio.map_request import MapRequest
from upr_protocol.client.trio.node_client import partition_map_of
from upr_protocol.errors import BrokenError, ClosedError, ServerError, Status, UprError
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.wire import MapReply

LIVED_S: Final = 10.0
"""A connection that lasted so long was a good one: its loss is a first failure."""

PAUSE_MAX_S: Final = 0.5
"""Between two rounds of asking for the map: a partition that nobody takes is not waited for much
longer than it takes to give it to another node."""

CALM_S: Final = 2.0
"""After so long without a round of asking the next one is a first one."""

_GRACE_S: Final = 0.1
"""How long a node may take to answer on a connection that it is busy with."""


class NodeHandler(ConnectionHandler, Protocol):
    """A handler that lives through several connections to one node.

    Attributes:
        patience: Told of progress.
    """

    patience: RetryPolicy

    async def drain(self) -> None:
        """Waits until closing the connection takes nothing from anybody: what was asked on it may
        have been done, and is not asked again."""


M = TypeVar("M", bound=NodeHandler)


class PoolClient(Protocol[M]):
    """Whose connections they are."""

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to connect for."""

    @property
    def partitions(self) -> Iterable[PartitionId]:
        """Those that want a node."""

    def is_waiting_for(self, partition: PartitionId) -> bool:
        """Whether something waits until `partition` has a node."""

    def new_handler(self) -> M:
        """A handler for one more node."""

    def place(self, partition: PartitionId, handler: M | None) -> None:
        """`partition` is with this node now; None while it is with none."""

    def remove_handler(self, handler: M) -> None:
        """The node is not needed any more."""


@attrs.define(eq=False)
class _Node(Generic[M]):
    """A node that is needed.

    Attributes:
        address: Where it is. That of the node that is met first may name several places: one after
            the other is tried.
        handler: Who deals with it.
        connection: The connection to it; None while there is none.
        map_request: What it was asked about its map on this connection.
        is_down: Whether the last connection, or attempt to make one, failed.
    """

    address: Address
    handler: M
    connection: Connection | None = None
    map_request: MapRequest = attrs.field(factory=MapRequest)
    is_down: bool = False
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    @property
    def is_up(self) -> bool:
        """Whether there is a connection."""
        return self.connection is not None

    def ask(self) -> bool:
        """Asks it for its map, if there is a connection; whether it may yet answer. While it is
        connected to there is no need: it says which map it has when it greets."""
        if self.connection is None:
            return not self.is_down
        return self.map_request.ask(self.connection, self.address.bucket, _GRACE_S)


class ConnectionPool(Generic[M]):
    """Keeps the connections that a client needs.

    Args:
        address: Where to begin.
        options: How to connect.
        client: Whose connections they are.
        state: What a node must be for a partition to be of use for it.
        by_map: Whether to go by the map at all, and not to stay with the address.
        patience_s: How long to go on without a node for a partition that is waited for.
        draw: Gives numbers in [0, 1), for the waits between attempts.
        opened: The partitions whose histories are of interest; none for all.

    Attributes:
        metadata: What is known of the map.
        last_failure: Why the last connection, or attempt to make one, ended; empty at first.
        settled: Set when it is known for the first time where all partitions are: the map is here,
            or there is none, and each node that it names was reached or could not be.
    """

    def __init__(
        self,
        address: Address,
        options: TrioOptions,
        client: PoolClient[M],
        *,
        patience_s: float,
        state: PartitionState = PartitionState.ACTIVE,
        by_map: bool = True,
        draw: Callable[[], float] = random.random,
        opened: tuple[PartitionId, ...] = (),
    ) -> None:
        self.metadata = ClusterMetadata(address, by_map=by_map)
        self.last_failure = ""
        self.settled = trio.Event()
        self._options = options
        self._client = client
        self._state = state
        self._patience_s = patience_s
        self._draw = draw
        self._opened = opened
        self._error: UprError | None = None
        self._nursery: trio.Nursery | None = None
        self._nodes: list[_Node[M]] = []
        self._was_connected = False
        self._where: dict[PartitionId, Address | None] = {}
        self._unplaced_since: dict[PartitionId, float] = {}
        self._refusals: dict[PartitionId, UprError] = {}
        self._rests: dict[PartitionId, float] = {}
        self._backoffs: dict[PartitionId, Backoff] = {}
        self._doubted = False
        self._wake = trio.Event()
        self._pauses = Backoff(draw, cap_s=PAUSE_MAX_S)
        self._round_at = -math.inf
        self._map_connections: dict[Address, MapConnection] = {}

    async def run(self) -> None:
        """Connects and stays connected until the client is finished. Cancelled, it closes its
        connections.

        The addresses that the user gave are tried once: what never answered is more likely wrong
        than away.

        Raises:
            UprError: There is no use in going on.
        """
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            node = _Node(self.metadata.address, self._client.new_handler())
            self._nodes.append(node)
            nursery.start_soon(self._attend, node)
            nursery.start_soon(self._watch)
        if self._error is not None:
            raise self._error

    def _end(self, error: UprError | None) -> None:
        if self._error is None:
            self._error = error
        assert self._nursery is not None
        self._nursery.cancel_scope.cancel()

    # One node.

    async def _attend(self, node: _Node[M]) -> None:
        with node.scope:
            try:
                await self._stay_connected(node)
            except UprError as error:
                self._end(error)

    async def _stay_connected(self, node: _Node[M]) -> None:
        tried = 0
        while True:
            error: UprError = ClosedError("the connection was closed here")
            places = node.address.each()
            place = places[tried % len(places)]
            try:
                async with open_connection(
                    place, self._options, node.handler, self._opened
                ) as connection:
                    connected_at = trio.current_time()
                    await connection.ended.wait()
                    if trio.current_time() - connected_at >= LIVED_S:
                        node.handler.patience.progress()
                    if connection.failure is not None:
                        error = connection.failure
            except UprError as failure:
                error = failure
            was_up, node.connection, node.is_down = node.is_up, None, True
            if self._client.finished:
                self._end(None)
                return
            tried += not was_up
            if not self._was_connected:
                if tried < len(places):
                    continue
                raise error
            self.last_failure = str(error)
            self._settle()
            self.doubt()
            await trio.sleep(node.handler.patience.wait_s(self._judged(error), trio.current_time()))

    async def _let_go(self, node: _Node[M]) -> None:
        """Closes the connection to a node that is not needed any more."""
        await node.handler.drain()
        node.scope.cancel()

    def _judged(self, error: UprError) -> UprError:
        """What is final of the only node need not be so of one among several."""
        refused = isinstance(error, ServerError) and error.status is Status.NO_BUCKET
        return BrokenError(str(error)) if refused and self.metadata.revision else error

    def connected(self, handler: M, connection: Connection) -> None:
        """A handler's connection has come as far as that the bucket is open; called before the
        handler begins."""
        self._was_connected = True
        node = self._node_of(handler)
        if node is None:
            return  # it was dismissed this moment
        node.connection, node.map_request, node.is_down = connection, MapRequest(), False
        was_alone = self.metadata.is_alone
        self.metadata.note_revision(connection.handshake.map_revision)
        if was_alone:
            # All partitions are here; or none is anywhere, before the map is.
            self._route()
        if self.metadata.is_stale:
            node.ask()
        self._settle()

    def _node_of(self, handler: M) -> _Node[M] | None:
        return next((node for node in self._nodes if node.handler is handler), None)

    def _settle(self) -> None:
        if self.metadata.is_stale:
            return
        if all(node.is_up or node.is_down for node in self._nodes):
            self.settled.set()

    # What members hear.

    def told(self, handler: M, reply: MapReply) -> None:
        """A node told its map.

        Raises:
            RemoteProtocolError: It is none.
        """
        node = self._node_of(handler)
        if node is not None:
            node.map_request.waits = False
        self._learn(reply)

    def _learn(self, reply: MapReply) -> None:
        found = partition_map_of(reply)
        if found is not None and self.metadata.take(found):
            self._rests.clear()
            self._pauses.reset()
            self._round_at = -math.inf
            self._route()
            self._settle()
            self._wake.set()

    def doubt(self, map_revision: int = 0) -> None:
        """The map may be an old one; some node has this revision."""
        self.metadata.note_revision(map_revision)
        self._doubted = True
        self._wake.set()

    def refused(self, partition: PartitionId, error: UprError, map_revision: int) -> None:
        """The node that a partition is with does not take it, or not any more."""
        backoff = self._backoffs.setdefault(partition, Backoff(self._draw, cap_s=PAUSE_MAX_S))
        now = trio.current_time()
        self._rests[partition] = now + backoff.next_wait_s()
        self._where[partition] = None
        self._unplaced_since.setdefault(partition, now)
        self._refusals[partition] = error
        self.last_failure = str(error)
        self.doubt(map_revision)

    def refusal_of(self, partition: PartitionId) -> UprError | None:
        """Why a partition is with no node: the map names none, or the one that it names did not
        take it; None when neither is known."""
        nobody = self.metadata.no_holder_text(partition, self._state)
        return BrokenError(nobody) if nobody else self._refusals.get(partition)

    def works(self, partition: PartitionId) -> None:
        """The node that a partition is with does what is asked of it."""
        self._unplaced_since.pop(partition, None)
        if self._refusals.pop(partition, None) is not None:
            self._backoffs.pop(partition, None)

    # All nodes.

    def _route(self) -> None:
        """Gives each partition the node that the map names, as far as it names one."""
        client, nursery = self._client, self._nursery
        assert nursery is not None
        for node in self._nodes:
            if node.connection is not None and not self.metadata.is_alone:
                node.address = node.connection.address
        before, self._where = self._where, {}
        for partition in client.partitions:
            self._where[partition] = self._home(partition, before.get(partition))
        needed = {address for address in self._where.values() if address is not None}
        for node in list(self._nodes):
            if needed and node.address not in needed:
                self._nodes.remove(node)
                for partition, address in before.items():
                    if address == node.address:
                        client.place(partition, None)
                client.remove_handler(node.handler)
                nursery.start_soon(self._let_go, node)
        at = {node.address: node for node in self._nodes}
        for address in sorted(needed - at.keys(), key=str):
            at[address] = _Node(address, client.new_handler())
            self._nodes.append(at[address])
            nursery.start_soon(self._attend, at[address])
        for partition, address in self._where.items():
            client.place(partition, at[address].handler if address is not None else None)

    def _home(self, partition: PartitionId, current: Address | None) -> Address | None:
        """The node for a partition; None while there is none, and while it rests."""
        now = trio.current_time()
        rests = self._rests.get(partition, now) > now
        chosen = None if rests else self._choose(partition, current)
        if chosen is None:
            self._unplaced_since.setdefault(partition, now)
        elif not self._client.is_waiting_for(partition):
            # Nothing may come that shows that it works, and what comes has its whole patience.
            self._unplaced_since.pop(partition, None)
        return chosen

    def _choose(self, partition: PartitionId, current: Address | None) -> Address | None:
        """The node for a partition: where it is, if that will do; or the first that is not known to
        be away."""
        holders = self.metadata.holders(partition, self._state)
        away = {node.address for node in self._nodes if node.is_down}
        good = [address for address in holders if address not in away]
        if current in good:
            return current
        return next(iter(good or holders), None)

    @property
    def _uneasy(self) -> bool:
        """Whether the map is to be asked for."""
        return not self.metadata.is_alone and (
            self._doubted
            or self.metadata.is_stale
            or None in self._where.values()
            or not all(node.is_up for node in self._nodes)
        )

    async def _watch(self) -> None:
        """Asks for the map whenever there is a reason to, but not all the time."""
        while True:
            if self._uneasy:
                now = trio.current_time()
                if now >= self._round_at:
                    if now >= self._round_at + CALM_S:
                        self._pauses.reset()
                    self._doubted, self._round_at = False, now + self._pauses.next_wait_s()
                    self._ask_around()
                self._route()
                self._give_up_on_unplaced()
            if self._uneasy:
                await trio.sleep_until(self._next_look())
            else:
                self._wake = trio.Event()
                await self._wake.wait()

    def _next_look(self) -> float:
        """When there is something to do: to ask again, or to try a node that refused."""
        now = trio.current_time()
        rests = [
            at for number, at in self._rests.items() if at > now and not self._where.get(number)
        ]
        return min([max(self._round_at, now), *rests])

    def _give_up_on_unplaced(self) -> None:
        now = trio.current_time()
        for partition, since in list(self._unplaced_since.items()):
            if not self._client.is_waiting_for(partition):
                del self._unplaced_since[partition]  # while it has no node, `_route` begins anew
            elif now - since >= self._patience_s:
                error = self.refusal_of(partition)
                if error is None:
                    error = BrokenError(f"no node takes partition {partition}")
                error.add_note(f"gave up after {now - since:.0f} s")
                self._end(error)

    def _ask_around(self) -> None:
        """Asks every node for its map. What was asked on its connection, and did not answer for a
        while, may be gone without a word: it is asked on a connection of its own."""
        assert self._nursery is not None
        asked = {node.address for node in self._nodes if node.ask()}
        for address in self.metadata.known_nodes():
            connection = self._map_connections.get(address)
            if address in asked or (connection is not None and connection.ask()):
                continue
            if connection is not None:
                connection.scope.cancel()
            connection = self._map_connections[address] = MapConnection(
                address, self._options, self._learn
            )
            self._nursery.start_soon(connection.run)
