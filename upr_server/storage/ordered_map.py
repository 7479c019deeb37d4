"""An ordered map from bytes to bytes with atomic commits: all that is asked of a disk.

The log and the index are written against this and nothing else. LMDB is one such map, and the
simulated disk of the tests another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from upr_protocol.chunk import Buffer


class ReadTransaction(Protocol):
    """The map as it was when the transaction began."""

    def get(self, key: bytes) -> Buffer | None:
        """The value of `key`, valid until the transaction ends; None when there is none."""

    def get_all(self, keys: Sequence[bytes]) -> Iterable[tuple[bytes, Buffer]]:
        """Those of `keys` that are there, with their values; cheapest by rising key."""

    def scan(self, first: bytes, last: bytes) -> Iterator[tuple[bytes, Buffer]]:
        """Keys from `first` to `last`, both included, and their values, by rising key.

        In a `Writer`, what is written meanwhile may or may not appear.
        """

    def last(self, first: bytes, last: bytes) -> tuple[bytes, Buffer] | None:
        """The highest key from `first` to `last`, both included, and its value."""


class WriteTransaction(ReadTransaction, Protocol):
    """The same, being changed; committed when the context ends without an exception."""

    def put(self, key: bytes, value: Buffer) -> None:
        """Sets `key`."""

    def put_all(self, items: Iterable[tuple[bytes, Buffer]]) -> None:
        """Sets many; cheapest by rising key."""

    def delete(self, key: bytes) -> None:
        """Takes `key` out, if it is there."""


class OrderedMap(Protocol):
    """The map.

    Whatever its methods raise is a `StorageError`; after `StoreFailedError` it is good for nothing.
    """

    def read(self) -> AbstractContextManager[ReadTransaction]:
        """A transaction that sees the last commit and keeps seeing it. To be kept short: what it
        sees is not reused meanwhile."""

    def write(self, *, reserve_bytes: int = 0) -> AbstractContextManager[WriteTransaction]:
        """A transaction that is on disk, whole, when the context has ended; or not at all.

        Args:
            reserve_bytes: Room that must be there before anything is written, 0 for none.

        Raises:
            DiskFullError: There is no room; nothing has changed.
            StoreFailedError: Anything else: nobody knows what has changed.
        """

    def statistics(self) -> dict[str, int]:
        """`bytes_used` of `bytes_in_file`."""

    def close(self) -> None:
        """Lets go of it."""
