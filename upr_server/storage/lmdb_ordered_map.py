"""LMDB as an ordered map: a B+ tree in one memory-mapped file, copied on write.

A commit writes its pages to free places of the file, syncs, and then writes one of two meta pages,
which says where the new root is. A crash at any moment leaves the last commit or the one before.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from struct import Struct
from typing import Final

import lmdb

from upr_kernel import record_mark
from upr_protocol.chunk import Buffer
from upr_protocol.durable_files import FULL_DISK_ERRORS
from upr_server.storage.errors import (
    CorruptionError,
    DataDirectoryError,
    DiskFullError,
    StorageError,
    StoreFailedError,
)
from upr_server.storage.lmdb_file import check_length
from upr_server.storage.records import mark_before_damage, with_checksum, without_checksum

WRONG_TYPES: Final = (errno.EISDIR, errno.ENOTDIR, errno.ELOOP)
"""The errors of something else in the place of a file or of its folder."""

MAP_BYTES_DEFAULT: Final = 256 * 1024 * 1024 * 1024
"""The largest memory map by default. A process has 128 TiB of addresses, and each bucket takes two
maps. With maps as large as a disk of 4 TiB no addresses would be left for the 16th bucket, or for
existing buckets once the disk has grown. With this limit 250 buckets fit, whatever the disk. The
setting `disk_bytes_max` gives a bucket more."""

MAP_BYTES_MIN: Final = 1024 * 1024
"""The smallest memory map that works."""

PAGE_BYTES: Final = resource.getpagesize()
"""What the size of a memory map is a multiple of."""

MAP_BYTES_TO_SPARE: Final = 256 * 1024 * 1024
"""The memory map grows when less than this is left in it. It is more than one commit takes. Some
file systems change their size with every write of somebody else, and to map a file again costs as
much as touching its pages again; so the map does not follow each change."""

LOCK_BYTES: Final = 64 * 1024
"""More than LMDB's lock file takes."""

COMMIT: Final = b"\0"
"""The key under which every commit stores its own number.

LMDB finds the newest commit by its two meta pages, which carry no checksum. After one flipped bit
there it would serve the commit before the last, whole and in order. So a tree whose number differs
from its meta page's is refused. (So is a copy whose commits were renumbered: `mdb_copy -c`.)
"""

_COMMIT: Final = Struct("<QQ")
"""The commit's number, and the sum of the marks of all records; 0 if the map keeps none."""

_DAMAGE_ERRORS: Final = (
    lmdb.InvalidError,
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
    lmdb.IncompatibleError,
    lmdb.MapResizedError,
)
"""What LMDB finds in a file that somebody else has changed. It writes nothing then. (Where the file
may have been grown by its writer, `_begin` follows.)"""

_DAMAGED_FRONTS_MAX: Final = 64
"""How many damaged records `verify` looks at one by one. Their number is that of single accidents:
a file that holds more is damaged as a whole."""

_SUM_END: Final = 1 << 64

_META_MAGIC: Final = Struct("<16xI")
_MAGIC: Final = 0xBEEFC0DE
"""What each meta page has in its first field. No commit changes it."""

_OTHER_META: Final = "its meta pages are not what was written"

_META_TRANSACTION: Final = Struct("<144xQ")
"""The number of a meta page's commit. Before it stand the descriptions of two trees."""


