"""At `now`, every scan is a scan by brute force of what the server has.

Random documents, definitions, updates and deletions; indexers and servers that crash; indexes that
come and go meanwhile. `UPR_INDEXER_ROUNDS` says how many runs; each names its seed.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.indexer.kit import BUCKET, an_indexer, by_brute_force, define, name_of, scan, until_ready
from tests.indexer.test_keys import compare
from tests.kit.held_store import HeldStore
from tests.kit.process import eventually
from upr_protocol.client import Client, connect
from upr_server.app import Server, running_server
from upr_server.config import BucketConfig, Config
from upr_server.indexer.definition import IndexDefinition
from upr_server.indexer.indexer import Indexer

ROUNDS = int(os.environ.get("UPR_INDEXER_ROUNDS", "6"))
PARTITIONS = 4
KEYS = [f"k{number}" for number in range(40)]
DEFINITIONS = [
    IndexDefinition(("a",)),
    IndexDefinition(("a", "b")),
    IndexDefinition(("b", "document_key()"), "a"),
    IndexDefinition(("c[0]",), "b != a"),
    IndexDefinition(("c",)),
]
VALUES = [None, True, False, 0, 1, 1.5, -2, 2**53 + 1, "", "x", "xy", "é", [1], [1, "x"], {"q": 1}]


class World:
    """A server that crashes, an indexer that crashes, and who writes.

    Attributes:
        rollbacks: How many times a partition of an indexer's went back.
    """

    def __init__(self, seed: int, data_dir: Path) -> None:
        self.rng = random.Random(seed)
        self._data_dir = data_dir
        self._store = HeldStore()
        self._store.released.set()
        self.ring = self.rng.choice([5, 50, 1000])
        self._port = 0
        self._nursery: trio.Nursery | None = None
        self.server: Server
        self.client: Client
        self.indexer: Indexer
        self.defined: dict[str, IndexDefinition] = {}
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

    async def _start(self, what: str, run: Any) -> None:
        assert self._nursery is not None
        started = trio.Event()
        ended = self._ended[what] = trio.Event()
        scope = self._stop[what] = trio.CancelScope()

        async def go() -> None:
            try:
                with scope:
                    await run(started)
            finally:
                ended.set()

        self._nursery.start_soon(go)
        await started.wait()

    async def crash(self, what: str) -> None:
        """Cancels it where it stands: nothing is saved."""
        if what == "indexer":
            self.rollbacks += self.indexer.stream.rollbacks
        self._stop[what].cancel()
        await self._ended[what].wait()

    def hold_commits(self) -> None:
        """What is written from now on is lost when the server crashes."""
        self._store.released = trio.Event()

    async def start_server(self) -> None:
        self._store = HeldStore(self._store.room)
        self._store.released.set()

        async def run(started: trio.Event) -> None:
            config = Config(
                listen=f"127.0.0.1:{self._port}", buckets=(BucketConfig(BUCKET, PARTITIONS),)
            )
            async with running_server(config, self._store) as self.server:
                self._port = self.server.port
                async with connect(self.server.url(BUCKET)) as self.client:
                    started.set()
                    await trio.sleep_forever()

        await self._start("server", run)

    async def start_indexer(self) -> None:
        async def run(started: trio.Event) -> None:
            async with an_indexer(
                self.server.url(BUCKET), self._data_dir, ring=self.ring
            ) as self.indexer:
                started.set()
                await trio.sleep_forever()

        await self._start("indexer", run)

    # Who writes.

    def _document(self) -> str:
        choice = self.rng.choice
        if self.rng.random() < 0.1:
            return choice(["", "no json", "7", "[]", '"x"'])
        fields: dict[str, Any] = {}
        for name in "abc":
            if self.rng.random() < 0.8:
                fields[name] = choice(VALUES)
        if self.rng.random() < 0.3:
            fields["c"] = [choice(VALUES), choice(VALUES)]
        return json.dumps(fields)

    async def write(self, count: int) -> None:
        for _ in range(count):
            key = self.rng.choice(KEYS)
            if self.rng.random() < 0.25:
                if await self.client.get(key) is not None:
                    await self.client.delete(key)
            else:
                await self.client.set(key, self._document())

    async def redefine(self) -> None:
        name = self.rng.choice("xyz")
        definition = self.rng.choice(DEFINITIONS)
        self.defined[name] = definition
        await define(self.client, name, {"i": definition})

    # What must hold.

    async def contents(self) -> dict[bytes, bytes]:
        items = await self.client.get_many(KEYS)
        return {item.key: bytes(item.value) for item in items if item is not None}

    async def read_designs(self) -> None:
        """A server that crashed may have lost some."""
        found = {}
        for name in "xyz":
            item = await self.client.get(f"_design/{name}")
            if item is not None:
                fields = json.loads(item.value)["indexes"]["i"]
                found[name] = IndexDefinition(tuple(fields["key"]), fields["filter"])
        self.defined = found

    def _is_current(self) -> bool:
        names = set(self.indexer.names())
        return names == {name_of(f"{name}/i") for name in self.defined} and all(
            self.indexer.find(name_of(f"{name}/i")).definition == definition
            for name, definition in self.defined.items()
        )

    async def check(self) -> None:
        await eventually(self._is_current, "the indexes are those that are defined", 20)
        await until_ready(self.indexer, *(f"{name}/i" for name in self.defined))
        contents = await self.contents()
        for name, definition in self.defined.items():
            wanted = by_brute_force(definition, contents)
            found = await scan(self.indexer, f"{name}/i", timeout_s=20)
            assert found == wanted
            if wanted:
                middle = self.rng.choice(wanted)[0][:1]
                down = await scan(self.indexer, f"{name}/i", prefix=middle, descending=True)
                some = [entry for entry in wanted if compare(entry[0][0], middle[0]) == 0]
                assert down == some[::-1]
            self.indexer.find(name_of(f"{name}/i")).file.check_invariants()


@pytest.mark.parametrize("seed", range(ROUNDS))
async def test_at_now_it_is_what_the_server_has(seed: int, tmp_path: Path) -> None:
    world = World(seed, tmp_path)
    async with world.running():
        await world.redefine()
        for _ in range(6):
            await world.write(world.rng.randrange(60))
            step = world.rng.choice(["indexer", "server", "both", "redefine", "drop", "check"])
            if step in ("indexer", "both"):
                await world.crash("indexer")
                await world.write(world.rng.randrange(20))
            if step in ("server", "both"):
                if world.rng.random() < 0.5:
                    world.hold_commits()
                    await world.write(world.rng.randrange(20))
                await world.crash("server")
                await world.start_server()
                await world.read_designs()
                await world.write(world.rng.randrange(20))
            if step in ("indexer", "both"):
                await world.start_indexer()
            if step == "redefine":
                await world.redefine()
            if step == "drop" and world.defined:
                name = world.rng.choice(sorted(world.defined))
                await world.client.delete(f"_design/{name}")
                del world.defined[name]
            if step != "redefine":
                await world.check()
        await world.check()
