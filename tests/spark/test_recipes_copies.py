"""Snapshots, backups and restores, compared with the server key by key."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, StructField, StructType

from tests.spark.bucket import (
    FAR,
    change,
    contents,
    contents_of_frame,
    drop,
    made_anew,
    put,
)
from tests.spark.model_driver_client import ModelDriverClient
from upr_protocol.chunk import Mutation
from upr_protocol.client import BlockingClient, PartitionInfo, PartitionNumbers
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import Operation, PartitionId, PartitionState, SeqNo
from upr_protocol.spark.errors import OptionError, PipelineError
from upr_protocol.spark.leased_source import LeasedDataSource
from upr_protocol.spark.read_tasks import ReadTask
from upr_protocol.spark.recipes import (
    Manifest,
    PartitionPart,
    backup,
    read_snapshot,
    restore,
    snapshot,
)
from upr_protocol.spark.recipes import folder as folder_module
from upr_protocol.spark.recipes.backup import _starts
from upr_protocol.spark.recipes.cut import PinnedCut, check_cut, options_of_cut, pin_cut
from upr_protocol.spark.recipes.folder import locked_folder, make_folder, plain_path

NewBucket = Callable[..., str]


def ends(url: str) -> dict[str, int]:
    """How far each partition is."""
    with BlockingClient(url) as client:
        return {str(row.partition): row.high_seq for row in client.seqnos()}


def failing(code: str, action: Callable[[], object]) -> str:
    """The sentence of the error that an action has to end with."""
    with pytest.raises(PipelineError) as caught:
        action()
    assert caught.value.code == code
    return str(caught.value)


def assert_no_lease_is_held(client: BlockingClient) -> None:
    """It would hold up compaction, and take the place of others."""
    assert client.stats(client.address.bucket)["leases"]["held"] == 0


# Snapshots.


def test_a_snapshot_holds_what_the_bucket_held(
    spark: SparkSession, new_bucket: NewBucket, tmp_path: Path
) -> None:
    url = new_bucket()
    # To Spark's readers this is a pattern, and the other folder one of those that it stands for.
    folder = tmp_path / "a [1]{2}*"
    (tmp_path / "a 12" / "data").mkdir(parents=True)
    change(url, put(range(60)))
    change(url, put(range(10), "newer"))
    change(url, drop(range(5)))
    held_then, ends_then = contents(url), ends(url)
    manifest = snapshot(spark, url, folder)
    assert contents_of_frame(read_snapshot(spark, folder)) == held_then
    assert Manifest.read(folder) == manifest
    assert manifest.rows == 55
    assert manifest.deletions == 0
    assert manifest.bucket == url.rpartition("/")[2]
    assert {name: part.end for name, part in manifest.partitions.items()} == ends_then
    assert sum(part.rows for part in manifest.partitions.values()) == 55
    assert all(part.start == 0 for part in manifest.partitions.values())
    with BlockingClient(url) as client:
        for info in client.partitions():
            part = manifest.partitions[str(info.partition)]
            assert part.position.log == info.log
            assert part.history_id == f"{info.log.current:016x}"
        assert_no_lease_is_held(client)


def test_a_snapshot_with_structs_has_the_values_that_are_none(
    spark: SparkSession, new_bucket: NewBucket, tmp_path: Path
) -> None:
    url = new_bucket(1)
    change(url, [Mutation(Operation.SET, b"a", b'{"n":1}'), Mutation(Operation.SET, b"b", b"text")])
    snapshot(spark, url, tmp_path, options={"valueSchema": "n INT"})
    rows = read_snapshot(spark, tmp_path).selectExpr("string(key)", "value.n", "string(unparsed)")
    assert {tuple(row) for row in rows.collect()} == {("a", 1, None), ("b", None, "text")}


def test_an_unfinished_snapshot_is_refused(
    spark: SparkSession, new_bucket: NewBucket, tmp_path: Path
) -> None:
    url = new_bucket()
    change(url, put(range(10)))
    folder = tmp_path / "snapshot"
    snapshot(spark, url, folder)
    (folder / "manifest.json").rename(tmp_path / "manifest.json")
    assert "is incomplete" in failing("UPR_FOLDER", lambda: read_snapshot(spark, folder))
    assert "not finished" in failing("UPR_FOLDER", lambda: snapshot(spark, url, folder))
    change(url, drop([3]))
    manifest = snapshot(spark, url, folder, overwrite=True)
    assert contents_of_frame(read_snapshot(spark, folder)) == contents(url)
    failing("UPR_FOLDER", lambda: snapshot(spark, url, folder))

    # A copy that is not whole, and one that has more than it should.
    first = min(folder.glob("data/*.parquet"))
    shutil.copy(first, folder / "data" / "stray.parquet")
    assert contents_of_frame(read_snapshot(spark, folder)) == contents(url)
    first.write_bytes(b"short")
    assert "whole copy" in failing("UPR_FOLDER", lambda: read_snapshot(spark, folder))
    for damaged in (b'{"format_version": 1}', b'{"kind": "\xff"}'):
        (folder / "manifest.json").write_bytes(damaged)
        assert "damaged" in failing("UPR_FOLDER", lambda: read_snapshot(spark, folder))
    newer = {**msgspec.to_builtins(manifest), "format_version": 2}
    (folder / "manifest.json").write_text(json.dumps(newer))
    assert "of version 2" in failing("UPR_FOLDER", lambda: read_snapshot(spark, folder))
    increment = {**msgspec.to_builtins(manifest), "kind": "increment", "files": {}}
    (folder / "manifest.json").write_text(json.dumps(increment))
    assert "no snapshot" in failing("UPR_FOLDER", lambda: read_snapshot(spark, folder))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear")
    sentence = failing(
        "UPR_FOLDER", lambda: snapshot(spark, url, tmp_path / "other", overwrite=True)
    )
    assert "letter.txt" in sentence


def test_what_cannot_be_a_snapshot(
    spark: SparkSession, new_bucket: NewBucket, tmp_path: Path
) -> None:
    url = new_bucket()
    folder = tmp_path / "snapshot"
    with locked_folder(plain_path(folder)):
        assert "another process" in failing("UPR_FOLDER", lambda: snapshot(spark, url, folder))
    with pytest.raises(OptionError, match="plain path"):
        snapshot(spark, url, "s3://bucket/folder")
    with pytest.raises(OptionError, match="startingOffsets"):
        snapshot(spark, url, folder, options={"startingOffsets": "latest"})
    failing("UPR_NO_BUCKET", lambda: snapshot(spark, url + "-not", folder))
    # An empty bucket is one like any other.
    manifest = snapshot(spark, url, folder.as_uri())
    assert manifest.rows == 0
    assert read_snapshot(spark, folder).count() == 0


# Backups.


def test_a_new_folder_survives_a_crash_with_those_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished increment is there then, and its name must be, too."""
    synced: list[Path] = []
    monkeypatch.setattr(folder_module, "sync_path", synced.append)
    with locked_folder(tmp_path / "backups" / "bucket"):
        assert set(synced) == {tmp_path, tmp_path / "backups"}
        synced.clear()
        for _ in range(2):
            make_folder(tmp_path / "backups" / "bucket" / "000000")
        assert synced == [tmp_path / "backups" / "bucket"]


