"""Files and folders that survive a crash."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def sync_folder(path: Path) -> None:
    """Has the names in a folder, made and removed, survive a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file. A crash leaves the whole new file, or whatever was there before.

    Raises:
        OSError: It cannot be written; what was there before still is.
    """
    new = path.with_name(f".{path.name}")
    try:
        with new.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)
    except OSError:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
