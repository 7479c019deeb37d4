"""Reading the items that an index finds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import LongType, StringType, StructField, StructType

from tests.indexer.processes import indexer_process
from tests.spark.bucket import change
from tests.spark.model_driver_client import ModelDriverClient
from tests.spark.reads import load
from tests.spark.waiting import until
from upr_protocol.chunk import Mutation
from upr_protocol.client import IndexClient, IndexEntry, IndexerError, IndexPage, Item
from upr_protocol.errors import BrokenError, CredentialsError, UprError
from upr_protocol.ids import Cas, HistoryId, Operation, PartitionId, SeqNo
from upr_protocol.spark import index_reader
from upr_protocol.spark.errors import OptionError, PipelineError
from upr_protocol.spark.index_reader import IndexReader
from upr_protocol.spark.item_lookup import FIRST_AT_ONCE
from upr_protocol.spark.read_options import ReadOptions
from upr_protocol.spark.schema import default_schema


def test_an_index_is_read_with_a_range(
    spark: SparkSession, new_bucket: Callable[..., str], tmp_path: Path
) -> None:
    url = new_bucket(4)
    planes = [(f"p{number}", {"seats": number, "maker": "AB"[number % 2]}) for number in range(30)]
    change(
        url,
        [
            *(
                Mutation(Operation.SET, key.encode(), json.dumps(item).encode())
                for key, item in planes
            ),
            Mutation(Operation.SET, b"\xff", b'{"seats": 99, "maker": "C"}'),
        ],
    )
    with indexer_process(url, tmp_path) as indexer, IndexClient(indexer.url) as indexes:
        definition = {"key": ["maker", "seats"], "include": ["seats"]}
        indexes.create("planes", {"indexes": {"by_maker": definition}})
        until(
            lambda: any(row["state"] == "ready" for row in indexes.indexes()), "the index is ready"
        )
        options = {"index": "planes/by_maker", "indexer": indexer.url}
        schema = "index_key STRING, key STRING, value STRUCT<seats: INT>"
        rows = load(spark, url, schema, indexPrefix='"A"', **options).collect()
        assert [(row.index_key, row.key, row.value.seats) for row in rows] == [
            (f'["A",{number}]', f"p{number}", number) for number in range(0, 30, 2)
        ]
        between = {"indexFrom": '["A", 20]', "indexTo": '["B", 3]'}
        frame = load(spark, url, metadata="false", **between, **options)
        assert frame.columns == ["index_key", "key", "value"]
        assert [bytes(row.key) for row in frame.collect()] == [
            b"p%d" % number for number in (20, 22, 24, 26, 28, 1, 3)
        ]
        change(url, [Mutation(Operation.DELETE, b"p28")])
        assert frame.count() == 6, "it is as new as the read"
        (row,) = load(
            spark, url, "key BINARY, included STRING", indexPrefix='["C"]', **options
        ).collect()
        assert (bytes(row.key), row.included) == (b"\xff", "[99]")
        schema = "key BINARY, value STRUCT<maker: INT>, unparsed STRING"
        (row,) = load(spark, url, schema, indexPrefix='["C"]', **options).collect()
        assert (row.value, row.unparsed) == (None, '{"seats": 99, "maker": "C"}')
        with pytest.raises(PySparkException, match=r"\[UPR_INDEX\].*planes/nothing"):
            load(spark, url, index="planes/nothing", indexer=indexer.url).collect()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"index": "planes"}, "write it like planes/by_size"),
        ({"index": "a/b"}, "the option indexer is missing"),
        ({"index": "a/b", "indexer": "upr://host"}, "is not an indexer's URL"),
        ({"index": "a/b", "indexer": "http://h", "indexFrom": "["}, "write JSON"),
        ({"index": "a/b", "indexer": "http://h", "indexPrefix": "1", "indexTo": "1"}, "excludes"),
        ({"index": "a/b", "indexer": "http://h", "key": "x"}, "index and key exclude each other"),
        ({"index": "a/b", "indexer": "http://h", "stability": "any"}, "index and stability"),
        ({"indexFrom": "1"}, "needs the option index"),
    ],
)
def test_options_of_an_index_that_are_wrong(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(OptionError) as refusal:
        ReadOptions.parse({"url": "upr://h/b", **options})
    assert sentence in str(refusal.value)


class AbsentIndexer:
    """An indexer that is away for some requests, and goes away after some entries."""

    absences = 0
    failure: UprError = BrokenError("the indexer cannot be reached")
    entries = 3
    ends_early = False

    def __init__(self, *_arguments: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        pass

    def scan_all(self, _name: str, **_options: object) -> Iterator[IndexEntry]:
        if AbsentIndexer.absences:
            AbsentIndexer.absences -= 1
            raise self.failure
        for number in range(self.entries):
            yield IndexEntry(key=[number], id=f"p{number}")
        if self.ends_early:
            raise BrokenError("the indexer does not answer")

    def scan(self, _name: str, **_options: object) -> IndexPage:
        if AbsentIndexer.absences:
            AbsentIndexer.absences -= 1
            raise self.failure
        return IndexPage()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long a read has waited, each time; no time passes."""
    waits: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(waits), sleep=waits.append)
    monkeypatch.setattr(index_reader, "time", clock)
    monkeypatch.setattr(index_reader, "IndexClient", AbsentIndexer)
    return waits


