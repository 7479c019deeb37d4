"""The data directory: its lock, its format, and where each bucket lies in it.

::

    DIRECTORY/
      format              "upr 1": the version of the format of everything here
      lock                locked by the one server that uses the directory
      buckets/NAME/log/   the bucket's log, an LMDB environment
      buckets/NAME/index/ its index, another environment: LMDB has one writer an environment
      event-queues        the event bus's queues, while no server runs; missing after a crash
      users               the users of the cluster, readable by the server's user alone
      had-users           empty; says that there must be a file users
      audit.jsonl         who asked for what, where there are users; full ones have a number behind

A bucket is created under a name that begins with a dot, and then renamed. Folders with such a name
are what a crash left of a creation or a deletion.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import platformdirs

from upr_protocol.durable_files import FULL_DISK_ERRORS, replace_file, sync_path
from upr_server.storage.chunk_log import COMMIT_RESERVE_BYTES
from upr_server.storage.errors import (
    CorruptionError,
    DataDirectoryError,
    DiskFullError,
    StorageError,
)
from upr_server.storage.event_queue_file import EventQueueFile
from upr_server.storage.lmdb_ordered_map import NO_FILE_LEFT, OPEN_FILES_ADVICE, LmdbOrderedMap
from upr_server.storage.ordered_map import OrderedMap
from upr_server.storage.records import FORMAT_VERSION
from upr_server.storage.users_file import UsersFile

FORMAT_TEXT: Final = f"upr {FORMAT_VERSION}\n"

PARTS: Final = ("log", "index")
"""What is in a bucket's folder."""


def default_data_dir() -> Path:
    """The data directory of a user who names none."""
    return platformdirs.user_data_path("upr")


_NEW_FORMAT: Final = ".format"


