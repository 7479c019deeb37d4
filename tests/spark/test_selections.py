"""Which rows the options of a read select: those that a filter of all rows selects."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import attrs
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import StructField, StructType

from tests.kit.effort import effort
from tests.spark.server import BlockingServer
from upr_protocol.chunk import Mutation
from upr_protocol.client import BlockingClient
from upr_protocol.client.options import new_lease_id
from upr_protocol.errors import ServerError
from upr_protocol.hashing import partition_of
from upr_protocol.ids import SEQ_MAX, Durability, Operation
from upr_protocol.spark.batch_reader import BatchReader
from upr_protocol.spark.read_options import ReadOptions
from upr_protocol.spark.schema import READ_COLUMNS

PARTITIONS = 3
TEXTS = (
    "a",
    "ab",
    "abc",
    "A",
    "Ab",
    "ä",
    "äö",
    "日本",
    "日本語",
    "%",
    "%a",
    "_",
    "a\\",
    " a",
    "a\0b",
)
KEYS = [*(text.encode() for text in TEXTS), b"\xff", *(b"key %d" % index for index in range(20))]
NAMES = [name for name in READ_COLUMNS if not name.startswith(("bucket", "snapshot_"))]

FUTURE_US = 1 << 51
"""A time in some years, in microseconds since 1970."""

Row = dict[str, Any]


@attrs.frozen
class Bucket:
    """A bucket, and all its rows."""

    url: str
    rows: list[Row]
    client: BlockingClient

    def read(self, options: dict[str, str], names: list[str]) -> list[Row]:
        """The rows that a read of these columns has."""
        schema = StructType([StructField(name, *READ_COLUMNS[name]) for name in names])
        lease_id = new_lease_id()
        reader = BatchReader(ReadOptions.parse({"url": self.url, **options}), schema, lease_id)
        try:
            return [
                row
                for task in reader.partitions()
                for batch in reader.read(task)
                for row in batch.to_pylist()
            ]
        finally:
            with suppress(ServerError):  # nothing was to be pinned
                self.client.release_lease(lease_id)


@pytest.fixture(scope="module")
def bucket(server: BlockingServer) -> Iterator[Bucket]:
    url = server.create_bucket("selections", PARTITIONS)
    draw = random.Random(1)
    with BlockingClient(url, durability=Durability.PERSISTED) as client:
        for _ in range(5):
            client.apply(
                Mutation(Operation.DELETE, key)
                if draw.random() < 0.2
                else Mutation(Operation.SET, key, draw.randbytes(draw.choice((0, 3, 2000))))
                for key in draw.choices(KEYS, k=60)
            )
        # Their older versions stay on disk as long as this lease.
        client.acquire_lease(
            [(partition, 0, SEQ_MAX) for partition in range(PARTITIONS)],
            time_to_live_s=3600,
            owner="test",
        )
        bucket = Bucket(url, [], client)
        bucket.rows.extend(bucket.read({}, NAMES))
        assert len(bucket.rows) > 100
        yield bucket


def offsets(data: st.DataObject, partitions: set[int], rows: list[Row]) -> dict[int, int]:
    """Numbers of some partitions."""
    newest = {row["partition"]: row["seq"] for row in rows}
    chosen = data.draw(st.sets(st.sampled_from(sorted(partitions))))
    return {partition: data.draw(st.integers(0, newest[partition])) for partition in chosen}


def as_json(seqs: dict[int, int]) -> str:
    return msgspec.json.encode({str(partition): seq for partition, seq in seqs.items()}).decode()


@settings(max_examples=effort(30, 300))
@given(data=st.data())
def test_options_select_what_a_filter_selects(bucket: Bucket, data: st.DataObject) -> None:
    """Keys, prefixes, partitions, numbers, times, tasks, columns, and one row for each key."""
    options: dict[str, str] = {}
    rows, partitions = bucket.rows, set(range(PARTITIONS))
    texts = st.sampled_from([*TEXTS, "key 1", "none"])
    if data.draw(st.booleans()):
        options["key"] = text = data.draw(texts)
        rows = [row for row in rows if row["key"] == text.encode()]
        partitions = {partition_of(text.encode(), PARTITIONS)}
    else:
        options["keyPrefix"] = text = data.draw(texts | st.just(""))
        rows = [row for row in rows if row["key"].startswith(text.encode())]
        if data.draw(st.booleans()):
            partitions = data.draw(st.sets(st.sampled_from(range(PARTITIONS)), min_size=1))
            options["partitions"] = ",".join(map(str, sorted(partitions)))
            rows = [row for row in rows if row["partition"] in partitions]
    moments_us = [0, *(row["cas"] // 1000 for row in bucket.rows), FUTURE_US]
    start_us, starts = None, dict[int, int]()
    if data.draw(st.booleans()):
        start_us = data.draw(st.sampled_from(moments_us))
        options["startingTimestamp"] = as_time(start_us)
        rows = [row for row in rows if row["cas"] >= 1000 * start_us]
    else:
        starts = offsets(data, partitions, bucket.rows)
        options["startingOffsets"] = as_json(starts)
        rows = [row for row in rows if row["seq"] > starts.get(row["partition"], 0)]
    if data.draw(st.booleans()):
        later_us = [moment for moment in moments_us if start_us is None or moment > start_us]
        end_us = data.draw(st.sampled_from([*later_us, 2 * FUTURE_US]))
        options["endingTimestamp"] = as_time(end_us)
        rows = [row for row in rows if row["cas"] < 1000 * end_us]
    else:
        ends = offsets(data, partitions, bucket.rows)
        ends = {partition: max(seq, starts.get(partition, 0)) for partition, seq in ends.items()}
        options["endingOffsets"] = as_json(ends)
        rows = [row for row in rows if row["seq"] <= ends.get(row["partition"], row["seq"])]
    options["maxPartitionBytes"] = str(data.draw(st.sampled_from([2000, 1 << 30])))
    options["minPartitions"] = str(data.draw(st.sampled_from([1, 5])))
    if data.draw(st.booleans()):
        options["deduplicate"] = "true"
        newest = {row["key"]: row for row in sorted(rows, key=lambda row: row["seq"])}
        rows = list(newest.values())
    names = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    read_rows = bucket.read(options, names)
    assert all(list(row) == names for row in read_rows)
    expected = [[row[name] for name in names] for row in rows]
    assert sorted(map(repr, expected)) == sorted(repr(list(row.values())) for row in read_rows)


def as_time(moment_us: int) -> str:
    time = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=moment_us)
    return time.isoformat()
