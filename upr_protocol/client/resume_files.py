"""Where a consumer keeps its resume state, and files that are replaced atomically."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import trio

from upr_protocol.client.core.resume_state import ResumeState


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces a file: writes a new one beside it, flushes that to disk, and renames it. When this
    returns, the new file survives a crash.

    Raises:
        OSError: It cannot be written; the old file is still there.
    """
    new_path = path.with_name(path.name + ".new")
    try:
        with new_path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new_path.replace(path)
    except OSError:
        with suppress(OSError):
            new_path.unlink()
        raise
    # Without this the rename itself may be lost.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class ResumeStore(Protocol):
    """Keeps one resume state. An application that has a database keeps the state there, best in one
    transaction with the data that it stands for."""

    async def load(self) -> ResumeState | None:
        """The state saved last, if there is one."""

    async def save(self, state: ResumeState) -> None:
        """Saves `state` in place of the one before. When this returns, `state` must survive a
        crash; if it is cancelled, either of the two may be there, but whole."""


class MemoryStore:
    """Keeps the state as long as the process lives.

    Attributes:
        state: The state saved last, or the one to begin with.
        saves: How often it was saved.
    """

    def __init__(self, state: ResumeState | None = None) -> None:
        self.state = state
        self.saves = 0

    async def load(self) -> ResumeState | None:
        """A copy of the state."""
        return None if self.state is None else self.state.copy()

    async def save(self, state: ResumeState) -> None:
        """Keeps a copy of `state`."""
        self.state = state.copy()
        self.saves += 1


class FileStore:
    """Keeps the state in a file, which is replaced atomically.

    Args:
        path: The file. Its folder must exist; two consumers must not share it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def load_now(self) -> ResumeState | None:
        """The state saved last, if there is one.

        Raises:
            OSError: The file cannot be read.
            ResumeStateError: It does not hold a resume state.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        return ResumeState.decode(data)

    def save_now(self, state: ResumeState) -> None:
        """Saves `state`; when this returns it is on disk.

        Raises:
            OSError: The file cannot be written; the old one is still there.
        """
        write_atomically(self.path, state.encode())

    async def load(self) -> ResumeState | None:
        """`load_now` in a thread."""
        return await trio.to_thread.run_sync(self.load_now)

    async def save(self, state: ResumeState) -> None:
        """`save_now` in a thread."""
        # Encoded here: the state belongs to this thread, and may change meanwhile.
        await trio.to_thread.run_sync(write_atomically, self.path, state.encode())
