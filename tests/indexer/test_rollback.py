"""Rollbacks: when a server has lost changes, the indexes undo them."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog

from tests.indexer.kit import (
    BUCKET,
    a_server,
    an_indexer,
    by_brute_force,
    define,
    scan,
    until_ready,
)
from tests.indexer.world import World
from tests.kit.process import eventually
from tests.kit.server_group import running_servers
from upr_protocol.client import (
    Event,
    RollbackConsumer,
    Undone,
    WriteResult,
    connect,
    publisher,
)
from upr_protocol.client.operator import fail_over
from upr_protocol.client.rollback.received_keys_file import ReceivedKeysFile
from upr_protocol.hashing import partition_of
from upr_protocol.ids import SEQ_MAX, Durability, PartitionId, SeqNo
from upr_protocol.partition_map import Assignment
from upr_server.indexer.document_rows import RoundChanges
from upr_server.indexer.freshness import WriteLostError
from upr_server.indexer.index_file import EntrySource, IndexFile
from upr_server.indexer.pure.definition import IndexDefinition, design_key
from upr_server.indexer.query import RequiredWrite

BY_A = IndexDefinition(("a",))


def as_written(answer: WriteResult) -> tuple[RequiredWrite, ...]:
    return (RequiredWrite(answer.partition, f"{answer.history_id:016x}", answer.seq),)


async def test_an_indexed_change_has_its_key_on_disk(tmp_path: Path) -> None:
    """Otherwise an indexer could not undo the change after it was killed."""
    world = World(0, tmp_path)
    async with world.running():
        await define(world.client, "x", {"i": BY_A})
        await until_ready(world.indexer, "x/i")
        write_result = await world.client.set("k", '{"a": 1}')
        assert len(await scan(world.indexer, "x/i", prefix=[1])) == 1
        path = tmp_path / "slice-0-of-1" / "ring"
        copy = tmp_path / "copy"
        shutil.copy(path, copy)
        keys_file = ReceivedKeysFile(copy, BUCKET)
        keys_file.close()
        assert (write_result.partition, b"k") in {
            (partition, key) for partition, key, _ in keys_file.keys.versions()
        }


@pytest.fixture
def rollbacks_synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose rollbacks were synced; checks that this comes before the stream asks for its
    next event. With that request the consumer forgets what was rolled back, so a rollback that is
    not on disk would be lost in a crash of the machine."""
    unsynced: set[IndexFile] = set()
    synced: list[Path] = []
    apply, sync, next_event = IndexFile.apply_changes, IndexFile.sync, RollbackConsumer.__anext__

    def apply_and_record(file: IndexFile, changes: RoundChanges, source: EntrySource) -> int:
        if any(batch.is_rollback for batch in changes.batches):
            unsynced.add(file)
        return apply(file, changes, source)

    def sync_and_record(file: IndexFile) -> None:
        sync(file)
        if file in unsynced:
            unsynced.remove(file)
            synced.append(file.path)

    async def checked_next_event(consumer: RollbackConsumer) -> Event | Undone:
        assert not unsynced
        return await next_event(consumer)

    monkeypatch.setattr(IndexFile, "apply_changes", apply_and_record)
    monkeypatch.setattr(IndexFile, "sync", sync_and_record)
    monkeypatch.setattr(RollbackConsumer, "__anext__", checked_next_event)
    return synced


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("undo_mutations", [1000, 1])
async def test_an_index_loses_what_the_server_lost(
    tmp_path: Path, undo_mutations: int, restarts: bool, rollbacks_synced: list[Path]
) -> None:
    world = World(0, tmp_path)
    world.undo_mutations = undo_mutations
    async with world.running():
        await define(world.client, "x", {"i": BY_A})
        await until_ready(world.indexer, "x/i")
        for index in range(40):
            await world.client.set(
                f"k{index}", f'{{"a": {index}}}', durability=Durability.PERSISTED
            )
        world.hold_commits()
        for index in range(20):
            await world.client.set(f"k{index}", '{"a": "lost"}')
        await world.client.delete("k30")
        answer = await world.client.set("k31", '{"b": "not in the index"}')
        assert len(await scan(world.indexer, "x/i", prefix=["lost"])) == 20
        if restarts:
            await world.crash("indexer")
        await world.crash("server")
        await world.start_server()
        if restarts:
            await world.start_indexer()
        await world.write(10)
        expected = by_brute_force(BY_A, await world.contents())
        await until_ready(world.indexer, "x/i")
        assert await scan(world.indexer, "x/i", timeout_s=20) == expected
        assert not [key for key, _ in expected if key == ["lost"]]
        assert world.indexer.slices[0].stream.rollbacks > 0
        assert rollbacks_synced
        with pytest.raises(WriteLostError, match="a failover has undone it"):
            await scan(world.indexer, "x/i", consistency="at_least", written=as_written(answer))