def prepare(path: Path) -> None:
    """Creates the directory, or checks that it is a data directory of this version.

    Raises:
        DataDirectoryError: It cannot be created or used; nothing in it was changed.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        format_path = path / "format"
        if format_path.exists():
            _check_format(path)
        elif not _is_new(path):
            raise DataDirectoryError(
                f"{path} is not empty and not a data directory; choose another with --data-dir"
            )
        else:
            (path / "buckets").mkdir(exist_ok=True)
            # This comes last: a directory with this file is complete.
            replace_file(format_path, FORMAT_TEXT.encode())
        if not os.access(path / "buckets", os.W_OK):
            is_read_only = os.statvfs(path / "buckets").f_flag & os.ST_RDONLY
            code = errno.EROFS if is_read_only else errno.EACCES
            raise OSError(code, os.strerror(code))
    except OSError as error:
        advice = _advice(error)
        if error.errno != errno.EFBIG:
            advice = f"{advice}, or choose another directory with --data-dir"
        raise DataDirectoryError(f"{path} cannot be written: {error.strerror}; {advice}") from error


def _is_new(path: Path) -> bool:
    """Whether it is empty, or what a crash left while a server was creating it."""
    buckets = path / "buckets"
    names = {entry.name for entry in path.iterdir()} - {_NEW_FORMAT}
    return not names or (names == {buckets.name} and not any(buckets.iterdir()))


def _check_format(path: Path) -> None:
    text = (path / "format").read_text("utf-8", "replace")
    if text != FORMAT_TEXT:
        raise DataDirectoryError(
            f"{path} has the format {text.strip()!r}, and this server writes "
            f"{FORMAT_TEXT.strip()!r}; use the server that wrote it, or another directory"
        )


@contextmanager
def lock_for_reading(path: Path) -> Iterator[None]:
    """Keeps servers from the directory while it is read without one. There may be any number of
    readers, and nothing in it is changed.

    Raises:
        DataDirectoryError: It is not a data directory, or a server uses it.
    """
    _check_ours(path)
    try:
        try:
            descriptor = os.open(path / "lock", os.O_RDONLY)
        except FileNotFoundError:
            # No server has ever used it.
            descriptor = os.open(path / "format", os.O_RDONLY)
    except OSError as error:
        raise DataDirectoryError(
            f"{path} cannot be read: {error.strerror}; run this as the user of the server"
        ) from error
    try:
        if not _has_locked(descriptor, path, fcntl.LOCK_SH):
            raise _in_use(path)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def lock_for_writing(path: Path) -> Iterator[None]:
    """Keeps servers and readers from the directory while it is changed without a server.

    Raises:
        DataDirectoryError: It is not a data directory, it is in use, or it cannot be written.
    """
    _check_ours(path)
    try:
        descriptor = lock(path)
    except OSError as error:
        raise DataDirectoryError(
            f"{path} cannot be written: {error.strerror}; {_advice(error)}"
        ) from error
    if descriptor is None:
        raise _in_use(path)
    try:
        yield
    finally:
        os.close(descriptor)


def _check_ours(path: Path) -> None:
    try:
        if not (path / "format").exists():
            raise DataDirectoryError(f"{path} is not a data directory; name one with --data-dir")
        _check_format(path)
    except OSError as error:
        raise DataDirectoryError(
            f"{path} cannot be read: {error.strerror}; run this as the user of the server"
        ) from error


def _advice(error: OSError) -> str:
    """What helps where the system refuses to make files."""
    if error.errno in NO_FILE_LEFT:
        return OPEN_FILES_ADVICE
    if error.errno == errno.EROFS:
        return "mount its file system for writing"
    if error.errno == errno.EFBIG:
        return "raise the limit of a file's size (`ulimit -f unlimited`)"
    if error.errno == errno.ENOTEMPTY:
        return "a folder of this name is there: move it away, or start the server again"
    return "give the server's user write permission"


def _in_use(path: Path) -> DataDirectoryError:
    return DataDirectoryError(f"{path} is in use by a server; stop it first")


def lock(path: Path) -> int | None:
    """Locks the directory for this process and for those that inherit the descriptor.

    Returns:
        The descriptor, which holds the lock for as long as any process has it open; None if another
        process holds the lock.

    Raises:
        OSError: The file with the lock cannot be opened.
        DataDirectoryError: The file system has no locks.
    """
    descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    is_locked = False
    try:
        is_locked = _has_locked(descriptor, path, fcntl.LOCK_EX)
    finally:
        if not is_locked:
            os.close(descriptor)
    return descriptor if is_locked else None


def _has_locked(descriptor: int, path: Path, operation: int) -> bool:
    """Locks a file of the directory; False if another process holds the lock.

    Raises:
        DataDirectoryError: The file system has no locks.
    """
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise DataDirectoryError(
            f"{path} cannot be locked: {error.strerror}; use a disk whose file system has locks"
        ) from error
    return True


def _remove(folder: Path) -> None:
    """Removes the folder of a bucket. An operator may have put a symbolic link in its place: of
    where that leads to, perhaps the top of a disk, only what is ours goes.

    Raises:
        OSError: It cannot be removed.
    """
    if not folder.is_symlink():
        shutil.rmtree(folder)
        return
    for part in PARTS:
        if (folder / part).exists():
            shutil.rmtree(folder / part)
    folder.unlink()


class DataDirectory:
    """The buckets of a data directory: a `BucketDirectory` of LMDB environments.

    Args:
        path: The data directory.
        readonly: Whether only to read.
        bytes_max: How large each file may become; 0 for as large as the disk is, up to a bound.

    Attributes:
        event_queues: The file in which a clean stop leaves the event queues.
        users: The file with the users of the cluster.
    """

    def __init__(self, path: Path, *, readonly: bool = False, bytes_max: int = 0) -> None:
        self._path = path / "buckets"
        self.event_queues = EventQueueFile(path)
        self.users = UsersFile(path)
        self._readonly = readonly
        self._bytes_max = bytes_max

    def names(self) -> list[str]:
        """The buckets, sorted; without folders that a crash left half made or half deleted."""
        return sorted(path.name for path in self._folders() if not path.name.startswith("."))

    def remove_leftovers(self) -> dict[str, str]:
        """Removes the folders that a crash left half made or half deleted; files that are not ours
        stay. Returns why a folder could not be removed, by its name."""
        failures: dict[str, str] = {}
        for folder in self._folders():
            if folder.name.startswith("."):
                try:
                    _remove(folder)
                except OSError as error:
                    failures[folder.name] = str(error)
        return failures

    def _folders(self) -> list[Path]:
        # The folder that a symbolic link leads to may be on a disk that is not mounted now.
        return [path for path in self._path.iterdir() if path.is_dir() or path.is_symlink()]

    def open(self, name: str) -> tuple[OrderedMap, OrderedMap]:
        """Opens log and index of a bucket.

        Raises:
            CorruptionError: The log is missing or damaged.
            DataDirectoryError: It cannot be accessed.
        """
        log = self._path / name / "log" / "data.mdb"
        try:
            # In the place of a missing or empty file LMDB would make an empty map.
            if not self._readonly and (not log.is_file() or not log.stat().st_size):
                raise CorruptionError(f"{log} is missing, empty or no file")
        except OSError as error:
            raise DataDirectoryError(
                f"{log} cannot be read: {error.strerror}; give the server's user read permission"
            ) from error
        return self._open(self._path / name)

    def _open(self, path: Path) -> tuple[OrderedMap, OrderedMap]:
        log = self._open_map(path / "log", is_summed=True)
        try:
            index = self._open_map(path / "index", copies_values=True, is_derived=True)
        except StorageError:
            log.close()
            raise
        if not self._readonly:
            try:
                log.verify_length()
                index.verify_length()
                log.verify()
            except StorageError:
                log.close()
                index.close()
                raise
        return log, index

    def _open_map(
        self,
        path: Path,
        *,
        is_summed: bool = False,
        copies_values: bool = False,
        is_derived: bool = False,
    ) -> LmdbOrderedMap:
        return LmdbOrderedMap(
            path,
            readonly=self._readonly,
            bytes_max=self._bytes_max,
            is_summed=is_summed,
            copies_values=copies_values,
            is_derived=is_derived,
        )

    def create(self, name: str, fill: Callable[[OrderedMap, OrderedMap], None]) -> None:
        """Creates a bucket: it is there, filled, or not at all.

        Args:
            name: The bucket's name.
            fill: Writes the first records into its log and index.

        Raises:
            DiskFullError: There is not enough space.
            DataDirectoryError: Its files cannot be made.
        """
        try:
            self._check_space()
            self._create(self._path / name, self._path / f".new-{name}", fill)
        except OSError as error:
            if error.errno in FULL_DISK_ERRORS:
                raise DiskFullError(f"the disk is full: {error}; make room there") from error
            raise DataDirectoryError(
                f"{self._path / name} cannot be created: {error.strerror}; {_advice(error)}"
            ) from error

    def _check_space(self) -> None:
        disk = os.statvfs(self._path)
        free_bytes = disk.f_bavail * disk.f_frsize
        if free_bytes < COMMIT_RESERVE_BYTES:
            # The bucket could take no commit. And on a disk without any space LMDB's new lock file,
            # which is written through a memory map, would kill this process with SIGBUS.
            raise DiskFullError(
                f"the disk of {self._path} has {free_bytes} bytes left; a new bucket needs "
                f"{COMMIT_RESERVE_BYTES}; make room there"
            )

    def _create(
        self, folder: Path, new_folder: Path, fill: Callable[[OrderedMap, OrderedMap], None]
    ) -> None:
        if new_folder.exists():
            # A crash left it, or an attempt that could not remove it.
            shutil.rmtree(new_folder)
        leftover = new_folder
        # Opened before anything is made: if no descriptor were left once the bucket has its name,
        # it might be there after a crash or not.
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            self._make(new_folder, fill)
            new_folder.rename(folder)
            leftover = folder
            os.fsync(descriptor)
        except Exception:
            shutil.rmtree(leftover, ignore_errors=True)
            raise
        finally:
            os.close(descriptor)

    def _make(self, new_path: Path, fill: Callable[[OrderedMap, OrderedMap], None]) -> None:
        parts = [new_path / part for part in PARTS]
        for part in parts:
            part.mkdir(parents=True)
        log, index = self._open(new_path)
        try:
            fill(log, index)
        finally:
            log.close()
            index.close()
        for folder in (*parts, new_path):
            sync_path(folder)

    def delete(self, name: str) -> None:
        """Deletes a bucket's files, which are closed. If somebody has removed them, it is done.

        Raises:
            DataDirectoryError: They cannot be deleted, or only in part.
        """
        folder, deleted_folder = self._path / name, self._path / f".deleted-{name}"
        try:
            if os.path.lexists(deleted_folder):
                # A deletion that failed left it.
                _remove(deleted_folder)
            if os.path.lexists(folder):
                folder.rename(deleted_folder)
                sync_path(self._path)
                _remove(deleted_folder)
        except OSError as error:
            raise DataDirectoryError(
                f"{folder} cannot be deleted: {error}; give the server's user write permission, "
                "and delete the bucket again"
            ) from error