def reader_of_absent_indexer() -> IndexReader:
    options = {"index": "a/b", "indexer": "http://h", "timeoutSeconds": "60"}
    schema = StructType([StructField("index_key", StringType())])
    return IndexReader(ReadOptions.parse({"url": "upr://h/b", **options}), schema)


def rows_of_absent_indexer() -> list[pa.RecordBatch]:
    return list(reader_of_absent_indexer().read(InputPartition(0)))


def test_an_indexer_that_is_away_is_waited_for(
    waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AbsentIndexer, "absences", 3)
    (batch,) = rows_of_absent_indexer()
    assert batch.column("index_key").to_pylist() == ["[0]", "[1]", "[2]"]
    assert len(waits) == 3
    monkeypatch.setattr(AbsentIndexer, "absences", 1000)
    with pytest.raises(PipelineError, match=r"UPR_UNREACHABLE.*reached\. Start the indexer"):
        rows_of_absent_indexer()
    assert 60 <= sum(waits) < 70


@pytest.mark.parametrize("code", ["slice_missing", "building", "overloaded"])
def test_an_indexer_that_is_not_ready_is_waited_for(
    waits: list[float], monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """As after a restart: it listens before it knows its indexes."""
    failure = IndexerError(code, "ask again in a second", retry_after_s=1.0)
    monkeypatch.setattr(AbsentIndexer, "failure", failure)
    monkeypatch.setattr(AbsentIndexer, "absences", 3)
    assert sum(batch.num_rows for batch in rows_of_absent_indexer()) == 3
    assert len(waits) == 3
    monkeypatch.setattr(AbsentIndexer, "absences", 1000)
    with pytest.raises(PipelineError, match=r"UPR_INDEX.*ask again in a second"):
        rows_of_absent_indexer()
    assert 60 <= sum(waits) < 70


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (BrokenError("the indexer cannot be reached"), "UPR_UNREACHABLE"),
        (IndexerError("building", "is being built", retry_after_s=1.0), "UPR_INDEX"),
    ],
)
def test_the_driver_waits_for_an_indexer_before_a_task_begins(
    waits: list[float],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failure: UprError,
    code: str,
) -> None:
    """Each run of the task would wait as long, and nobody would see why."""
    monkeypatch.setattr(AbsentIndexer, "failure", failure)
    monkeypatch.setattr(AbsentIndexer, "absences", 20)
    assert len(reader_of_absent_indexer().partitions()) == 1
    assert caplog.text.count(f"{failure}; trying again for 60 s (timeoutSeconds)") == 1
    monkeypatch.setattr(AbsentIndexer, "absences", 1000)
    waits.clear()
    with pytest.raises(PipelineError, match=rf"\[{code}\].*{failure}"):
        reader_of_absent_indexer().partitions()
    assert 60 <= sum(waits) < 70


def test_a_missing_index_is_told_before_a_task_begins(
    waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AbsentIndexer, "absences", 1)
    monkeypatch.setattr(AbsentIndexer, "failure", IndexerError("no_index", "there is no index a/b"))
    with pytest.raises(PipelineError, match=r"UPR_INDEX\].*there is no index a/b"):
        reader_of_absent_indexer().partitions()
    assert not waits


