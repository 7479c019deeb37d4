"""The data directory of an indexer: who may use it, and whose files are in it."""

from __future__ import annotations

import fcntl
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import structlog

from upr_server.indexer.index_file import IndexFileError
from upr_server.indexer.slices import SliceId

log = structlog.get_logger(__name__)

_SLICE_FOLDER: Final = re.compile(r"slice-\d+-of-\d+")


class FolderInUseError(IndexFileError):
    """Another process uses a folder."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps others from a folder for as long as the context; it is made when there is none.

    Raises:
        FolderInUseError: Another indexer uses it.
        OSError: It cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
    except BlockingIOError as error:
        raise FolderInUseError(
            f"another indexer uses {folder}; stop it, or choose another --data-dir"
        ) from error


def remove_other_slices(data_dir: Path, slice_count: int) -> None:
    """Removes the slices of another division of the indexes, or of an earlier version. They are
    built again from the bucket. What is not known to be an indexer's stays."""
    own = {SliceId(index, slice_count).folder for index in range(slice_count)}
    others = [
        path
        for path in sorted(data_dir.iterdir())
        if path.name not in own and _SLICE_FOLDER.fullmatch(path.name) and (path / "lock").is_file()
    ]
    if (data_dir / "catalog" / "data.mdb").is_file():
        # An earlier version. The catalog is last: if this is interrupted, the next start goes on.
        names = ("indexes", "ring", "catalog")
        others += [path for path in map(data_dir.joinpath, names) if path.exists()]
    if not others:
        return
    log.warning(
        "the indexes are divided in another way than before; building them again",
        slices=slice_count,
        removed=[path.name for path in others],
    )
    for path in others:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
