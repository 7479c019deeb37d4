"""Requests to a bucket, each to the node whose it is."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

import trio

from upr_protocol.address import Address
from upr_protocol.client.core import calls
from upr_protocol.client.core.calls import Call, HeldLease, PartitionNumbers
from upr_protocol.client.trio.connection import Connection
from upr_protocol.client.trio.connection_pool import ConnectionPool
from upr_protocol.client.trio.node_channel import NodeChannel
from upr_protocol.client.trio.node_publisher import WRONG_NODE
from upr_protocol.client.trio.request_channel import PendingReply
from upr_protocol.errors import BrokenError, ServerError, UprError
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.wire import LeaseAction, PartitionLog

T = TypeVar("T")

REQUEST_PATIENCE_S: Final = 30.0
"""How long a request waits for the node whose it is: longer than a failover should take."""


class RequestDispatcher:
    """A channel for each node; the client of a client's pool.

    The only node that there is is not connected to again: whoever lost it is told.

    Args:
        address: Where the client was told to go.
        credit_timeout_s: How long a change waits for a server that grants no credit.
        patience_s: How long a request waits for the node whose it is.

    Attributes:
        address: See above.
        opened: Set when the first connection is connected, or there is none to be had.
        error: Why nothing can be asked any more; None while it can.
        partition_count: The bucket's; 0 when none was opened.
        pool: Who keeps the connections; set by whoever makes it.
    """

    pool: ConnectionPool[NodeChannel]

    def __init__(self, address: Address, credit_timeout_s: float, patience_s: float) -> None:
        self.address = address
        self.opened = trio.Event()
        self.error: UprError | None = None
        self.partition_count = 0
        self._credit_timeout_s = credit_timeout_s
        self._patience_s = patience_s
        self._channels: list[NodeChannel] = []
        self._at: dict[PartitionId, NodeChannel | None] = {}
        self._requests = 0
        self._is_lost = False
        self._changed = trio.Event()

    async def run(self) -> None:
        """Keeps the connections until there is no use in it; cancelled, it closes them."""
        try:
            await self.pool.run()
        except UprError as error:
            self.error = error
        self.opened.set()
        self.pool.settled.set()
        self._notify()

    # The pool's side.

    @property
    def finished(self) -> bool:
        """See `PoolClient`."""
        return self.pool.metadata.is_alone and self._is_lost

    @property
    def partitions(self) -> Iterable[PartitionId]:
        """See `PoolClient`."""
        return map(PartitionId, range(self.partition_count))

    def is_waiting_for(self, partition: PartitionId) -> bool:  # noqa: ARG002
        """See `PoolClient`. Each request has its own patience."""
        return False

    def new_handler(self) -> NodeChannel:
        """See `PoolClient`."""
        channel = NodeChannel(self, self._credit_timeout_s)
        self._channels.append(channel)
        return channel

    def place(self, partition: PartitionId, handler: NodeChannel | None) -> None:
        """See `PoolClient`."""
        if self._at.get(partition) is not handler:
            self._at[partition] = handler
            self._notify()

    def remove_handler(self, handler: NodeChannel) -> None:
        """See `PoolClient`."""
        self._requests += handler.requests
        self._channels.remove(handler)

    # The channels' side.

    def connected(self, channel: NodeChannel, connection: Connection) -> None:
        """A channel is connected."""
        self.partition_count = connection.handshake.partition_count
        self.pool.connected(channel, connection)
        self.opened.set()
        self._notify()

    def lost(self, error: UprError) -> None:
        """A channel's connection is over."""
        if self.opened.is_set():
            self._is_lost = True
            if self.pool.metadata.is_alone and self.error is None:
                self.error = error
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    # Asking.

    async def ask(self, call: Call[T]) -> T:
        """Makes a request and waits for its answer. What a node says is not its to do goes to the
        node whose it is; what is about no partition, to any.

        Raises:
            ServerError: It was refused.
            BrokenError: The connection was lost, and it may have been done or not; or there was no
                node for it in time, and it was not.
            ClosedError: The connection was closed here.
        """

        async def once(channel: NodeChannel) -> T:
            return await channel.ask(call)

        return await self._patiently(once, call.partition)

    async def send(self, call: Call[T]) -> Callable[[], Awaitable[T]]:
        """Makes a request; what this returns waits for the answer."""

        async def sent(channel: NodeChannel) -> PendingReply[T]:
            return await channel.send(call)

        reply = await self._patiently(sent, call.partition)

        async def answer() -> T:
            try:
                return await reply.wait()
            except ServerError as error:
                if self.pool.metadata.is_alone or error.status not in WRONG_NODE:
                    raise
                self.pool.doubt(error.map_revision)
            return await self.ask(call)

        return answer

    async def _patiently(
        self, once: Callable[[NodeChannel], Awaitable[T]], partition: PartitionId | None
    ) -> T:
        deadline = trio.current_time() + self._patience_s
        if partition is not None and partition >= self.partition_count:
            partition = None  # any server says what is wrong with it
        while True:
            channel = await self._channel_for(partition, deadline)
            try:
                found = await once(channel)
            except ServerError as error:
                final = self.pool.metadata.is_alone or trio.current_time() >= deadline
                if final or partition is None or error.status not in WRONG_NODE:
                    raise
                if self._at.get(partition) is channel:
                    self.pool.refused(partition, error, error.map_revision)
                    self._at[partition] = None
            else:
                if partition is not None:
                    self.pool.works(partition)
                return found

    async def _channel_for(self, partition: PartitionId | None, deadline: float) -> NodeChannel:
        """Who can be asked now.

        Raises:
            ServerError, BrokenError: Nobody, and so it stayed.
        """
        while True:
            if self.error is not None:
                raise self.error
            if partition is None:
                channel = next((channel for channel in self._channels if channel.is_up), None)
            else:
                channel = self._at.get(partition)
            if channel is not None and channel.is_up:
                return channel
            with trio.move_on_at(deadline) as scope:
                await self._changed.wait()
            if scope.cancelled_caught:
                refusal = None if partition is None else self.pool.refusal_of(partition)
                if refusal is not None:
                    raise refusal
                what = "the bucket" if partition is None else f"partition {partition}"
                raise BrokenError(
                    f"no node takes {what}: {self.pool.last_failure or 'no map'}. If that node is "
                    "gone, `upr failover` makes a replica active in its place"
                )

    async def seqnos(self, partitions: tuple[PartitionId, ...]) -> list[PartitionNumbers]:
        """How far partitions are, each told by its own node; all of them when none are named."""
        if self.pool.metadata.is_alone:
            return await self.ask(calls.seqnos(partitions))
        deadline = trio.current_time() + self._patience_s
        rows: dict[PartitionId, PartitionNumbers] = {}
        missing = set(partitions or self.partitions) & set(self.partitions)
        while missing:
            channel, some = await self._group(missing, deadline)
            told = await channel.ask(calls.seqnos(some))
            rows.update((row.partition, row) for row in told)
            missing -= rows.keys()
            if missing.isdisjoint(some):
                continue
            self.pool.doubt()
            with trio.move_on_at(deadline) as scope:
                await self._changed.wait()
            if scope.cancelled_caught:
                raise BrokenError(f"no node has partition {min(missing)}")
        return [rows[partition] for partition in sorted(rows)]

    async def _group(
        self, partitions: Iterable[PartitionId], deadline: float
    ) -> tuple[NodeChannel, list[PartitionId]]:
        """Who can be asked now about the first of these, if there is one, and those of them that
        are with it; of what the bucket does not have any server says what is wrong.

        Raises:
            ServerError, BrokenError: The first is with nobody, and so it stayed.
        """
        wanted = sorted(partitions)
        first = next((number for number in wanted if number in self._at), None)
        channel = await self._channel_for(first, deadline)
        return channel, [number for number in wanted if self._at.get(number, channel) is channel]

    async def acquire(
        self,
        ranges: tuple[tuple[int, int, int], ...],
        *,
        time_to_live_s: int,
        owner: str,
        lease_id: int,
    ) -> HeldLease:
        """A lease of ranges, under one ID at each node that has some of them."""
        lease_id = lease_id or int.from_bytes(os.urandom(8), "little") | 1
        deadline = trio.current_time() + self._patience_s
        missing = {PartitionId(one[0]) for one in ranges}
        held: list[HeldLease] = []
        while missing or not held:
            channel, some = await self._group(missing, deadline)
            missing -= set(some)
            call = calls.lease(
                LeaseAction.ACQUIRE,
                lease_id=lease_id,
                time_to_live_s=time_to_live_s,
                owner=owner,
                ranges=[one for one in ranges if one[0] in some],
            )
            held.append(await channel.ask(call))
        return calls.one_lease(held)

    async def known_nodes(self, call: Call[HeldLease]) -> HeldLease:
        """Asks the same about a lease at every node that the map names for a partition; whatever
        some of them have of it counts. Those that can be asked at once do not wait for the others.

        Raises:
            ServerError: None of them has it.
            BrokenError: One of them could not be asked in time, or did not answer.
        """
        if not self.partition_count:
            return await self.ask(call)
        deadline = trio.current_time() + self._patience_s
        held: list[HeldLease] = []
        refusals: list[ServerError] = []
        broken: BrokenError | None = None
        asked: set[NodeChannel | None] = set()
        while left := [number for number in self._named if self._at.get(number) not in asked]:
            homes = (self._at.get(number) for number in left)
            channel = next((home for home in homes if home is not None and home.is_up), None)
            if channel is None:
                channel = await self._channel_for(left[0], deadline)
            asked.add(channel)
            try:
                held.append(await channel.ask(call))
            except ServerError as error:
                refusals.append(error)
            except BrokenError as error:
                broken = error
        if broken is not None:
            raise broken
        if not held:
            raise refusals[0] if refusals else BrokenError("no node has any partition")
        return calls.one_lease(held)

    @property
    def _named(self) -> list[PartitionId]:
        """The partitions for which the map names a node; all of them while there is no map."""
        metadata = self.pool.metadata
        return [
            partition
            for partition in self.partitions
            if metadata.map is None or metadata.holders(partition, PartitionState.ACTIVE)
        ]

    # What is known without asking.

    @property
    def logs(self) -> list[PartitionLog]:
        """What the nodes that partitions are with told of them when they were connected to."""
        return [
            channel.connection.handshake.logs[partition]
            for partition, channel in self._at.items()
            if channel is not None
            and channel.is_up
            and partition in channel.connection.handshake.logs
        ]

    @property
    def requests(self) -> int:
        """How many requests were made."""
        return self._requests + sum(channel.requests for channel in self._channels)

    @property
    def credit_left(self) -> int:
        """Bytes that the nodes would take of changes."""
        return sum(
            channel.connection.session.credit.left for channel in self._channels if channel.is_up
        )

    def __len__(self) -> int:
        """How many requests wait for their answers."""
        return sum(len(channel) for channel in self._channels)