class LmdbOrderedMap:
    """One LMDB environment, for one thread.

    Args:
        path: Its folder, which must exist.
        readonly: Whether only to read. Another process may write at the same time.
        bytes_max: How large its file may become; 0 for as large as the disk is at the time, but no
            larger than `MAP_BYTES_DEFAULT`.
        is_alone: Whether nobody writes meanwhile. Then reading leaves no trace, not even in LMDB's
            table of readers.
        is_summed: Whether commits keep a sum over all records, for `verify`. It costs them a
            look-up of everything that they replace.
        copies_values: Whether what is read is copied, which is cheaper for short values.
        is_derived: Whether what it holds can be made again from another map. Then damage that a
            write meets is no failure of the disk, and errors say what to do.

    Raises:
        DataDirectoryError: It cannot be opened.
        CorruptionError: The file is not LMDB's, its meta pages are damaged, or it is no file.
    """

    def __init__(
        self,
        path: Path,
        *,
        readonly: bool = False,
        bytes_max: int = 0,
        is_alone: bool = False,
        is_summed: bool = False,
        copies_values: bool = False,
        is_derived: bool = False,
    ) -> None:
        self._path = path
        self._is_readonly = readonly
        self._is_alone = is_alone
        self._is_summed = is_summed
        self._copies_values = copies_values
        self._is_derived = is_derived
        self._bytes_max = bytes_max
        self._reads_open = 0
        self._open(self._map_bytes_wanted())
        if is_alone or not readonly:
            try:
                self._check_meta_pages()
            except CorruptionError:
                self._env.close()
                raise
            except OSError as error:
                self._env.close()
                raise DataDirectoryError(f"{path} cannot be opened: {error.strerror}") from error

    def _open(self, map_bytes: int) -> None:
        self._map_bytes = map_bytes
        if not self._is_alone:
            self._check_room_for_lock()
        try:
            self._env = lmdb.open(
                str(self._path),
                map_size=map_bytes,
                readonly=self._is_readonly,
                create=not self._is_readonly,
                lock=not self._is_alone,
                # Most reads go through neighbouring pages once.
                readahead=True,
                # A written page holds no bytes of memory freed before. So no secrets reach the
                # file, and the crash tests see the same bytes every time.
                meminit=True,
            )
            self._page_bytes = self._env.stat()["psize"]
            if not self._is_readonly:
                # Killed processes leave their entries in the table of readers.
                self._env.reader_check()
        except lmdb.ReadonlyError as error:
            raise DataDirectoryError(
                f"{self._path} cannot be opened: {error}; give the server's user write permission"
            ) from error
        except lmdb.MemoryError as error:
            raise DataDirectoryError(
                f"{self._path} cannot be opened: no addresses are left for a memory map of "
                f"{map_bytes} bytes, and each bucket needs two; set disk_bytes_max to less, "
                "or delete buckets"
            ) from error
        except lmdb.Error as error:
            if _is_full(error):
                raise self._disk_full(error) from error
            # The system's errors have positive numbers. The others are LMDB's own, and concern what
            # the file holds; that of another version of LMDB's format has the number 0.
            code = getattr(error, "code", 0)
            if code <= 0 or code in WRONG_TYPES:
                if self._is_derived and code <= 0:
                    raise self._damage(f"cannot be opened: {error}") from error
                raise CorruptionError(f"{self._path} cannot be opened: {error}") from error
            raise DataDirectoryError(f"{self._path} cannot be opened: {error}") from error

    def _check_room_for_lock(self) -> None:
        """LMDB writes its lock file through a memory map. Without room for a new one, that would
        kill this process with SIGBUS; and leave a file that has a length and no blocks."""
        lock = self._path / "lock.mdb"
        with suppress(OSError):  # LMDB says what is wrong
            if lock.exists() and lock.stat().st_blocks:
                return
            disk = os.statvfs(self._path)
            if disk.f_bavail * disk.f_frsize < LOCK_BYTES:
                raise DiskFullError(
                    f"the disk is full: {self._path} has no room for a lock file; make room there"
                )

    def _map_bytes_wanted(self) -> int:
        """How large the memory map should be, given the disk as it is now, and the system's limit
        of a file's size: a write beyond the map changes nothing, and one beyond the limit may be
        cut in the middle of a page."""
        map_bytes = self._bytes_max
        if not map_bytes:
            try:
                disk = os.statvfs(self._path)
                map_bytes = min(disk.f_frsize * disk.f_blocks, MAP_BYTES_DEFAULT)
            except OSError:
                # LMDB makes a folder that is missing, and says what else is wrong with it.
                map_bytes = MAP_BYTES_DEFAULT
        file_bytes_max = _file_bytes_max()
        return max(min(map_bytes, file_bytes_max - file_bytes_max % PAGE_BYTES), MAP_BYTES_MIN)

    def _grow(self) -> None:
        """Maps more of the file if it nears the end of the map and the disk has grown."""
        if self._map_bytes - self._file_bytes >= MAP_BYTES_TO_SPARE or self._reads_open:
            # Under an open transaction LMDB must not move the map.
            return
        map_bytes = self._map_bytes_wanted()
        if map_bytes <= self._map_bytes:
            return
        try:
            self._env.set_mapsize(map_bytes)
            self._map_bytes = map_bytes
        except lmdb.MemoryError:
            # No addresses are left, and LMDB has given up the map that it had. What worked before
            # goes on, and the file stays within that.
            self._env.close()
            self._bytes_max = self._map_bytes
            self._open(self._map_bytes)

    def _follow_growth(self) -> None:
        """Maps the file as its writer does, which has grown its own map."""
        try:
            self._env.set_mapsize(0)
        except lmdb.MemoryError as error:
            raise DataDirectoryError(
                f"no addresses are left for the grown file of {self._path}; set disk_bytes_max, or "
                "delete buckets, and start the server again"
            ) from error

    def _check_meta_pages(self) -> None:
        """Checks that the meta pages' commit numbers are neighbours, or both 0.

        Commits write the two pages in turn, and an interrupted one leaves its page as it was. One
        flipped bit escapes this check: the second bit of the newer number, if it was set. Without
        it the page looks like one that was not written yet.
        """
        with open(self._path / "data.mdb", "rb") as file:
            pages = [file.read(self._page_bytes) for _ in range(2)]
        if any(len(page) < _META_TRANSACTION.size for page in pages):
            raise CorruptionError(f"{self._path}/data.mdb is shorter than its two meta pages")
        even, odd = (_META_TRANSACTION.unpack_from(page)[0] for page in pages)
        if (even, odd) != (0, 0) and (even % 2 or not odd % 2 or abs(even - odd) != 1):
            raise CorruptionError(
                f"the meta pages of {self._path} are of commits {even} and {odd}: one is damaged"
            )
        if not self._is_readonly:
            # Before anything is read through the map. A process that only reads may want what is
            # left.
            check_length(self._path / "data.mdb")
        with self.read():
            pass

    def _sum(self, transaction: lmdb.Transaction, commit: int) -> int:
        """The sum that the tree keeps. Raises `CorruptionError` if the tree is not of this
        commit."""
        stored_value = transaction.get(COMMIT)
        if stored_value is None:
            if commit:
                raise CorruptionError(f"{self._path} lacks the number of its last commit, {commit}")
            return 0
        number_in_tree, total = _COMMIT.unpack(without_checksum(COMMIT, stored_value))
        if number_in_tree != commit:
            raise CorruptionError(
                f"{self._path} holds commit {number_in_tree}, and its meta page names {commit}"
            )
        return int(total)

    def verify(self) -> None:
        """Checks that the map holds exactly what the last commit left. O(keys).

        Checksums of records do not show that. A page that is no longer in use keeps its contents;
        one flipped bit in the tree can put it in the place of its successor. Its records have good
        checksums, and are old.

        One damaged byte in a record is no reason to refuse the map: whoever reads the record sees
        the damage by its checksum. If undoing such damage makes the sum match, everything else is
        what the last commit left. Nothing is repaired.

        Raises:
            CorruptionError: It holds something else.
        """
        total, previous = 0, b""
        with self.read() as transaction:
            expected_sum = self._sum(transaction.transaction, transaction.transaction.id())
            for key, value in transaction.scan(COMMIT + b"\0", b"\xff" * 512):
                if key <= previous:
                    raise CorruptionError(f"the keys of {self._path} are not in order")
                previous = key
                total += record_mark(key, value, False)
            if self._is_summed and total % _SUM_END != expected_sum:
                total += self._find_damaged_fronts(transaction)
        if self._is_summed and total % _SUM_END != expected_sum:
            raise CorruptionError(f"{self._path} does not hold what its last commit left")

    def _find_damaged_fronts(self, transaction: _ReadTransaction) -> int:
        """Finds the records whose mark was changed by damage. Returns by how much that has changed
        the sum of all marks."""
        difference = damaged_count = 0
        for key, value in transaction.scan(COMMIT + b"\0", b"\xff" * 512):
            if record_mark(key, value, True) >= 0:
                continue
            damaged_count += 1
            if damaged_count > _DAMAGED_FRONTS_MAX:
                break
            difference += mark_before_damage(key, value) - record_mark(key, value, False)
        return difference

    def verify_length(self) -> None:
        """Checks that a file which is shorter than its meta page says can still be written.

        LMDB does not write pages at the end that are free again, so such a file may be in order.
        `check_length` has seen, before the file was read through the map, that no page is missing
        which is in use.

        Raises:
            CorruptionError: The meta page says more than the memory map can hold.
        """
        if (self._path / "data.mdb").stat().st_size >= self._file_bytes:
            return
        try:
            with self._env.begin(write=True) as writing:
                writing.put(COMMIT, b"")
                writing.abort()
        except lmdb.MapFullError as error:
            raise CorruptionError(
                f"{self._path}/data.mdb is shorter than its meta page says"
            ) from error

    @contextmanager
    def read(self) -> Iterator[_ReadTransaction]:
        with self._translated(), self._begin() as transaction:
            self._reads_open += 1
            try:
                self._sum(transaction, transaction.id())
                yield _ReadTransaction(transaction)
            finally:
                self._reads_open -= 1

    def _begin(self) -> lmdb.Transaction:
        try:
            return self._new_transaction()
        except lmdb.MapResizedError:
            self._check_growth()
            self._follow_growth()
            return self._new_transaction()

    def _check_growth(self) -> None:
        """Checks that a file which has more pages than this map was grown by its writer: damaged
        meta pages may say so, too, and LMDB would give up the map for what they say. The writer
        itself grows a map before it writes the pages."""
        with open(self._path / "data.mdb", "rb") as file:
            pages = [file.read(self._page_bytes) for _ in range(2)]
        if not self._is_readonly or any(
            len(page) < _META_MAGIC.size or _META_MAGIC.unpack_from(page) != (_MAGIC,)
            for page in pages
        ):
            raise self._damage(f"is damaged: {_OTHER_META}")

    def _new_transaction(self, *, write: bool = False) -> lmdb.Transaction:
        if self._copies_values:
            return self._env.begin(write=write)
        return self._env.begin(write=write, buffers=True)

    @contextmanager
    def write(self, *, reserve_bytes: int = 0) -> Iterator[_WriteTransaction]:
        with self._translated(writing=True):
            self._grow()
            with self._new_transaction(write=True) as transaction:
                # This comes first: what damaged meta pages say of the room is not true.
                try:
                    total = self._sum(transaction, transaction.id() - 1)
                except CorruptionError as error:
                    raise self._damage(f"is damaged: {error}", writing=True) from error
                if reserve_bytes and self.free_bytes < reserve_bytes:
                    raise self._no_reserve(reserve_bytes)
                changes = _WriteTransaction(transaction, self._is_summed)
                yield changes
                if changes.is_changed:
                    total = (total + changes.sum_change) % _SUM_END
                    changes.put(
                        COMMIT, with_checksum(COMMIT, _COMMIT.pack(transaction.id(), total))
                    )

    @contextmanager
    def _translated(self, *, writing: bool = False) -> Iterator[None]:
        """Turns LMDB's errors into ours."""
        try:
            yield
        except StorageError:
            raise
        except (lmdb.Error, OSError) as error:
            if _is_full(error) or (writing and self._is_cut_by_limit(error)):
                # LMDB has aborted the transaction, before or while its pages were written. The meta
                # page still names the commit before.
                raise self._disk_full(error) from error
            if isinstance(error, _DAMAGE_ERRORS):
                reason = _OTHER_META if isinstance(error, lmdb.MapResizedError) else error
                raise self._damage(f"is damaged: {reason}", writing=writing) from error
            if writing:
                raise StoreFailedError(f"the disk failed: {self._path}: {error}") from error
            raise CorruptionError(f"{self._path} cannot be read: {error}") from error

    def _is_cut_by_limit(self, error: Exception) -> bool:
        """Whether the system has cut a write at its limit of a file's size, which was lowered since
        the file was mapped. LMDB calls that an I/O error. The file then ends at the limit, or did
        so behind it before: free pages on both sides of the limit are written together."""
        if getattr(error, "code", 0) != errno.EIO:
            return False
        return (self._path / "data.mdb").stat().st_size >= _file_bytes_max()

    def _damage(self, text: str, *, writing: bool = False) -> StorageError:
        """The error for a file that somebody else has changed."""
        if self._is_derived:
            return CorruptionError(
                f"{self._path}/data.mdb {text}; stop the server, delete this file, and start the "
                "server again: it makes the file again from the log"
            )
        if writing:
            # The system may have changed it, and lost what was written.
            return StoreFailedError(
                f"{self._path}/data.mdb {text}; start the server again: it refuses this bucket, "
                "and serves the others"
            )
        return CorruptionError(f"{self._path}/data.mdb {text}")

    def _disk_full(self, error: Exception) -> DiskFullError:
        code = getattr(error, "code", 0)
        if code in (errno.EFBIG, errno.EIO) or (
            isinstance(error, lmdb.MapFullError) and self._is_set_smaller_than_disk
        ):
            return self._limit_reached(f"has no room left: {error}")
        return DiskFullError(f"the disk is full: {self._path}: {error}; make room there")

    def _no_reserve(self, reserve_bytes: int) -> DiskFullError:
        rest = f"bytes left; the last {reserve_bytes} are for compaction"
        if self._is_set_smaller_than_disk and self._free_in_map < self._free_on_disk:
            return self._limit_reached(f"has {max(0, self._free_in_map)} {rest}")
        return DiskFullError(
            f"the disk of {self._path} has {self._free_on_disk} {rest}; make room there"
        )

    def _limit_reached(self, text: str) -> DiskFullError:
        file_bytes_max = _file_bytes_max()
        if file_bytes_max < self._map_bytes + PAGE_BYTES:
            return DiskFullError(
                f"{self._path} may have {file_bytes_max} bytes (ulimit -f), and {text}; release "
                "leases, or raise the limit of a file's size: `prlimit --fsize=unlimited --pid "
                f"{os.getpid()}`"
            )
        return DiskFullError(
            f"{self._path} may have {self._map_bytes} bytes (disk_bytes_max), and {text}; release "
            "leases, or raise disk_bytes_max"
        )

    @property
    def _is_set_smaller_than_disk(self) -> bool:
        """Whether a setting bounds the file, or its default, or the system's limit of a file's
        size, and not the disk's size."""
        is_limited = _file_bytes_max() < self._map_bytes + PAGE_BYTES
        return bool(self._bytes_max) or self._map_bytes >= MAP_BYTES_DEFAULT or is_limited

    @property
    def free_bytes(self) -> int:
        """How much can still be written, given the disk's space and the memory map's size."""
        return min(self._free_in_map, self._free_on_disk)

    @property
    def _free_in_map(self) -> int:
        file_bytes_max = _file_bytes_max()
        if file_bytes_max >= self._map_bytes:
            return self._map_bytes - self._used_bytes
        if file_bytes_max < self._file_bytes:
            # It was lowered since. Free pages may lie where nothing can be written.
            return 0
        return file_bytes_max - self._used_bytes

    @property
    def _free_on_disk(self) -> int:
        disk = os.statvfs(self._path)
        free_in_file = max(0, self._file_bytes - self._used_bytes)
        return disk.f_bavail * disk.f_frsize + free_in_file

    @property
    def _used_bytes(self) -> int:
        stat = self._env.stat()
        pages = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        return int(pages * self._page_bytes)

    @property
    def _file_bytes(self) -> int:
        return int((self._env.info()["last_pgno"] + 1) * self._page_bytes)

    def count(self) -> int:
        """How many keys there are according to the meta page."""
        with self._translated():
            return int(self._env.stat()["entries"])

    def statistics(self) -> dict[str, int]:
        """Bytes in use, and in the file."""
        with self.read():  # damaged meta pages name no true sizes
            return {"bytes_used": self._used_bytes, "bytes_in_file": self._file_bytes}

    def close(self) -> None:
        """Closes the file."""
        self._env.close()


