"""Finding items by key: the newest of each, as of the index's watermark, and how damage is
reported."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.kit.calls import calls_of
from tests.storage.log_model import row
from tests.storage.logged_index import LoggedIndex, on_simulated_disks, sets
from upr_protocol.chunk import Mutation
from upr_protocol.ids import Cas, Operation, SeqNo
from upr_server.engine import FetchRequest, is_damaged
from upr_server.storage.item_lookup import FIND_BYTES_MAX, FIND_KEYS
from upr_server.storage.records import chunk_key, index_entry_key


def test_it_finds_the_newest_of_each_key_as_of_its_watermark(logged_index: LoggedIndex) -> None:
    rows = sets(b"a", b"b", b"a")
    logged_index.commit(rows)
    assert logged_index.find(b"a", b"b") == [None, None]
    logged_index.follow()
    assert logged_index.find(b"a", b"never", b"b", b"a") == [rows[2], None, rows[1], rows[2]]
    logged_index.commit([row(Operation.DELETE, b"b", 4, 4), *sets(b"c", first=5)])
    assert logged_index.find(b"b", b"c") == [rows[1], None]
    logged_index.follow()
    assert logged_index.find(b"b") == [None]
    assert logged_index.index.watermark(0).item_count == 2


def test_partitions_and_keys_with_a_common_prefix_are_kept_apart(logged_index: LoggedIndex) -> None:
    first, second = sets(b"a", b"ab", b"a\0"), sets(b"a")
    logged_index.commit(first)
    logged_index.commit(second, partition=1)
    logged_index.follow()
    logged_index.follow(1)
    assert logged_index.find(b"a", b"ab", b"a\0", b"a\0\0") == [*first, None]
    assert logged_index.find(b"a", b"ab", partition=1) == [second[0], None]


def test_a_lookup_without_values_returns_sequence_number_and_expiry(
    logged_index: LoggedIndex,
) -> None:
    logged_index.commit(sets(b"a", b"b", expiry=70))
    logged_index.follow()
    (item,) = logged_index.find(b"b", value=False)
    assert item is not None
    assert (item.seq, item.expiry, item.value) == (2, 70, b"")


def test_an_answer_that_is_too_large_has_the_first_items(logged_index: LoggedIndex) -> None:
    rows = sets(b"a", b"b", b"c", b"d")
    logged_index.commit(rows)
    logged_index.follow()
    wants = [FetchRequest(key, 0, needs_value=True) for key in (b"d", b"none", b"a", b"b")]
    assert logged_index.items.find(0, wants, bytes_max=1) == [rows[3], None]
    assert logged_index.items.find(0, wants[2:], bytes_max=1) == [rows[0]]


def test_an_answer_fits_into_one_step_of_the_server(
    logged_index: LoggedIndex,
) -> None:
    value = bytes(256 * 1024)
    keys = [b"%02d" % index for index in range(1, 40)]
    logged_index.commit(
        [Mutation(Operation.SET, key, value, SeqNo(int(key)), Cas(int(key))) for key in keys]
    )
    logged_index.follow()
    items = logged_index.find(*keys)
    assert [item.key for item in items if item is not None] == keys[:8]
    assert FIND_BYTES_MAX // len(value) == 8


def test_items_that_do_not_fit_into_the_answer_are_not_looked_up() -> None:
    logged_index, _, _ = on_simulated_disks()
    keys = [b"%04d" % index for index in range(4 * FIND_KEYS)]
    logged_index.commit(sets(*keys))
    logged_index.follow()
    wants = [FetchRequest(key, 0, needs_value=True) for key in keys]

    def find(count: int) -> int:
        return calls_of(lambda: logged_index.items.find(0, wants[:count], bytes_max=1))

    assert find(len(keys)) < 1.1 * find(FIND_KEYS)
    items = logged_index.items.find(0, wants)
    assert [item.key for item in items if item is not None] == keys


def test_a_lookup_that_compaction_overtakes_is_repeated(
    logged_index: LoggedIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged_index.commit(sets(b"a", b"b"))
    logged_index.follow()
    find = logged_index.log.find_mutations
    newer = sets(b"a", first=3)

    def overwritten_first(
        partition: int, numbers: Sequence[int], bytes_max: int
    ) -> list[Mutation | str]:
        monkeypatch.undo()
        logged_index.commit(newer)
        logged_index.follow()
        logged_index.sweep()
        return find(partition, numbers, bytes_max)

    monkeypatch.setattr(logged_index.log, "find_mutations", overwritten_first)
    assert logged_index.find(b"a", b"b") == [newer[0], sets(b"b", first=2)[0]]


# What is damaged.


def test_an_item_with_a_damaged_chunk_is_refused_and_others_are_not() -> None:
    logged_index, log, _ = on_simulated_disks()
    rows = sets(b"a", b"b")
    logged_index.commit(rows)
    logged_index.follow()
    for bit in range(0, 2_000, 37):
        log.flip_bit(chunk_key(0, 1), bit)
        damaged, intact = logged_index.find(b"a", b"b")
        assert damaged is not None
        assert is_damaged(damaged)
        assert intact == rows[1]
        log.flip_bit(chunk_key(0, 1), bit)
    assert logged_index.find(b"a") == [rows[0]]


def test_an_entry_that_is_damaged_is_refused() -> None:
    logged_index, _, index = on_simulated_disks()
    logged_index.commit(sets(b"a", b"b"))
    logged_index.follow()
    for bit in range(8 * 16):
        index.flip_bit(index_entry_key(0, b"a"), bit)
        damaged, intact = logged_index.find(b"a", b"b")
        assert damaged is not None
        assert is_damaged(damaged)
        assert intact is not None
        assert not is_damaged(intact)
        index.flip_bit(index_entry_key(0, b"a"), bit)


@pytest.mark.parametrize("last", [b"\x09", b"\x79"])
def test_a_key_hidden_by_a_flipped_bit_is_not_reported_missing(
    logged_index: LoggedIndex, last: bytes
) -> None:
    """A bit flips in the key, and the entry stays at its place, now out of order."""
    logged_index.commit(sets(b"key 1", b"key 9"))
    logged_index.follow()
    assert logged_index.find(b"key", b"key 5", b"z") == [None] * 3
    entry = index_entry_key(0, b"key 1" if last < b"1" else b"key 9")
    with logged_index.index.ordered_map.write() as transaction:
        value = bytes(transaction.get(entry) or b"")
        transaction.delete(entry)
        transaction.put(entry[:-1] + last, value)
    (damaged,) = logged_index.find(b"key" + entry[-2:])
    assert damaged is not None
    assert is_damaged(damaged)
    assert None not in logged_index.find(b"key 9" if last < b"1" else b"key 1")
