"""Following which buckets change: a feed of the event bus, through any number of connections."""

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
from upr_protocol.client.core.options import IDENTITY_DEFAULT
from upr_protocol.client.core.retry import PATIENCE_S_DEFAULT, RetryPolicy
from upr_protocol.client.trio.connection import TrioOptions, open_connection
from upr_protocol.client.trio.request_channel import RequestChannel
from upr_protocol.concurrency import background
from upr_protocol.errors import ClosedError, UprError
from upr_protocol.limits import HANDSHAKE_TIMEOUT_S, IDLE_INTERVAL_S_DEFAULT, WINDOW_BYTES_DEFAULT
from upr_protocol.transport import Dial, dial_tcp
from upr_protocol.wire import EventsReply

TIMEOUT_S_DEFAULT: Final = 60
"""Longer than a restart takes, on either side."""

WAIT_S: Final = 10.0
"""How long a question waits for something to tell: an answer is a sign of life, on both sides."""

_QUESTIONS_A_TIMEOUT: Final = 3
"""So often a consumer says in its timeout that it is alive, however little there is to tell."""


@attrs.frozen
class LookAtEverything:
    """The consumer is new to the server, or was not heard of for longer than its timeout, or the
    server was killed: any bucket may have been created, deleted or changed. Look at everything,
    once; what comes after this is told."""


class EventFeed:
    """What becomes of a server's buckets, as an async iterator. `follow_events` makes one.

    To ask for the next is to say that this one is dealt with: what was not, as the process died or
    the connection broke, is told again.
    """

    def __init__(
        self,
        address: Address,
        options: TrioOptions,
        patience: RetryPolicy,
        question: Callable[[int], calls.Call[EventsReply]],
    ) -> None:
        self._addresses = deque(attrs.evolve(one, bucket="") for one in address.each())
        self._options = options
        self._patience = patience
        self._question = question
        self._acknowledged = 0
        self._told: deque[BucketEvent | LookAtEverything] = deque()
        self._error: UprError | None = None
        self._is_connected = False
        # Set, and replaced, when there is something to tell, or never will be again.
        self._news = trio.Event()
        # Set when everything that was told is dealt with.
        self._wanted = trio.Event()

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._is_connected

    @property
    def last_failure(self) -> str:
        """Why the last connection, or attempt to make one, ended."""
        return self._patience.last_failure

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> BucketEvent | LookAtEverything:
        """The next event; waits until there is one. Cancelled, nothing is lost.

        Raises:
            BrokenError: There was no connection for longer than patience lasts.
            ServerError: The server refused; with `FENCED`, because another consumer has taken the
                name.
            ClosedError: The context was left.
        """
        await trio.lowlevel.checkpoint()
        while not self._told:
            if self._error is not None:
                raise self._error
            self._wanted.set()
            await self._news.wait()
        return self._told.popleft()

    async def run(self) -> None:
        """Asks, for ever, or until that is no use any more."""
        try:
            while True:
                try:
                    await self._converse()
                except UprError as error:
                    self._is_connected = False
                    self._addresses.rotate(-1)
                    await trio.sleep(self._patience.wait_s(error, trio.current_time()))
        except UprError as error:
            self._end(error)
        finally:
            self._end(ClosedError("the feed of events was closed here"))

    async def _converse(self) -> None:
        address = self._addresses[0]
        asker = RequestChannel(address, 0.0)
        async with open_connection(address, self._options, asker):
            while True:
                reply = await asker.ask(self._question(self._acknowledged))
                self._is_connected = True
                self._patience.progress()
                if reply.batch:
                    await self._tell(reply)

    async def _tell(self, reply: EventsReply) -> None:
        if reply.everything:
            self._told.append(LookAtEverything())
        self._told += reply.events
        self._wanted = trio.Event()
        self._rouse()
        await self._wanted.wait()
        self._acknowledged = reply.batch

    def _end(self, error: UprError) -> None:
        self._error = self._error or error
        self._rouse()

    def _rouse(self) -> None:
        news, self._news = self._news, trio.Event()
        news.set()


@asynccontextmanager
async def follow_events(
    target: str | Address,
    *,
    consumer: str,
    kinds: EventKind = ALL_KINDS,
    pattern: str = "*",
    timeout_s: int = TIMEOUT_S_DEFAULT,
    identity: str = IDENTITY_DEFAULT,
    patience_s: float = PATIENCE_S_DEFAULT,
    idle_interval_s: int = IDLE_INTERVAL_S_DEFAULT,
    connect_timeout_s: float = HANDSHAKE_TIMEOUT_S,
    dial: Dial = dial_tcp,
    draw: Callable[[], float] = random.random,
) -> AsyncIterator[EventFeed]:
    """Which of a server's buckets are created, deleted and updated, and which of their design
    documents are; not what changes in them. What happens often between two questions is told once.

    It reconnects by itself. Under its name a consumer is known to the server for `timeout_s` after
    it asked last, and is told what it has missed; later than that, or by another node where several
    are named, it is told to look at everything.

    Args:
        target: `upr://host:port`; of several nodes the first that can be reached. Each tells of the
            buckets that it holds.
        consumer: The consumer's name: 1 to 100 of letters, digits, `.`, `_`, `-`. One at a time has
            it.
        kinds: What to be told of.
        pattern: Of which buckets: a name, in which `*`, `?` and `[...]` stand for others. Another
            pattern, or other kinds, want another name: what was left out is not told later.
        timeout_s: For how long the server keeps what it has to tell without being asked, 1 to
            3,600. To deal with one batch must not take longer.
        identity: `what:who`, for the server's logs and statistics.
        patience_s: How long it goes on without a connection before it gives up.
        idle_interval_s: The silence after which a side says that it is there still.
        connect_timeout_s: How long a connection and its first answers may take.
        dial: How to reach an address, where that is not plain TCP.
        draw: Gives numbers in [0, 1), for the waits between attempts.

    Raises:
        AddressError: The URL is none.
    """
    address = Address.parse(target) if isinstance(target, str) else target
    options = TrioOptions(identity, WINDOW_BYTES_DEFAULT, idle_interval_s, connect_timeout_s, dial)

    def question(acknowledged: int) -> calls.Call[EventsReply]:
        return calls.next_events(
            consumer,
            acknowledged,
            timeout_s,
            min(WAIT_S, timeout_s / _QUESTIONS_A_TIMEOUT),
            kinds,
            pattern,
        )

    feed = EventFeed(address, options, RetryPolicy(patience_s, draw), question)
    async with background() as nursery:
        nursery.start_soon(feed.run)
        await trio.lowlevel.checkpoint()
        yield feed