def test_a_password_that_is_not_to_be_had_is_told_with_a_code(
    waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AbsentIndexer, "absences", 1)
    monkeypatch.setattr(AbsentIndexer, "failure", CredentialsError("others can read the file"))
    with pytest.raises(PipelineError, match=r"UPR_SERVER.*others can read the file"):
        rows_of_absent_indexer()
    assert not waits


def test_an_indexer_that_goes_away_during_a_read_fails_it(
    waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AbsentIndexer, "ends_early", True)
    with pytest.raises(PipelineError, match="UPR_UNREACHABLE"):
        rows_of_absent_indexer()
    assert not waits


class ItemDriver(ModelDriverClient):
    """A bucket of one partition, whose history is 1, without items."""

    def get_items(self, keys: Sequence[bytes]) -> list[None]:
        return [None] * len(keys)


@pytest.mark.parametrize(
    ("history_id", "seq", "is_refused"), [(1, 5, False), (7, 5, True), (7, 0, False)]
)
def test_an_index_of_another_bucket_is_refused(
    monkeypatch: pytest.MonkeyPatch, *, history_id: int, seq: int, is_refused: bool
) -> None:
    """Its keys are other items in this bucket, or none."""

    class Indexer(AbsentIndexer):
        def scan(self, _name: str, **_options: object) -> IndexPage:
            return IndexPage(timestamps={0: (f"{history_id:016x}", seq)})

    monkeypatch.setattr(index_reader, "IndexClient", Indexer)
    monkeypatch.setattr(index_reader, "BucketDriverClient", lambda _: ItemDriver(1))
    options = ReadOptions.parse({"url": "upr://h/b", "index": "a/b", "indexer": "http://h"})
    batches = IndexReader(options, default_schema(options)).read(InputPartition(0))
    if is_refused:
        with pytest.raises(OptionError, match="a/b of http://h is of another bucket than upr://h"):
            list(batches)
    else:
        assert not sum(batch.num_rows for batch in batches)


def test_large_items_are_read_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand of them may be more than memory has room for, or a column of Arrow's."""

    class Indexer(AbsentIndexer):
        entries = 50

        def scan(self, _name: str, **_options: object) -> IndexPage:
            return IndexPage()

    class LargeItems(ModelDriverClient):
        def get_items(self, keys: Sequence[bytes]) -> list[Item | None]:
            assert len(keys) <= FIRST_AT_ONCE
            value, partition = bytes(1_000_000), PartitionId(0)
            items: list[Item | None] = [
                Item(key, value, Cas(1), 0, 0, SeqNo(1), partition, HistoryId(1)) for key in keys
            ]
            return [*items[:-1], None]

    monkeypatch.setattr(index_reader, "IndexClient", Indexer)
    monkeypatch.setattr(index_reader, "BucketDriverClient", lambda _: LargeItems(1))
    options = ReadOptions.parse({"url": "upr://h/b", "index": "a/b", "indexer": "http://h"})
    batches = list(IndexReader(options, default_schema(options)).read(InputPartition(0)))
    keys = [key for batch in batches for key in batch.column("key").to_pylist()]
    index_keys = [key for batch in batches for key in batch.column("index_key").to_pylist()]
    assert len(keys) == 50 - len(batches), "one of each part is gone"
    assert [f"[{key.decode()[1:]}]" for key in keys] == index_keys


@pytest.mark.parametrize("name", ["seq", "cas"])
def test_a_number_of_an_item_that_spark_has_no_type_for(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    class Indexer(AbsentIndexer):
        entries = 1

        def scan(self, _name: str, **_options: object) -> IndexPage:
            return IndexPage()

    class ItemsWithLargeNumbers(ModelDriverClient):
        def get_items(self, keys: Sequence[bytes]) -> list[Item]:
            partition, number = PartitionId(0), 1 << 63
            return [
                Item(key, b"", Cas(number), 0, 0, SeqNo(number), partition, HistoryId(1))
                for key in keys
            ]

    monkeypatch.setattr(index_reader, "IndexClient", Indexer)
    monkeypatch.setattr(index_reader, "BucketDriverClient", lambda _: ItemsWithLargeNumbers(1))
    options = ReadOptions.parse({"url": "upr://h/b", "index": "a/b", "indexer": "http://h"})
    schema = StructType([StructField(name, LongType())])
    with pytest.raises(PipelineError, match=rf"UPR_TOO_LARGE.*column {name} holds {1 << 63},"):
        list(IndexReader(options, schema).read(InputPartition(0)))
