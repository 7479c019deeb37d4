"""Requests to a bucket: each to the node that holds its partition."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

import trio

from upr_protocol.address import Address
from upr_protocol.client.core import calls
from upr_protocol.client.core.calls import (
    Call,
    HeldLease,
    LeaseRequest,
    PartitionCallFactory,
    PartitionRow,
)
from upr_protocol.client.core.changes import Change
from upr_protocol.client.core.results import WriteResult
from upr_protocol.client.core.retry import WRONG_NODE, RetryState
from upr_protocol.client.trio.connection import TrioConnection, TrioOptions
from upr_protocol.client.trio.connection_pool import ConnectionPool, NodeHandler
from upr_protocol.client.trio.request_channel import RequestChannel
from upr_protocol.concurrency import Notifier, without_traceback
from upr_protocol.errors import BrokenError, ClosedError, ServerError, UprError
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.wire import PartitionLog

T = TypeVar("T")

REQUEST_RETRY_TIMEOUT_S: Final = 30.0
"""How long a request waits for the node of its partition: longer than a failover should take."""


class NodeChannel(RequestChannel, NodeHandler):
    """Requests to one node, over one connection after another. Its retries are endless: each
    request has a timeout of its own."""

    def __init__(self, dispatcher: RequestDispatcher, credit_timeout_s: float) -> None:
        super().__init__(dispatcher.address, credit_timeout_s)
        self.retry = RetryState(float("inf"), dispatcher.draw)
        self._dispatcher = dispatcher

    def connection_made(self, connection: TrioConnection) -> None:
        super().connection_made(connection)
        self._dispatcher.notify_changed()

    def connection_lost(self, error: UprError) -> None:
        super().connection_lost(error)
        self._dispatcher.node_lost(error)

    def node_removed(self) -> None:
        self._dispatcher.requests_of_removed_nodes += self.requests


class RequestDispatcher:
    """Sends each request of a client to the node that holds its partition, and retries it.

    It has a `NodeChannel` for each node that the partition map names.

    If one node holds the whole bucket and its connection is lost, there is no reconnecting: every
    call raises the error.

    Args:
        options: How to reach the nodes. `retry_timeout_s` is how long a request waits for the node
            of its partition.

    Attributes:
        has_opened: Set once the first connection is made, or could not be made.
        error: Why no request can be made any more; None while it can.
        partition_count: The bucket's; 0 when no bucket was opened.
        requests_of_removed_nodes: How many requests were sent to nodes that are not needed any
            more.
    """

    def __init__(self, address: Address, options: TrioOptions, credit_timeout_s: float) -> None:
        self.address = address
        self.draw = options.draw
        self.has_opened = trio.Event()
        self.error: UprError | None = None
        self.partition_count = 0
        self._credit_timeout_s = credit_timeout_s
        self._retry_timeout_s = options.retry_timeout_s
        self._channel_of: dict[PartitionId, NodeChannel | None] = {}
        self.requests_of_removed_nodes = 0
        self._is_lost = False
        self._changed = Notifier()
        self.connections = ConnectionPool(address, options, self)

    async def run(self) -> None:
        """Keeps the connections for as long as that is of use. Cancelled, it closes them."""
        try:
            await self.connections.run()
        except UprError as error:
            self.error = error
        self.has_opened.set()
        self.connections.located.set()
        self._changed.notify()

    def close(self) -> None:
        """Forgets the nodes, so that neither they nor this are in a reference cycle. Call it when
        `run` has ended. Requests that wait for a node raise `ClosedError`."""
        self.connections.close()
        self._channel_of.clear()
        self.error = without_traceback(self.error or ClosedError("the client was closed"))
        self._changed.notify()

    # What the connections call; `PoolOwner` documents it.

    @property
    def is_finished(self) -> bool:
        return self.connections.metadata.is_single_node and self._is_lost

    @property
    def partitions(self) -> Iterable[PartitionId]:
        return map(PartitionId, range(self.partition_count))

    def bucket_opened(self, connection: TrioConnection) -> None:
        self.partition_count = connection.handshake.partition_count
        self.has_opened.set()

    def is_waiting_for(self, partition: PartitionId) -> bool:  # noqa: ARG002
        """Never: each request has a timeout of its own."""
        return False

    def new_handler(self) -> NodeChannel:
        return NodeChannel(self, self._credit_timeout_s)

    def place(self, partition: PartitionId, handler: NodeChannel | None) -> None:
        if self._channel_of.get(partition) is not handler:
            self._channel_of[partition] = handler
            self._changed.notify()

    # For the channels.

    def notify_changed(self) -> None:
        """Wakes the tasks that wait for a channel."""
        self._changed.notify()

    def node_lost(self, error: UprError) -> None:
        """The connection to a node is lost."""
        if self.has_opened.is_set():
            self._is_lost = True
            if self.connections.metadata.is_single_node and self.error is None:
                self.error = error
        self._changed.notify()

    # Requests about one partition, or about none.

    async def ask(self, call: Call[T]) -> T:
        """Sends a request and waits for its answer. A request about no partition goes to any node.
        When a node says that it does not hold the partition, the request goes to the next one.

        Raises:
            ServerError: The server refused.
            BrokenError: The connection was lost, and the request may have been carried out or not;
                or no node could be asked in time, and it was not.
            ClosedError: The connection was closed here.
        """
        return await self._retry(lambda channel: channel.ask(call), call.partition)

    async def change(self, change: Change) -> WriteResult:
        """Makes a change, together with those that other tasks make now.

        Raises:
            ServerError, BrokenError, ClosedError: As for `ask`.
        """
        return await self._retry(lambda channel: channel.change(change), change.partition)

    async def send(self, call: Call[T]) -> Callable[[], Awaitable[T]]:
        """Sends a request; what this returns waits for the answer."""
        reply = await self._retry(lambda channel: channel.send(call), call.partition)

        async def answer() -> T:
            try:
                return await reply.wait()
            except ServerError as error:
                if self.connections.metadata.is_single_node or error.status not in WRONG_NODE:
                    raise
                self.connections.request_map(error.map_revision)
            return await self.ask(call)

        return answer

    async def _retry(
        self, request: Callable[[NodeChannel], Awaitable[T]], partition: PartitionId | None
    ) -> T:
        # When the wait for anything but an answer began: mostly there is none.
        deadline: float | None = None
        if partition is not None and partition >= self.partition_count:
            partition = None  # any server refuses it, and says why
        channel = self._channel(partition)
        if channel is None:
            deadline = trio.current_time() + self._retry_timeout_s
            channel = await self._await_channel(partition, deadline)
        while True:
            try:
                result = await request(channel)
            except ServerError as error:
                if deadline is None:
                    deadline = trio.current_time() + self._retry_timeout_s
                is_last = (
                    self.connections.metadata.is_single_node or trio.current_time() >= deadline
                )
                if is_last or partition is None or error.status not in WRONG_NODE:
                    raise
                if self._channel_of.get(partition) is channel:
                    self.connections.note_refused(partition, error, error.map_revision)
                    self._channel_of[partition] = None
                channel = await self._await_channel(partition, deadline)
            else:
                if partition is not None:
                    self.connections.router.note_succeeded(partition)
                return result

    async def _await_channel(self, partition: PartitionId | None, deadline: float) -> NodeChannel:
        """The channel for a partition, or any for None; waits until there is one.

        Raises:
            ServerError, BrokenError: There was none by the deadline.
        """
        while (channel := self._channel(partition)) is None:
            if not await self._wait_for_change(deadline):
                raise self._no_channel_error(partition)
        return channel

    def _channel(self, partition: PartitionId | None) -> NodeChannel | None:
        """The channel for a partition, or any for None; None while there is none.

        Raises:
            ServerError, BrokenError, ClosedError: There will be none.
        """
        if self.error is not None:
            raise without_traceback(self.error)
        if partition is None:
            return next((c for c in self.connections.handlers if c.is_connected), None)
        channel = self._channel_of.get(partition)
        return channel if channel is not None and channel.is_connected else None

    async def _wait_for_change(self, deadline: float) -> bool:
        """Waits until something has changed; false when nothing had by the deadline."""
        with trio.move_on_at(deadline) as scope:
            await self._changed.wait()
        return not scope.cancelled_caught

    def _no_channel_error(self, partition: PartitionId | None) -> UprError:
        reason = None if partition is None else self.connections.router.reason_unplaced(partition)
        if reason is not None:
            return reason
        node = "any node" if partition is None else f"the active node of partition {partition}"
        return BrokenError(
            f"no connection to {node}: {self.connections.last_failure or 'no partition map yet'}. "
            "If the node is gone, `upr failover` makes a replica active in its place"
        )

    # Requests about several partitions.

    async def ask_about(
        self, partitions: tuple[PartitionId, ...], call_for: PartitionCallFactory[PartitionRow]
    ) -> list[PartitionRow]:
        """Asks about partitions, each at the node that is active for it; about all when none are
        named. A single node says itself which partitions it has."""
        if self.connections.metadata.is_single_node:
            return await self.ask(call_for(partitions))
        deadline = trio.current_time() + self._retry_timeout_s
        rows: dict[PartitionId, PartitionRow] = {}
        missing_partitions = set(partitions or self.partitions)
        if unknown_partitions := missing_partitions.difference(self.partitions):
            # Any node refuses them, and says why.
            return await self.ask(call_for(sorted(unknown_partitions)))
        while missing_partitions:
            channel, group = await self._next_group(missing_partitions, deadline)
            try:
                reply_rows = await channel.ask(call_for(group))
            except ServerError as error:
                if not self._note_wrong_node(channel, group, error, deadline):
                    raise
                continue
            for row in reply_rows:
                self.connections.router.note_succeeded(row.partition)
                rows[row.partition] = row
            missing_partitions -= rows.keys()
        return [rows[partition] for partition in sorted(rows)]

    def _note_wrong_node(
        self,
        channel: NodeChannel,
        partitions: Iterable[PartitionId],
        error: ServerError,
        deadline: float,
    ) -> bool:
        """Has partitions placed anew that a node was asked about in vain. False if it does not help
        to ask for them elsewhere, or the time is over."""
        if (
            self.connections.metadata.is_single_node
            or error.status not in WRONG_NODE
            or trio.current_time() >= deadline
        ):
            return False
        # The node does not say which of them it is not active for.
        for partition in partitions:
            if self._channel_of.get(partition) is channel:
                self.connections.note_refused(partition, error, error.map_revision)
                self._channel_of[partition] = None
        return True

    async def _next_group(
        self, partitions: Iterable[PartitionId], deadline: float
    ) -> tuple[NodeChannel, list[PartitionId]]:
        """A channel to ask, and the partitions to ask it about: the first of `partitions`, and
        others at the same node. Partitions that the bucket does not have go to any node, which
        refuses them.

        Raises:
            ServerError, BrokenError: There was no channel by the deadline.
        """
        sorted_partitions = sorted(partitions)
        first_partition = next(
            (partition for partition in sorted_partitions if partition in self._channel_of), None
        )
        channel = await self._await_channel(first_partition, deadline)
        return channel, [
            p for p in sorted_partitions if self._channel_of.get(p, channel) is channel
        ]

    async def acquire_lease(self, request: LeaseRequest) -> HeldLease:
        """Acquires a lease, with the same ID at each node that has some of its ranges.

        Raises:
            ServerError: A node refused. `RANGE_GONE`: there is such a lease already, and partitions
                of it have another active node since.
            BrokenError: Some node could not be asked in time, or did not answer.
        """
        deadline = trio.current_time() + self._retry_timeout_s
        missing_partitions = request.partitions
        leases: list[HeldLease] = []
        while missing_partitions or not leases:
            channel, partitions = await self._next_group(missing_partitions, deadline)
            try:
                lease = await channel.ask(request.call_for(partitions))
            except ServerError as error:
                if not self._note_wrong_node(channel, partitions, error, deadline):
                    raise
                continue
            if not self.connections.metadata.is_single_node:
                request.check_granted(lease, partitions)
            for partition in partitions:
                self.connections.router.note_succeeded(partition)
            missing_partitions -= set(partitions)
            leases.append(lease)
        return calls.merge_leases(leases)

    async def ask_all_holders(self, call: Call[HeldLease]) -> HeldLease:
        """Asks every node that the map names for a partition about a lease, and merges what they
        hold of it. Nodes that can be asked at once do not wait for the others.

        Raises:
            ServerError: No node has the lease. `RANGE_GONE`: or a partition of it has another
                active node since.
            BrokenError: Some node could not be asked in time, or did not answer.
        """
        if not self.partition_count:
            return await self.ask(call)
        deadline = trio.current_time() + self._retry_timeout_s
        leases: dict[NodeChannel, HeldLease] = {}
        refusals: list[ServerError] = []
        broken_error: BrokenError | None = None
        asked_channels: set[NodeChannel | None] = set()
        # By the time that some nodes have answered, a newer map may name others.
        while partitions_left := [
            p for p in self._assigned_partitions() if self._channel_of.get(p) not in asked_channels
        ]:
            channels = (self._channel_of.get(partition) for partition in partitions_left)
            channel = next((c for c in channels if c is not None and c.is_connected), None)
            if channel is None:
                channel = await self._await_channel(partitions_left[0], deadline)
            asked_channels.add(channel)
            try:
                leases[channel] = await channel.ask(call)
            except ServerError as error:
                refusals.append(error)
            except BrokenError as error:
                broken_error = error
        if broken_error is not None:
            raise broken_error
        if not leases:
            raise refusals[0] if refusals else BrokenError("no node has any partition")
        for channel, lease in leases.items():
            calls.check_active(lease, [p for p, c in self._channel_of.items() if c is channel])
        return calls.merge_leases(list(leases.values()))

    def _assigned_partitions(self) -> list[PartitionId]:
        """The partitions that the map names a node for; all of them while there is no map."""
        metadata = self.connections.metadata
        return [
            partition
            for partition in self.partitions
            if metadata.map is None or metadata.holders(partition, PartitionState.ACTIVE)
        ]

    # Known without asking.

    @property
    def logs(self) -> list[PartitionLog]:
        """The log of each partition, as its node sent it during the handshake."""
        return [
            channel.connection.handshake.logs[partition]
            for partition, channel in self._channel_of.items()
            if channel is not None
            and channel.is_connected
            and partition in channel.connection.handshake.logs
        ]

    @property
    def requests(self) -> int:
        """How many requests were sent."""
        return self.requests_of_removed_nodes + sum(c.requests for c in self.connections.handlers)

    @property
    def credit_left(self) -> int:
        """How many bytes of changes the nodes would take."""
        connected_channels = (
            channel for channel in self.connections.handlers if channel.is_connected
        )
        return sum(
            channel.connection.session.credit.remaining_bytes for channel in connected_channels
        )

    def __len__(self) -> int:
        """How many requests have no answer yet."""
        return sum(len(channel) for channel in self.connections.handlers)
