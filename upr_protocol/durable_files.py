"""Files and folders that survive a crash of the machine."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

FULL_DISK_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT)
"""The errors of a full disk, and of an exhausted quota."""


def sync_path(path: Path) -> None:
    """Has a file's contents, or the names in a folder, survive a crash.

    Raises:
        OSError: They cannot be written.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Replaces a file, or makes it. A crash leaves the whole new file, or what was there before.

    While it is written the new file has the same name with a period before it.

    Args:
        path: The file.
        data: Its contents.
        mode: Who may read and write it, as far as the process's mask lets them.

    Raises:
        OSError: It cannot be written; what was there before still is. Or it is replaced, but the
            folder cannot be synchronised: a crash may bring back what was there before.
    """
    new_path = path.with_name(f".{path.name}")
    try:
        # What a crash left there may be readable by others.
        new_path.unlink(missing_ok=True)
        with open(new_path, "wb", opener=partial(os.open, mode=mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new_path.replace(path)
    except OSError as error:
        with suppress(OSError):
            new_path.unlink(missing_ok=True)
        if error.filename is None:  # it could not be written
            error.filename = str(path)
        raise
    # Without this the rename itself may be lost.
    sync_path(path.parent)
