"""LMDB as an `Environment`: a B+ tree in one memory-mapped file, copied on write.

A commit writes its pages to free places of the file, syncs, and then writes one of two meta pages
that says where the new root is: a crash at any moment leaves the last commit or the one before.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from struct import Struct
from typing import Final
from zlib import crc32

import lmdb

from upr_protocol.chunk import Buffer
from upr_server.storage.errors import (
    CorruptionError,
    DataDirectoryError,
    DiskFullError,
    StorageError,
    StoreFailedError,
)
from upr_server.storage.records import seal, unseal

FULL: Final = (errno.ENOSPC, errno.EDQUOT)
"""The errors of a disk that is full, or of a user's share of one."""

MAP_BYTES_DEFAULT: Final = 256 * 1024 * 1024 * 1024
"""The largest map that is made when nobody says otherwise. A process has 128 TiB of addresses, and
every bucket takes two maps of them: with maps as large as a disk of 4 TiB there would be none left
for the 16th bucket, or for those of before when the disk had grown. So there is room for 250
buckets, whatever the disk. One that needs more than this is given it by `disk_bytes_max`."""

PAGES_BYTES_MIN: Final = 1024 * 1024
"""The smallest map that there can be."""

COMMIT: Final = b"\0"
"""The key under which every commit leaves its own number.

LMDB finds the newest commit by its two meta pages, which carry no checksum: one flipped bit there,
and it would serve the commit before the last, whole and in order. A tree whose number is not that
of its meta page is refused. (So is a copy whose commits were numbered anew: `mdb_copy -c`.)
"""

_COMMIT: Final = Struct("<QQ")
"""The commit's number, and the sum of the marks of all that the map holds, where that is kept."""

_MARKED_BYTES_MAX: Final = 1024
"""Of a longer value its length must do: LMDB keeps it in pages of its own, and to look at the first
of each would be to read half the disk."""

_SUM_END: Final = 1 << 64

_META_TRANSACTION: Final = Struct("<144xQ")
"""The number of a meta page's commit, behind the records of its two trees."""


