"""Looking up keys."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.client import Item, RefusedKeysError
from upr_protocol.client.core.key_lookup import KeyLookup
from upr_protocol.errors import RemoteProtocolError, Status
from upr_protocol.hashing import partition_of
from upr_protocol.ids import Cas, HistoryId, Operation, PartitionId, SeqNo
from upr_protocol.limits import GET_REPLY_KEYS_MAX
from upr_protocol.wire import Get, GetReply

PARTITIONS: Final = 2
HISTORY: Final = HistoryId(5)
STORED, MISSING, DAMAGED = "stored", "missing", "damaged"


def test_refused_keys_cross_the_border_of_a_process() -> None:
    item = Item(b"b", b"value", Cas(7), 0, 0, SeqNo(3), PartitionId(1), HistoryId(5))
    error = RefusedKeysError({b"a": Status.DAMAGED}, [None, item])
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert (copy.status, copy.statuses, copy.items) == (error.status, error.statuses, error.items)


def fate_of(key: bytes) -> str:
    """What the server has of a key."""
    return (STORED, MISSING, DAMAGED)[sum(key) % 3]


def row_of(key: bytes) -> Mutation:
    """What the server answers about a key."""
    fate = fate_of(key)
    if fate == STORED:
        return Mutation(Operation.SET, key, b"value of " + key, SeqNo(3), Cas(7))
    return Mutation(Operation.DELETE, key, flags=Status.DAMAGED if fate == DAMAGED else 0)


def answer_to(request: Get, count: int) -> GetReply:
    """The server's answer about the first `count` keys of a request."""
    rows = [row_of(key) for key in request.keys[:count]]
    chunk = Chunk.build(rows, SeqNo(0), SeqNo(9))
    return GetReply(HISTORY, count, chunk, partition=request.partition, opaque=request.opaque)


def item_of(key: bytes) -> Item | None:
    """What the caller is to get for a key."""
    if fate_of(key) != STORED:
        return None
    partition = partition_of(key, PARTITIONS)
    return Item(key, b"value of " + key, Cas(7), 0, 0, SeqNo(3), partition, HISTORY)


def look_up(keys: Sequence[bytes], answered_count: Callable[[int], int]) -> KeyLookup:
    """Looks keys up at a server that answers so many keys of a request at a time."""
    lookup = KeyLookup.of_keys(keys, PARTITIONS)
    for request in lookup.requests():
        keys_left = len(request.message(1).keys)
        assert 1 <= keys_left <= GET_REPLY_KEYS_MAX
        while keys_left:
            message = request.message(1)
            assert len(message.keys) == keys_left
            assert {partition_of(key, PARTITIONS) for key in message.keys} == {request.partition}
            count = answered_count(keys_left)
            keys_left -= count
            assert request.receive(answer_to(message, count)) == (not keys_left)
    return lookup


@given(st.lists(st.binary(min_size=1, max_size=2), max_size=12), st.data())
def test_each_key_has_its_item_however_few_are_answered_at_a_time(
    keys: list[bytes], data: st.DataObject
) -> None:
    lookup = look_up(keys, lambda count: data.draw(st.integers(1, count)))
    expected = [item_of(key) for key in keys]
    damaged_keys = {key for key in keys if fate_of(key) == DAMAGED}
    if not damaged_keys:
        assert lookup.checked_items() == expected
        return
    with pytest.raises(RefusedKeysError) as caught:
        lookup.checked_items()
    assert caught.value.statuses == dict.fromkeys(damaged_keys, Status.DAMAGED)
    assert caught.value.items == expected


def test_more_keys_than_an_answer_may_have_are_asked_for_in_several_requests() -> None:
    keys = [b"%d" % number for number in range(3 * GET_REPLY_KEYS_MAX)]
    assert look_up(keys, lambda count: count).items == [item_of(key) for key in keys]


@pytest.mark.parametrize(("next_index", "row_count"), [(0, 0), (3, 3), (1, 2), (2, 1)], ids=str)
def test_an_answer_that_does_not_fit_its_request_is_refused(
    next_index: int, row_count: int
) -> None:
    """An answer about none would be asked for for ever."""
    (request,) = KeyLookup({PartitionId(0): [(0, b"k"), (1, b"l")]}).requests()
    chunk = Chunk.build([row_of(b"k")] * row_count, SeqNo(0), SeqNo(9))
    with pytest.raises(RemoteProtocolError, match="the request named 2 keys"):
        request.receive(GetReply(HISTORY, next_index, chunk, partition=PartitionId(0), opaque=1))
