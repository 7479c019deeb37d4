"""The index of a bucket: how it follows the log, what expires, and how it reports damage."""

from __future__ import annotations

from functools import partial
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.log_model import record_of, row
from tests.storage.logged_index import PARTITIONS, LoggedIndex, on_simulated_disks, sets
from upr_protocol.chunk import Mutation
from upr_protocol.ids import Operation, SeqNo
from upr_server.storage.chunk_log import ChunkLog
from upr_server.storage.errors import CorruptionError
from upr_server.storage.key_index import KeyIndex
from upr_server.storage.records import BucketRecord, expiry_key, index_entry_key
from upr_server.storage.simulated_disk import SimulatedDisk


def test_an_item_expires_once_and_not_when_it_was_overwritten(logged_index: LoggedIndex) -> None:
    logged_index.commit(sets(b"a", b"b", b"c", expiry=70))
    logged_index.follow()
    logged_index.commit([row(Operation.SET, b"a", 4, 4, 90), row(Operation.DELETE, b"b", 5, 5)])
    logged_index.follow()
    due, _ = logged_index.index.find_expired(100, b"", 10)
    assert [(item.key, item.expiry) for item in due] == [(b"c", 70), (b"a", 90)]


def test_a_clock_later_than_the_highest_expiry_time_finds_expired_items(
    logged_index: LoggedIndex,
) -> None:
    """Such a time does not fit into 32 bits."""
    logged_index.commit(sets(b"a", expiry=70))
    logged_index.follow()
    due, _ = logged_index.index.find_expired(1 << 33, b"", 10)
    assert [item.key for item in due] == [b"a"]


def test_a_tombstone_does_not_expire_even_with_an_expiry(logged_index: LoggedIndex) -> None:
    rows = sets(b"a", expiry=70)
    logged_index.commit([*rows, Mutation(Operation.DELETE, b"a", seq=SeqNo(2), expiry=80)])
    logged_index.follow()
    assert logged_index.index.find_expired(100, b"", 10) == ([], b"")
    assert logged_index.find(b"a") == [None]


def test_the_newest_numbers_are_those_of_single_entries_or_damaged() -> None:
    logged_index, _, index = on_simulated_disks()
    logged_index.commit([*sets(b"a", b"b", b"a"), row(Operation.DELETE, b"b", 4, 4)])
    logged_index.follow()
    newest_seqs = partial(logged_index.index.newest_seqs, 0, b"")
    assert newest_seqs(3) == ([3, 4], b"")
    assert newest_seqs(1) == ([3], index_entry_key(0, b"a"))
    assert logged_index.index.newest_seqs(0, index_entry_key(0, b"a"), 3) == ([4], b"")
    assert logged_index.index.newest_seqs(1, b"", 3) == ([], b"")
    for bit in range(8 * 16):
        index.flip_bit(index_entry_key(0, b"a"), bit)
        with pytest.raises(CorruptionError):
            newest_seqs(3)
        index.flip_bit(index_entry_key(0, b"a"), bit)
    with index.write() as transaction:
        transaction.put(index_entry_key(0, b"a"), b"short")
    with pytest.raises(CorruptionError, match="5 bytes"):
        newest_seqs(3)


def test_an_item_whose_expiry_record_is_damaged_is_left_out() -> None:
    logged_index, _, index = on_simulated_disks()
    logged_index.commit(sets(b"a", b"b", expiry=70))
    logged_index.follow()
    index.flip_bit(expiry_key(70, 0, 2), 3)
    items, _ = logged_index.index.find_expired(100, b"", 10)
    assert [item.key for item in items] == [b"a"]


def test_a_damaged_entry_that_was_deleted_expires_nothing() -> None:
    """Only its expiry record is left. The key was set again, under the same sequence number,
    without an expiry: deleting it would lose the item."""
    logged_index, _, index = on_simulated_disks()
    logged_index.commit(sets(b"a", b"b", expiry=70))
    logged_index.follow()
    index.flip_bit(index_entry_key(0, b"a"), 3)
    while logged_index.index.delete_entries(0, 1):
        pass
    logged_index.log.truncate(0, record_of(0))
    logged_index.commit([*sets(b"a"), *sets(b"b", first=2, expiry=70)])
    logged_index.follow()
    items, _ = logged_index.index.find_expired(100, b"", 10)
    assert [item.key for item in items] == [b"b"]


def test_an_index_ahead_of_its_log_is_refused() -> None:
    logged_index, _, index = on_simulated_disks()
    logged_index.commit(sets(b"a", b"b"))
    logged_index.follow()
    older = ChunkLog(SimulatedDisk())
    older.create(BucketRecord("b", PARTITIONS, 0), [record_of(0)] * PARTITIONS)
    with pytest.raises(CorruptionError, match="beyond the log's end at 0"):
        KeyIndex(index, older).follow_log(0, 10)


CHANGES: Final = st.lists(
    st.tuples(
        st.sampled_from([Operation.SET, Operation.DELETE]),
        st.sampled_from([b"a", b"b", b"c", b"d"]),
        st.sampled_from([0, 10, 20]),
    ),
    min_size=1,
    max_size=6,
)


@given(st.lists(CHANGES, max_size=6))
def test_the_index_knows_items_and_expiries_whether_their_keys_are_new_or_known(
    batches: list[list[tuple[Operation, bytes, int]]],
) -> None:
    logged = LoggedIndex(SimulatedDisk(), SimulatedDisk())
    newest: dict[bytes, Mutation] = {}
    seq = 0
    for changes in batches:
        rows = []
        for operation, key, expiry in changes:
            seq += 1
            rows.append(row(operation, key, seq, seq, expiry if operation is Operation.SET else 0))
            newest[key] = rows[-1]
        logged.commit(rows)
        mark = logged.index.follow_log(0, len(rows))
        items = {key: change for key, change in newest.items() if change.op is Operation.SET}
        assert (mark.seq, mark.item_count) == (seq, len(items))
        assert logged.find(*newest) == [items.get(key) for key in newest]
        expired, _ = logged.index.find_expired(20, b"", 100)
        assert {(item.key, item.seq, item.expiry) for item in expired} == {
            (key, change.seq, change.expiry) for key, change in items.items() if change.expiry
        }