def test_increments_restore_each_state(
    spark: SparkSession, new_bucket: NewBucket, tmp_path: Path
) -> None:
    url = new_bucket()
    folder = tmp_path / "backup"
    lines: list[str] = []
    states = []
    for mutations in (
        [],
        put(range(40)) + put(range(5), "newer"),
        drop(range(10)) + put(range(30, 50), "newest") + put([3]),
        [],
        [Mutation(Operation.SET, b"\0\xff", b"", flags=2**32 - 1, expiry=FAR), *drop([49])],
    ):
        change(url, mutations)
        states.append(contents(url))
        increment = backup(spark, url, folder, on_progress=lines.append)
        assert {name: part.end for name, part in increment.partitions.items()} == ends(url)
        assert increment.number == len(states) - 1
    assert "increment 2: 31 numbers to read" in lines
    assert Manifest.read(folder / "000002").deletions == 9
    assert Manifest.read(folder / "000003").rows == 0

    for through in (1, None):
        target = new_bucket(3)
        restored = restore(spark, folder, target, through=through)
        assert contents(target) == states[-1 if through is None else through]
        assert restored.increments == (5 if through is None else through + 1)
    full = new_bucket(3)
    change(full, put([1]))
    failing("UPR_NOT_EMPTY", lambda: restore(spark, folder, full))
    change(full, put(range(100, 102)))
    restore(spark, folder, full, through=2, may_have_contents=True)
    assert set(contents(full)) == {*states[2], b"key-100", b"key-101"}, "key-1 is deleted by it"
    with pytest.raises(OptionError, match="increment 5 does not exist"):
        restore(spark, folder, full, through=5, may_have_contents=True)


