"""Reading the items that an index finds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tests.indexer.processes import indexer_process
from tests.spark.bucket import change
from tests.spark.test_read import load, until
from upr_protocol.chunk import Mutation
from upr_protocol.client import IndexClient
from upr_protocol.ids import Operation
from upr_protocol.spark.errors import OptionError
from upr_protocol.spark.read_options import ReadOptions


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
        ({"indexFrom": "1"}, "needs the option index"),
    ],
)
def test_options_of_an_index_that_are_wrong(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(OptionError) as refused:
        ReadOptions.parse({"url": "upr://h/b", **options})
    assert sentence in str(refused.value)
