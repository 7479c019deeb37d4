"""Indexes that are divided into slices, all in one process."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from threading import Event, Semaphore, get_ident
from typing import Any, cast

import msgspec
import pytest
import structlog
import trio

from tests.indexer.brute_force import Row, index_rows
from tests.indexer.kit import (
    PARTITIONS,
    POOL_BYTES,
    a_server,
    an_indexer,
    ask,
    by_brute_force,
    define,
    name_of,
    scan,
    until,
    until_ready,
    workers_in_the_loop,
)
from tests.indexer.silent_listener import NoListener
from tests.kit.process import eventually
from upr_protocol.client import Address, Client, connect
from upr_protocol.concurrency import first_failure
from upr_protocol.errors import UprError
from upr_server.app import Server
from upr_server.indexer import designs as designs_module
from upr_server.indexer import query as query_module
from upr_server.indexer import slice_link
from upr_server.indexer import worker_process as worker_process_module
from upr_server.indexer.definitions import NoIndexError
from upr_server.indexer.designs import ALL_INDEXES_MAX, PARSES_AT_ONCE, Designs
from upr_server.indexer.directory import remove_other_slices
from upr_server.indexer.freshness import WriteLostError
from upr_server.indexer.indexer import STATISTICS_S, Indexer
from upr_server.indexer.moments import MomentGoneError
from upr_server.indexer.pool import MemoryPool, OverloadedError
from upr_server.indexer.pure.definition import DefinitionError, IndexDefinition
from upr_server.indexer.query import Query, Range, RequiredWrite
from upr_server.indexer.scanner import LATE_S, Scanner
from upr_server.indexer.server_progress import ServerProgress
from upr_server.indexer.slice import Slice
from upr_server.indexer.slice_scanner import BuildingError
from upr_server.indexer.slices import (
    CatalogReport,
    SliceAnswer,
    SliceId,
    SliceMissingError,
    SliceScan,
)
from upr_server.indexer.worker import serve_slice
from upr_server.indexer.worker_process import WorkerProcess

CITY = IndexDefinition(("city", "n"), include=("n",))
CONTENTS = {b"k%02d" % n: b'{"city": "%d", "n": %d}' % (n % 7, n) for n in range(60)}
KEPT = [SliceId(index, 3) for index in range(3)]
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


@pytest.fixture
async def indexer_of_workers(server: Server, tmp_path: Path) -> AsyncIterator[Indexer]:
    url = server.url("b")
    make_holder = workers_in_the_loop(url, tmp_path)
    async with an_indexer(url, tmp_path, slices=3, make_holder=make_holder) as indexer:
        await until_ready(indexer, "d/city")
        yield indexer


def rows_of(page: object) -> list[Row]:
    return [Row(e.key, e.id, e.included) for e in page.entries]  # type: ignore[attr-defined]


async def test_an_answer_has_the_entries_of_all_slices(indexer: Indexer) -> None:
    await check_answers(indexer)
    assert not any(len(part.moments) for part in indexer.slices)


async def test_an_answer_has_the_entries_of_all_workers(indexer_of_workers: Indexer) -> None:
    await check_answers(indexer_of_workers)
    assert (await indexer_of_workers.statistics())["moments"] == 0


async def check_answers(indexer: Indexer) -> None:
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


async def test_the_bounds_of_a_long_query_are_counted_in_a_thread(
    indexer: Indexer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To count 32,000 values takes 15 ms, and each slice counts them in each step of a scan."""
    loop_thread, counted_in_loop, size_of = get_ident(), 0, query_module._size_of

    def counted_size_of(key: list[Any], size_max: int) -> tuple[int, int]:
        nonlocal counted_in_loop
        counted_in_loop += get_ident() == loop_thread
        return size_of(key, size_max)

    monkeypatch.setattr(query_module, "_size_of", counted_size_of)
    ranges = tuple(Range(prefix=[str(number), [0] * 40]) for number in range(300))
    assert not (await ask(indexer, "d/city", Query(ranges=ranges))).entries
    assert counted_in_loop < 100


