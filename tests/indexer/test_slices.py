"""Indexes that are divided into slices, in one process."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import structlog
import trio

from tests.indexer.brute_force import Row, index_rows
from tests.indexer.kit import (
    PARTITIONS,
    a_server,
    an_indexer,
    ask,
    by_brute_force,
    define,
    name_of,
    scan,
    until_ready,
)
from upr_protocol.client import connect
from upr_server.app import Server
from upr_server.indexer.indexer import Indexer
from upr_server.indexer.moments import MomentGoneError
from upr_server.indexer.pure.definition import IndexDefinition
from upr_server.indexer.query import Query
from upr_server.indexer.slice_scanner import BuildingError
from upr_server.indexer.slices import SliceId

CITY = IndexDefinition(("city", "n"), include=("n",))
CONTENTS = {b"k%02d" % n: b'{"city": "%d", "n": %d}' % (n % 7, n) for n in range(60)}
NOW = Query(consistency="now", limit=10_000)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with a_server() as server, connect(server.url("b")) as client:
        for key, value in CONTENTS.items():
            await client.set(key, value)
        await define(client, "d", {"city": CITY})
        yield server


@pytest.fixture
async def indexer(server: Server, tmp_path: Path) -> AsyncIterator[Indexer]:
    async with an_indexer(server.url("b"), tmp_path, slices=3) as indexer:
        await until_ready(indexer, "d/city")
        yield indexer


def rows_of(page: object) -> list[Row]:
    return [Row(e.key, e.id, e.included) for e in page.entries]  # type: ignore[attr-defined]


async def test_an_answer_is_of_all_slices(indexer: Indexer) -> None:
    rows = index_rows(CITY, CONTENTS)
    query = msgspec.structs.replace(NOW, timestamps=True, explain=True)
    page = await ask(indexer, "d/city", query)
    assert rows_of(page) == rows
    assert set(page.timestamps) == set(range(PARTITIONS))
    assert sum(seq for _, seq in page.timestamps.values()) == len(CONTENTS) + 1
    assert page.explanation is not None
    assert (page.explanation.slices, page.explanation.index_entries) == (3, len(rows))
    assert page.explanation.entries_given == page.explanation.entries_read == len(rows)
    assert page.explanation.freshness == "barrier"
    assert len({wait.reason for wait in page.explanation.waits}) == len(page.explanation.waits)
    down = await ask(indexer, "d/city", msgspec.structs.replace(NOW, descending=True, limit=7))
    assert rows_of(down) == rows[::-1][:7]
    assert down.continuation
    counted = await ask(indexer, "d/city", Query(count=True, min=True, max=True))
    assert (counted.count, counted.min, counted.max) == (60, ["0", 0], ["6", 55])
    query = Query(count=True, distinct=1, max=True, explain=True, timestamps=True)
    beginnings = await ask(indexer, "d/city", query)
    assert (beginnings.count, beginnings.min, beginnings.max) == (7, None, ["6"])
    assert set(beginnings.timestamps) == set(range(PARTITIONS))
    assert not any(len(part.moments) for part in indexer.slices)


async def test_a_moment_is_of_all_slices(server: Server, indexer: Indexer) -> None:
    rows = index_rows(CITY, CONTENTS)
    page = await ask(indexer, "d/city", Query(consistency="now", limit=20, hold_s=60))
    assert [len(part.moments) for part in indexer.slices] == [1, 1, 1]
    async with connect(server.url("b")) as client:
        for key in CONTENTS:
            await client.delete(key)
    assert await scan(indexer, "d/city") == []
    query = Query(limit=10_000, hold_s=60, moment=page.moment, continuation=page.continuation)
    rest = await ask(indexer, "d/city", query)
    assert rows_of(page) + rows_of(rest) == rows
    assert rest.moment == page.moment
    query = Query(count=True, distinct=1, moment=page.moment, hold_s=60)
    assert (await ask(indexer, "d/city", query)).count == 7
    await indexer.scanner.release(page.moment)
    assert not any(len(part.moments) for part in indexer.slices)
    for token in (page.moment, "x", "x.y.z"):
        with pytest.raises(MomentGoneError):
            await ask(indexer, "d/city", Query(moment=token))


async def test_a_moment_that_one_slice_cannot_hold_is_held_by_none(
    indexer: Indexer, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = await ask(indexer, "d/city", Query(hold_s=60))
    indexer.slices[1].moments.release_all()
    with pytest.raises(MomentGoneError):
        await ask(indexer, "d/city", Query(hold_s=60, moment=page.moment))
    with pytest.raises(MomentGoneError):
        await indexer.scanner.release(page.moment)


async def test_no_answer_comes_from_a_part_of_the_slices(indexer: Indexer) -> None:
    file = indexer.slices[2].definitions.find(name_of("d/city")).file
    file._joined = False
    with pytest.raises(BuildingError):
        await ask(indexer, "d/city", Query(hold_s=60))
    # Those that had an answer hold no moment for it.
    await trio.testing.wait_all_tasks_blocked()
    assert not any(len(part.moments) for part in indexer.slices)
    status = await indexer.scanner.status(name_of("d/city"))
    assert status.state == "building"
    assert [part.state for part in status.slices] == ["ready", "ready", "building"]
    assert sum(part.entries for part in status.slices) == status.entries == len(CONTENTS)
    file._joined = True
    # A slice that has yet to hear of another definition.
    indexer.slices[0].definitions.find(name_of("d/city")).definition = IndexDefinition(("n",))
    with pytest.raises(BuildingError):
        await scan(indexer, "d/city")


async def test_indexes_that_are_divided_anew_are_built_again(
    server: Server, tmp_path: Path
) -> None:
    (tmp_path / "indexes" / "old").mkdir(parents=True)
    (tmp_path / "ring").touch()
    expected = by_brute_force(CITY, CONTENTS)
    # In the end there are more slices than partitions.
    for slices in (2, 2, PARTITIONS + 1):
        with structlog.testing.capture_logs() as logs:
            async with an_indexer(server.url("b"), tmp_path, slices=slices) as indexer:
                await until_ready(indexer, "d/city")
                assert await scan(indexer, "d/city") == expected
                figures = await indexer.statistics()
                assert figures["connected"] is True
                assert [row["slice"] for row in figures["slices"]] == list(range(slices))
        lines = [line for line in logs if "divided in another way" in line["event"]]
        is_first_time = "building index" in [line["event"] for line in logs]
        assert len(lines) == is_first_time
        assert set(os.listdir(tmp_path)) == {
            "lock",
            *(SliceId(part, slices).folder for part in range(slices)),
        }