def _mark_in_sum(key: bytes, value: Buffer) -> int:
    """What the sum has for a record that was written before. If it has been damaged since, that is
    the mark that it had then: otherwise the sum would keep a mark of no record for ever."""
    mark = record_mark(key, value, True)
    return mark if mark >= 0 else mark_before_damage(key, value)


class _ReadTransaction:
    def __init__(self, transaction: lmdb.Transaction) -> None:
        self.transaction = transaction

    def get(self, key: bytes) -> Buffer | None:
        value: Buffer | None = self.transaction.get(key)
        return value

    def get_all(self, keys: Sequence[bytes]) -> Iterable[tuple[bytes, Buffer]]:
        with self.transaction.cursor() as cursor:
            return [(bytes(key), value) for key, value in cursor.getmulti(keys)]

    def scan(self, first_key: bytes, last_key: bytes) -> Iterator[tuple[bytes, Buffer]]:
        with self.transaction.cursor() as cursor:
            if not cursor.set_range(first_key):
                return
            for key, value in cursor.iternext():
                key = bytes(key)
                if key > last_key:
                    return
                yield key, value

    def last(self, first_key: bytes, last_key: bytes) -> tuple[bytes, Buffer] | None:
        with self.transaction.cursor() as cursor:
            if not cursor.set_range(last_key):
                has_key = cursor.last()
            else:
                has_key = bytes(cursor.key()) == last_key or cursor.prev()
            if not has_key or bytes(cursor.key()) < first_key:
                return None
            return bytes(cursor.key()), cursor.value()


