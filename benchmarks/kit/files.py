"""Files of a data directory: read, copied, and put out of the page cache."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Final

_PIECE_BYTES: Final = 1 << 20


def data_files(data_dir: Path) -> list[Path]:
    """The maps of all buckets."""
    return sorted(data_dir.glob("buckets/*/*/data.mdb"))


def read_once(data_dir: Path) -> float:
    """Reads the maps from their beginnings to their ends, 1 MiB at a time; seconds."""
    buffer = bytearray(_PIECE_BYTES)
    started_at = time.monotonic()
    for path in data_files(data_dir):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.monotonic() - started_at


def drop_from_cache(data_dir: Path) -> None:
    """Has the maps read from the disk next time; nobody may have them mapped."""
    for path in data_files(data_dir):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy(data_dir: Path, to: Path) -> None:
    """Copies a data directory, and waits until the copy is on disk."""
    shutil.copytree(data_dir, to)
    for path in data_files(to):
        with path.open("rb") as file:
            os.fsync(file.fileno())