async def test_changes_from_before_and_after_a_failover_are_required_together(
    tmp_path: Path,
) -> None:
    """A client has the results of all its writes. The query was refused as wrong."""
    world = World(0, tmp_path)
    async with world.running():
        await define(world.client, "x", {"i": BY_A})
        await until_ready(world.indexer, "x/i")
        kept = await world.client.set("k", '{"a": "kept"}', durability=Durability.PERSISTED)
        world.hold_commits()
        lost = await world.client.set("k", '{"a": "lost"}')
        await world.crash("server")
        await world.start_server()
        new = await world.client.set("k", '{"a": "new"}')
        assert (kept.partition, kept.history_id) == (lost.partition, lost.history_id)
        assert new.history_id != kept.history_id

        async def scan_after(*written: WriteResult) -> list[tuple[list[object], str]]:
            required = tuple(itertools.chain.from_iterable(map(as_written, written)))
            options = {"consistency": "at_least", "written": required, "timeout_s": 20}
            return await scan(world.indexer, "x/i", **options)

        assert await scan_after(kept, new) == [(["new"], "k")]
        assert await scan_after(new, kept) == [(["new"], "k")]
        with pytest.raises(WriteLostError, match=f"change {lost.seq} of partition"):
            await scan_after(kept, lost, new)


async def test_an_index_that_is_being_built_begins_again(tmp_path: Path) -> None:
    """An index that is being built has no received keys, so its partitions start again at 0."""
    world = World(0, tmp_path)
    async with world.running():
        for index in range(40):
            await world.client.set(
                f"k{index}", f'{{"a": {index}}}', durability=Durability.PERSISTED
            )
        await world.client.set(
            "_design/x", '{"indexes": {"i": {"key": ["a"]}}}', durability=Durability.PERSISTED
        )
        world.hold_commits()
        for index in range(20):
            await world.client.set(f"k{index}", '{"a": "lost"}')
        await world.crash("server")
        await world.start_server()
        await until_ready(world.indexer, "x/i")
        expected = by_brute_force(BY_A, await world.contents())
        assert len(expected) == 40
        assert await scan(world.indexer, "x/i", timeout_s=20) == expected


async def test_partitions_that_a_new_bucket_of_the_name_has_not_are_cleared(
    tmp_path: Path,
) -> None:
    """There is no stream of these partitions, so nothing else would remove their documents and
    design documents."""
    old_design = next(
        name
        for name in (f"old{number}" for number in range(100))
        if partition_of(design_key(name), 4) == 3
    )
    async with (
        a_server(partitions=4) as server,
        connect(server.url(BUCKET)) as client,
        an_indexer(server.url(BUCKET), tmp_path, slices=3) as indexer,
    ):
        await define(client, "x", {"i": BY_A})
        await define(client, old_design, {"i": BY_A})
        for index in range(20):
            await client.set(f"old{index}", '{"a": 1}')
        await until_ready(indexer, "x/i", f"{old_design}/i")
        assert len(await scan(indexer, "x/i")) == 20
    async with a_server(partitions=2) as server, connect(server.url(BUCKET)) as client:
        await define(client, "x", {"i": BY_A})
        await client.set("new", '{"a": 1}')
        async with an_indexer(server.url(BUCKET), tmp_path, slices=3) as indexer:
            parts = indexer.slices
            await eventually(lambda: all(part.definitions.is_open for part in parts), "it runs")
            assert await scan(indexer, "x/i") == [([1], "new")]
            await eventually(lambda: len(indexer.designs.names()) == 1, "the other is dropped")


async def test_an_entry_stays_when_the_partition_before_is_cleared(tmp_path: Path) -> None:
    """In a new bucket of the same name a document may be in another partition. Clearing its former
    partition must not remove the entry that its new partition has made."""
    keys = [f"k{number}" for number in range(40)]
    async with (
        a_server(partitions=2) as server,
        connect(server.url(BUCKET)) as client,
        an_indexer(server.url(BUCKET), tmp_path) as indexer,
    ):
        await define(client, "x", {"i": BY_A})
        await until_ready(indexer, "x/i")
        for key in keys:
            await client.set(key, '{"a": 1}')
        assert await scan(indexer, "x/i") == [([1], key) for key in sorted(keys)]
    async with running_servers("ab", partitions=4) as group:
        base = group.map("a")
        actives = {partition: Assignment("b" if partition < 2 else "a") for partition in range(4)}
        for name in "ab":
            await group.set_map(name, base.revision + 1, actives, base)
        async with connect(group.address("a")) as client:
            await define(client, "x", {"i": BY_A})
            for key in keys:
                await client.set(key, '{"a": 1}')
        await group.stop("b")
        async with an_indexer(str(group.address("a")), tmp_path) as indexer:
            # The partitions of node a are read first, because node b is down.
            await eventually(lambda: {2, 3} <= indexer.slices[0].stream.marks.keys(), "a is read")
            await group.start("b")
            assert await scan(indexer, "x/i") == [([1], key) for key in sorted(keys)]


