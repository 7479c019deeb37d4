"""Errors of an index on disk, and the room that it needs."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import lmdb

from upr_protocol.durable_files import FULL_DISK_ERRORS
from upr_protocol.errors import UprError

FILE_BYTES_MAX: Final = 64 * 1024 * 1024 * 1024
"""How large an index may become: addresses, not disk. A process has some for 2,000 indexes. The
disk's own size is no bound here, as a disk may grow."""

FREE_BYTES_MIN: Final = 1024 * 1024
"""Where less is free, a write that failed half-way has found no room, and no new index is made."""


class IndexFileError(UprError):
    """The files of an index cannot be used."""


class DiskFullError(IndexFileError):
    """An index has found no room on the disk, or has no more addresses; nothing has changed."""


class NotSettledError(Exception):
    """The index is between two states that the server had: a snapshot is half applied."""


@contextmanager
def errors_of_index(path: Path) -> Iterator[None]:
    """Turns LMDB's errors into ours."""
    try:
        yield
    except (lmdb.Error, OSError) as error:
        if isinstance(error, lmdb.MapFullError):
            raise DiskFullError(
                f"the index in {path} has {FILE_BYTES_MAX} bytes, the most it may: drop it, or "
                "divide the indexes among more workers or slices"
            ) from error
        if _is_disk_full(error, path):
            raise DiskFullError(
                f"the disk is full: the index in {path} cannot be written: {error}"
            ) from error
        raise IndexFileError(f"the index in {path} cannot be used: {error}") from error


def _is_disk_full(error: Exception, path: Path) -> bool:
    """Whether a write has failed for want of room. Where the first of some pages find room, LMDB
    calls it an error of input and output."""
    code = error.errno if isinstance(error, OSError) else getattr(error, "code", 0)
    if code != errno.EIO:
        return code in FULL_DISK_ERRORS
    with suppress(OSError):
        return _free_bytes(path) < FREE_BYTES_MIN
    return False


def check_space(path: Path) -> None:
    """Makes sure that there is room for a new index. Without any, LMDB's new lock file, which is
    written through a memory map, would kill this process with SIGBUS.

    Raises:
        OSError: There is none.
    """
    free_bytes = _free_bytes(path)
    if free_bytes < FREE_BYTES_MIN:
        reason = f"{free_bytes} bytes are left, and a new index needs {FREE_BYTES_MIN}"
        raise OSError(errno.ENOSPC, reason)


def _free_bytes(path: Path) -> int:
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize
