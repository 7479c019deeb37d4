"""A simulated disk: an ordered map in memory that can fail on demand.

What was committed survives a `crash`. A commit that is made to fail does not happen, or happens and
is not reported, as on a real disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from sortedcontainers import SortedDict

from upr_protocol.chunk import Buffer
from upr_server.storage.errors import DiskFullError, StoreFailedError


class SimulatedDisk:
    """An ordered map with atomic commits.

    Attributes:
        bytes_max: How much it holds; a commit that would exceed it raises `DiskFullError`.
        fault: Called at each commit. A `StoreFailedError` that it raises makes the disk unusable.
        keep_on_fault: Whether the commit that such an error ends happens nevertheless.
        commits: How many commits there were.
    """

    def __init__(self, bytes_max: int = 1 << 62) -> None:
        self._items: SortedDict[bytes, bytes] = SortedDict()
        self._bytes = 0
        self._failed = False
        self.bytes_max = bytes_max
        self.fault: Callable[[], None] | None = None
        self.keep_on_fault = False
        self.commits = 0

    @contextmanager
    def read(self) -> Iterator[_ReadTransaction]:
        # There is one thread, so nothing changes while a transaction reads.
        self._check()
        yield _ReadTransaction(self._items)

    @contextmanager
    def write(self, *, reserve_bytes: int = 0) -> Iterator[_WriteTransaction]:
        self._check()
        if reserve_bytes and self.free_bytes < reserve_bytes:
            raise DiskFullError(f"the last {reserve_bytes} bytes are for compaction")
        transaction = _WriteTransaction(self._items)
        try:
            yield transaction
            new_bytes = self._bytes + transaction.grown_bytes
            if transaction.grown_bytes > 0 and new_bytes > self.bytes_max:
                raise DiskFullError(f"{new_bytes} bytes exceed the disk's {self.bytes_max}")
            if self.fault is not None:
                self.fault()
        except StoreFailedError:
            self._failed = True
            if self.keep_on_fault:
                self._bytes += transaction.grown_bytes
            else:
                transaction.undo()
            raise
        except BaseException:
            transaction.undo()
            raise
        self._bytes = new_bytes
        self.commits += 1

    @property
    def free_bytes(self) -> int:
        """How much can still be written."""
        return max(0, self.bytes_max - self._bytes)

    def crash(self) -> None:
        """Restarts the machine: what was committed is there."""
        self._failed = False
        self.fault = None

    def flip_bit(self, key: bytes, bit: int) -> None:
        """Flips one bit of a value."""
        value = bytearray(self._items[key])
        value[bit // 8 % len(value)] ^= 1 << bit % 8
        self._items[key] = bytes(value)

    def keys(self) -> list[bytes]:
        """Every key, in order."""
        return list(self._items)

    def statistics(self) -> dict[str, int]:
        """How many bytes are in use."""
        return {"bytes_used": self._bytes, "bytes_in_file": self._bytes}

    def close(self) -> None:
        """Does nothing: the map outlives its users."""

    def _check(self) -> None:
        if self._failed:
            raise StoreFailedError("the disk has failed")


class _ReadTransaction:
    def __init__(self, items: SortedDict[bytes, bytes]) -> None:
        self._items = items

    def get(self, key: bytes) -> Buffer | None:
        value: Buffer | None = self._items.get(key)
        return value

    def get_all(self, keys: Sequence[bytes]) -> Iterable[tuple[bytes, Buffer]]:
        return [(key, self._items[key]) for key in keys if key in self._items]

    def scan(self, first_key: bytes, last_key: bytes) -> Iterator[tuple[bytes, Buffer]]:
        for key in list(self._items.irange(first_key, last_key)):
            yield key, self._items[key]

    def last(self, first_key: bytes, last_key: bytes) -> tuple[bytes, Buffer] | None:
        for key in self._items.irange(first_key, last_key, reverse=True):
            return key, self._items[key]
        return None


class _WriteTransaction(_ReadTransaction):
    def __init__(self, items: SortedDict[bytes, bytes]) -> None:
        super().__init__(items)
        self._values_before: dict[bytes, bytes | None] = {}
        self.grown_bytes = 0

    def put(self, key: bytes, value: Buffer) -> None:
        self.delete(key)
        self._items[key] = bytes(value)
        self.grown_bytes += len(key) + len(value)

    def put_all(self, items: Iterable[tuple[bytes, Buffer]]) -> None:
        for key, value in items:
            self.put(key, value)

    def put_new(self, items: Sequence[tuple[bytes, Buffer]]) -> int:
        new_items = [(key, value) for key, value in items if key not in self._items]
        self.put_all(new_items)
        return len(new_items)

    def delete(self, key: bytes) -> None:
        value = self._items.pop(key, None)
        self._values_before.setdefault(key, value)
        if value is not None:
            self.grown_bytes -= len(key) + len(value)

    def undo(self) -> None:
        for key, value in self._values_before.items():
            self._items.pop(key, None)
            if value is not None:
                self._items[key] = value
