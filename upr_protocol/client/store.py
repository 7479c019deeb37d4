"""Where a consumer keeps its resume state."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import trio

from upr_protocol.client.resume import ResumeState
from upr_protocol.client.whole_file import write_whole


class ResumeStore(Protocol):
    """Keeps one resume state. An application that has a database keeps it there, best in one
    transaction with the data that it stands for."""

    async def load(self) -> ResumeState | None:
        """What was saved last; None when nothing was."""

    async def save(self, state: ResumeState) -> None:
        """Keeps `state` in place of what was saved before. Once this returned it must survive a
        crash; cancelled, either may be there, but whole."""


class MemoryStore:
    """Keeps the state for as long as the process lives."""

    def __init__(self, state: ResumeState | None = None) -> None:
        self.state = state
        self.saves = 0
        """How often it was saved."""

    async def load(self) -> ResumeState | None:
        """See `ResumeStore`."""
        return None if self.state is None else self.state.copy()

    async def save(self, state: ResumeState) -> None:
        """See `ResumeStore`."""
        self.state = state.copy()
        self.saves += 1


class FileStore:
    """Keeps the state in a file, which is always whole: it is written beside it, flushed to the
    disk, and put in its place.

    Args:
        path: The file. Its folder must be there; no two consumers may share it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def load_now(self) -> ResumeState | None:
        """What was saved last; None when nothing was.

        Raises:
            OSError: The file cannot be read.
            ResumeStateError: What is in it is no resume state.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        return ResumeState.decode(data)

    def save_now(self, state: ResumeState) -> None:
        """Keeps `state`; when this returns it is on disk.

        Raises:
            OSError: The file cannot be written; what was there before still is.
        """
        write_whole(self.path, state.encode())

    async def load(self) -> ResumeState | None:
        """See `ResumeStore`, and `load_now` for what it raises."""
        return await trio.to_thread.run_sync(self.load_now)

    async def save(self, state: ResumeState) -> None:
        """See `ResumeStore`, and `save_now` for what it raises."""
        # Encoded here, on the thread that the state belongs to.
        await trio.to_thread.run_sync(write_whole, self.path, state.encode())
