"""Looking up keys."""

from __future__ import annotations

import pickle

from upr_protocol.client import Item, RefusedKeysError
from upr_protocol.errors import Status
from upr_protocol.ids import Cas, HistoryId, PartitionId, SeqNo


def test_refused_keys_cross_the_border_of_a_process() -> None:
    item = Item(b"b", b"value", Cas(7), 0, 0, SeqNo(3), PartitionId(1), HistoryId(5))
    error = RefusedKeysError({b"a": Status.DAMAGED}, [None, item])
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert (copy.status, copy.statuses, copy.items) == (error.status, error.statuses, error.items)
