from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from upr_protocol.cli.batches import BYTES_MAX, ITEMS_MAX, Batches
from upr_protocol.hashing import partition_of
from upr_protocol.ids import PartitionId


@given(
    st.lists(st.tuples(st.binary(min_size=1, max_size=3), st.binary(max_size=3)), max_size=50),
    st.integers(1, 5),
)
def test_each_item_comes_once_in_its_partition_and_in_order(
    items: list[tuple[bytes, bytes]], partition_count: int
) -> None:
    batches = Batches(partition_count)
    assert all(batches.add(key, value) is None for key, value in items)
    found = batches.all()
    for partition, chunk in found:
        chunk.check_published()
        of_partition = [
            item for item in items if partition_of(item[0], partition_count) == partition
        ]
        assert list(zip(chunk.keys(), chunk.values(), strict=True)) == of_partition
    assert sum(chunk.count for _, chunk in found) == len(items)
    assert batches.all() == []


def test_a_batch_is_given_when_it_has_enough_items() -> None:
    batches = Batches(1)
    full = [batches.add(b"%d" % number, b"") for number in range(2 * ITEMS_MAX)]
    assert [index for index, batch in enumerate(full) if batch is not None] == [
        ITEMS_MAX - 1,
        2 * ITEMS_MAX - 1,
    ]
    assert batches.all() == []


def test_a_batch_is_given_when_it_has_enough_bytes() -> None:
    batches = Batches(1)
    assert batches.add(b"a", b"") is None
    full = batches.add(b"b", bytes(BYTES_MAX))
    assert full is not None
    assert full[0] == PartitionId(0)
    assert full[1].keys() == [b"a", b"b"]
    assert batches.add(b"c", bytes(BYTES_MAX)) is not None
    assert batches.all() == []