async def test_a_partition_that_begins_again_drops_no_index(tmp_path: Path) -> None:
    world = World(0, tmp_path)
    # There are too few received keys to undo with: partitions start again at 0, also the one of
    # the design document.
    world.undo_mutations = 1
    with structlog.testing.capture_logs() as logs:
        async with world.running():
            await define(world.client, "x", {"i": BY_A})
            await until_ready(world.indexer, "x/i")
            await world.client.set("k0", '{"a": 0}', durability=Durability.PERSISTED)
            for index in range(3):
                world.hold_commits()
                for change in range(40):
                    await world.client.set(f"k{change}", f'{{"a": {index}}}')
                    await world.client.set(f"_design/{change}", "lost")
                await scan(world.indexer, "x/i")
                await world.crash("server")
                await world.start_server()
                await world.write(10)
                expected = by_brute_force(BY_A, await world.contents())
                assert await scan(world.indexer, "x/i", timeout_s=20) == expected
            assert any(line["event"] == "rolling back" and not line["to"] for line in logs)
            # A dropped index is noticed again after that.
            await world.client.delete("_design/x")
            await eventually(lambda: not world.indexer.designs.names(), "it is dropped", 20)
    assert [
        line["event"] for line in logs if line["event"] in ("building index", "dropping index")
    ] == [
        "building index",
        "dropping index",
    ]


async def test_a_failover_between_servers(tmp_path: Path) -> None:
    async with running_servers("ab") as group:
        url = f"{group.proxies['a'].url('').rstrip('/')},127.0.0.1:{group.proxies['b'].port}/b"
        async with an_indexer(url, tmp_path) as indexer:
            await group.set("a", {"_design/x": '{"indexes": {"i": {"key": ["a"]}}}'})
            await until_ready(indexer, "x/i")
            await group.set("a", {f"k{n}": f'{{"a": {n}}}' for n in range(40)})
            assert len(await scan(indexer, "x/i")) == 40
            await group.stop("a")
            await fail_over(group.operator("b"), all_of="a", to="b", lose_acknowledged=True)
            await group.set("b", {"k1": '{"a": "after"}'})
            contents = {}
            for index in range(40):
                value = await group.get("b", f"k{index}")
                if value is not None:
                    contents[b"k%d" % index] = value.encode()
            entries = await scan(indexer, "x/i", timeout_s=20)
            assert entries == by_brute_force(BY_A, contents)
            assert (["after"], "k1") in entries


async def test_a_key_is_forgotten_only_once_its_change_is_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes keys of changes in a snapshot that has not ended. If the indexes were behind
    the forgotten keys, a restarted indexer would have to read the partition again from 0."""
    trim = ReceivedKeysFile.trim
    floors: dict[PartitionId, SeqNo] = {}

    async def trim_checked(
        keys_file: ReceivedKeysFile,
        droppable_seq: Callable[[PartitionId], SeqNo],
        *,
        in_order: bool = False,
    ) -> bool:
        has_trimmed = await trim(keys_file, droppable_seq, in_order=in_order)
        floors.update(keys_file.keys.floors())
        file = indexer.slices[0].catalog.file
        assert all(file.mark(partition).seq >= floor for partition, floor in floors.items())
        return has_trimmed

    monkeypatch.setattr(ReceivedKeysFile, "trim", trim_checked)
    async with (
        a_server(partitions=1) as server,
        connect(server.url(BUCKET)) as client,
        an_indexer(server.url(BUCKET), tmp_path, undo_mutations=10) as indexer,
    ):
        async with publisher(server.url(BUCKET)) as writer:
            for index in range(100):
                await writer.set(f"k{index}", "0")
        await client.set("k", "0")
        file = indexer.slices[0].catalog.file
        await eventually(lambda: file.mark(PartitionId(0)).seq == 101, "all is applied")
        await eventually(lambda: bool(floors), "keys are forgotten")


async def test_a_partition_that_has_to_begin_again_at_a_start_is_whole(tmp_path: Path) -> None:
    """The received keys are as after a kill while the partition started again. The stream must
    start at 0, too, and not at the position that the indexes had before they were cleared."""
    async with a_server(partitions=1) as server, connect(server.url(BUCKET)) as client:
        async with an_indexer(server.url(BUCKET), tmp_path) as indexer:
            await define(client, "x", {"i": BY_A})
            await until_ready(indexer, "x/i")
            for index in range(10):
                await client.set(f"k{index}", f'{{"a": {index}}}')
            assert len(await scan(indexer, "x/i")) == 10
        keys_file = ReceivedKeysFile(tmp_path / "slice-0-of-1" / "ring", BUCKET)
        await keys_file.raise_floor(PartitionId(0), SEQ_MAX)
        keys_file.close()
        async with an_indexer(server.url(BUCKET), tmp_path) as indexer:
            await client.set("k10", '{"a": 10}')
            await until_ready(indexer, "x/i")
            assert len(await scan(indexer, "x/i")) == 11
            assert indexer.slices[0].stream.rollbacks == 1
