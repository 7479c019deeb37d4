"""Folders that are whole or not there: what is written last makes the rest count."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from upr_protocol.durable_files import sync_path
from upr_protocol.spark.errors import OptionError, PipelineError

LOCK: Final = ".lock"

_PATTERN_CHARACTER: Final = re.compile(r"[\\*?\[\]{}]")


def plain_path(text: str | os.PathLike[str]) -> Path:
    """A folder that driver and executors reach by a plain path.

    Args:
        text: A path, or a `file:` URL.

    Raises:
        OptionError: It is a URL of another kind.
    """
    parts = urlsplit(os.fspath(text))
    if parts.scheme not in ("", "file"):
        raise OptionError(
            f"{os.fspath(text)!r} is not a plain path that every executor reaches: name a folder "
            "of a shared file system, and copy it elsewhere when it is complete"
        )
    return Path(unquote(parts.path) if parts.scheme else os.fspath(text)).absolute()


def path_to_read(path: Path) -> str:
    """A path for one of Spark's readers, to which some characters stand for others."""
    return _PATTERN_CHARACTER.sub(r"\\\g<0>", str(path))


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Keeps a folder to oneself, for as long as the context; makes it when it is missing.

    Raises:
        PipelineError: Another is at work in it.
    """
    make_folder(folder)
    with (folder / LOCK).open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PipelineError(
                "UPR_FOLDER", f"{folder}: another process is at work in it; wait until it is done"
            ) from None
        yield


def make_folder(folder: Path) -> None:
    """Makes a folder, and those above it that are missing, so that they survive a crash."""
    missing_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing_folders:
        sync_path(path.parent)


def paths_in_folder(folder: Path) -> list[Path]:
    """What is in a folder, without the lock; nothing when it is not there."""
    if not folder.exists():
        return []
    return sorted(path for path in folder.iterdir() if path.name != LOCK)


def sync_folder(folder: Path) -> None:
    """Syncs everything below a folder to disk, names and contents."""
    for base, _, names in os.walk(folder):
        for name in names:
            sync_path(Path(base, name))
        sync_path(Path(base))
    sync_path(folder.parent)


def remove_paths(paths: list[Path]) -> None:
    """Removes files and folders, with what is in them."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
