"""A publisher and a consumer that keep the protocol, for tests with clients that break it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Protocol

import trio

from tests.kit.mirror import Mirror, assert_same, server_contents
from upr_protocol.client import Consumer, Publisher, connect, consume, publisher

BUCKET: Final = "good-clients"
PARTITIONS: Final = 4
KEYS: Final = 200
SETS_A_ROUND: Final = 50

PACE_S: Final = 0.05
"""How long after the beginning of a round the next one begins, if the round is over by then: 20
rounds and 1,000 changes a second. Alone a round takes some 5 ms."""

PAUSE_S: Final = 0.02
"""Where rounds take longer, they still leave the processor to others in between."""

ROUND_MAX_S: Final = 10.0
"""On a busy machine a round takes milliseconds; what takes longer than this was held up."""


class Served(Protocol):
    """A server, in this process or in another one."""

    def url(self, bucket: str = "") -> str:
        """The URL of a bucket there, or of the server."""


class GoodClients:
    """Makes rounds: publishes, waits for a barrier, and checks that everything was received.

    Attributes:
        took_s: How long each round took.
    """

    def __init__(self, consumer: Consumer, sink: Publisher) -> None:
        self.took_s: list[float] = []
        self._consumer = consumer
        self._sink = sink
        self._mirror = Mirror()
        self._written: dict[bytes, bytes] = {}
        self._round_over = trio.Event()

    @property
    def rounds(self) -> int:
        """How many rounds were made."""
        return len(self.took_s)

    async def _follow(self) -> None:
        async for event in self._consumer:
            self._mirror.apply(event)

    async def _work(self) -> None:
        batch = 0
        while True:
            began_at = trio.current_time()
            for _ in range(SETS_A_ROUND):
                batch += 1
                key, value = b"key-%d" % (batch % KEYS), b"value-%d" % batch
                await self._sink.set(key, value)
                self._written[key] = value
            await self._sink.flush()
            await self._consumer.barrier()
            assert_same(self._mirror.contents, self._written, PARTITIONS)
            self.took_s.append(trio.current_time() - began_at)
            self._round_over.set()
            await trio.sleep(max(PAUSE_S, PACE_S - self.took_s[-1]))

    async def more_rounds(self, count: int = 5) -> None:
        """Waits until so many more rounds are complete, which shows that the clients are served."""
        for _ in range(self.rounds, self.rounds + count):
            self._round_over = trio.Event()
            await self._round_over.wait()

    def check(self) -> None:
        """Checks that the clients were never disconnected and never waited long."""
        assert self.rounds > 0
        assert self._consumer.statistics().connections == 1
        assert self._sink.statistics().connections == 1
        longest_s = max(self.took_s)
        assert longest_s < ROUND_MAX_S, f"{longest_s:.1f} s for a round"


@asynccontextmanager
async def good_clients(server: Served) -> AsyncIterator[GoodClients]:
    """A publisher and a consumer that work while the context lasts. At its end, what they have is
    compared with the server, and `check` is called."""
    async with connect(server.url()) as client:
        await client.create_bucket(BUCKET, PARTITIONS)
    url = server.url(BUCKET)
    async with consume(url) as consumer, publisher(url) as sink, connect(url) as client:
        clients = GoodClients(consumer, sink)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(clients._follow)
            nursery.start_soon(clients._work)
            await clients.more_rounds(2)
            yield clients
            await clients.more_rounds()
            nursery.cancel_scope.cancel()
        clients.check()
        await sink.flush()
        written_items = clients._written
        assert_same(written_items, await server_contents(client, written_items), PARTITIONS)
