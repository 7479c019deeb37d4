"""One connection to each node that is needed, after the partition map.

The first connection goes to the user's address. A single node there holds every partition. A node
of a cluster is asked for the map, and from then on each partition is used at the node that the map
names. When a node refuses a partition, or cannot be reached, all known nodes are asked for their
map, and the newest counts. While a partition has no node they are asked again and again, less and
less often.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Generic, Protocol, TypeVar

import attrs
import trio

from upr_protocol.address import Address
from upr_protocol.client.core.metadata import ClusterMetadata, partition_map_of
from upr_protocol.client.core.retry import MAP_WAIT_S_MAX, RetryState
from upr_protocol.client.core.routing import PartitionRouter
from upr_protocol.client.trio.connection import (
    ConnectionHandler,
    TrioConnection,
    TrioOptions,
    open_connection,
)
from upr_protocol.client.trio.map_refresher import MapRefresher, MapRequest
from upr_protocol.concurrency import Notifier
from upr_protocol.errors import BrokenError, ClosedError, ServerError, Status, UprError
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.wire import MapReply, Message

STABLE_CONNECTION_S: Final = 10.0
"""The loss of a connection that lasted so long counts as a first failure."""

_BUSY_ANSWER_TIMEOUT_S: Final = 0.1
"""How long a node may take to tell its map on a connection that it is busy with. After that it is
asked on a connection of its own: this one may be dead."""


class NodeHandler(ConnectionHandler):
    """Uses one node, over one connection after another: for a publisher's batches, a client's
    requests or a consumer's streams. `retry` is told of progress, and says when to give the node
    up."""

    retry: RetryState

    def node_removed(self) -> None:
        """The node is not needed any more."""

    async def drain(self) -> None:
        """Waits until closing the connection costs nobody an answer: a request that was sent may
        have been carried out, and is not repeated. What another node repeats need not wait."""


H = TypeVar("H", bound=NodeHandler)


class PoolOwner(Protocol[H]):
    """The owner of the connections: it says which it needs."""

    @property
    def is_finished(self) -> bool:
        """Whether it needs no connection any more."""

    @property
    def partitions(self) -> Iterable[PartitionId]:
        """The partitions that need a node."""

    def bucket_opened(self, connection: TrioConnection) -> None:
        """A connection has opened the bucket. From now on the owner knows its partitions.

        Raises:
            UprError: The bucket is not the one that it was; the connection ends with this error.
        """

    def is_waiting_for(self, partition: PartitionId) -> bool:
        """Whether something waits until `partition` has a node."""

    def new_handler(self) -> H:
        """A handler for one more node."""

    def place(self, partition: PartitionId, handler: H | None) -> None:
        """Uses `partition` at this handler's node from now on; None while it has no node."""


@attrs.define(eq=False)
class _Node(ConnectionHandler, Generic[H]):
    """A node that is needed. Its messages go to the handler, but for its map.

    Attributes:
        address: Where it is. The user's address may name several hosts; one after the other is
            tried for the first node.
        connection: The connection to it; None while it is not connected.
        dialled_at: When the last attempt to connect began.
        is_down: Whether the last connection, or attempt to make one, failed.
        scope: Cancel it to close the connection for good.
    """

    pool: ConnectionPool[H]
    address: Address
    handler: H
    connection: TrioConnection | None = None
    dialled_at: float = 0.0
    map_request: MapRequest = attrs.field(factory=MapRequest)
    is_down: bool = False
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    def ask_map(self) -> bool:
        """Asks the node for its map if it is connected; whether an answer may arrive. A node that
        is being connected to tells its revision by itself."""
        if self.connection is None:
            return not self.is_down
        return self.map_request.send(self.connection, self.pool.metadata, _BUSY_ANSWER_TIMEOUT_S)

    def connection_made(self, connection: TrioConnection) -> None:
        self.pool.node_connected(self, connection)

    def message_received(self, message: Message) -> None:
        if isinstance(message, MapReply):
            self.map_request.is_open = False
            assert self.connection is not None, "it has sent a message"
            self.pool.learn_map(self.connection.address, message, self.map_request.revision)
        else:
            self.handler.message_received(message)

    def ready_to_write(self) -> float | None:
        return self.handler.ready_to_write()

    async def wait_for_room(self) -> None:
        await self.handler.wait_for_room()

    def connection_lost(self, error: UprError) -> None:
        self.handler.connection_lost(error)


