"""Following which buckets change: a feed of the event buses of all nodes that hold them.

Each node's bus tells of what that node holds. So the feed follows one of the given nodes, asks it
for the partition maps of the buckets, and follows the other nodes that the maps name, and those
that their maps name. It asks again every `MAP_INTERVAL_S`, so a node that joins is followed a few
seconds later; as that node does not know the consumer, it tells it to look at everything.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import islice
from typing import Final, Self, Unpack

import attrs
import trio

from upr_protocol.address import Address
from upr_protocol.bucket_event import (
    ALL_KINDS,
    BucketEvent,
    BucketFate,
    EventFilter,
    EventKind,
)
from upr_protocol.client.core import calls
from upr_protocol.client.core.retry import RETRY_TIMEOUT_S_DEFAULT, RetryState
from upr_protocol.client.trio.connection import ConnectOptions, TrioOptions, open_connection
from upr_protocol.client.trio.node_client import map_call, node_status
from upr_protocol.client.trio.request_channel import RequestChannel
from upr_protocol.concurrency import Notifier, background_nursery
from upr_protocol.errors import ClosedError, ServerError, UprError
from upr_protocol.wire import EventsReply

CONSUMER_TIMEOUT_S_DEFAULT: Final = 60
"""Longer than a restart takes, of a server or of a consumer."""

POLL_S: Final = 10.0
"""How long a request waits for events. An answer is a sign of life, in both directions."""

MAP_INTERVAL_S: Final = 10.0
"""How often a node is asked which other nodes there are; also after a bucket was created."""

_MAPS_AT_ONCE: Final = 64
"""How many maps a node is asked for together. A map has up to some 60 kB."""

_POLLS_PER_TIMEOUT: Final = 3
"""How often a consumer asks within its timeout, however few events there are."""


@attrs.frozen
class LookAtEverything:
    """Any bucket may have been created, deleted or changed: the consumer is new to the server, was
    silent for longer than its timeout, or the server was killed. Look at every bucket once; later
    changes come as events."""


class EventFeed:
    """What happens to the buckets of all nodes, as an async iterator. `follow_events` makes one.

    By asking for the next event the application acknowledges the one before. Events that were not
    acknowledged, because the process died or the connection broke, come again.
    """

    def __init__(
        self,
        address: Address,
        options: TrioOptions,
        retry: RetryState,
        new_request: Callable[[int], calls.Call[EventsReply]],
        event_filter: EventFilter,
    ) -> None:
        self._addresses = deque(attrs.evolve(host, bucket="") for host in address.each_node())
        self._options = options
        self._retry = retry
        self._new_request = new_request
        self._event_filter = event_filter
        self._first_node = ""
        """The node that is followed at one of the given addresses; empty before it has a name."""
        self._acknowledged_batches: dict[str, int] = {}
        """By the node's name."""
        self._named_nodes: dict[str, dict[str, Address]] = {}
        """The nodes, with their addresses, that each node's maps name."""
        self._other_nodes: dict[str, trio.CancelScope] = {}
        self._nursery: trio.Nursery | None = None
        self._events: deque[BucketEvent | LookAtEverything] = deque()
        self._error: UprError | None = None
        self._is_connected = False
        self._has_events = Notifier()
        """Notified when there are events, or never will be again."""
        self._is_drained = Notifier()
        """Notified when the application asks for an event and there is none."""

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to one of the given nodes now."""
        return self._is_connected

    @property
    def last_failure(self) -> str:
        """Why the last such connection, or attempt to connect, ended."""
        return self._retry.last_failure

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> BucketEvent | LookAtEverything:
        """The next event; waits until there is one. Cancelled, no event is lost.

        Raises:
            BrokenError: There was no connection for longer than `retry_timeout_s`.
            ServerError: A node refused; with `SUPERSEDED`, because another consumer has taken the
                name.
            ClosedError: The context was left.
        """
        await trio.lowlevel.checkpoint()
        while not self._events:
            if self._error is not None:
                raise self._error
            self._is_drained.notify()
            await self._has_events.wait()
        return self._events.popleft()

    async def run(self) -> None:
        """Asks for events for ever, or until going on is of no use."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                await self._keep_following(self._addresses, self._retry, is_first=True)
        finally:
            self._end(ClosedError("the feed of events was closed here"))

    async def _keep_following(
        self, addresses: deque[Address], retry: RetryState, *, is_first: bool = False
    ) -> None:
        """Follows one of the nodes at `addresses`, the next one when a connection ends. Ends the
        feed when going on is of no use."""
        assert self._nursery is not None
        try:
            while True:
                try:
                    await self._follow(addresses[0], retry, is_first=is_first)
                except UprError as error:
                    self._is_connected &= not is_first
                    addresses.rotate(-1)
                    await trio.sleep(retry.wait_after_failure_s(error, trio.current_time()))
        except UprError as error:
            if isinstance(error, ServerError) and not is_first:
                # A node that the application has not named.
                sentence = f"the node at {addresses[0].host_ports} refused: {error.sentence}"
                error = ServerError(error.status, sentence, error.map_revision)
            self._end(error)
            self._nursery.cancel_scope.cancel()

    async def _follow_other(self, node: str, address: Address, scope: trio.CancelScope) -> None:
        """Follows a node that a map names, for as long as one does. A node that is away is tried
        for ever: others hold its partitions by then, or it comes back."""
        with scope:
            await self._keep_following(deque([address]), RetryState(math.inf, self._options.draw))
        if self._other_nodes.get(node) is scope:
            del self._other_nodes[node]

    async def _follow(self, address: Address, retry: RetryState, *, is_first: bool = False) -> None:
        """Asks a node for events, for as long as the connection lasts."""
        channel = RequestChannel(address, 0.0)
        async with open_connection(address, self._options, channel):
            maps_read_at = -math.inf
            node = ""
            while True:
                now = trio.current_time()
                if now >= maps_read_at + MAP_INTERVAL_S:
                    name_before = node
                    node, addresses = await self._ask_for_nodes(channel)
                    self._named_nodes[node] = addresses
                    if is_first:
                        self._first_node = node
                    if not name_before:  # it had none of the buckets, and said no name
                        batch = self._acknowledged_batches.pop(name_before, 0)
                        self._acknowledged_batches.setdefault(node, batch)
                    self._follow_named_nodes()
                    maps_read_at = now
                acknowledged_batch = self._acknowledged_batches.get(node, 0)
                reply = await channel.ask(self._new_request(acknowledged_batch))
                self._is_connected |= is_first
                retry.note_progress()
                if reply.batch:
                    await self._hand_out(reply)
                    self._acknowledged_batches[node] = reply.batch
                    if any(event.fate is not BucketFate.NONE for event in reply.events):
                        maps_read_at = -math.inf

    async def _ask_for_nodes(self, channel: RequestChannel) -> tuple[str, dict[str, Address]]:
        """The node's own name, and the nodes that its maps of the buckets name."""
        node = ""
        addresses: dict[str, str] = {}
        buckets = await channel.ask(calls.list_buckets())
        names = iter([b.name for b in buckets if self._event_filter.kinds_of(b.name)])
        while batch := list(islice(names, _MAPS_AT_ONCE)):
            replies = [await channel.send(map_call(name)) for name in batch]
            for name, reply in zip(batch, replies, strict=True):
                with suppress(ServerError):  # the bucket was deleted meanwhile
                    status = await node_status(await reply.wait(), name)
                    node = status.node
                    if status.map is not None:
                        addresses |= status.map.nodes
        of_node = channel.connection.address.of_node
        return node, {name: of_node(host_port) for name, host_port in addresses.items()}

    def _follow_named_nodes(self) -> None:
        """Follows the nodes that maps name now, and no others."""
        assert self._nursery is not None
        addresses: dict[str, Address] = {}
        nodes = [self._first_node]
        for node in nodes:
            for name, address in self._named_nodes.get(node, {}).items():
                if name not in nodes:
                    nodes.append(name)
                    addresses[name] = address
        for node, scope in list(self._other_nodes.items()):
            if node not in addresses:
                scope.cancel()
                del self._other_nodes[node]
                if node != self._first_node:
                    # It may have counted events that it has not told.
                    self._put(LookAtEverything())
        for node, address in addresses.items():
            if node not in self._other_nodes:
                scope = self._other_nodes[node] = trio.CancelScope()
                self._nursery.start_soon(self._follow_other, node, address, scope)

    def _put(self, *events: BucketEvent | LookAtEverything) -> None:
        self._events += events
        self._has_events.notify()

    async def _hand_out(self, reply: EventsReply) -> None:
        """Gives a batch to the application, and waits until the application has processed it."""
        is_drained = self._is_drained.next_event()
        self._put(*([LookAtEverything()] if reply.everything else []), *reply.events)
        await is_drained.wait()

    def _end(self, error: UprError) -> None:
        self._error = self._error or error
        self._has_events.notify()


