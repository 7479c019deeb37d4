"""An ordered map from bytes to bytes with atomic commits: all that the server needs of a disk.

The log and the index use this interface and nothing else. LMDB implements it, and so does the
simulated disk of the tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from upr_protocol.chunk import Buffer


class ReadTransaction(Protocol):
    """The map as it was when the transaction began."""

    def get(self, key: bytes) -> Buffer | None:
        """The value of `key`, valid until the transaction ends; None if the key is missing."""

    def get_all(self, keys: Sequence[bytes]) -> Iterable[tuple[bytes, Buffer]]:
        """Those of `keys` that exist, with their values; cheapest in rising order."""

    def scan(self, first_key: bytes, last_key: bytes) -> Iterator[tuple[bytes, Buffer]]:
        """Keys from `first_key` to `last_key`, both included, and their values, by rising key.

        In a `WriteTransaction`, what is written during the scan may or may not appear.
        """

    def last(self, first_key: bytes, last_key: bytes) -> tuple[bytes, Buffer] | None:
        """The highest key from `first_key` to `last_key`, both included, and its value, or
        None."""


class WriteTransaction(ReadTransaction, Protocol):
    """The map, with the transaction's own changes. They are committed when the context ends without
    an exception."""

    def put(self, key: bytes, value: Buffer) -> None:
        """Sets the value of `key`."""

    def put_all(self, items: Iterable[tuple[bytes, Buffer]]) -> None:
        """Sets many values; cheapest in rising order of their keys."""

    def put_new(self, items: Sequence[tuple[bytes, Buffer]]) -> int:
        """Sets those of many values whose keys are missing, and leaves the others; cheapest in
        rising order of their keys, of which none may occur twice. Returns how many it has set."""

    def delete(self, key: bytes) -> None:
        """Deletes `key` if it exists."""


class OrderedMap(Protocol):
    """The map. Its methods raise only `StorageError`; after `StoreFailedError` it is unusable."""

    def read(self) -> AbstractContextManager[ReadTransaction]:
        """A transaction that sees the last commit and keeps seeing it. It should be short: space
        that later commits free cannot be reused while it lasts."""

    def write(self, *, reserve_bytes: int = 0) -> AbstractContextManager[WriteTransaction]:
        """A transaction that is on disk, whole, when the context has ended; or not at all.

        Args:
            reserve_bytes: Free space that must be left before anything is written, 0 for none.

        Raises:
            DiskFullError: There is not enough space; nothing has changed.
            StoreFailedError: The disk failed; whether anything has changed is unknown.
        """

    def statistics(self) -> dict[str, int]:
        """`bytes_used`, and `bytes_in_file`, which include free space within the file."""

    def close(self) -> None:
        """Closes its files."""