class LmdbMap:
    """One LMDB environment. To be used by one thread.

    Args:
        path: Its folder, which must exist.
        readonly: Whether only to read; another process may write at the same time.
        bytes_max: How large its file may become; 0 for as large as the disk is, but no larger than
            `MAP_BYTES_DEFAULT`.
        is_alone: Whether nobody writes meanwhile; reading then leaves no trace, not even in the
            table of readers.
        is_summed: Whether commits keep the sum of all that the map holds, for `verify`; it costs
            them a look at everything that they replace.

    Raises:
        DataDirectoryError: It cannot be opened.
        CorruptionError: It is none, or its meta pages are damaged.
    """

    def __init__(
        self,
        path: Path,
        *,
        readonly: bool = False,
        bytes_max: int = 0,
        is_alone: bool = False,
        is_summed: bool = False,
    ) -> None:
        self._path = path
        self._is_summed = is_summed
        disk = os.statvfs(path)
        disk_bytes = disk.f_frsize * disk.f_blocks
        self._map_bytes = max(bytes_max or min(disk_bytes, MAP_BYTES_DEFAULT), PAGES_BYTES_MIN)
        try:
            self._env = lmdb.open(
                str(path),
                map_size=self._map_bytes,
                readonly=readonly,
                create=not readonly,
                lock=not is_alone,
                # What a read touches is mostly read once, and near what is read next.
                readahead=True,
                # A page that is written has no bytes of what was freed before: no secrets, and
                # crashes are the same every time.
                meminit=True,
            )
            self._page_bytes = self._env.stat()["psize"]
            if not readonly:
                # Processes that were killed leave their place in the table of readers.
                self._env.reader_check()
        except lmdb.InvalidError as error:
            raise CorruptionError(f"{path} cannot be opened: {error}") from error
        except lmdb.ReadonlyError as error:
            raise DataDirectoryError(
                f"{path} cannot be opened: {error}; give the server's user the right to write it"
            ) from error
        except lmdb.MemoryError as error:
            raise DataDirectoryError(
                f"{path} cannot be opened: there are no addresses left for a map of "
                f"{self._map_bytes} bytes, of which each bucket takes two; set disk_bytes_max to "
                "less, or delete buckets"
            ) from error
        except lmdb.Error as error:
            if _is_full(error):
                raise DiskFullError(f"the disk is full: {error}") from error
            raise DataDirectoryError(f"{path} cannot be opened: {error}") from error
        if is_alone or not readonly:
            try:
                self._check_meta_pages()
            except CorruptionError:
                self._env.close()
                raise

    def _check_meta_pages(self) -> None:
        """Commits take the two meta pages in turn; one that is cut off leaves its page as it was.

        So their numbers are neighbours, or both are 0. One bit is beyond this: the second of the
        newer number, where it is set. Without it the page looks like one that was not yet written.
        """
        with open(self._path / "data.mdb", "rb") as file:
            pages = [file.read(self._page_bytes) for _ in range(2)]
        if any(len(page) < _META_TRANSACTION.size for page in pages):
            raise CorruptionError(f"{self._path} is shorter than its meta pages")
        even, odd = (_META_TRANSACTION.unpack_from(page)[0] for page in pages)
        if (even, odd) != (0, 0) and (even % 2 or not odd % 2 or abs(even - odd) != 1):
            raise CorruptionError(
                f"the meta pages of {self._path} are of commits {even} and {odd}: one is damaged"
            )
        with self.read():
            pass

    def _sum(self, transaction: lmdb.Transaction, number: int) -> int:
        """The sum that stands in the tree; raises `CorruptionError` if the tree is not that of the
        commit `number`."""
        found = transaction.get(COMMIT)
        if found is None:
            if number:
                raise CorruptionError(f"{self._path} has no number of its last commit, {number}")
            return 0
        in_tree, total = _COMMIT.unpack(unseal(COMMIT, found))
        if in_tree != number:
            raise CorruptionError(f"{self._path} is not as commit {number} has left it")
        return int(total)

    def verify(self) -> None:
        """Sees that the map holds what the last commit has left, no less and nothing else. O(keys).

        A page that is no longer in use keeps what it held. One flipped bit in the tree, and such a
        page is in the place of its successor: what it holds has good checksums, and is old.

        Raises:
            CorruptionError: It does not.
        """
        total, before = 0, b""
        with self.read() as reader:
            expected = self._sum(reader.transaction, reader.transaction.id())
            for key, value in reader.scan(COMMIT + b"\0", b"\xff" * 512):
                if key <= before:
                    raise CorruptionError(f"{self._path} has its keys in another order")
                before = key
                total += _mark(key, value)
        if self._is_summed and total % _SUM_END != expected:
            raise CorruptionError(f"{self._path} does not hold what its last commit has left")

    def verify_length(self) -> None:
        """Sees that the file has all pages that are in use. O(1), mostly.

        A page that is missing kills its reader with SIGBUS: better now than after something was
        written to the file. LMDB does not write pages at the end that are free again, so that a
        file may be shorter than its meta page says: then everything is touched, and the list of
        free pages, which who writes reads.
        """
        if (self._path / "data.mdb").stat().st_size >= self._file_bytes:
            return
        with self.read() as reader:
            for _, value in reader.scan(COMMIT, b"\xff" * 512):
                bytes(value[-1:])
        with self._env.begin(write=True) as transaction:
            transaction.put(COMMIT, b"")
            transaction.abort()

    @contextmanager
    def read(self) -> Iterator[_Reader]:
        """See `Environment`."""
        with _translated(), self._env.begin(buffers=True) as transaction:
            self._sum(transaction, transaction.id())
            yield _Reader(transaction)

    @contextmanager
    def write(self, *, reserve_bytes: int = 0) -> Iterator[_Writer]:
        """See `Environment`.

        Args:
            reserve_bytes: Room that must be left before anything is written.
        """
        with _translated(writing=True):
            if reserve_bytes and self.free_bytes < reserve_bytes:
                raise DiskFullError(
                    f"{self._path} has {self.free_bytes} bytes left; the last {reserve_bytes} "
                    "are for compaction"
                )
            with self._env.begin(write=True, buffers=True) as transaction:
                total = self._sum(transaction, transaction.id() - 1)
                writer = _Writer(transaction, self._is_summed)
                yield writer
                if writer.is_changed:
                    total = (total + writer.grown) % _SUM_END
                    writer.put(COMMIT, seal(COMMIT, _COMMIT.pack(transaction.id(), total)))

    @property
    def free_bytes(self) -> int:
        """What can still be written, on the disk and in the map."""
        disk = os.statvfs(self._path)
        used, file_bytes = self._used_bytes, self._file_bytes
        in_file = max(0, file_bytes - used)
        return min(self._map_bytes - used, disk.f_bavail * disk.f_frsize + in_file)

    @property
    def _used_bytes(self) -> int:
        stat = self._env.stat()
        pages = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        return int(pages * self._page_bytes)

    @property
    def _file_bytes(self) -> int:
        return int((self._env.info()["last_pgno"] + 1) * self._page_bytes)

    def count(self) -> int:
        """How many keys there are, as the meta page counts them."""
        with _translated():
            return int(self._env.stat()["entries"])

    def statistics(self) -> dict[str, int]:
        """Bytes in use, and in the file."""
        with _translated():
            return {"bytes_used": self._used_bytes, "bytes_in_file": self._file_bytes}

    def close(self) -> None:
        """Lets go of it."""
        self._env.close()