def test_a_chain_with_a_gap_is_refused(
    spark: SparkSession, new_bucket: NewBucket, tmp_path: Path
) -> None:
    url = new_bucket(2)
    folder = tmp_path / "backup"
    for first in (0, 10, 20):
        change(url, put(range(first, first + 10)))
        backup(spark, url, folder)
    target = new_bucket(2)

    # The last one was not finished: what is before it stands, and it is made anew.
    (folder / "000002" / "manifest.json").unlink()
    restore(spark, folder, target)
    assert len(contents(target)) == 20
    assert backup(spark, url, folder).number == 2
    made_anew(target, 2)
    restore(spark, folder, target)
    assert contents(target) == contents(url)

    middle = folder / "000001"
    manifest = json.loads((middle / "manifest.json").read_text())
    part = next(part_entry for part_entry in manifest["partitions"].values() if part_entry["rows"])
    part["end"] += 1
    (middle / "manifest.json").write_text(json.dumps(manifest))
    assert "ends at" in failing("UPR_BACKUP_GAP", lambda: restore(spark, folder, target))
    shutil.rmtree(middle)
    failing("UPR_BACKUP_GAP", lambda: restore(spark, folder, target))
    assert "1 is missing" in failing("UPR_BACKUP_GAP", lambda: backup(spark, url, folder))
    failing("UPR_FOLDER", lambda: restore(spark, tmp_path / "nowhere", target))
    (tmp_path / "empty").mkdir()
    failing("UPR_FOLDER", lambda: restore(spark, tmp_path / "empty", target))


def test_a_bucket_that_has_parted_is_not_added(
    spark: SparkSession, new_bucket: NewBucket, tmp_path: Path
) -> None:
    url, other_url = new_bucket(4), new_bucket(4)
    folder = tmp_path / "backup"
    change(url, put(range(20)))
    state = contents(url)
    backup(spark, url, folder)
    assert "not of" in failing("UPR_FOLDER", lambda: backup(spark, other_url, folder))
    made_anew(url, 4)
    change(url, put(range(90)))
    assert "new backup" in failing("UPR_ROLLBACK", lambda: backup(spark, url, folder))
    made_anew(url, 5)
    assert "had 4" in failing("UPR_ROLLBACK", lambda: backup(spark, url, folder))
    # What there is stays good.
    restore(spark, folder, other_url)
    assert contents(other_url) == state


def test_an_increment_has_all_keys_and_their_values(
    spark: SparkSession, new_bucket: NewBucket, tmp_path: Path
) -> None:
    """If one increment were of some keys, no later one would have the changes of the others."""
    url = new_bucket(2)
    change(url, put(range(3)))
    backup(spark, url, tmp_path)
    change(url, put(range(3, 6)))
    for name in ("key", "keyPrefix", "valueSchema"):
        with pytest.raises(OptionError, match=f"the option {name} is not for a backup"):
            backup(spark, url, tmp_path, options={name: "key-3"})
    assert backup(spark, url, tmp_path).rows == 3
    with BlockingClient(url) as client:
        assert_no_lease_is_held(client)


def increment_of(cut: PinnedCut) -> Manifest:
    """The manifest of a cut of a bucket with one partition."""
    log = cut.logs[PartitionId(0)]
    part = PartitionPart(
        f"{log.current:016x}",
        tuple((f"{history_id:016x}", seq) for history_id, seq in log.pairs()),
        cut.starts[PartitionId(0)],
        cut.ends[PartitionId(0)],
        1,
    )
    return Manifest(
        kind="increment",
        bucket="b",
        created="",
        partition_count=1,
        partitions={"0": part},
        rows=1,
        deletions=0,
        files={},
    )


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize(("to", "sentence"), [(4, "shares 4 with"), (12, "up to 15 while")])
def test_an_increment_does_not_span_a_failover(*, is_pinned: bool, to: int, sentence: str) -> None:
    """The new history has other changes, some of them below the start of the increment: none would
    ever have them."""
    driver = ModelDriverClient(1)

    def write(count: int) -> None:
        for _ in range(count):
            driver.write(0, 0)
        driver.flush(0)

    def fail_over() -> None:
        driver.fail_over(0, to)
        write(20)

    write(10)
    first = pin_cut(driver, lambda _: {})
    check_cut(driver, first, lambda _: {})
    starts_of = partial(_starts, increment_of(first))
    write(5)
    if not is_pinned:
        driver.before_next_lease = fail_over
    second = pin_cut(driver, starts_of)
    if is_pinned:
        fail_over()
    if is_pinned or to == 4:
        assert sentence in failing("UPR_ROLLBACK", lambda: check_cut(driver, second, starts_of))
    else:
        # All of it is of the new history.
        assert second.ends == {0: 32}
        check_cut(driver, second, starts_of)


