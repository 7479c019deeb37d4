"""LMDB as an ordered map: a B+ tree in one memory-mapped file, copied on write.

A commit writes its pages to free places of the file, syncs, and then writes one of two meta pages,
which says where the new root is. A crash at any moment leaves the last commit or the one before.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from struct import Struct
from typing import Final

import lmdb

from upr_kernel import record_mark
from upr_protocol.durable_files import FULL_DISK_ERRORS
from upr_server.storage.errors import (
    CorruptionError,
    DataDirectoryError,
    DiskFullError,
    StorageError,
    StoreFailedError,
)
from upr_server.storage.lmdb_file import check_length
from upr_server.storage.lmdb_space import FileSizes, LmdbSpace, system_limit_bytes
from upr_server.storage.lmdb_transactions import (
    COMMIT,
    COMMIT_RECORD,
    SUM_END,
    LmdbReadTransaction,
    LmdbWriteTransaction,
)
from upr_server.storage.records import mark_before_damage, with_checksum, without_checksum

WRONG_TYPES: Final = (errno.EISDIR, errno.ENOTDIR, errno.ELOOP)
"""The errors of something else in the place of a file or of its folder."""

MAP_BYTES_TO_SPARE: Final = 256 * 1024 * 1024
"""The memory map grows when less than this is left in it. It is more than one commit takes. Some
file systems change their size with every write of somebody else, and to map a file again costs as
much as touching its pages again; so the map does not follow each change."""

NO_FILE_LEFT: Final = (errno.EMFILE, errno.ENFILE)
"""The errors of a process, or a system, that may open no more files."""

OPEN_FILES_ADVICE: Final = "raise the limit of open files (`ulimit -Hn`), or delete buckets"
"""What helps then: a map takes three files."""

LOCK_BYTES: Final = 64 * 1024
"""More than LMDB's lock file takes."""

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
        self._space = LmdbSpace(path, bytes_max)
        self._reads_open = 0
        self._open(self._space.wanted_map_bytes())
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
        self._space.map_bytes = map_bytes
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
            text = f"{self._path} cannot be opened: {error}"
            if code in NO_FILE_LEFT:
                text = f"{self._path} cannot be opened: {os.strerror(code)}; {OPEN_FILES_ADVICE}"
            raise DataDirectoryError(text) from error

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

    def _grow(self) -> None:
        """Maps more of the file if it nears the end of the map and the disk has grown."""
        space = self._space
        if space.map_bytes - self._sizes.file_bytes >= MAP_BYTES_TO_SPARE or self._reads_open:
            # Under an open transaction LMDB must not move the map.
            return
        map_bytes = space.wanted_map_bytes()
        if map_bytes <= space.map_bytes:
            return
        try:
            self._env.set_mapsize(map_bytes)
            space.map_bytes = map_bytes
        except lmdb.MemoryError:
            # No addresses are left, and LMDB has given up the map that it had. What worked before
            # goes on, and the file stays within that.
            self._env.close()
            space.bytes_max = space.map_bytes
            self._open(space.map_bytes)

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
        number_in_tree, total = COMMIT_RECORD.unpack(without_checksum(COMMIT, stored_value))
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
            if self._is_summed and total % SUM_END != expected_sum:
                total += self._find_damaged_fronts(transaction)
        if self._is_summed and total % SUM_END != expected_sum:
            raise CorruptionError(f"{self._path} does not hold what its last commit left")

    def _find_damaged_fronts(self, transaction: LmdbReadTransaction) -> int:
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
        if (self._path / "data.mdb").stat().st_size >= self._sizes.file_bytes:
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
    def read(self) -> Iterator[LmdbReadTransaction]:
        with self._translated(), self._begin() as transaction:
            self._reads_open += 1
            try:
                self._sum(transaction, transaction.id())
                yield LmdbReadTransaction(transaction)
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
    def write(self, *, reserve_bytes: int = 0) -> Iterator[LmdbWriteTransaction]:
        with self._translated(writing=True):
            self._grow()
            with self._new_transaction(write=True) as transaction:
                # This comes first: what damaged meta pages say of the room is not true.
                try:
                    total = self._sum(transaction, transaction.id() - 1)
                except CorruptionError as error:
                    raise self._damage(f"is damaged: {error}", writing=True) from error
                if reserve_bytes and self.free_bytes < reserve_bytes:
                    raise self._space.no_reserve_error(self._sizes, reserve_bytes)
                changes = LmdbWriteTransaction(transaction, self._is_summed)
                yield changes
                if changes.is_changed:
                    total = (total + changes.sum_change) % SUM_END
                    changes.put(
                        COMMIT, with_checksum(COMMIT, COMMIT_RECORD.pack(transaction.id(), total))
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
        return (self._path / "data.mdb").stat().st_size >= system_limit_bytes()

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
            isinstance(error, lmdb.MapFullError) and self._space.is_smaller_than_disk
        ):
            return self._space.limit_error(f"has no room left: {error}")
        return DiskFullError(f"the disk is full: {self._path}: {error}; make room there")

    @property
    def free_bytes(self) -> int:
        """How much can still be written, given the disk's space and the memory map's size."""
        return self._space.free_bytes(self._sizes)

    @property
    def _sizes(self) -> FileSizes:
        stat = self._env.stat()
        pages = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        page_count = self._env.info()["last_pgno"] + 1
        return FileSizes(int(pages * self._page_bytes), int(page_count * self._page_bytes))

    def count(self) -> int:
        """How many keys there are according to the meta page."""
        with self._translated():
            return int(self._env.stat()["entries"])

    def statistics(self) -> dict[str, int]:
        """Bytes in use, and in the file."""
        with self.read():  # damaged meta pages name no true sizes
            sizes = self._sizes
            return {"bytes_used": sizes.used_bytes, "bytes_in_file": sizes.file_bytes}

    def close(self) -> None:
        """Closes the file."""
        self._env.close()


def _is_full(error: Exception) -> bool:
    code = getattr(error, "code", 0)
    return isinstance(error, lmdb.MapFullError) or code in (*FULL_DISK_ERRORS, errno.EFBIG)