def _mark(key: bytes, value: Buffer) -> int:
    """Stands for a key and its value, which begins with a checksum of all of it."""
    mark = crc32(len(value).to_bytes(8), crc32(key))
    return mark if len(value) > _MARKED_BYTES_MAX else crc32(value[:16], mark)


class _Reader:
    def __init__(self, transaction: lmdb.Transaction) -> None:
        self.transaction = transaction

    def get(self, key: bytes) -> Buffer | None:
        value: Buffer | None = self.transaction.get(key)
        return value

    def get_all(self, keys: Sequence[bytes]) -> Iterable[tuple[bytes, Buffer]]:
        with self.transaction.cursor() as cursor:
            return [(bytes(key), value) for key, value in cursor.getmulti(keys)]

    def scan(self, first: bytes, last: bytes) -> Iterator[tuple[bytes, Buffer]]:
        with self.transaction.cursor() as cursor:
            if not cursor.set_range(first):
                return
            for key, value in cursor.iternext():
                key = bytes(key)
                if key > last:
                    return
                yield key, value

    def last(self, first: bytes, last: bytes) -> tuple[bytes, Buffer] | None:
        with self.transaction.cursor() as cursor:
            if not cursor.set_range(last):
                found = cursor.last()
            else:
                found = bytes(cursor.key()) == last or cursor.prev()
            if not found or bytes(cursor.key()) < first:
                return None
            return bytes(cursor.key()), cursor.value()


class _Writer(_Reader):
    def __init__(self, transaction: lmdb.Transaction, is_summed: bool) -> None:
        super().__init__(transaction)
        self.is_changed = False
        self.grown = 0
        self._is_summed = is_summed

    def _replaces(self, key: bytes, value: Buffer | None) -> None:
        self.is_changed = True
        if self._is_summed and key != COMMIT:
            old = self.transaction.get(key)
            if old is not None:
                self.grown -= _mark(key, old)
            if value is not None:
                self.grown += _mark(key, value)

    def put(self, key: bytes, value: Buffer) -> None:
        self._replaces(key, value)
        self.transaction.put(key, value)

    def put_all(self, items: Iterable[tuple[bytes, Buffer]]) -> None:
        if self._is_summed:
            for key, value in items:
                self.put(key, value)
            return
        self.is_changed = True
        with self.transaction.cursor() as cursor:
            cursor.putmulti(items)

    def delete(self, key: bytes) -> None:
        self._replaces(key, None)
        self.transaction.delete(key)


def _is_full(error: Exception) -> bool:
    return isinstance(error, lmdb.MapFullError) or getattr(error, "code", 0) in FULL


@contextmanager
def _translated(*, writing: bool = False) -> Iterator[None]:
    """Turns LMDB's errors into ours."""
    try:
        yield
    except StorageError:
        raise
    except (lmdb.Error, OSError) as error:
        if _is_full(error):
            # LMDB has given the transaction up, before or while its pages were written: the meta
            # page still names the commit before.
            raise DiskFullError(f"the disk is full: {error}") from error
        if writing:
            raise StoreFailedError(f"the disk failed: {error}") from error
        raise CorruptionError(f"the store cannot be read: {error}") from error
