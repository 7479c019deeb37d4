"""How many items are looked up at once."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, BooleanType, LongType, StructField, StructType

from upr_protocol.client import Item
from upr_protocol.ids import Cas, HistoryId, PartitionId, SeqNo
from upr_protocol.spark.item_lookup import (
    BYTES_AT_ONCE,
    FIRST_AT_ONCE,
    GROWTH_MAX,
    ITEMS_AT_ONCE,
    ItemLookup,
)
from upr_protocol.spark.read_options import ReadOptions
from upr_protocol.spark.recipes import join_side


class Items:
    """A bucket that has an item at each key but one.

    Attributes:
        value: The value of each item.
        counts: How many were asked for, each time.
    """

    missing = b"key-3"

    def __init__(self, value: bytes) -> None:
        self.value = value
        self.counts: list[int] = []

    def get_items(self, keys: Sequence[str | bytes]) -> list[Item | None]:
        self.counts.append(len(keys))
        return [None if key == self.missing else self._item(key) for key in keys]

    def _item(self, key: str | bytes) -> Item:
        assert isinstance(key, bytes)
        return Item(key, self.value, Cas(1), 2, 3, SeqNo(4), PartitionId(0), HistoryId(5))

    def close(self) -> None:
        pass


KEYS = [b"key-%d" % number for number in range(3000)]


@pytest.mark.parametrize("nbytes", [0, 100, 20_000, 300_000, 3_000_000])
def test_so_many_items_come_together_as_memory_has_room_for(nbytes: int) -> None:
    keys = KEYS[: 3000 if nbytes < 1000 else 200]
    source = Items(bytes(nbytes))
    lookup = ItemLookup(source)
    items = [item for part in lookup.parts(keys) for item in part]
    assert [
        key if item is None else item.key for item, key in zip(items, keys, strict=True)
    ] == keys
    assert [index for index, item in enumerate(items) if item is None] == [3]
    # Some are missing, so that the others may be a few more.
    fitting = BYTES_AT_ONCE // max(nbytes, 1) * 2
    assert all(count <= max(fitting, FIRST_AT_ONCE) for count in source.counts)
    assert max(source.counts) <= ITEMS_AT_ONCE
    if nbytes < 1000:
        assert source.counts[:4] == [FIRST_AT_ONCE * GROWTH_MAX**step for step in range(3)] + [1000]


def test_the_items_of_a_join_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All those of a batch of Spark's, 10,000 rows, may be more than an Arrow array can hold."""
    source = Items(bytes(1_000_000))
    monkeypatch.setattr(join_side, "BucketDriverClient", lambda _: source)
    schema = StructType(
        [
            StructField("key", BinaryType()),
            StructField("value", BinaryType()),
            StructField("is_there", BooleanType()),
            StructField("flags", LongType()),
            StructField("expiry", LongType()),
        ]
    )
    lookup = join_side._lookup(ReadOptions.parse({"url": "upr://h/b"}), schema)
    batches = [pa.array(KEYS[:50]), pa.array(KEYS[50:60])]
    columns = [column.to_pylist() for column in lookup(iter(batches))]
    assert max(map(len, columns)) == FIRST_AT_ONCE
    rows = [row for column in columns for row in column]
    assert [row["is_there"] for row in rows] == [number != 3 for number in range(60)]
    assert {len(row["value"] or b"") for row in rows} == {0, 1_000_000}