class ConnectionPool(Generic[H]):
    """Keeps connections to the nodes that its owner needs.

    Args:
        owner: Says which partitions need a node, and uses the nodes.
        opened_partitions: The partitions whose histories the owner needs; empty for all.

    Attributes:
        located: Set when all partitions have been located for the first time: the map is the
            newest, and each node that it names was reached or could not be.
        connect_s: How long it took to connect to the first node; 0 before that.
    """

    def __init__(
        self,
        address: Address,
        options: TrioOptions,
        owner: PoolOwner[H],
        *,
        state: PartitionState = PartitionState.ACTIVE,
        opened_partitions: tuple[PartitionId, ...] = (),
    ) -> None:
        self.metadata = ClusterMetadata(address, follow_map=options.follow_map)
        self.last_failure = ""
        self.located = trio.Event()
        self.connect_s = 0.0
        self._options = options
        self._owner = owner
        self._opened_partitions = opened_partitions
        self.router = PartitionRouter(self.metadata, state, options.retry_timeout_s, options.draw)
        self._refresher = MapRefresher(self.metadata, options)
        self._error: UprError | None = None
        self._nursery: trio.Nursery | None = None
        self._nodes: list[_Node[H]] = []
        self._was_connected = False
        self._map_needed = Notifier()

    async def run(self) -> None:
        """Connects, and stays connected until the owner is finished. Cancelled, it closes its
        connections.

        At first each host of the user's address is tried once, and once more if it was given less
        than the whole time: an address that never answered is more likely wrong than down.

        Raises:
            UprError: Going on is of no use.
        """
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._add_node(self.metadata.address)
            nursery.start_soon(self._refresh_map)
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # or it would refer to itself through its traceback's frame

    def close(self) -> None:
        """Forgets the nodes and the owner, so that none of them is in a reference cycle. Call it
        when `run` has ended and the owner is closed. From then on there are no handlers."""
        for node in self._nodes:
            node.handler.node_removed()
        self._nodes.clear()
        self._refresher.close()
        self._nursery = None
        del self._owner

    def _stop(self, error: UprError | None) -> None:
        if self._error is None:
            self._error = error
        assert self._nursery is not None
        self._nursery.cancel_scope.cancel()

    # One node.

    def _add_node(self, address: Address) -> _Node[H]:
        assert self._nursery is not None
        node = _Node(self, address, self._owner.new_handler())
        self._nodes.append(node)
        self._nursery.start_soon(self._run_node, node)
        return node

    async def _run_node(self, node: _Node[H]) -> None:
        with node.scope:
            try:
                await self._keep_connected(node)
            except UprError as error:
                # The frames of its traceback refer to it.
                self._stop(error.with_traceback(None))

    async def _keep_connected(self, node: _Node[H]) -> None:
        attempts, is_any_slow = 0, False
        while True:
            hosts = node.address.each_node()
            # The last one has the whole time, and the others have it in a second round.
            is_first_attempt = not self._was_connected and attempts < len(hosts) - 1
            options = self._options.for_first_attempt() if is_first_attempt else self._options
            error = await self._connect_once(node, hosts[attempts % len(hosts)], options)
            was_up, node.connection, node.is_down = node.connection is not None, None, True
            if self._owner.is_finished:
                self._stop(None)
                return
            # A connection that was lost is first made again to the same host.
            attempts += not was_up
            if not self._was_connected:
                timed_out_at = node.dialled_at + options.connect_timeout_s
                is_any_slow |= is_first_attempt and trio.current_time() >= timed_out_at
                if attempts < (2 * len(hosts) - 1 if is_any_slow else len(hosts)):
                    continue
                raise error
            self.last_failure = str(error)
            self._check_located()
            self.request_map()
            # Other nodes may still have the bucket that this one does not have (any more).
            if isinstance(error, ServerError) and error.status is Status.NO_BUCKET:
                error = BrokenError(str(error)) if self.metadata.revision else error
            await trio.sleep(node.handler.retry.wait_after_failure_s(error, trio.current_time()))

    async def _connect_once(self, node: _Node[H], host: Address, options: TrioOptions) -> UprError:
        """Connects to a node and waits until the connection ends; gives the reason."""
        node.dialled_at = trio.current_time()
        try:
            async with open_connection(host, options, node, self._opened_partitions) as connection:
                connected_at = trio.current_time()
                await connection.ended.wait()
                if trio.current_time() - connected_at >= STABLE_CONNECTION_S:
                    node.handler.retry.note_progress()
                return connection.failure or ClosedError("the connection was closed here")
        except UprError as error:
            return error

    async def _close_node(self, node: _Node[H]) -> None:
        await node.handler.drain()
        node.scope.cancel()

    # For the nodes.

    def node_connected(self, node: _Node[H], connection: TrioConnection) -> None:
        """A node has opened the bucket.

        Raises:
            UprError: See `PoolOwner.bucket_opened`.
        """
        self._owner.bucket_opened(connection)
        if not self._was_connected:
            self._was_connected, self.connect_s = True, trio.current_time() - node.dialled_at
        if node not in self._nodes:
            return  # it was removed this moment
        node.connection, node.map_request, node.is_down = connection, MapRequest(), False
        was_single_node = self.metadata.is_single_node
        self.metadata.note_revision(connection.handshake.map_revision)
        if was_single_node:
            # Either this node holds every partition; or the map will tell, and until it arrives
            # no partition has a node.
            self._route()
        if self.metadata.is_stale:
            node.ask_map()
        self._check_located()
        node.handler.connection_made(connection)

    def learn_map(self, node: Address, reply: MapReply | None, asked_revision: int) -> None:
        """A node told its map, or has no such bucket. It was asked when `asked_revision` was the
        newest that was known.

        Raises:
            RemoteProtocolError: The answer is not a valid map of the bucket.
        """
        bucket = self.metadata.address.bucket
        partition_map = None if reply is None else partition_map_of(reply, bucket)
        if self.metadata.learn(node, partition_map, asked_revision):
            self.router.note_map_changed()
            self._refresher.note_map_changed()
            self._route()
            self._check_located()
            self._map_needed.notify()

    # For the owner and the handlers.

    @property
    def handlers(self) -> list[H]:
        """The handler of each node."""
        return [node.handler for node in self._nodes]

    def request_map(self, map_revision: int = 0) -> None:
        """Has the nodes asked for the map, because it may be stale; some node has `map_revision`,
        if that is not 0."""
        self.metadata.note_revision(map_revision)
        self._refresher.is_requested = True
        self._map_needed.notify()

    def note_refused(self, partition: PartitionId, error: UprError, map_revision: int) -> None:
        """The node of a partition refused it."""
        self.router.note_refused(partition, error, trio.current_time())
        self.last_failure = str(error)
        self.request_map(map_revision)

    def _check_located(self) -> None:
        are_all_tried = all(node.connection is not None or node.is_down for node in self._nodes)
        if are_all_tried and not self.metadata.is_stale:
            self.located.set()

    # Where partitions are.

    def _route(self) -> None:
        """Places each partition with the node that the map names, if it names one."""
        owner = self._owner
        if not self.metadata.is_single_node:
            # The user's address may name several hosts; from now on the first node is where its
            # connection leads.
            for node in self._nodes:
                if node.connection is not None:
                    node.address = node.connection.address
        down = {node.address for node in self._nodes if node.is_down}
        now = trio.current_time()
        placements = self.router.route(owner.partitions, down, owner.is_waiting_for, now)
        needed_addresses = {address for address in placements.values() if address is not None}
        nodes = {node.address: node for node in self._nodes}
        # First new nodes, then partitions, and unneeded nodes last: a handler that is removed has
        # nothing left to give away then.
        for address in sorted(needed_addresses - nodes.keys(), key=str):
            nodes[address] = self._add_node(address)
        for partition, node_address in placements.items():
            owner.place(partition, None if node_address is None else nodes[node_address].handler)
        # If the map names no node at all, the nodes that are connected can still tell a newer map.
        if needed_addresses:
            for node in [node for node in self._nodes if node.address not in needed_addresses]:
                self._remove_node(node)

    def _remove_node(self, node: _Node[H]) -> None:
        assert self._nursery is not None
        self._nodes.remove(node)
        node.handler.node_removed()
        self._nursery.start_soon(self._close_node, node)

    @property
    def _needs_map(self) -> bool:
        """Whether there is a reason to ask for the map. A single node has none."""
        return not self.metadata.is_single_node and (
            self._refresher.is_requested
            or self.metadata.is_stale
            or self.router.has_unplaced
            or any(node.connection is None for node in self._nodes)
        )

    async def _refresh_map(self) -> None:
        """Asks for the map whenever there is a reason to, but not all the time. Where a single node
        has refused some partitions, it is asked for them again."""
        assert self._nursery is not None
        while True:
            if self._needs_map:
                now = trio.current_time()
                if self._refresher.begin_round(now):
                    asked_nodes = {node.address for node in self._nodes if node.ask_map()}
                    self._refresher.ask_others(asked_nodes, self.learn_map, self._nursery)
                self._route()
                error = self.router.timeout_error(self._owner.is_waiting_for, now)
                if error is not None:
                    self._stop(error)
            elif self.router.has_unplaced:
                self._route()
            if self._needs_map:
                now = trio.current_time()
                round_at = max(self._refresher.next_round_at, now)
                await trio.sleep_until(min(round_at, self.router.next_retry_at(now)))
            elif self.router.has_unplaced:
                # All are placed together, and not each when it is due: to place a thousand
                # partitions takes milliseconds.
                await trio.sleep(MAP_WAIT_S_MAX)
            else:
                await self._map_needed.wait()
