"""The oracle: writes random documents and definitions, and checks every scan at `now`."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec

from tests.indexer.brute_force import Row, index_rows
from tests.indexer.kit import ask, by_brute_force, define, name_of, scan, until_ready
from tests.indexer.pure.key_order import compare
from tests.kit.process import eventually
from upr_protocol.client import Client
from upr_server.indexer.indexer import Indexer
from upr_server.indexer.pure.definition import IndexDefinition
from upr_server.indexer.query import Query

KEYS = [f"k{index}" for index in range(40)]
DEFINITIONS = [
    IndexDefinition(("a",)),
    IndexDefinition(("a", "b")),
    IndexDefinition(("b", "document_key()"), "a"),
    IndexDefinition(("c[0]",), "b != a"),
    IndexDefinition(("c",)),
    IndexDefinition(("c", "a"), each="c"),
    IndexDefinition(("a", "c"), "b", each="c", include=("b", "c", "document_key()")),
    IndexDefinition(("a",), include=("c",)),
]
VALUES = [None, True, False, 0, 1, 1.5, -2, 2**53 + 1, "", "x", "xy", "é", [1], [1, "x"], {"q": 1}]


class Oracle:
    """Writes random documents and definitions, and compares scans with a scan by brute force.

    Attributes:
        rng: The random number generator.
        client: Writes.
        indexer: The indexer that is scanned.
        defined: The definition of the index that each design document defines.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.client: Client
        self.indexer: Indexer
        self.defined: dict[str, IndexDefinition] = {}

    # Writing.

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

    # Checking.

    async def contents(self) -> dict[bytes, bytes]:
        items = await self.client.get_many(KEYS)
        return {item.key: bytes(item.value) for item in items if item is not None}

    async def read_designs(self) -> None:
        """Reads from the server which indexes are defined: a crash may have lost some."""
        definitions = {}
        for name in "xyz":
            item = await self.client.get(f"_design/{name}")
            if item is not None:
                fields = json.loads(item.value)["indexes"]["i"]
                definitions[name] = msgspec.convert(fields, IndexDefinition)
        self.defined = definitions

    def _is_current(self) -> bool:
        designs = self.indexer.designs
        return set(designs.names()) == {name_of(f"{name}/i") for name in self.defined} and all(
            designs.find(name_of(f"{name}/i")) == definition
            for name, definition in self.defined.items()
        )

    async def check(self) -> None:
        await eventually(self._is_current, "the indexes are those that are defined", 20)
        await until_ready(self.indexer, *(f"{name}/i" for name in self.defined))
        contents = await self.contents()
        for name, definition in self.defined.items():
            expected = by_brute_force(definition, contents)
            query = Query(consistency="now", limit=10_000, timeout_s=20)
            answer = await ask(self.indexer, f"{name}/i", query)
            entries = [Row(entry.key, entry.id, entry.included) for entry in answer.entries]
            assert entries == index_rows(definition, contents)
            if expected:
                middle = self.rng.choice(expected)[0][:1]
                down = await scan(self.indexer, f"{name}/i", prefix=middle, descending=True)
                with_prefix = [entry for entry in expected if compare(entry[0][0], middle[0]) == 0]
                assert down == with_prefix[::-1]
            for part in self.indexer.slices:
                part.definitions.find(name_of(f"{name}/i")).file.check_invariants()
        for name, definition in self.defined.items():
            contents = await self.contents()
            assert await self._page_while_writing(name) == index_rows(definition, contents)
        assert not any(len(part.moments) for part in self.indexer.slices)

    async def _page_while_writing(self, name: str) -> list[Row]:
        """All entries of one moment at `now`, page by page, while documents change."""
        query = Query(consistency="now", limit=self.rng.randrange(2, 9), hold_s=60, timeout_s=20)
        rows: list[Row] = []
        while True:
            page = await ask(self.indexer, f"{name}/i", query)
            rows += [Row(entry.key, entry.id, entry.included) for entry in page.entries]
            if not page.continuation:
                await self.indexer.scanner.release(page.moment)
                return rows
            await self.write(self.rng.randrange(6))
            query = msgspec.structs.replace(
                query, consistency="any", continuation=page.continuation, moment=page.moment
            )
