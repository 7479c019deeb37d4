"""Moments: what their pages show, and when the indexer releases them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.indexer.brute_force import expected_answer, index_rows
from tests.indexer.index_batches import apply, batch, entries, whole
from tests.indexer.kit import (
    a_server,
    an_indexer,
    ask,
    define,
    name_of,
    scan,
    source_of,
    until_ready,
)
from tests.indexer.queried_index import CONTENTS, DEFINITIONS, an_index, answer_of, queries, rows_of
from tests.kit.process import eventually
from upr_protocol.client import Client, connect
from upr_server.indexer import moments as moments_module
from upr_server.indexer.definitions import NoIndexError
from upr_server.indexer.document_rows import RoundChanges
from upr_server.indexer.entry_reader import EntrySelection
from upr_server.indexer.index_file import IndexFile, IndexFileError
from upr_server.indexer.indexer import Indexer
from upr_server.indexer.moments import (
    AGE_S_MAX,
    CHECK_INTERVAL_S,
    HOLD_S_MAX,
    MOMENT_BYTES,
    MOMENTS_MAX,
    Moment,
    MomentGoneError,
    Moments,
)
from upr_server.indexer.pool import MemoryPool, OverloadedError
from upr_server.indexer.pure.definition import IndexDefinition
from upr_server.indexer.query import Query, QueryError

POOL_BYTES = 64 * 1024 * 1024
CITY = IndexDefinition(("city",))


@settings(max_examples=100)
@given(DEFINITIONS, st.lists(CONTENTS, min_size=2, max_size=4), queries(), st.integers(1, 5))
def test_pages_of_a_view_do_not_see_what_is_written_meanwhile(
    tmp_path_factory: pytest.TempPathFactory,
    definition: IndexDefinition,
    states: list[dict[bytes, bytes]],
    query: Query,
    limit: int,
) -> None:
    contents = states.pop()
    expected = expected_answer(index_rows(definition, contents), query).rows
    with an_index(tmp_path_factory.mktemp("index"), definition, contents) as index:
        rows, seq = [], len(contents)
        query = msgspec.structs.replace(query, limit=limit)
        with index.file.open_view() as view:
            while True:
                page = answer_of([view], [index], query)
                rows += rows_of(page)
                if not page.continuation:
                    break
                query = msgspec.structs.replace(query, continuation=page.continuation)
                if states:
                    state = states.pop()
                    items = [
                        (seq + n, key, state.get(key))
                        for n, key in enumerate(contents.keys() | state.keys(), 1)
                    ]
                    seq += len(items)
                    contents = state
                    changes = batch(0, whole(seq), items)
                    index.file.apply_changes(RoundChanges([changes]), source_of(index))
    assert rows == expected


@pytest.fixture
def file(tmp_path: Path) -> Iterator[IndexFile]:
    file = IndexFile(tmp_path / "i", "b")
    apply(file, batch(0, whole(1), [(1, b"k", b"v")]))
    yield file
    file.close()


@pytest.fixture
def moments(nursery: trio.Nursery) -> Iterator[Moments]:
    moments = Moments(MemoryPool(POOL_BYTES))
    nursery.start_soon(moments.run)
    yield moments
    moments.release_all()


def hold_moment(moments: Moments, file: IndexFile, hold_s: float) -> Moment:
    moment = moments.hold(file, file.open_view())
    with moment.in_use(hold_s):
        pass
    return moment


async def test_a_moment_is_held_for_as_long_as_asked_after_each_use(
    moments: Moments, file: IndexFile, autojump_clock: MockClock
) -> None:
    moment = hold_moment(moments, file, 10)
    for _ in range(5):
        await trio.sleep(9.9)
        assert moments.find(moment.token, file) is moment
        with moment.in_use(10):
            await trio.sleep(60)
    await trio.sleep(9.9)
    moment.check()
    await trio.sleep(0.1 + CHECK_INTERVAL_S)
    with pytest.raises(MomentGoneError, match="is not held"):
        moments.find(moment.token)
    assert moments.given_up == 1


async def test_a_moment_does_not_live_for_ever_by_use(
    moments: Moments, file: IndexFile, autojump_clock: MockClock
) -> None:
    moment = hold_moment(moments, file, 60)
    with moment.in_use(60):
        await trio.sleep(AGE_S_MAX - 1)
        moment.check()
        async with moment.reading() as view:
            await trio.sleep(1 + CHECK_INTERVAL_S)
            assert moment.is_gone
            # A scan that is reading the moment continues.
            assert view.scan(EntrySelection(), 9).entries == entries(file)
        with pytest.raises(MomentGoneError):
            async with moment.reading():
                raise AssertionError("it is held")


async def test_a_moment_is_given_up_when_its_file_grows_too_much(
    moments: Moments, file: IndexFile, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moments_module, "GROWTH_BYTES_MAX", 1024 * 1024)
    moment = hold_moment(moments, file, 60)
    sizes, seq = [file.disk_bytes()], 1
    with moment.in_use(60):
        while not moment.is_gone:
            # The same documents again and again: the file grows only because of the moment.
            items = [(seq + n, b"k%d" % n, b"v") for n in range(1, 101)]
            apply(file, batch(0, whole(seq + 100), items))
            seq += 100
            sizes.append(file.disk_bytes())
            await trio.sleep(CHECK_INTERVAL_S)
            assert sizes[-1] < 3 * 1024 * 1024
    assert sizes[-1] > 1024 * 1024
    settled = file.disk_bytes()
    for _ in range(100):
        apply(
            file, batch(0, whole(seq + 100), [(seq + n, b"k%d" % n, b"v") for n in range(1, 101)])
        )
        seq += 100
    assert file.disk_bytes() == settled


async def test_moments_are_bounded_in_number_and_count_in_the_pool(
    moments: Moments, file: IndexFile, autojump_clock: MockClock
) -> None:
    for _ in range(MOMENTS_MAX):
        hold_moment(moments, file, 60)
    assert moments._pool.scan_bytes == MOMENTS_MAX * MOMENT_BYTES
    with pytest.raises(OverloadedError, match="64 moments"):
        hold_moment(moments, file, 60)
    moments.release_all()
    assert moments._pool.scan_bytes == 0
    await trio.lowlevel.checkpoint()
    moments._pool.reserve(POOL_BYTES)
    with pytest.raises(OverloadedError, match="short of memory"):
        hold_moment(moments, file, 60)
    moments._pool.release(POOL_BYTES)


@pytest.fixture
async def indexer(tmp_path: Path) -> AsyncIterator[tuple[Client, Indexer]]:
    async with (
        a_server() as server,
        connect(server.url("b")) as client,
        an_indexer(server.url("b"), tmp_path) as indexer,
    ):
        await define(client, "d", {"city": CITY, "other": CITY})
        for number in range(9):
            await client.set(f"k{number}", json.dumps({"city": "abc"[number % 3]}))
        await until_ready(indexer, "d/city", "d/other")
        yield client, indexer


async def page(indexer: Indexer, **fields: Any) -> Any:
    return await ask(indexer, "d/city", Query(limit=2, **fields))


async def test_every_kind_of_query_may_be_asked_of_a_moment(
    indexer: tuple[Client, Indexer],
) -> None:
    client, target = indexer
    first = await page(target, consistency="now", hold_s=60, timestamps=True)
    assert first.moment
    for number in range(9):
        await client.set(f"k{number}", "{}")
    assert await scan(target, "d/city") == []
    moment = {"moment": first.moment, "hold_s": 60}
    again = await page(target, **moment, timestamps=True)
    assert again == first
    counted = await ask(target, "d/city", Query(**moment, count=True, max=True))
    assert (counted.count, counted.max) == (9, ["c"])
    explained = await page(target, **moment, explain=True, descending=True)
    assert explained.explanation.freshness == "moment"
    assert [entry.id for entry in explained.entries] == ["k8", "k5"]
    # A request without `hold_s` releases the moment.
    assert (await page(target, moment=first.moment)).entries == first.entries
    with pytest.raises(MomentGoneError):
        await page(target, moment=first.moment)
    assert not target.slices[0].moments
    assert target.pool.scan_bytes == 0


async def test_a_moment_is_refused_for_another_index(indexer: tuple[Client, Indexer]) -> None:
    client, target = indexer
    first = await page(target, hold_s=60)
    query = Query(moment=first.moment)
    with pytest.raises(MomentGoneError):
        await ask(target, "d/other", query)
    with pytest.raises(MomentGoneError):
        await page(target, moment="x")
    await client.delete("_design/d")
    await eventually(lambda: not target.designs.names(), "the index is dropped")
    with pytest.raises(NoIndexError):
        await ask(target, "d/city", query)
    await eventually(lambda: not target.slices[0].moments, "its moments are released")
    await define(client, "d", {"city": CITY})
    await until_ready(target, "d/city")
    with pytest.raises(MomentGoneError):
        await ask(target, "d/city", query)


async def test_a_refused_request_does_not_release_the_moment(
    indexer: tuple[Client, Indexer],
) -> None:
    _, target = indexer
    first = await page(target, hold_s=60)
    for fields in {"consistency": "now"}, {"prefix": [1, 2]}, {"continuation": "x"}:
        with pytest.raises(QueryError):
            await page(target, moment=first.moment, hold_s=60, **fields)
    assert (await page(target, moment=first.moment)).entries == first.entries


async def test_moments_end_with_the_indexer(tmp_path: Path) -> None:
    async with a_server() as server, connect(server.url("b")) as client:
        await define(client, "d", {"city": CITY})
        async with an_indexer(server.url("b"), tmp_path) as target:
            await until_ready(target, "d/city")
            first = await page(target, hold_s=HOLD_S_MAX)
            name = name_of("d/city")
            held_file = target.slices[0].definitions.find(name).file
        assert first.moment
        assert held_file._is_closed
        async with an_indexer(server.url("b"), tmp_path) as target:
            await until_ready(target, "d/city")
            with pytest.raises(MomentGoneError, match="the indexer was restarted"):
                await page(target, moment=first.moment)


async def test_a_moment_that_is_released_between_two_readers_is_closed(tmp_path: Path) -> None:
    """The second reader has the lock, but has not begun to read. If nothing closed the view, the
    file would grow until the garbage collector finds the moment."""
    moments = Moments(MemoryPool(POOL_BYTES))
    with an_index(tmp_path, CITY, {}) as index:
        view = index.file.open_view()
        moment = moments.hold(index.file, view)

        async def read() -> None:
            with pytest.raises(MomentGoneError):
                async with moment.reading():
                    pass

        async with trio.open_nursery() as nursery:
            async with moment.reading():
                nursery.start_soon(read)
                await trio.testing.wait_all_tasks_blocked()
            moments.release(moment)
        with pytest.raises(IndexFileError):
            view.opening()
