"""An indexer beside a server: from documents to scans."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio
import trio.lowlevel

from tests.indexer.kit import (
    a_server,
    an_indexer,
    ask,
    by_brute_force,
    define,
    name_of,
    scan,
    until_ready,
)
from tests.kit.process import eventually
from upr_protocol.client import connect
from upr_protocol.failover import Position
from upr_protocol.ids import HistoryId, SeqNo
from upr_server.indexer.definitions import NoIndexError
from upr_server.indexer.document_rows import RoundChanges
from upr_server.indexer.freshness import WriteLostError
from upr_server.indexer.index_batch import IndexBatch
from upr_server.indexer.index_file import IndexView
from upr_server.indexer.mark import Mark
from upr_server.indexer.pipeline import worker_thread
from upr_server.indexer.pure.definition import DefinitionError, IndexDefinition, IndexName
from upr_server.indexer.query import Query, QueryError, RequiredWrite
from upr_server.indexer.slice_scanner import BuildingError, IndexFailedError, NotFreshError

T = TypeVar("T")

CITY = IndexDefinition(("city",))
BOTH = IndexDefinition(("city", "n"), "n > `1`")


async def test_documents_are_found_as_soon_as_they_are_written(tmp_path: Path) -> None:
    async with (
        a_server() as server,
        connect(server.url("b")) as client,
        an_indexer(server.url("b"), tmp_path) as indexer,
    ):
        await define(client, "d", {"city": CITY, "both": BOTH})
        await until_ready(indexer, "d/city", "d/both")
        assert await scan(indexer, "d/city") == []
        contents = {}
        for index in range(30):
            key, value = b"k%d" % index, {"city": "abc"[index % 3], "n": index % 5}
            contents[key] = json.dumps(value).encode()
            await client.set(key, contents[key])
            assert await scan(indexer, "d/city") == by_brute_force(CITY, contents)
        assert await scan(indexer, "d/both") == by_brute_force(BOTH, contents)
        assert await scan(indexer, "d/both", prefix=["b"]) == [
            entry for entry in by_brute_force(BOTH, contents) if entry[0][0] == "b"
        ]
        await client.set("k1", '{"city": "z"}')
        await client.delete("k2")
        assert (["z"], "k1") in await scan(indexer, "d/city")
        assert "k2" not in [key for _, key in await scan(indexer, "d/city")]
        counted = await ask(indexer, "d/city", Query(count=True, consistency="now"))
        assert counted.count == 29
        assert not counted.timestamps


async def test_a_count_tells_how_far_each_partition_was_if_asked(tmp_path: Path) -> None:
    async with (
        a_server() as server,
        connect(server.url("b")) as client,
        an_indexer(server.url("b"), tmp_path) as indexer,
    ):
        await define(client, "d", {"city": CITY})
        await client.set("k1", '{"city": "a"}')
        await until_ready(indexer, "d/city")
        counted = await ask(
            indexer, "d/city", Query(count=True, timestamps=True, consistency="now")
        )
        assert counted.count == 1
        # The document, and the design document.
        assert sum(seq for _, seq in counted.timestamps.values()) == 2


@pytest.mark.parametrize(
    ("query", "place"),
    [(Query(count=True, limit=5), "limit"), (Query(consistency="at_least"), "written")],
)
async def test_fields_that_contradict_each_other_are_refused(
    tmp_path: Path, query: Query, place: str
) -> None:
    async with (
        a_server() as server,
        connect(server.url("b")) as client,
        an_indexer(server.url("b"), tmp_path) as indexer,
    ):
        await define(client, "d", {"city": CITY})
        await until_ready(indexer, "d/city")
        with pytest.raises(QueryError) as refusal:
            await ask(indexer, "d/city", query)
        assert refusal.value.place == place


async def test_a_restarted_indexer_resumes_where_it_was(tmp_path: Path) -> None:
    async with a_server() as server, connect(server.url("b")) as client:
        await define(client, "d", {"city": CITY})
        await client.set("k1", '{"city": "a"}')
        async with an_indexer(server.url("b"), tmp_path) as indexer:
            await until_ready(indexer, "d/city")
            assert await scan(indexer, "d/city") == [(["a"], "k1")]
        await client.set("k2", '{"city": "b"}')
        await client.delete("k1")
        async with an_indexer(server.url("b"), tmp_path) as indexer:
            # It is there at once, and was not built again.
            await eventually(
                lambda: bool(indexer.slices[0].definitions.names()), "the index is there"
            )
            assert indexer.slices[0].definitions.find(name_of("d/city")).file.is_built
            assert await scan(indexer, "d/city") == [(["b"], "k2")]


async def test_an_added_index_is_built_and_a_dropped_one_removed(
    tmp_path: Path,
) -> None:
    async with (
        a_server() as server,
        connect(server.url("b")) as client,
        an_indexer(server.url("b"), tmp_path) as indexer,
    ):
        contents = {b"k%d" % n: b'{"city": "%d", "n": %d}' % (n % 7, n) for n in range(200)}
        for key, value in contents.items():
            await client.set(key, value)
        await indexer.designs.create("d", b'{"indexes": {"city": {"key": ["city"]}}}')
        await until_ready(indexer, "d/city")
        assert await scan(indexer, "d/city") == by_brute_force(CITY, contents)
        await indexer.designs.create("e", b'{"indexes": {"both": {"key": ["city", "n"]}}}')
        await until_ready(indexer, "e/both")
        assert len(await scan(indexer, "e/both")) == 200
        await indexer.designs.drop("d")
        await eventually(lambda: name_of("d/city") not in indexer.designs.names(), "it was dropped")
        folder = tmp_path / indexer.slices[0].slice_id.folder / "indexes"
        await eventually(lambda: len(list(folder.iterdir())) == 1, "its files are removed")
        assert len(await scan(indexer, "e/both")) == 200
        with pytest.raises(NoIndexError):
            await scan(indexer, "d/city")
        with pytest.raises(NoIndexError):
            await indexer.designs.drop("d")


async def test_a_definition_that_changes_is_another_index(tmp_path: Path) -> None:
    async with (
        a_server() as server,
        connect(server.url("b")) as client,
        an_indexer(server.url("b"), tmp_path) as indexer,
    ):
        await client.set("k1", '{"city": "a", "n": 5}')
        await define(client, "d", {"city": CITY})
        await until_ready(indexer, "d/city")
        assert await scan(indexer, "d/city") == [(["a"], "k1")]
        await define(client, "d", {"city": IndexDefinition(("n",))})

        def is_another() -> bool:
            name = name_of("d/city")
            return name in indexer.designs.names() and indexer.designs.find(name) != CITY

        await eventually(is_another, "it is another index")
        await until_ready(indexer, "d/city")
        assert await scan(indexer, "d/city") == [([5], "k1")]


async def test_a_bad_definition_is_refused_or_listed_as_a_mistake(tmp_path: Path) -> None:
    async with (
        a_server() as server,
        connect(server.url("b")) as client,
        an_indexer(server.url("b"), tmp_path) as indexer,
    ):
        with pytest.raises(DefinitionError, match=r"indexes\.a\.key\[0\]: column 3"):
            await indexer.designs.create("d", b'{"indexes": {"a": {"key": ["x["]}}}')
        assert await client.get("_design/d") is None
        await client.set("_design/d", '{"indexes": {"a": {"key": ["x["]}}}')
        await eventually(lambda: bool(indexer.designs.mistakes), "the mistake is told")
        assert "indexes.a.key[0]: column 3" in indexer.designs.mistakes["d"]
        assert indexer.designs.names() == []


async def test_at_least_sees_ones_own_writes(tmp_path: Path) -> None:
    async with (
        a_server() as server,
        connect(server.url("b")) as client,
        an_indexer(server.url("b"), tmp_path) as indexer,
    ):
        await define(client, "d", {"city": CITY})
        await until_ready(indexer, "d/city")
        answer = await client.set("k", "")
        for index in range(300):
            answer = await client.set("k", f'{{"city": {index}}}')
            required_writes = (
                RequiredWrite(answer.partition, f"{answer.history_id:x}", answer.seq),
            )
            entries = await scan(indexer, "d/city", consistency="at_least", written=required_writes)
            assert entries == [([index], "k")]
        ahead = (RequiredWrite(answer.partition, f"{answer.history_id:x}", answer.seq + 1),)
        with pytest.raises(NotFreshError):
            await scan(indexer, "d/city", consistency="at_least", written=ahead, timeout_s=0.05)


async def test_scans_that_come_together_share_a_barrier(tmp_path: Path) -> None:
    async with (
        a_server() as server,
        connect(server.url("b")) as client,
        an_indexer(server.url("b"), tmp_path) as indexer,
    ):
        await define(client, "d", {"city": CITY})
        await until_ready(indexer, "d/city")
        await scan(indexer, "d/city")
        barriers_before = indexer.slices[0].barriers.sent_count
        async with trio.open_nursery() as nursery:
            for _ in range(40):
                nursery.start_soon(scan, indexer, "d/city")
        assert 1 <= indexer.slices[0].barriers.sent_count - barriers_before <= 2


async def test_a_scan_of_an_index_that_is_being_built_is_refused(tmp_path: Path) -> None:
    gate = trio.Event()
    names: Callable[[], list[IndexName]] = list

    thread = worker_thread()

    async def work(function: Callable[[], T]) -> T:
        if names():
            await gate.wait()
        return await thread(function)

    async with (
        a_server() as server,
        connect(server.url("b")) as client,
        an_indexer(server.url("b"), tmp_path, work=work) as indexer,
    ):
        names = indexer.designs.names
        await define(client, "d", {"city": CITY})
        await eventually(lambda: bool(indexer.designs.names()), "the index is there")
        with pytest.raises(BuildingError):
            await scan(indexer, "d/city")
        gate.set()
        await until_ready(indexer, "d/city")


async def test_a_change_that_is_lost_during_the_scan_is_not_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failover is applied between the look at the required change and the answer."""
    async with (
        a_server() as server,
        connect(server.url("b")) as client,
        an_indexer(server.url("b"), tmp_path) as indexer,
    ):
        await define(client, "d", {"city": CITY})
        answer = await client.set("k", '{"city": "a"}')
        await until_ready(indexer, "d/city")
        await scan(indexer, "d/city")
        file = indexer.slices[0].definitions.find(name_of("d/city")).file
        real_view = file.open_view

        def view_and_fail_over(**options: Any) -> IndexView:
            view = real_view(**options)
            position = file.mark(answer.partition).position
            log = position.log.with_branch(HistoryId(99), SeqNo(answer.seq - 1))
            file.marks[answer.partition] = Mark(
                Position(log, SeqNo(answer.seq - 1), SeqNo(answer.seq - 1))
            )
            return view

        monkeypatch.setattr(file, "open_view", view_and_fail_over)
        required_writes = (RequiredWrite(answer.partition, f"{answer.history_id:x}", answer.seq),)
        with pytest.raises(WriteLostError):
            await scan(indexer, "d/city", consistency="at_least", written=required_writes)


