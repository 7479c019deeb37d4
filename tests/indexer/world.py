"""A server and an indexer that both crash, and a client that writes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from tests.indexer.kit import BUCKET, an_indexer, workers_in_the_loop
from tests.indexer.oracle import Oracle
from tests.kit.held_store import HeldStore
from upr_protocol.client import connect
from upr_server.app import Server, running_server
from upr_server.config import BucketConfig, ServerConfig
from upr_server.indexer.indexer import HolderMaker

PARTITIONS = 4


class World(Oracle):
    """A server and an indexer, which both crash, and a client that writes.

    Attributes:
        slices: How many slices the indexer has.
        in_workers: Whether the slices are in workers, which are tasks of this process.
        rollbacks: How many times an indexer rolled back a partition.
    """

    def __init__(self, seed: int, data_dir: Path) -> None:
        super().__init__(seed)
        self._data_dir = data_dir
        self._store = HeldStore()
        self._store.released.set()
        self.undo_mutations = self.rng.choice([5, 50, 1000])
        self.slices = (1, 3, 2)[seed % 3]
        self.in_workers = False
        self._port = 0
        self._nursery: trio.Nursery | None = None
        self.server: Server
        self.rollbacks = 0
        self._stop: dict[str, trio.CancelScope] = {}
        self._ended: dict[str, trio.Event] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as self._nursery:
            await self.start_server()
            await self.start_indexer()
            yield
            await self.crash("indexer")
            await self.crash("server")

    async def _start(self, name: str, run: Any) -> None:
        assert self._nursery is not None
        started = trio.Event()
        end_event = self._ended[name] = trio.Event()
        scope = self._stop[name] = trio.CancelScope()

        async def go() -> None:
            try:
                with scope:
                    await run(started)
            finally:
                end_event.set()

        self._nursery.start_soon(go)
        await started.wait()

    async def crash(self, name: str) -> None:
        """Cancels the server or the indexer, so that it saves nothing."""
        if name == "indexer":
            self.rollbacks += sum(part.stream.rollbacks for part in self.indexer.slices)
        self._stop[name].cancel()
        await self._ended[name].wait()

    def hold_commits(self) -> None:
        """Stops commits: what is written from now on is lost when the server crashes."""
        self._store.released = trio.Event()

    async def start_server(self) -> None:
        self._store = HeldStore(self._store.directory)
        self._store.released.set()

        async def run(started: trio.Event) -> None:
            config = ServerConfig(
                listen=f"127.0.0.1:{self._port}", buckets=(BucketConfig(BUCKET, PARTITIONS),)
            )
            async with running_server(config, self._store) as self.server:
                self._port = self.server.port
                async with connect(self.server.url(BUCKET)) as self.client:
                    started.set()
                    await trio.sleep_forever()

        await self._start("server", run)

    def _make_holder(self) -> HolderMaker | None:
        if not self.in_workers:
            return None
        return workers_in_the_loop(
            self.server.url(BUCKET), self._data_dir, undo_mutations=self.undo_mutations
        )

    async def start_indexer(self) -> None:
        async def run(started: trio.Event) -> None:
            async with an_indexer(
                self.server.url(BUCKET),
                self._data_dir,
                undo_mutations=self.undo_mutations,
                slices=self.slices,
                make_holder=self._make_holder(),
            ) as self.indexer:
                started.set()
                await trio.sleep_forever()

        await self._start("indexer", run)
