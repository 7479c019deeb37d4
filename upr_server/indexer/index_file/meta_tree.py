"""What an index has beside its entries: the marks, and the state that it is in."""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Final

import lmdb

from upr_protocol.ids import HistoryId, PartitionId, SeqNo
from upr_server.indexer.index_file.scan_result import Timestamps
from upr_server.indexer.index_file.tree import Tree, items_between
from upr_server.indexer.mark import Mark, decode_timestamp

_PARTITION: Final = Struct(">H")
_COUNT: Final = Struct(">I")
_MARK: Final = b"m"
_MARKS_END: Final = b"n"
_UNSETTLED: Final = b"u"
_BUILT: Final = b"j"
_OPENING: Final = b"o"
_BUCKET: Final = b"b"
_FAILURE: Final = b"f"
_FORMAT: Final = b"v"
_FORMAT_VERSION: Final = b"2"
"""An index in another format is emptied: the server has everything."""


class MetaTree:
    """The tree of marks and state, in one transaction. Every call is O(log partitions) if nothing
    else is said.

    Args:
        transaction: A transaction of the index's file.
        tree: The tree.
    """

    __slots__ = ("_transaction", "_tree")

    def __init__(self, transaction: lmdb.Transaction[bytes], tree: Tree) -> None:
        self._transaction = transaction
        self._tree = tree

    def _get(self, key: bytes) -> bytes:
        return self._transaction.get(key, b"", db=self._tree)

    def _put(self, key: bytes, value: bytes) -> None:
        self._transaction.put(key, value, db=self._tree)

    # State.

    def bucket(self) -> str:
        """The bucket whose documents are in the index; empty if the file is new."""
        return self._get(_BUCKET).decode()

    def has_format(self) -> bool:
        """Whether the file has the format of this program."""
        return self._get(_FORMAT) == _FORMAT_VERSION

    def begin(self, bucket: str) -> None:
        """Notes, in an empty file, the bucket and the format."""
        self._put(_BUCKET, bucket.encode())
        self._put(_FORMAT, _FORMAT_VERSION)

    def opening(self) -> str:
        """The opening of the file that writes to it; empty if the file was removed."""
        return self._get(_OPENING).decode()

    def set_opening(self, opening: str) -> None:
        """Notes which opening of the file writes to it from now on."""
        self._put(_OPENING, opening.encode())

    def remove_opening(self) -> None:
        """Notes that the file is removed."""
        self._transaction.delete(_OPENING, db=self._tree)

    def is_built(self) -> bool:
        """Whether the index is complete."""
        return self._transaction.get(_BUILT, db=self._tree) is not None

    def set_built(self) -> None:
        """Notes that the index is complete."""
        self._put(_BUILT, b"")

    def failure(self) -> str:
        """Why entries are missing in it; empty if none are."""
        return self._get(_FAILURE).decode()

    def set_failure(self, failure: str) -> None:
        """Notes why entries are missing in it."""
        self._put(_FAILURE, failure.encode())

    # Marks.

    def marks(self, bucket: str) -> dict[PartitionId, Mark]:
        """How far each partition is. O(partitions)."""
        return {
            partition: Mark.decode(bucket, partition, data)
            for partition, data in self._encoded_marks()
        }

    def put_mark(self, bucket: str, partition: PartitionId, mark: Mark) -> None:
        """Notes how far a partition is."""
        self._put(_MARK + _PARTITION.pack(partition), mark.encode(bucket, partition))

    def timestamp(self, partition: PartitionId) -> tuple[HistoryId, SeqNo]:
        """How far a partition is, without the rest of its mark."""
        data = self._get(_MARK + _PARTITION.pack(partition))
        return decode_timestamp(data) if data else (HistoryId(0), SeqNo(0))

    def timestamps(self) -> Timestamps:
        """How far each partition is, without the rest of their marks. O(partitions)."""
        return {partition: decode_timestamp(data) for partition, data in self._encoded_marks()}

    def _encoded_marks(self) -> Iterator[tuple[PartitionId, bytes]]:
        for key, data in items_between(self._transaction, self._tree, _MARK, _MARKS_END):
            yield PartitionId(_PARTITION.unpack(key[1:])[0]), data

    def unsettled_count(self) -> int:
        """How many partitions are between two states that the server had."""
        data = self._get(_UNSETTLED)
        return int(_COUNT.unpack(data)[0]) if data else 0

    def set_unsettled_count(self, count: int) -> None:
        """Notes how many partitions are between two states that the server had."""
        self._put(_UNSETTLED, _COUNT.pack(count))