def test_a_cut_is_of_nodes_that_know_of_its_lease() -> None:
    """A node that took over has compacted as it liked: rows of the cut may be missing."""
    driver = ModelDriverClient(2)
    for _ in range(3):
        driver.write(0, 0)
        driver.write(1, 1)
    for partition in range(2):
        driver.flush(partition)
    cut = pin_cut(driver, lambda _: {})
    # One that has lapsed has lost nothing yet.
    driver.let_leases_lapse()
    check_cut(driver, cut, lambda _: {})
    for partition in range(2):
        driver.take_over(partition)
        assert "Run this again" in failing(
            "UPR_RANGE_GONE", lambda: check_cut(driver, cut, lambda _: {})
        )


def test_a_cut_has_all_that_was_acknowledged_though_a_node_takes_over() -> None:
    """The node may have the newest changes in memory alone when it is asked to pin them."""
    driver = ModelDriverClient(1)
    for _ in range(5):
        driver.write(0, 0)

    def take_over() -> None:
        driver.partitions[0].persisted = 3

    driver.before_next_lease = take_over
    cut = pin_cut(driver, lambda _: {})
    assert cut.ends == {0: 5}
    assert list(driver.leases) == [cut.lease_id]


def test_a_cut_that_cannot_be_told_of_pins_nothing() -> None:
    """It would hold back compaction until its lease ends by itself."""

    class GoneServer(ModelDriverClient):
        def seqnos(self) -> Mapping[PartitionId, PartitionNumbers]:
            if self.leases:
                raise PipelineError("UPR_UNREACHABLE", "the server has gone")
            return super().seqnos()

    driver = GoneServer(1)
    failing("UPR_UNREACHABLE", lambda: pin_cut(driver, lambda _: {}))
    assert not driver.leases


@pytest.mark.parametrize("loses_changes", [False, True])
def test_a_cut_is_read_under_its_own_lease_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, *, loses_changes: bool
) -> None:
    """A node that took over would grant another lease of the same name, on what it has left: and
    nobody would notice the rows that are missing. Numbers that it never had are not reported as
    wrong options either.
    """
    driver = ModelDriverClient(1)
    driver.write(0, 0)
    cut = pin_cut(driver, lambda _: {})
    options = options_of_cut({"url": "upr://h/b"}, cut)
    source = LeasedDataSource({name.lower(): text for name, text in options.items()})
    reader = source.reader(StructType([StructField("seq", LongType())]))
    monkeypatch.setattr(reader, "_driver_of", lambda _: driver)
    (task,) = reader.partitions()
    assert isinstance(task, ReadTask)
    assert driver.read(0, 0, 1, task.lease_id) == [(1, 0)]
    if loses_changes:
        driver.fail_over(0, 0)
    else:
        driver.write(0, 0)
        driver.flush(0)
        driver.take_over(0)
    failing("UPR_RANGE_GONE", reader.partitions)
    error = "UPR_ROLLBACK" if loses_changes else "UPR_RANGE_GONE"
    failing(error, lambda: check_cut(driver, cut, lambda _: {}))


@pytest.mark.parametrize(
    ("high", "purge", "log", "code"),
    [
        (10, 0, [(7, 4), (5, 0)], None),
        (90, 0, [(9, 10), (7, 4), (5, 0)], None),
        (90, 10, [(7, 4), (5, 0)], None),
        (90, 11, [(7, 4), (5, 0)], "UPR_RANGE_GONE"),
        (90, 0, [(9, 8), (7, 4), (5, 0)], "UPR_ROLLBACK"),
        (90, 0, [(9, 4), (5, 0)], "UPR_ROLLBACK"),
        (90, 0, [(9, 0)], "UPR_ROLLBACK"),
        (9, 0, [(7, 4), (5, 0)], "UPR_ROLLBACK"),
    ],
)
def test_whether_an_increment_may_follow(
    high: int, purge: int, log: list[tuple[int, int]], code: str | None
) -> None:
    partition = PartitionId(0)
    part = PartitionPart("7", (("7", 4), ("5", 0)), 0, 10, 3)
    last = Manifest(
        kind="increment",
        bucket="b",
        created="",
        partition_count=1,
        partitions={"0": part},
        rows=3,
        deletions=0,
        files={},
    )
    info = PartitionInfo(
        partition,
        True,
        PartitionState.ACTIVE,
        SeqNo(high),
        SeqNo(high),
        SeqNo(purge),
        FailoverLog.of_pairs(log),
    )
    if code is None:
        assert _starts(last, {partition: info}) == {partition: 10}
    else:
        assert "new backup" in failing(code, lambda: _starts(last, {partition: info}))
