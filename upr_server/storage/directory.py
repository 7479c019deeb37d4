"""The data directory: who may use it, and where each bucket lies in it.

::

    DIRECTORY/
      format              "upr 1": the version of what lies here
      lock                held by the one server that uses it
      buckets/NAME/log/   the bucket's log, an LMDB environment
      buckets/NAME/index/ its index, another: LMDB has one writer an environment
      event-queues        the queues of the event bus, while no server runs; missing after a crash

A bucket is made beside its place and then moved there; names that begin with a dot are what a crash
left of that, and of deletions.
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

from upr_server.storage.chunk_log import COMMIT_RESERVE_BYTES
from upr_server.storage.errors import CorruptionError, DataDirectoryError, DiskFullError
from upr_server.storage.event_queue_file import EventQueueFile
from upr_server.storage.files import replace_file, sync_folder
from upr_server.storage.lmdb_map import FULL, LmdbMap
from upr_server.storage.ordered_map import OrderedMap
from upr_server.storage.records import FORMAT_VERSION

FORMAT_TEXT: Final = f"upr {FORMAT_VERSION}\n"


def default_data_dir() -> Path:
    """Where a user's data lies when nobody says otherwise."""
    return platformdirs.user_data_path("upr")


_NEW_FORMAT: Final = ".format"


