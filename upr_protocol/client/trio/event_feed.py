"""Following which buckets change: a feed of the event bus, over any number of connections."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, Self

import attrs
import trio

from upr_protocol.address import Address
from upr_protocol.bucket_event import ALL_KINDS, BucketEvent, EventKind
from upr_protocol.client.core import calls
from upr_protocol.client.core.retry import RETRY_TIMEOUT_S_DEFAULT, RetryState
from upr_protocol.client.options import IDENTITY_DEFAULT
from upr_protocol.client.trio.connection import TrioOptions, open_connection
from upr_protocol.client.trio.request_channel import RequestChannel
from upr_protocol.concurrency import Notifier, background
from upr_protocol.errors import ClosedError, UprError
from upr_protocol.limits import HANDSHAKE_TIMEOUT_S, IDLE_INTERVAL_S_DEFAULT, WINDOW_BYTES_DEFAULT
from upr_protocol.transport import Dial, dial_tcp
from upr_protocol.wire import EventsReply

CONSUMER_TIMEOUT_S_DEFAULT: Final = 60
"""Longer than a restart takes, of a server or of a consumer."""

POLL_S: Final = 10.0
"""How long a request waits for events. An answer is a sign of life, in both directions."""

_POLLS_PER_TIMEOUT: Final = 3
"""How often a consumer asks within its timeout, however few events there are."""


@attrs.frozen
class LookAtEverything:
    """Any bucket may have been created, deleted or changed: the consumer is new to the server, was
    silent for longer than its timeout, or the server was killed. Look at every bucket once; later
    changes come as events."""


class EventFeed:
    """What happens to a server's buckets, as an async iterator. `follow_events` makes one.

    By asking for the next event the application acknowledges the one before. Events that were not
    acknowledged, because the process died or the connection broke, come again.
    """

    def __init__(
        self,
        address: Address,
        options: TrioOptions,
        retry: RetryState,
        new_request: Callable[[int], calls.Call[EventsReply]],
    ) -> None:
        self._addresses = deque(attrs.evolve(place, bucket="") for place in address.each())
        self._options = options
        self._retry = retry
        self._new_request = new_request
        self._acknowledged_batch = 0
        self._events: deque[BucketEvent | LookAtEverything] = deque()
        self._error: UprError | None = None
        self._is_connected = False
        self._has_news = Notifier()
        """Notified when there are events, or never will be again."""
        self._is_drained = Notifier()
        """Notified when the application asks for an event and there is none."""

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._is_connected

    @property
    def last_failure(self) -> str:
        """Why the last connection, or attempt to connect, ended."""
        return self._retry.last_failure

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> BucketEvent | LookAtEverything:
        """The next event; waits until there is one. Cancelled, no event is lost.

        Raises:
            BrokenError: There was no connection for longer than `retry_timeout_s`.
            ServerError: The server refused; with `SUPERSEDED`, because another consumer has taken
                the name.
            ClosedError: The context was left.
        """
        await trio.lowlevel.checkpoint()
        while not self._events:
            if self._error is not None:
                raise self._error
            self._is_drained.notify()
            await self._has_news.wait()
        return self._events.popleft()

    async def run(self) -> None:
        """Asks for events for ever, or until going on is of no use."""
        try:
            while True:
                try:
                    await self._poll()
                except UprError as error:
                    self._is_connected = False
                    self._addresses.rotate(-1)
                    await trio.sleep(self._retry.wait_s(error, trio.current_time()))
        except UprError as error:
            self._end(error)
        finally:
            self._end(ClosedError("the feed of events was closed here"))

    async def _poll(self) -> None:
        """Connects to the next address, and asks there for as long as the connection lasts."""
        address = self._addresses[0]
        channel = RequestChannel(address, 0.0)
        async with open_connection(address, self._options, channel):
            while True:
                reply = await channel.ask(self._new_request(self._acknowledged_batch))
                self._is_connected = True
                self._retry.progress()
                if reply.batch:
                    await self._hand_out(reply)

    async def _hand_out(self, reply: EventsReply) -> None:
        """Gives a batch to the application, and waits until the application has processed it."""
        if reply.everything:
            self._events.append(LookAtEverything())
        self._events += reply.events
        drained = self._is_drained.next_event()
        self._has_news.notify()
        await drained.wait()
        self._acknowledged_batch = reply.batch

    def _end(self, error: UprError) -> None:
        self._error = self._error or error
        self._has_news.notify()


@asynccontextmanager
async def follow_events(
    target: str | Address,
    *,
    consumer: str,
    kinds: EventKind = ALL_KINDS,
    pattern: str = "*",
    timeout_s: int = CONSUMER_TIMEOUT_S_DEFAULT,
    identity: str = IDENTITY_DEFAULT,
    retry_timeout_s: float = RETRY_TIMEOUT_S_DEFAULT,
    idle_interval_s: int = IDLE_INTERVAL_S_DEFAULT,
    connect_timeout_s: float = HANDSHAKE_TIMEOUT_S,
    dial: Dial = dial_tcp,
    draw: Callable[[], float] = random.random,
) -> AsyncIterator[EventFeed]:
    """Follows which of a server's buckets are created, deleted and updated, and which of their
    design documents are; not what changes in a bucket. Repeated changes between two requests come
    as one event.

    The feed reconnects by itself. The server keeps events under the consumer's name for `timeout_s`
    after the last request. After that, or if another of several nodes is reached, the consumer gets
    `LookAtEverything`.

    Args:
        target: `upr://host:port`; of several nodes the first that can be reached. Each node reports
            the buckets that it holds.
        consumer: The consumer's name: 1 to 100 of letters, digits, `.`, `_`, `-`. One consumer at a
            time has it.
        kinds: The kinds of events.
        pattern: The buckets: a name, in which `*`, `?` and `[...]` stand for others. The server
            counts no other events; a consumer that comes back with another pattern or other kinds
            gets `LookAtEverything`.
        timeout_s: How long the server keeps events without being asked, 1 to 3,600. The application
            must process each batch in less.
        identity: `what:who`, for the server's logs and statistics.
        retry_timeout_s: How long to go on without a connection before giving up.
        idle_interval_s: After so much silence a side sends a keep-alive.
        connect_timeout_s: How long a connection and its first answers may take.
        dial: How to reach an address, where that is not plain TCP.
        draw: Gives numbers in [0, 1), for the waits between attempts.

    Raises:
        AddressError: The URL is malformed.
    """
    address = Address.parse(target) if isinstance(target, str) else target
    options = TrioOptions(identity, WINDOW_BYTES_DEFAULT, idle_interval_s, connect_timeout_s, dial)

    def new_request(acknowledged_batch: int) -> calls.Call[EventsReply]:
        return calls.next_events(
            consumer,
            acknowledged_batch,
            timeout_s,
            min(POLL_S, timeout_s / _POLLS_PER_TIMEOUT),
            kinds,
            pattern,
        )

    feed = EventFeed(address, options, RetryState(retry_timeout_s, draw), new_request)
    async with background() as nursery:
        nursery.start_soon(feed.run)
        await trio.lowlevel.checkpoint()
        yield feed