@asynccontextmanager
async def follow_events(
    target: str | Address,
    *,
    consumer: str,
    kinds: EventKind = ALL_KINDS,
    pattern: str = "*",
    timeout_s: int = CONSUMER_TIMEOUT_S_DEFAULT,
    retry_timeout_s: float = RETRY_TIMEOUT_S_DEFAULT,
    **options: Unpack[ConnectOptions],
) -> AsyncIterator[EventFeed]:
    """Follows which buckets are created, deleted and updated, and which of their design documents
    are; not what changes in a bucket. Repeated changes between two requests come as one event.

    Each node reports what it holds. The feed follows all nodes that the buckets' partition maps
    name, from one of the given nodes on; so an event may come from several of them.

    The feed reconnects by itself. Each node keeps events under the consumer's name for `timeout_s`
    after the last request. After that, or when a node joins or leaves, the consumer gets
    `LookAtEverything`.

    Args:
        target: `upr://host:port`; of several nodes the first that can be reached.
        consumer: The consumer's name: 1 to 100 of letters, digits, `.`, `_`, `-`. One consumer at a
            time has it.
        kinds: The kinds of events.
        pattern: The buckets: a name, in which `*`, `?` and `[...]` stand for others. The server
            counts no other events; a consumer that comes back with another pattern or other kinds
            gets `LookAtEverything`.
        timeout_s: How long the server keeps events without being asked, 1 to 3,600. The application
            must process each batch in less.
        retry_timeout_s: How long to go on without a connection before giving up.
        **options: How to connect.

    Raises:
        AddressError: The URL is malformed.
    """
    address = Address.parse(target) if isinstance(target, str) else target
    connection = TrioOptions(**options)

    def new_request(acknowledged_batch: int) -> calls.Call[EventsReply]:
        return calls.next_events(
            consumer,
            acknowledged_batch,
            timeout_s,
            min(POLL_S, timeout_s / _POLLS_PER_TIMEOUT),
            kinds,
            pattern,
        )

    retry = RetryState(retry_timeout_s, connection.draw)
    event_filter = EventFilter(kinds, pattern)
    feed = EventFeed(address, connection, retry, new_request, event_filter)
    async with background_nursery() as nursery:
        nursery.start_soon(feed.run)
        await trio.lowlevel.checkpoint()
        yield feed