async def test_a_rollback_is_not_answered_before_its_mark_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that commits notes the marks a moment after the commit: a scan that reads between
    the two has an index without the required change, and a mark that says it is there."""
    async with (
        a_server() as server,
        connect(server.url("b")) as client,
        an_indexer(server.url("b"), tmp_path) as indexer,
    ):
        await define(client, "d", {"city": CITY})
        answer = await client.set("k", '{"city": "a"}')
        await until_ready(indexer, "d/city")
        assert len(await scan(indexer, "d/city")) == 1
        index = indexer.slices[0].definitions.find(name_of("d/city"))
        file, source = index.file, index.pipeline_member(lambda: None).source
        real_view = file.open_view

        def view_before_the_mark(**options: Any) -> IndexView:
            mark = file.mark(answer.partition)
            log = mark.position.log.with_branch(HistoryId(99), SeqNo(answer.seq - 1))
            batch = IndexBatch(
                answer.partition,
                Mark(Position(log, SeqNo(answer.seq - 1), SeqNo(answer.seq - 1))),
                rollback_documents={b"k": None},
            )
            file.apply_changes(RoundChanges([batch]), source)
            file.marks = {**file.marks, answer.partition: mark}
            return real_view(**options)

        monkeypatch.setattr(file, "open_view", view_before_the_mark)
        written = (RequiredWrite(answer.partition, f"{answer.history_id:x}", answer.seq),)
        with pytest.raises(NotFreshError):
            await scan(indexer, "d/city", consistency="at_least", written=written, timeout_s=0.1)


async def test_an_index_that_costs_too_much_fails_alone_and_is_named(
    tmp_path: Path,
) -> None:
    hostile = IndexDefinition(("city" + "|join('',[@,@])" * 31,))
    contents = {b"k%d" % index: b'{"city": "x"}' for index in range(30)}
    async with a_server() as server, connect(server.url("b")) as client:
        await define(client, "d", {"city": CITY, "hostile": hostile})
        for key, value in contents.items():
            await client.set(key, value)
        for _ in range(2):  # and it is still left out after a restart
            async with an_indexer(server.url("b"), tmp_path) as indexer:
                await until_ready(indexer, "d/city", "d/hostile")
                assert await scan(indexer, "d/city") == by_brute_force(CITY, contents)
                with pytest.raises(IndexFailedError, match=r"d/hostile was left out: .* cost more"):
                    await scan(indexer, "d/hostile")
                status = await indexer.scanner.status(name_of("d/hostile"))
                assert (status.state, status.entries) == ("failed", 0)
                assert "cost more" in status.failure
            await client.set("more", '{"city": "y"}')
            contents[b"more"] = b'{"city": "y"}'
        # A simpler definition is another index.
        await define(client, "d", {"city": CITY, "hostile": CITY})
        async with an_indexer(server.url("b"), tmp_path) as indexer:
            definitions, name = indexer.slices[0].definitions, name_of("d/hostile")
            await eventually(
                lambda: name in definitions.names() and definitions.find(name).definition == CITY,
                "the index is defined anew",
            )
            await until_ready(indexer, "d/hostile")
            assert await scan(indexer, "d/hostile") == by_brute_force(CITY, contents)


async def test_an_index_that_fails_while_a_scan_waits_does_not_answer(tmp_path: Path) -> None:
    hostile = IndexDefinition(("city" + "|join('',[@,@])" * 31,))
    async with (
        a_server() as server,
        connect(server.url("b")) as client,
        an_indexer(server.url("b"), tmp_path) as indexer,
    ):
        await define(client, "d", {"city": CITY, "hostile": hostile})
        await until_ready(indexer, "d/city", "d/hostile")
        assert await scan(indexer, "d/hostile") == []
        pipeline, stream = indexer.slices[0].pipeline, indexer.slices[0].stream
        stream.pause()
        # What is on its way is still received: the first of these, perhaps.
        for index in range(29):
            await client.set(f"k{index}", '{"city": "x"}')
        answer = await client.set("k29", '{"city": "x"}')
        written = (RequiredWrite(answer.partition, f"{answer.history_id:x}", answer.seq),)
        async with trio.open_nursery() as nursery:

            async def scan_and_fail() -> None:
                with pytest.raises(IndexFailedError, match="d/hostile was left out"):
                    await scan(indexer, "d/hostile", consistency="at_least", written=written)

            nursery.start_soon(scan_and_fail)
            await eventually(lambda: pipeline._waiting_tasks > 0, "the scan waits")
            stream.resume()
        # The others have what was written.
        entries = await scan(indexer, "d/city", consistency="at_least", written=written)
        assert len(entries) == 30


async def test_a_costly_index_does_not_keep_others_from_being_built(tmp_path: Path) -> None:
    """It gets no further from where it was left out. The others join the stream without it."""
    hostile = IndexDefinition(("city" + "|join('',[@,@])" * 31,))
    contents = {b"k%d" % index: b'{"city": "x", "n": 5}' for index in range(60)}
    async with a_server() as server, connect(server.url("b")) as client:
        for key, value in contents.items():
            await client.set(key, value)
        async with an_indexer(server.url("b"), tmp_path) as indexer:
            await define(client, "d", {"hostile": hostile, "both": BOTH})
            await until_ready(indexer, "d/both", "d/hostile")
            contents[b"more"] = b'{"city": "y", "n": 7}'
            await client.set("more", contents[b"more"])
            assert await scan(indexer, "d/both") == by_brute_force(BOTH, contents)
            file = indexer.slices[0].definitions.find(name_of("d/hostile")).file
            assert file.failure
            marks = dict(file.marks)
            await client.set("more", contents[b"more"])
            await scan(indexer, "d/both")
            assert file.marks == marks
        # And after a restart, the stream does not begin again where it was left out.
        async with an_indexer(server.url("b"), tmp_path) as indexer:
            await until_ready(indexer, "d/both", "d/hostile")
            contents[b"last"] = b'{"city": "z", "n": 7}'
            await client.set("last", contents[b"last"])
            assert await scan(indexer, "d/both") == by_brute_force(BOTH, contents)
            assert indexer.slices[0].pipeline.mutations < len(contents)
