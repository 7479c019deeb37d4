"""The file of received keys, written anew without what is not needed any more.

To encode 200,000 keys takes 0.2 s, and several times as long where the processors are busy. A
consumer that waited for it would read nothing meanwhile. So a few keys are encoded with each change
that comes, and what is appended to the file meanwhile is written behind them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Final

import msgspec

from upr_protocol.client.rollback.received_keys import ReceivedKeys
from upr_protocol.ids import HistoryId, PartitionId, SeqNo

VERSIONS_PER_RECORD: Final = 1000


class ReceivedKeysRewrite:
    """A rewrite under way.

    Args:
        keys: The keys. They may change between two calls.

    Attributes:
        appended_records: What was appended to the file since the rewrite began; to be added by the
            owner, from before the rewrite's first step on.
        is_done: Whether all keys are encoded.
    """

    def __init__(self, keys: ReceivedKeys) -> None:
        self.appended_records: list[bytes] = []
        self.is_done = False
        self._keys = keys
        self._order: Iterator[tuple[PartitionId, bytes]] | None = None
        self._rows: dict[PartitionId, list[tuple[bytes, SeqNo, HistoryId]]] = {}
        self._records: list[bytes] = []

    def step(self, count: int) -> None:
        """Encodes so many keys more, 1 µs each. The first step lists all of them, some 10 ns each.

        A key that has changed since the rewrite began is encoded as it is now, and one that has
        gone is not: its partition's floor is above it, or a record says that the partition was
        dropped.
        """
        if self._order is None:
            self._order = iter(self._keys.order())
        keys, listed_count = self._keys, 0
        for partition, key in islice(self._order, count):
            listed_count += 1
            version = keys.version(partition, key)
            if version is None:
                continue
            rows = self._rows.setdefault(partition, [])
            rows.append((key, version.seq, version.history_id))
            if len(rows) == VERSIONS_PER_RECORD:
                self._encode_rows(partition)
        self.is_done = listed_count < count

    def _encode_rows(self, partition: PartitionId) -> None:
        rows = self._rows.pop(partition)
        self._records.append(msgspec.msgpack.encode(("replaced", partition, rows)))

    def records(self) -> list[bytes]:
        """The file's records behind its header, once all keys are encoded. O(records)."""
        for partition in list(self._rows):
            self._encode_rows(partition)
        # Only now: keys may have been dropped since they were listed.
        floors = encoded_floors(self._keys.floors())
        return [*floors, *self._records, *self.appended_records]


def encoded_floors(floors: Mapping[PartitionId, SeqNo]) -> list[bytes]:
    """The records of floors."""
    return [msgspec.msgpack.encode(("floor", partition, seq)) for partition, seq in floors.items()]
