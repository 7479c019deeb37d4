"""Which builders there are, as indexes are defined and dropped while they are built."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import trio

from tests.indexer.kit import BUCKET, a_server, an_indexer, define, entries_of, name_of
from tests.kit.process import eventually
from upr_protocol.client import connect
from upr_server.indexer.builder import IndexBuilder
from upr_server.indexer.definitions import index_path
from upr_server.indexer.document_rows import RoundChanges
from upr_server.indexer.index_file import EntrySource, IndexFile
from upr_server.indexer.indexer import Indexer
from upr_server.indexer.pure.definition import IndexDefinition

BY_N = IndexDefinition(("n",))


async def test_a_builder_goes_on_until_its_last_index_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[IndexBuilder] = []
    ended: list[IndexBuilder] = []

    async def build_for_ever(builder: IndexBuilder) -> None:
        began.append(builder)
        try:
            await trio.sleep_forever()
        finally:
            ended.append(builder)

    monkeypatch.setattr(IndexBuilder, "run", build_for_ever)
    async with (
        a_server() as server,
        connect(server.url(BUCKET)) as client,
        an_indexer(server.url(BUCKET), tmp_path) as indexer,
    ):
        definitions = indexer.slices[0].definitions
        await define(client, "d", {"first": BY_N, "second": BY_N})
        await eventually(lambda: len(began) == 1, "building has begun")
        (builder,) = began
        assert len(builder.members) == 2

        async def define_and_wait(indexes: dict[str, IndexDefinition]) -> None:
            await define(client, "d", indexes)
            count = len(indexes)
            await eventually(
                lambda: len(definitions.names()) == definitions.building_count == count,
                "the others are dropped",
            )

        await define_and_wait({"second": BY_N})
        assert (began, ended) == ([builder], [])
        await define_and_wait({})
        await eventually(lambda: bool(ended), "building has ended")
        assert (began, ended) == ([builder], [builder])


async def test_an_index_that_has_nothing_yet_does_not_have_others_begin_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where both were being built at a stop, the next start built them together: it cleared what
    the one had, as the other had it not."""
    cleared: list[Path] = []
    apply = IndexFile.apply_changes

    def apply_noted(file: IndexFile, changes: RoundChanges, source: EntrySource) -> int:
        cleared.extend(file.path for batch in changes.batches if batch.clears_partition)
        return apply(file, changes, source)

    monkeypatch.setattr(IndexFile, "apply_changes", apply_noted)

    async def until_read(indexer: Indexer, name: str) -> None:
        await eventually(lambda: entries_of(indexer, name) == 20, f"{name} is read")

    # No index is ever complete.
    monkeypatch.setattr(IndexBuilder, "_join", lambda _builder: None)
    async with a_server() as server, connect(server.url(BUCKET)) as client:
        for number in range(20):
            await client.set(f"k{number}", '{"n": 1}')
        await define(client, "d", {"old": BY_N, "new": BY_N})
        async with an_indexer(server.url(BUCKET), tmp_path) as indexer:
            await until_read(indexer, "d/old")
            await until_read(indexer, "d/new")
        path = index_path(tmp_path / "slice-0-of-1", name_of("d/new"), BY_N)
        shutil.rmtree(path)
        IndexFile(path, BUCKET).close()
        async with an_indexer(server.url(BUCKET), tmp_path) as indexer:
            await until_read(indexer, "d/new")
            assert entries_of(indexer, "d/old") == 20
    assert not cleared