class _WriteTransaction(_ReadTransaction):
    def __init__(self, transaction: lmdb.Transaction, is_summed: bool) -> None:
        super().__init__(transaction)
        self.is_changed = False
        self.sum_change = 0
        self._is_summed = is_summed
        self._cursor = transaction.cursor()

    def put(self, key: bytes, value: Buffer) -> None:
        self.is_changed = True
        if not self._is_summed or key == COMMIT:
            self.transaction.put(key, value)
            return
        # One search, where the key is new; none, where it is in the page of the one before.
        old_value = self._cursor.replace(key, value)
        if old_value is not None:
            self.sum_change -= _mark_in_sum(key, old_value)
        self.sum_change += record_mark(key, value, False)

    def put_all(self, items: Iterable[tuple[bytes, Buffer]]) -> None:
        if self._is_summed:
            for key, value in items:
                self.put(key, value)
            return
        self.is_changed = True
        with self.transaction.cursor() as cursor:
            cursor.putmulti(items)

    def put_new(self, items: Sequence[tuple[bytes, Buffer]]) -> int:
        if self._is_summed:
            new_items = [(key, value) for key, value in items if self.transaction.get(key) is None]
            self.put_all(new_items)
            return len(new_items)
        self.is_changed = True
        with self.transaction.cursor() as cursor:
            _, count = cursor.putmulti(items, overwrite=False)
            return int(count)

    def delete(self, key: bytes) -> None:
        self.is_changed = True
        if not self._cursor.set_key(key):
            return
        if self._is_summed:
            # Where it lies in the file: `pop` would copy it, and read all of a large value.
            self.sum_change -= _mark_in_sum(key, self._cursor.value())
        self._cursor.delete()


def _is_full(error: Exception) -> bool:
    code = getattr(error, "code", 0)
    return isinstance(error, lmdb.MapFullError) or code in (*FULL_DISK_ERRORS, errno.EFBIG)


def _file_bytes_max() -> int:
    """How large the system lets a file become that this process writes."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return sys.maxsize if soft_limit == resource.RLIM_INFINITY else soft_limit