async def test_the_explanation_of_a_count_says_how_its_first_page_got_fresh(
    indexer: Indexer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Different beginnings of keys are counted page by page. Later pages only name the moment."""
    monkeypatch.setattr("upr_server.indexer.merge.LIMIT_MAX", 2)
    query = Query(consistency="now", count=True, distinct=1, explain=True)
    counted = await ask(indexer, "d/city", query)
    assert counted.count == 7
    assert counted.explanation is not None
    assert counted.explanation.freshness == "barrier"
    assert "barrier" in [wait.reason for wait in counted.explanation.waits]


async def test_all_slices_hold_a_moment_and_release_it(server: Server, indexer: Indexer) -> None:
    rows = index_rows(CITY, CONTENTS)
    page = await ask(indexer, "d/city", Query(consistency="now", limit=20, hold_s=60))
    assert [len(part.moments) for part in indexer.slices] == [1, 1, 1]
    async with connect(server.url("b")) as client:
        for key in CONTENTS:
            await client.delete(key)
    assert await scan(indexer, "d/city") == []
    query = Query(limit=10_000, hold_s=60, moment=page.moment, continuation=page.continuation)
    last_page = await ask(indexer, "d/city", query)
    assert rows_of(page) + rows_of(last_page) == rows
    assert last_page.moment == page.moment
    query = Query(count=True, distinct=1, moment=page.moment, hold_s=60)
    assert (await ask(indexer, "d/city", query)).count == 7
    await indexer.scanner.release(page.moment)
    assert not any(len(part.moments) for part in indexer.slices)
    for token in (page.moment, "x", "x.y.z"):
        with pytest.raises(MomentGoneError):
            await ask(indexer, "d/city", Query(moment=token))


async def test_all_slices_release_a_moment_that_one_slice_has_lost(
    indexer: Indexer, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = await ask(indexer, "d/city", Query(hold_s=60))
    indexer.slices[1].moments.release_all()
    with pytest.raises(MomentGoneError):
        await ask(indexer, "d/city", Query(hold_s=60, moment=page.moment))
    with pytest.raises(MomentGoneError):
        await indexer.scanner.release(page.moment)
    # The slices that held the moment have released it.
    assert not any(len(part.moments) for part in indexer.slices)


async def test_a_scan_fails_while_one_slice_builds_the_index(indexer: Indexer) -> None:
    file = indexer.slices[2].definitions.find(name_of("d/city")).file
    file._is_built = False
    with pytest.raises(BuildingError):
        await ask(indexer, "d/city", Query(hold_s=60))
    # The slices that had answered hold no moment.
    await trio.testing.wait_all_tasks_blocked()
    assert not any(len(part.moments) for part in indexer.slices)
    status = await indexer.scanner.status(name_of("d/city"))
    assert status.state == "building"
    assert [part.state for part in status.slices] == ["ready", "ready", "building"]
    assert sum(part.entries for part in status.slices) == status.entries == len(CONTENTS)
    file._is_built = True
    # This slice has not received the new definition yet.
    indexer.slices[0].definitions.find(name_of("d/city")).definition = IndexDefinition(("n",))
    with pytest.raises(BuildingError):
        await scan(indexer, "d/city")


async def test_indexes_are_built_again_when_the_number_of_slices_changes(
    server: Server, tmp_path: Path
) -> None:
    # An earlier version left these files.
    for folder in ("indexes/old", "catalog"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("ring", "catalog/data.mdb"):
        (tmp_path / file).touch()
    expected = by_brute_force(CITY, CONTENTS)
    # The last time there are more slices than partitions.
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
            "definitions.json",
            "lock",
            *(SliceId(part, slices).folder for part in range(slices)),
        }


async def test_files_that_are_not_the_indexers_stay_in_its_directory(tmp_path: Path) -> None:
    names = {"catalog", "indexes", "ring", "ringtones", "slice-of-life", "slice-1-of-2"}
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "photo").touch()
    await remove_other_slices(tmp_path, KEPT)
    assert set(os.listdir(tmp_path)) == names
    (tmp_path / "slice-1-of-2" / "lock").touch()
    await remove_other_slices(tmp_path, KEPT)
    assert set(os.listdir(tmp_path)) == names - {"slice-1-of-2"}


async def test_an_interrupted_removal_of_a_slice_goes_on_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the lock, later starts did not remove the other files."""
    folder = tmp_path / "slice-0-of-2"
    (folder / "indexes").mkdir(parents=True)
    for name in ("lock", "ring", "indexes/data.mdb"):
        (folder / name).touch()

    def interrupt(path: Path) -> None:
        (path / "lock").unlink(missing_ok=True)
        raise OSError("the process was killed")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", interrupt)
        with pytest.raises(OSError, match="was killed"):
            await remove_other_slices(tmp_path, [])
    await remove_other_slices(tmp_path, [])
    assert not folder.exists()


async def test_workers_answer_as_a_slice_in_this_process_does(
    server: Server, indexer_of_workers: Indexer
) -> None:
    """They pass on errors, moments, statistics, and numbers that are too large for MessagePack."""
    indexer = indexer_of_workers
    with pytest.raises(MomentGoneError, match="is not held"):
        await ask(indexer, "d/city", Query(moment="x.y.z"))
    page = await ask(indexer, "d/city", Query(consistency="now", limit=20, hold_s=60))
    assert (await indexer.statistics())["moments"] == 3
    await indexer.scanner.release(page.moment)
    assert (await indexer.statistics())["moments"] == 0
    ahead = (RequiredWrite(1, "1", 1),)
    with pytest.raises(WriteLostError, match="which the server does not know"):
        await ask(indexer, "d/city", Query(consistency="at_least", written=ahead))
    assert await scan(indexer, "d/city", prefix=[2**70]) == []
    figures = await indexer.statistics()
    assert figures["connected"] is True
    assert figures["pool_bytes"] == 4 * POOL_BYTES
    status = await indexer.scanner.status(name_of("d/city"))
    assert (status.state, status.entries, status.behind) == ("ready", len(CONTENTS), 0)
    holder = indexer.holders[1]
    assert isinstance(holder, WorkerProcess)
    # An unexpected query raises an error, and the workers go on.
    with pytest.raises(UprError, match="the indexer failed"):
        await holder.scan(SliceScan(name_of("d/city"), CITY, Query(distinct=-1), 0))
    assert len(await scan(indexer, "d/city")) == len(CONTENTS)


async def test_a_worker_that_cannot_go_on_ends_the_indexer(tmp_path: Path) -> None:
    async with a_server() as server, connect(server.url()) as client:
        with pytest.raises(UprError):
            await lose_the_bucket(server.url("b"), tmp_path, client)


async def lose_the_bucket(url: str, data_dir: Path, client: Client) -> None:
    """Runs an indexer and deletes its bucket."""
    make_holder = workers_in_the_loop(url, data_dir)
    try:
        async with an_indexer(url, data_dir, slices=2, make_holder=make_holder) as indexer:

            async def is_connected() -> bool:
                return bool((await indexer.statistics())["connected"])

            await until(is_connected)
            await client.delete_bucket("b")
            await trio.sleep_forever()
    except BaseExceptionGroup as failures:
        # Both workers report the error.
        raise first_failure(failures) from failures


async def test_a_worker_that_hangs_is_reported_as_missing_and_replaced(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slice_link, "HANG_S", 0.1)
    monkeypatch.setattr(slice_link, "PING_S", 0.01)
    monkeypatch.setattr(worker_process_module, "RESTART_S", 0.01)
    url = server.url("b")
    make_worker_holder = workers_in_the_loop(url, tmp_path)

    def make_holder(slice_id: SliceId) -> WorkerProcess:
        holder = make_worker_holder(slice_id)
        assert isinstance(holder, WorkerProcess)
        # On a machine that pauses, a worker that runs would be given up, too.
        monkeypatch.setattr(holder, "_ping_link", do_not_ping)
        return holder

    async def do_not_ping() -> None:
        pass

    async with an_indexer(url, tmp_path, slices=2, make_holder=make_holder) as indexer:
        await until_ready(indexer, "d/city")
        holder = indexer.holders[1]
        assert isinstance(holder, WorkerProcess)
        assert holder._frames is not None
        first_frames, start_worker, may_start = holder._frames, holder._start_worker, trio.Event()

        @asynccontextmanager
        async def start_later() -> AsyncIterator[trio.abc.Stream]:
            await may_start.wait()
            async with start_worker() as stream:
                yield stream

        monkeypatch.setattr(holder, "_start_worker", start_later)
        with structlog.testing.capture_logs() as logs, monkeypatch.context() as patch:
            # Messages to the worker are lost.
            patch.setattr(first_frames, "queue_message", lambda _message: trio.Event())
            patch.delattr(holder, "_ping_link")
            with pytest.raises(SliceMissingError, match="slice 1 of 2 does not run"):
                await scan(indexer, "d/city")
            status = await indexer.scanner.status(name_of("d/city"))
            assert (status.state, status.slices[1].state) == ("missing", "missing")
            assert "slice 1 of 2" in status.failure
            assert not (await indexer.statistics())["connected"]
        assert any("does not answer" in line["event"] for line in logs)
        may_start.set()
        await until_ready(indexer, "d/city")
        assert await scan(indexer, "d/city") == by_brute_force(CITY, CONTENTS)
        assert holder._frames is not first_frames


async def test_the_pause_before_a_restart_grows_while_workers_fail(
    autojump_clock: trio.testing.MockClock,
) -> None:
    starts = []

    @asynccontextmanager
    async def start_worker() -> AsyncIterator[trio.abc.Stream]:
        starts.append(trio.current_time())
        stream, worker_stream = trio.testing.memory_stream_pair()
        await worker_stream.aclose()
        yield stream

    holder = WorkerProcess(SliceId(1, 2), config=b"", pool_bytes=1, start_worker=start_worker)
    with pytest.raises(SliceMissingError, match=r"^slice 1 of 2 .* is being started"):
        await holder.release("")
    with trio.move_on_after(100):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(holder.run, NoListener())
            await trio.sleep(99.9)
            with pytest.raises(
                SliceMissingError, match=r"^slice 1 of 2 .* 9 workers in succession have ended"
            ):
                await holder.release("")
    pauses = [after - before for before, after in pairwise(starts)]
    assert pauses == pytest.approx([0.5, 1, 2, 4, 8, 16, 30, 30])


async def test_a_worker_that_cannot_be_started_is_tried_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The error from the operating system does not end the indexer."""
    starts = []

    @asynccontextmanager
    async def start_worker() -> AsyncIterator[trio.abc.Stream]:
        starts.append(trio.current_time())
        if len(starts) < 4:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        stream, _ = trio.testing.memory_stream_pair()
        yield stream

    holder = WorkerProcess(SliceId(), config=b"", pool_bytes=1, start_worker=start_worker)
    with trio.move_on_after(10):
        await holder.run(NoListener())
    assert starts == pytest.approx([0, 0.5, 1.5, 3.5])


async def test_a_worker_ends_if_the_indexer_ends_before_its_first_message() -> None:
    stream, worker_stream = trio.testing.memory_stream_pair()
    await stream.aclose()
    await serve_slice(worker_stream, lambda _config: None)


async def test_a_worker_has_a_minute_to_start(
    autojump_clock: trio.testing.MockClock,
) -> None:
    starts = []

    @asynccontextmanager
    async def start_worker() -> AsyncIterator[trio.abc.Stream]:
        starts.append(trio.current_time())
        stream, _ = trio.testing.memory_stream_pair()
        yield stream

    holder = WorkerProcess(SliceId(), config=b"", pool_bytes=1, start_worker=start_worker)
    with trio.move_on_after(61):
        await holder.run(NoListener())
    assert starts == pytest.approx([0, 60.5])


async def test_a_starting_indexer_does_not_say_that_an_index_does_not_exist() -> None:
    holders = [WorkerProcess(SliceId(part, 2), config=b"", pool_bytes=1) for part in range(2)]
    designs = Designs(Address.parse("upr://h/b"), "indexer", holders)
    designs.catalog_read(0, CatalogReport({}, 0))
    with pytest.raises(SliceMissingError, match="slice 1 of 2 has yet to say"):
        designs.find(name_of("d/city"))
    designs.catalog_read(1, CatalogReport({}, 0))
    async with trio.open_nursery() as nursery:
        await designs._reconcile(nursery)
        nursery.cancel_scope.cancel()
    # The folders may be empty, so the slices may not have read the document yet.
    designs._whole_at[0] = 0
    with pytest.raises(SliceMissingError, match="slice 1 of 2 has yet to say whether there are m"):
        designs.find(name_of("d/city"))
    designs._whole_at[1] = 0
    async with trio.open_nursery() as nursery:
        await designs._reconcile(nursery)
        nursery.cancel_scope.cancel()
    with pytest.raises(NoIndexError):
        designs.find(name_of("d/city"))
    # Definitions that were there before a rollback are still known.
    designs.catalog_read(1, CatalogReport({}, 1))
    with pytest.raises(NoIndexError):
        designs.find(name_of("d/city"))


def a_design(index_count: int) -> bytes:
    """The text of a design document with `index_count` indexes."""
    indexes = {f"i{number}": {"key": ["city"]} for number in range(index_count)}
    return msgspec.json.encode({"indexes": indexes})


async def test_designs_with_more_indexes_than_a_slice_can_open_are_refused(
    autojump_clock: trio.testing.MockClock,
) -> None:
    holder = WorkerProcess(SliceId(), config=b"", pool_bytes=1)
    designs = Designs(Address.parse("upr://h/b"), "indexer", [holder])

    async def read(texts: dict[str, bytes], *, is_whole: bool = True) -> set[str]:
        """The designs that have indexes when a catalog has these texts."""
        designs.catalog_read(0, CatalogReport(texts, 0))
        designs._whole_at[0] = 0 if is_whole else 1
        async with trio.open_nursery() as nursery:
            await designs._reconcile(nursery)
            nursery.cancel_scope.cancel()
        assert len(designs.names()) <= ALL_INDEXES_MAX
        return {name.design for name in designs.names()}

    texts = {name: a_design(64) for name in ("b", "c", "d", "e")}
    assert await read(texts) == set(texts)
    # A new design does not replace others, and is refused before it is written.
    assert await read({"a": a_design(1), **texts}) == set(texts)
    sentence = "1 indexes beside the 256 of other designs; all together may have 256"
    assert designs.mistakes == {"a": f"indexes: {sentence}"}
    with pytest.raises(DefinitionError, match=sentence):
        await designs.create("a", a_design(1))
    # Designs that a catalog lacks for a while are kept, and count.
    assert await read({"a": a_design(64)}, is_whole=False) == set(texts)
    assert await read({"a": a_design(64)}) == {"a"}
    assert not designs.mistakes


async def test_at_most_two_documents_are_parsed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop and the threads that parse share the interpreter."""
    under_way = Semaphore(0)
    may_end = Event()
    started_count = 0

    def parse(name: str, text: bytes) -> None:
        nonlocal started_count
        started_count += 1
        under_way.release()
        may_end.wait()
        raise DefinitionError("", f"{name}: {len(text)}")

    monkeypatch.setattr(designs_module, "parse_design", parse)
    holder = WorkerProcess(SliceId(), config=b"", pool_bytes=1)
    designs = Designs(Address.parse("upr://h/b"), "indexer", [holder])

    async def create() -> None:
        with pytest.raises(DefinitionError, match="d: 2"):
            await designs.create("d", b"{}")

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(create)
        for _ in range(PARSES_AT_ONCE):
            await trio.to_thread.run_sync(under_way.acquire)
        await trio.testing.wait_all_tasks_blocked()
        started_at_once = started_count
        may_end.set()
    assert (started_at_once, started_count) == (PARSES_AT_ONCE, 10)


@pytest.mark.parametrize("way", ["written", "streamed"])
async def test_a_stop_does_not_wait_until_a_document_is_parsed(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest document takes 15 s to parse, and all of them a minute."""
    has_begun, has_ended, may_end = Event(), Event(), Event()

    def parse(name: str, text: bytes) -> None:
        has_begun.set()
        may_end.wait(60)
        has_ended.set()
        raise DefinitionError("", f"{name}: {len(text)}")

    monkeypatch.setattr(designs_module, "parse_design", parse)
    holder = WorkerProcess(SliceId(), config=b"", pool_bytes=1)
    designs = Designs(Address.parse("upr://h/b"), "indexer", [holder])
    designs.catalog_read(0, CatalogReport({"d": b"{}"}, 0))

    async def run() -> None:
        if way == "written":
            await designs.create("d", b"{}")
        else:
            async with trio.open_nursery() as inner_nursery:
                await designs._reconcile(inner_nursery)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await trio.to_thread.run_sync(has_begun.wait)
        nursery.cancel_scope.cancel()
    assert not has_ended.is_set()
    may_end.set()


async def test_an_overloaded_slice_is_asked_again_whether_its_catalog_is_current(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = WorkerProcess(SliceId(), config=b"", pool_bytes=1)
    designs = Designs(Address.parse("upr://h/b"), "indexer", [holder])
    designs.catalog_read(0, CatalogReport({}, 0))
    refusals = [OverloadedError(), OverloadedError()]

    async def confirm() -> int:
        await trio.lowlevel.checkpoint()
        if refusals:
            raise refusals.pop()
        return 0

    monkeypatch.setattr(holder, "confirm", confirm)
    await designs.wait_until_current()
    assert designs._is_whole(0)


async def overloaded(*_args: object) -> None:
    await trio.lowlevel.checkpoint()
    raise OverloadedError("no memory")


async def test_a_failed_release_of_a_moment_does_not_hide_the_first_error(
    indexer: Indexer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = indexer.slices
    are_answered = trio.Event()
    scan = first.scan

    async def scan_first(asked: SliceScan) -> SliceAnswer:
        answer = await scan(asked)
        are_answered.set()
        return answer

    async def scan_third(_asked: SliceScan) -> SliceAnswer:
        await are_answered.wait()
        await trio.testing.wait_all_tasks_blocked()
        raise SliceMissingError(third.slice_id, "is away")

    monkeypatch.setattr(first, "scan", scan_first)
    monkeypatch.setattr(third, "scan", scan_third)
    monkeypatch.setattr(first, "release", overloaded)
    with pytest.raises(SliceMissingError, match="is away"):
        await ask(indexer, "d/city", msgspec.structs.replace(NOW, hold_s=10))
    assert not len(second.moments)


async def test_the_moments_of_all_slices_are_released_at_the_same_time(
    indexer: Indexer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If they were released one after the other, each would delay the error, and a client that
    disconnects, by a second."""
    *answering, third = indexer.slices
    answers, letting_go, are_all = list[SliceAnswer](), list[str](), trio.Event()
    released = list[str]()

    async def release(token: str) -> None:
        letting_go.append(token)
        if len(letting_go) == len(answering):
            are_all.set()
        await are_all.wait()
        released.append(token)

    def scan_of(part: Slice) -> Callable[[SliceScan], Awaitable[SliceAnswer]]:
        scan = part.scan

        async def scan_and_note(asked: SliceScan) -> SliceAnswer:
            answers.append(await scan(asked))
            return answers[-1]

        return scan_and_note

    async def scan_third(_asked: SliceScan) -> SliceAnswer:
        await eventually(lambda: len(answers) == len(answering), "the others have answered")
        await trio.testing.wait_all_tasks_blocked()
        raise SliceMissingError(third.slice_id, "is away")

    for part in answering:
        monkeypatch.setattr(part, "scan", scan_of(part))
        monkeypatch.setattr(part, "release", release)
    monkeypatch.setattr(third, "scan", scan_third)
    with pytest.raises(SliceMissingError, match="is away"):
        await ask(indexer, "d/city", msgspec.structs.replace(NOW, hold_s=10))
    assert sorted(released) == sorted(answer.moment for answer in answers)


async def test_statistics_say_which_slice_has_no_memory(
    indexer: Indexer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexer.slices[0], "statistics", overloaded)
    figures = await indexer.statistics()
    assert figures["connected"] is False
    assert figures["slices"][0] == {
        "slice": 0,
        "connected": False,
        "failure": "no memory; try again in a second",
    }


async def test_statistics_say_which_slices_do_not_answer(
    autojump_clock: trio.testing.MockClock,
    indexer: Indexer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All slices are asked at once. The answer has the figures of the slices that do answer."""
    for part in indexer.slices[:2]:
        monkeypatch.setattr(part, "statistics", trio.sleep_forever)
    began = trio.current_time()
    figures = await indexer.statistics()
    assert trio.current_time() - began == pytest.approx(STATISTICS_S)
    assert figures["connected"] is False
    *silent_slices, answering_slice = figures["slices"]
    assert [part["failure"] for part in silent_slices] == [
        f"slice {index} of 3 did not answer within 2 s" for index in range(2)
    ]
    assert answering_slice["connected"] is True
    assert figures["moments"] == answering_slice["moments"]


async def test_a_scan_says_that_an_index_is_being_built_if_its_definition_changes_meanwhile(
    indexer: Indexer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *_ = indexer.slices
    other = IndexDefinition(("n", "city"))

    async def scan_first(asked: SliceScan) -> SliceAnswer:
        await trio.lowlevel.checkpoint()
        indexer.designs._definitions[name_of("d/city")] = other
        raise NoIndexError(f"the index {asked.name} was dropped during the scan")

    monkeypatch.setattr(first, "scan", scan_first)
    with pytest.raises(BuildingError):
        await ask(indexer, "d/city", NOW)


class SlowCounter:
    """A slice of another process that counts for a minute."""

    heard_at = 0.0

    def __init__(self, index: int) -> None:
        self.slice_id = SliceId(index, 2)

    async def scan(self, scan: SliceScan) -> SliceAnswer:
        await trio.sleep(60)
        return SliceAnswer(
            count=3 if scan.query.count else None,
            searches=1,
            entries_read=3,
            index_entries=3,
            freshness="as_it_was",
            waits=[],
            read_seconds=60,
        )


async def test_a_count_may_take_longer_than_the_timeout_for_a_fresh_index(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Otherwise a count that takes longer than 12 s would always be refused as if a slice were
    missing."""
    address, holders = Address.parse("upr://h/b"), [SlowCounter(0), SlowCounter(1)]
    designs = Designs(address, "indexer", cast("Any", holders))
    designs._definitions = {name_of("d/city"): CITY}
    pool = MemoryPool(POOL_BYTES)
    scanner = Scanner(designs, cast("Any", holders), pool, ServerProgress(address))
    async with scanner.scan(name_of("d/city"), Query(count=True)) as answer:
        assert answer.rest.count == 6
    with pytest.raises(SliceMissingError, match="does not answer"):
        async with scanner.scan(name_of("d/city"), Query()):
            pass
    assert trio.current_time() == pytest.approx(60 + 10 + LATE_S)
