"""The store, as the server uses it: over processes and LMDB, and simulated, alike."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
import trio.testing

from tests.kit.answer_rows import pack_rows
from tests.kit.process import children_of
from tests.storage.log_model import Model, apply, record_of
from tests.storage.planes import (
    BUCKET,
    MAP_BYTES,
    PARTITIONS,
    PLENTY,
    create,
    one_row,
    read_all,
    some_write,
)
from upr_protocol.ids import SeqNo
from upr_server.engine import FetchRequest
from upr_server.storage.api import Store
from upr_server.storage.bucket_maintenance import MaintenanceStep
from upr_server.storage.calls import (
    Commit,
    DeleteAnswers,
    DeleteBucketFiles,
    DeleteLeases,
    FindExpired,
    FindItems,
    LoadBuckets,
    Maintain,
    MarkCleanStop,
    PutLease,
    ReadChunks,
    StartServing,
)
from upr_server.storage.errors import (
    StorageError,
)
from upr_server.storage.partition_write import PartitionWrite
from upr_server.storage.processes import (
    open_store,
)
from upr_server.storage.records import LeaseRecord
from upr_server.storage.simulated import SimulatedDirectory, SimulatedStore
from upr_server.storage.stored_bucket import StoredAnswer

Opener = Callable[[], AbstractAsyncContextManager[Store]]
"""Opens the same disk again each time."""


@pytest.fixture(params=["processes", "simulated"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    directory = SimulatedDirectory()

    @asynccontextmanager
    async def processes() -> AsyncIterator[Store]:
        async with open_store(tmp_path / "data", bytes_max=MAP_BYTES) as store:
            yield store

    @asynccontextmanager
    async def simulated() -> AsyncIterator[Store]:
        random = Random(3)
        yield SimulatedStore(directory, lambda _call: random.random() / 1_000)

    return processes if request.param == "processes" else simulated


async def upkeep(store: Store) -> tuple[MaintenanceStep, dict[str, Any]]:
    return await store.ask(Maintain(BUCKET.name, urgent=True, leases=(), purge_before_cas=0))


async def upkeep_all(store: Store) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    more = True
    while more:
        steps, figures = await upkeep(store)
        more = steps.has_more
    return figures


# What a bucket goes through.


async def test_a_bucket_is_found_again_as_it_was_left(opener: Opener) -> None:
    lease = LeaseRecord(9, "someone", ((0, 0, 3),), 60, 1_234.5)
    token = StoredAnswer(b"sixteen bytes id", 4, b"answer")
    async with opener() as store:
        assert (await store.ask(LoadBuckets())).buckets == []
        await create(store)
        await store.ask(StartServing(BUCKET.name, [(1, record_of(0))]))
        write = some_write(0, 0)
        rows = [(token.writer, counter, token.answer) for counter in (3, token.counter, 5)]
        answers = pack_rows(rows)
        write = PartitionWrite(0, write.record, write.chunks, [answers])
        await store.ask(Commit(BUCKET.name, [write, some_write(2, 0, 5)]))
        surplus_tokens = [StoredAnswer(token.writer, counter, b"") for counter in (3, 5, 6)]
        await store.ask(DeleteAnswers(BUCKET.name, 0, surplus_tokens))
        await store.ask(PutLease(BUCKET.name, lease))
        await store.ask(PutLease(BUCKET.name, LeaseRecord(10, "another", (), 60, 1.0)))
        await store.ask(DeleteLeases(BUCKET.name, [10, 11]))
        await store.ask(MarkCleanStop(BUCKET.name))
    async with opener() as store:
        (stored_bucket,) = (await store.ask(LoadBuckets())).buckets
        assert (stored_bucket.record, stored_bucket.is_clean, list(stored_bucket.leases)) == (
            BUCKET,
            True,
            [lease],
        )
        assert [partition.record.high for partition in stored_bucket.partitions] == [3, 0, 5, 0]
        assert list(stored_bucket.partitions[0].tokens) == [token]
        assert await read_all(store, 0, 3) == list(write.chunks[0])
        await store.ask(StartServing(BUCKET.name, []))
        (stored_bucket,) = (await store.ask(LoadBuckets())).buckets
        assert not stored_bucket.is_clean
        assert not store.failed.is_set()


async def test_a_folder_with_another_name_is_not_taken_for_the_bucket_that_it_was(
    tmp_path: Path,
) -> None:
    # The server would read one folder, and write to the other.
    async with open_store(tmp_path, bytes_max=MAP_BYTES) as store:
        await create(store)
    buckets = tmp_path / "buckets"
    (buckets / BUCKET.name).rename(buckets / "renamed")
    async with open_store(tmp_path, bytes_max=MAP_BYTES) as store:
        loaded = await store.ask(LoadBuckets())
    assert loaded.buckets == []
    assert loaded.damaged_buckets == {"renamed": f"its record is that of the bucket {BUCKET.name}"}


async def test_committed_items_are_read_looked_up_and_expire(opener: Opener) -> None:
    async with opener() as store:
        await create(store)
        write = some_write(1, 0, 10, expiry=50)
        await store.ask(Commit(BUCKET.name, [write]))
        rows = await read_all(store, 1, 10)
        assert rows == list(write.chunks[0])
        requests = [FetchRequest(row.key, row.seq, needs_value=True) for row in rows]
        assert (await store.ask(FindItems(BUCKET.name, 1, requests))).all_rows() == rows
        by_key = [FetchRequest(row.key, 0, needs_value=True) for row in rows]
        assert (await store.ask(FindItems(BUCKET.name, 1, by_key))).all_rows() == [None] * 10
        figures = await upkeep_all(store)
        assert (await store.ask(FindItems(BUCKET.name, 1, by_key))).all_rows() == rows
        assert await store.ask(FindExpired(BUCKET.name, 49, b"", 100)) == ([], b"")
        items, after = await store.ask(FindExpired(BUCKET.name, 50, b"", 4))
        assert [item.seq for item in items] == [1, 2, 3, 4]
        items, after = await store.ask(FindExpired(BUCKET.name, 50, after, 100))
        assert ([item.seq for item in items], after) == ([5, 6, 7, 8, 9, 10], b"")
        assert figures["commits"] == 1


def mapped_files(part: str) -> list[str]:
    """What the processes of the store have mapped, where the path has `part` in it."""
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in children_of(os.getpid())]
    return [line for text in maps for line in text.splitlines() if part in line]


async def test_a_deleted_bucket_can_be_created_again(opener: Opener) -> None:
    async with opener() as store:
        await create(store)
        await store.ask(Commit(BUCKET.name, [some_write(0, 0)]))
        assert len(await read_all(store, 0, 3)) == 3

        # Somebody still reads while it is deleted.
        async def read() -> None:
            for _ in range(200):
                try:
                    await read_all(store, 0, 3)
                except (StorageError, KeyError):
                    return  # there is no such bucket any more, or no such file

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            nursery.start_soon(read)
            await store.ask(DeleteBucketFiles(BUCKET.name))
        assert (await store.ask(LoadBuckets())).buckets == []
        # Nobody has a file of it open: otherwise the disk would not get its space back.
        assert mapped_files("/buckets/") == []
        await create(store)
        write = some_write(0, 0, 5)
        await store.ask(Commit(BUCKET.name, [write]))
        assert await read_all(store, 0, 5) == list(write.chunks[0])
        assert not store.failed.is_set()


async def test_an_answer_may_have_any_number_of_chunks(opener: Opener) -> None:
    count = 70_000
    small = [one_row(seq) for seq in range(1, count)]
    async with opener() as store:
        await create(store)
        await store.ask(Commit(BUCKET.name, [PartitionWrite(0, record_of(count - 1), small)]))
        chunks = await store.ask(ReadChunks(BUCKET.name, 0, SeqNo(0), SeqNo(count - 1), PLENTY))
        assert (len(chunks), chunks[-1].end) == (count - 1, count - 1)


# Many callers.


async def test_many_callers_at_once_each_get_their_own_answer(opener: Opener) -> None:
    model = Model(PARTITIONS)

    async def write_and_read(store: Store, partition: int) -> None:
        for turn in range(15):
            write = some_write(partition, model.highs[partition], 1 + turn % 3)
            await store.ask(Commit(BUCKET.name, [write]))
            model.take([write])
            high = model.highs[partition]
            rows = await read_all(store, partition, high)
            assert apply({}, rows) == model.contents(partition, high)
            seq = 1 + turn % high
            want = FetchRequest(b"key %d" % seq, seq, needs_value=True)
            items = await store.ask(FindItems(BUCKET.name, partition, [want]))
            assert items.all_rows() == [rows[seq - 1]]

    async def tidy(store: Store) -> None:
        for _ in range(20):
            await upkeep(store)

    async with opener() as store:
        await create(store)
        async with trio.open_nursery() as nursery:
            for partition in range(PARTITIONS):
                nursery.start_soon(write_and_read, store, partition)
            nursery.start_soon(tidy, store)


async def test_a_caller_that_is_cancelled_leaves_the_others_their_answers(opener: Opener) -> None:
    async with opener() as store:
        await create(store)
        with trio.CancelScope() as scope:
            scope.cancel()
            await store.ask(LoadBuckets())
        for partition in range(PARTITIONS):
            with trio.move_on_after(0.0001 * partition):
                await store.ask(Commit(BUCKET.name, [some_write(partition, 0)]))
        (bucket,) = (await store.ask(LoadBuckets())).buckets
        # Each is there, whole, or not at all.
        for partition, stored_partition in enumerate(bucket.partitions):
            assert stored_partition.record.high in (0, 3)
            assert len(await read_all(store, partition, stored_partition.record.high)) in (0, 3)
