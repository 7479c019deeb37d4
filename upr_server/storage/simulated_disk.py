"""A disk that is simulated: an `Environment` in memory, which can fail on demand.

What was committed survives a `crash`; a commit that the disk was told to fail does not happen, or
happens and is not reported, as with a real one.
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
        bytes_max: The room there is; a commit that would exceed it raises `DiskFullError`.
        fault: Called at each commit; what it raises is the disk's failure. Changes the commit made
            are kept if `keep_on_fault`, and the disk is good for nothing afterwards.
        keep_on_fault: See `fault`.
        commits: How many there were.
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
    def read(self) -> Iterator[_Reader]:
        """See `Environment`. There is one thread, so nothing changes meanwhile."""
        self._check()
        yield _Reader(self._items)

    @contextmanager
    def write(self, *, reserve_bytes: int = 0) -> Iterator[_Writer]:
        """See `Environment`."""
        self._check()
        if reserve_bytes and self.free_bytes < reserve_bytes:
            raise DiskFullError(f"the last {reserve_bytes} bytes are for compaction")
        writer = _Writer(self._items)
        try:
            yield writer
            grown = self._bytes + writer.grown_bytes
            if writer.grown_bytes > 0 and grown > self.bytes_max:
                raise DiskFullError(f"{grown} bytes are more than {self.bytes_max}")
            if self.fault is not None:
                self.fault()
        except StoreFailedError:
            self._failed = True
            if self.keep_on_fault:
                self._bytes += writer.grown_bytes
            else:
                writer.undo()
            raise
        except BaseException:
            writer.undo()
            raise
        self._bytes = grown
        self.commits += 1

    @property
    def free_bytes(self) -> int:
        """The room that is left."""
        return max(0, self.bytes_max - self._bytes)

    def crash(self) -> None:
        """The machine goes down and comes up again: what was committed is there."""
        self._failed = False
        self.fault = None

    def flip(self, key: bytes, bit: int) -> None:
        """Turns one bit of a value round."""
        value = bytearray(self._items[key])
        value[bit // 8 % len(value)] ^= 1 << bit % 8
        self._items[key] = bytes(value)

    def keys(self) -> list[bytes]:
        """Every key."""
        return list(self._items)

    def statistics(self) -> dict[str, int]:
        """Bytes in use."""
        return {"bytes_used": self._bytes, "bytes_in_file": self._bytes}

    def close(self) -> None:
        """Lets go of it; nothing is lost."""

    def _check(self) -> None:
        if self._failed:
            raise StoreFailedError("the disk has failed")


class _Reader:
    def __init__(self, items: SortedDict[bytes, bytes]) -> None:
        self._items = items

    def get(self, key: bytes) -> Buffer | None:
        value: Buffer | None = self._items.get(key)
        return value

    def get_all(self, keys: Sequence[bytes]) -> Iterable[tuple[bytes, Buffer]]:
        return [(key, self._items[key]) for key in keys if key in self._items]

    def scan(self, first: bytes, last: bytes) -> Iterator[tuple[bytes, Buffer]]:
        for key in list(self._items.irange(first, last)):
            yield key, self._items[key]

    def last(self, first: bytes, last: bytes) -> tuple[bytes, Buffer] | None:
        for key in self._items.irange(first, last, reverse=True):
            return key, self._items[key]
        return None


class _Writer(_Reader):
    def __init__(self, items: SortedDict[bytes, bytes]) -> None:
        super().__init__(items)
        self._before: dict[bytes, bytes | None] = {}
        self.grown_bytes = 0

    def put(self, key: bytes, value: Buffer) -> None:
        self.delete(key)
        self._items[key] = bytes(value)
        self.grown_bytes += len(key) + len(value)

    def put_all(self, items: Iterable[tuple[bytes, Buffer]]) -> None:
        for key, value in items:
            self.put(key, value)

    def delete(self, key: bytes) -> None:
        value = self._items.pop(key, None)
        self._before.setdefault(key, value)
        if value is not None:
            self.grown_bytes -= len(key) + len(value)

    def undo(self) -> None:
        for key, value in self._before.items():
            self._items.pop(key, None)
            if value is not None:
                self._items[key] = value