def prepare(path: Path) -> None:
    """Makes the directory, or sees that it is one of ours.

    Raises:
        DataDirectoryError: It cannot be made or used; nothing in it was changed.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        form = path / "format"
        if form.exists():
            _check_format(path)
        elif not _is_new(path):
            raise DataDirectoryError(
                f"{path} is not empty, and no data directory: choose another with --data-dir"
            )
        else:
            (path / "buckets").mkdir(exist_ok=True)
            # The last thing that is made: whoever sees it sees everything.
            replace_file(form, FORMAT_TEXT.encode())
        if not os.access(path / "buckets", os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise DataDirectoryError(
            f"{path} cannot be written: {error.strerror}; give the server's user the right to, or "
            "choose another directory with --data-dir"
        ) from error


def _is_new(path: Path) -> bool:
    """Whether there is nothing, or what a server left that went down while it made it."""
    buckets = path / "buckets"
    left = {found.name for found in path.iterdir()} - {_NEW_FORMAT}
    return not left or (left == {buckets.name} and not any(buckets.iterdir()))


def _check_format(path: Path) -> None:
    found = (path / "format").read_text("utf-8", "replace")
    if found != FORMAT_TEXT:
        raise DataDirectoryError(
            f"{path} is of another version ({found.strip()!r}, this server writes "
            f"{FORMAT_TEXT.strip()!r}): use the server that wrote it, or another directory"
        )


@contextmanager
def lock_for_reading(path: Path) -> Iterator[None]:
    """Sees that the directory is one of ours, and keeps servers from it while it is read.

    Nothing in it is changed, and there may be any number of readers.

    Raises:
        DataDirectoryError: It is none, or a server uses it.
    """
    _check_ours(path)
    try:
        try:
            descriptor = os.open(path / "lock", os.O_RDONLY)
        except FileNotFoundError:
            # No server has ever used it.
            descriptor = os.open(path / "format", os.O_RDONLY)
    except OSError as error:
        raise DataDirectoryError(f"{path} cannot be read: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise _in_use(path) from error
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
        raise DataDirectoryError(f"{path} cannot be written: {error.strerror}") from error
    if descriptor is None:
        raise _in_use(path)
    try:
        yield
    finally:
        os.close(descriptor)


def _check_ours(path: Path) -> None:
    try:
        if not (path / "format").exists():
            raise DataDirectoryError(f"{path} is no data directory: name one with --data-dir")
        _check_format(path)
    except OSError as error:
        raise DataDirectoryError(f"{path} cannot be read: {error.strerror}") from error


def _in_use(path: Path) -> DataDirectoryError:
    return DataDirectoryError(f"{path} is used by a server: stop that one first")


def lock(path: Path) -> int | None:
    """Takes the directory for this process and those that inherit the descriptor.

    Returns:
        The descriptor that holds it, for as long as anybody has it open; None when another has it.
    """
    descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


class DataDirectory:
    """The buckets of a data directory: a `BucketDirectory` of LMDB environments.

    Args:
        path: The data directory.
        readonly: Whether only to read.
        bytes_max: How large each file may become; 0 for as large as the disk is, up to a bound.

    Attributes:
        event_queues: The file in which a clean stop leaves the event queues.
    """

    def __init__(self, path: Path, *, readonly: bool = False, bytes_max: int = 0) -> None:
        self._path = path / "buckets"
        self.event_queues = EventQueueFile(path)
        self._readonly = readonly
        self._bytes_max = bytes_max

    def names(self) -> list[str]:
        """The buckets, sorted. What a crash left of others goes; files of somebody else are left
        alone."""
        folders = [path for path in self._path.iterdir() if path.is_dir()]
        if not self._readonly:
            for left in folders:
                if left.name.startswith("."):
                    shutil.rmtree(left)
        return sorted(path.name for path in folders if not path.name.startswith("."))

    def open(self, name: str) -> tuple[OrderedMap, OrderedMap]:
        """Log and index of a bucket.

        Raises:
            CorruptionError: The log is not there; LMDB would make an empty one in its place.
            DataDirectoryError: It may not be looked at.
        """
        log = self._path / name / "log" / "data.mdb"
        try:
            if not self._readonly and (not log.exists() or not log.stat().st_size):
                raise CorruptionError(f"{log} is missing, or empty")
        except OSError as error:
            raise DataDirectoryError(
                f"{log} cannot be read: {error.strerror}; give the server's user the right to"
            ) from error
        return self._open(self._path / name)

    def _open(self, path: Path) -> tuple[OrderedMap, OrderedMap]:
        log, index = (
            LmdbMap(
                path / part,
                readonly=self._readonly,
                bytes_max=self._bytes_max,
                is_summed=part == "log",
            )
            for part in ("log", "index")
        )
        if not self._readonly:
            log.verify_length()
            index.verify_length()
            log.verify()
        return log, index

    def create(self, name: str, fill: Callable[[OrderedMap, OrderedMap], None]) -> None:
        """Makes a bucket.

        Raises:
            DiskFullError: There is no room for it; nothing is left of it.
        """
        disk = os.statvfs(self._path)
        free_bytes = disk.f_bavail * disk.f_frsize
        if free_bytes < COMMIT_RESERVE_BYTES:
            # It could take no commit. And on a disk with no room at all LMDB's new lock file, which
            # is written through a map, would kill this process with SIGBUS.
            raise DiskFullError(
                f"the disk of {self._path} has {free_bytes} bytes left; a new bucket needs "
                f"{COMMIT_RESERVE_BYTES}"
            )
        new = self._path / f".new-{name}"
        if new.exists():
            # A crash left it.
            shutil.rmtree(new)
        try:
            self._make(new, fill)
            new.rename(self._path / name)
        except Exception as error:
            shutil.rmtree(new, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in FULL:
                raise DiskFullError(f"the disk is full: {error}") from error
            raise
        sync_folder(self._path)

    def _make(self, new: Path, fill: Callable[[OrderedMap, OrderedMap], None]) -> None:
        parts = [new / part for part in ("log", "index")]
        for part in parts:
            part.mkdir(parents=True)
        log, index = self._open(new)
        try:
            fill(log, index)
        finally:
            log.close()
            index.close()
        for made in (*parts, new):
            sync_folder(made)

    def delete(self, name: str) -> None:
        """Takes a bucket away."""
        gone = self._path / f".deleted-{name}"
        (self._path / name).rename(gone)
        sync_folder(self._path)
        shutil.rmtree(gone)
