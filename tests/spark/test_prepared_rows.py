"""Batches of increments that run again in any tasks, against a naive model. With a real server, and
without Spark."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from tests.spark.bucket_values import contents
from tests.spark.schemas import schema_of
from tests.spark.server import BlockingServer
from upr_protocol.chunk import Chunk
from upr_protocol.ids import PartitionId
from upr_protocol.spark import prepared_rows, writer
from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.prepared_rows import PreparedRows, commit_rows, in_stable_order, rounds_of
from upr_protocol.spark.publication import attempt_of, writer_id
from upr_protocol.spark.write_options import WriteOptions
from upr_protocol.spark.writer import WriteTask

NewBucket = Callable[..., str]
Row = tuple[str, str, str]
Rounds = Iterator[Iterator[tuple[PartitionId, Chunk]]]

COMMUTING = st.tuples(st.just("increment"), st.sampled_from("abcdef"), st.integers(0, 9).map(str))
"""Rows that may be in any task."""
ORDERED = st.tuples(
    st.sampled_from(("increment", "decrement", "set")),
    st.sampled_from("xyz"),
    st.integers(0, 9).map(str),
)
"""Rows whose order makes a difference: those of a key are in one task."""
ROWS = st.lists(COMMUTING | ORDERED, min_size=1, max_size=40)

SCHEMA = "op string, key string, value string"
_QUERIES = count()
_BUCKETS = count()


class KilledError(Exception):
    """The driver is gone."""


def expected(rows: list[Row]) -> dict[bytes, bytes]:
    """What the rows leave in an empty bucket, one after the other."""
    values = defaultdict[str, int](int)
    for op, key, text in rows:
        count = int(text)
        if op == "set":
            values[key] = count
        else:
            change = count if op == "increment" else -count
            values[key] = max(0, values[key] + change)
    return {key.encode(): b"%d" % value for key, value in values.items()}


def in_tasks(draw: Any, rows: list[Row]) -> list[list[Row]]:
    """The rows in some tasks, in some order."""
    tasks: list[list[Row]] = [[] for _ in range(draw(st.integers(1, 4)))]
    task_of_key = {key: draw(st.integers(0, len(tasks) - 1)) for key in "xyz"}
    commuting = draw(st.permutations([row for row in rows if row[1] not in task_of_key]))
    for row in rows:
        if row[1] in task_of_key:
            tasks[task_of_key[row[1]]].append(row)
    for row in commuting:
        task = tasks[draw(st.integers(0, len(tasks) - 1))]
        task.insert(draw(st.integers(0, len(task))), row)
    return tasks


def batch_of(rows: list[Row]) -> pa.RecordBatch:
    ops, keys, values = zip(*rows, strict=True) if rows else ((), (), ())
    columns = (ops, keys, values)
    arrays = [pa.array(column, pa.string()) for column in columns]
    return pa.record_batch(arrays, names=["op", "key", "value"])


class Driver:
    """Runs a batch of a stream again and again."""

    def __init__(self, url: str, **more: str) -> None:
        self.options = WriteOptions.parse(
            {"url": url, "operation": "apply", **more}, schema_of(SCHEMA), overwrite=False
        )
        self.job = f"query-{next(_QUERIES)}/0"
        self._runs = count(1_700_000_000)

    def run(
        self, tasks: list[list[Row]], *, batch_bytes: int, dies_after: int | None = None
    ) -> None:
        """Writes the tasks one after the other, and commits.

        Args:
            tasks: The rows of each.
            batch_bytes: The size of a batch of the commit.
            dies_after: The driver is gone when it has sent so many batches; None for never.
        """
        started_s = next(self._runs)
        messages = [
            WriteTask(
                self.options,
                writer_id(self.job.encode(), index),
                attempt_of(started_s, index),
            ).write_or_prepare(iter([batch_of(rows)]), self.job)
            for index, rows in enumerate(tasks)
        ]
        prepared = [message for message in messages if isinstance(message, PreparedRows)]

        def dying(table: pa.Table, partitions: int, _: int) -> Rounds:
            rows_left = count()

            def batches(
                of_round: Iterator[tuple[PartitionId, Chunk]],
            ) -> Iterator[tuple[PartitionId, Chunk]]:
                for batch in of_round:
                    if next(rows_left) == dies_after:
                        raise KilledError
                    yield batch

            for of_round in rounds_of(table, partitions, batch_bytes):
                yield batches(of_round)

        if prepared:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(prepared_rows, "rounds_of", dying)
                patch.setattr(prepared_rows, "ROUND_BATCHES", 2)
                commit_rows(self.options, prepared, attempt_of(started_s, 0))


@given(st.data())
def test_a_batch_counts_once_in_whatever_tasks_it_runs(
    server: BlockingServer, data: st.DataObject
) -> None:
    rows = data.draw(ROWS)
    url = server.create_bucket(f"layouts-{next(_BUCKETS)}", 3)
    driver = Driver(url)
    batch_bytes = data.draw(st.sampled_from((1, 60, 100_000)))
    for dies_after in data.draw(st.lists(st.integers(0, 12), max_size=3)):
        with suppress(KilledError):
            driver.run(in_tasks(data.draw, rows), batch_bytes=batch_bytes, dies_after=dies_after)
    driver.run(in_tasks(data.draw, rows), batch_bytes=batch_bytes)
    assert contents(url) == expected(rows)


@given(st.data())
def test_the_order_of_a_commit_does_not_depend_on_the_tasks(data: st.DataObject) -> None:
    rows = data.draw(ROWS)

    def committed() -> list[tuple[PartitionId, bytes]]:
        tasks = [batch_of(task) for task in in_tasks(data.draw, rows)]
        codes = {"set": 1, "increment": 6, "decrement": 7}
        table = pa.Table.from_batches(tasks)
        table = pa.table(
            {
                "op": pa.array([codes[op] for op in table["op"].to_pylist()], pa.uint8()),
                "key": table["key"].cast(pa.large_binary()),
                "value": table["value"].cast(pa.large_binary()),
            }
        )
        assert in_stable_order(table).num_rows == len(rows)
        return [
            (partition, bytes(chunk))
            for of_round in rounds_of(table, 3, 60)
            for partition, chunk in of_round
        ]

    first = committed()
    assert committed() == first


def test_other_rows_are_refused_when_a_batch_runs_again(new_bucket: NewBucket) -> None:
    url = new_bucket(1)
    driver = Driver(url)
    rows = [("increment", "a", "1"), ("increment", "b", "2")]
    driver.run([rows[:1], rows[1:]], batch_bytes=1000)
    with pytest.raises(PipelineError, match="UPR_REPLAY_DIFFERS"):
        driver.run([[*rows, ("increment", "a", "1")]], batch_bytes=1000)
    assert contents(url) == {b"a": b"1", b"b": b"2"}


def test_refused_rows_of_a_commit_are_dead_letters_once(
    new_bucket: NewBucket, tmp_path: Any
) -> None:
    url = new_bucket(2)
    driver = Driver(url, onError="deadLetter", deadLetterPath=str(tmp_path))
    rows = [
        ("set", "text", "no number"),
        ("increment", "text", "1"),
        ("increment", "a", "none"),
        ("increment", "b", "2"),
    ]
    driver.run([rows], batch_bytes=1000)
    driver.run([rows[:2], rows[2:]], batch_bytes=1000)
    (file,) = tmp_path.iterdir()
    letters = parquet.read_table(file, columns=["status", "value"]).to_pylist()
    assert {letter["status"] for letter in letters} == {"NOT_A_NUMBER"}
    assert sorted(letter["value"] for letter in letters) == [b"1", b"none"], "as written"
    assert contents(url) == {b"text": b"no number", b"b": b"2"}


def test_a_task_hands_few_refused_rows_to_the_driver_and_writes_the_others(
    new_bucket: NewBucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """All of them in memory, there may be more than that has room for."""
    monkeypatch.setattr(writer, "REJECTED_BYTES_MAX", 3000)
    url = new_bucket(1)
    driver = Driver(url, onError="deadLetter", deadLetterPath=str(tmp_path))
    rows = [("increment", f"key-{index}", "none") for index in range(50)]
    attempt = attempt_of(1_700_000_000, 0)
    for last_row in (("increment", "a", "1"), ("set", "a", "2")):
        task = WriteTask(driver.options, writer_id(driver.job.encode(), 0), attempt)
        message = task.write_or_prepare(iter([batch_of([*rows, last_row])]), driver.job)
        if isinstance(message, PreparedRows):
            assert 0 < len(message.rejected) < 15
            commit_rows(driver.options, [message], attempt)
        files = list(tmp_path.iterdir())
        letters = [key for file in files for key in parquet.read_table(file)["key"].to_pylist()]
        assert sorted(letters) == sorted(key.encode() for _, key, _ in rows)
        for file in files:
            file.unlink()
    assert contents(url) == {b"a": b"2"}


def test_a_task_that_the_driver_could_not_take_is_refused(
    new_bucket: NewBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared_rows, "PREPARED_BYTES_MAX", 100)
    driver = Driver(new_bucket(1))
    with pytest.raises(PipelineError, match=r"UPR_BATCH_TOO_LARGE.*maxFilesPerTrigger"):
        driver.run([[("increment", f"key-{index}", "1") for index in range(100)]], batch_bytes=1)
