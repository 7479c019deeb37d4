"""The data directory of an indexer: who may use it, and whose files are in it."""

from __future__ import annotations

import fcntl
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import structlog
import trio

from upr_server.indexer.index_file import IndexFileError
from upr_server.indexer.slices import SliceId

T = TypeVar("T")

log = structlog.get_logger(__name__)

_SLICE_FOLDER: Final = re.compile(r"slice-\d+-of-\d+")

_LOCK: Final = "lock"


LOCK_TIMEOUT_S: Final = 5.0
"""How long to wait for a folder: the worker of an indexer that was killed ends a moment after
it."""

LOCK_RETRY_S: Final = 0.05


class FolderInUseError(IndexFileError):
    """Another process uses a folder."""


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Keeps others from a folder for as long as the context; it is made when there is none.

    Raises:
        FolderInUseError: Another indexer uses it.
        OSError: It cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / _LOCK).open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
    except BlockingIOError as error:
        raise FolderInUseError(
            f"another indexer uses {folder}; stop it, or choose another --data-dir"
        ) from error


async def retry_while_in_use(use: Callable[[], T]) -> T:
    """What a function gives that uses a folder. If another process still does, waits for it, for
    `LOCK_TIMEOUT_S` at most.

    Raises:
        FolderInUseError: The other process goes on.
    """
    deadline = trio.current_time() + LOCK_TIMEOUT_S
    while True:
        try:
            return use()
        except FolderInUseError:
            if trio.current_time() >= deadline:
                raise
        await trio.sleep(LOCK_RETRY_S)


async def remove_other_slices(data_dir: Path, own_slices: Collection[SliceId]) -> None:
    """Removes the slices of another division of the indexes, those that other nodes keep now, and
    what an earlier version has left. They are built again from the bucket. What is not known to be
    an indexer's stays.

    Args:
        data_dir: Where the slices are kept.
        own_slices: The slices that stay.

    Raises:
        FolderInUseError: A worker of an indexer that was killed still uses one.
    """
    own_folders = {slice_id.folder for slice_id in own_slices}
    other_folders = _others(data_dir, own_folders)
    if not other_folders:
        return
    log.warning(
        "the indexes are divided in another way than before; building them again",
        slices=len(own_folders),
        removed=[path.name for path in other_folders],
    )
    for path in other_folders:
        with await retry_while_in_use(partial(_entered, path)):
            await trio.to_thread.run_sync(_remove, path)


def _others(data_dir: Path, own_folders: Collection[str]) -> list[Path]:
    folders = [
        path
        for path in sorted(data_dir.iterdir())
        if path.name not in own_folders
        and _SLICE_FOLDER.fullmatch(path.name)
        and (path / _LOCK).is_file()
    ]
    if (data_dir / "catalog" / "data.mdb").is_file():
        # An earlier version. The catalog is last: if this is interrupted, the next start goes on.
        names = ("indexes", "ring", "catalog")
        folders += [path for path in map(data_dir.joinpath, names) if path.exists()]
    return folders


def _entered(path: Path) -> ExitStack:
    """The lock of a slice's folder; of something else, nothing."""
    with ExitStack() as stack:
        if (path / _LOCK).is_file():
            stack.enter_context(locked_folder(path))
        return stack.pop_all()


def _remove(path: Path) -> None:
    if not path.is_dir():
        path.unlink()
        return
    for entry in path.iterdir():
        # The lock last: by it the rest is known to be an indexer's, if this is interrupted.
        if entry.name == _LOCK:
            continue
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    shutil.rmtree(path)
