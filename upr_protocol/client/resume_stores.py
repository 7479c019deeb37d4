"""Where a consumer keeps its resume state."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import trio

from upr_protocol.client.core.resume_state import ResumeState, ResumeStateError
from upr_protocol.durable_files import replace_file


class ResumeStore(Protocol):
    """Keeps one resume state. An application that has a database keeps the state there, best in one
    transaction with the data that it stands for."""

    async def load(self) -> ResumeState | None:
        """The state saved last, if there is one."""

    async def save(self, state: ResumeState) -> None:
        """Saves `state` in place of the one before. When this returns, `state` must survive a
        crash; if it is cancelled, either of the two may be there, but whole."""


class MemoryStore:
    """Keeps the state as long as the process lives: the one saved last, or the one to begin
    with."""

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
    """Keeps the state in a file, which is replaced atomically. Its folder must exist; two consumers
    must not share it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def load_now(self) -> ResumeState | None:
        """The state saved last, if there is one.

        Raises:
            OSError: The file cannot be read.
            ResumeStateError: It does not hold a resume state; the sentence names it.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            return ResumeState.decode(data)
        except ResumeStateError as error:
            raise ResumeStateError(f"{self.path}: {error}; name another file") from error

    def save_now(self, state: ResumeState) -> None:
        """Saves `state`; when this returns it is on disk.

        Raises:
            OSError: The file cannot be written; the old one is still there.
        """
        replace_file(self.path, state.encode())

    async def load(self) -> ResumeState | None:
        """`load_now` in a thread, which a cancelled call leaves to itself."""
        return await trio.to_thread.run_sync(self.load_now, abandon_on_cancel=True)

    async def save(self, state: ResumeState) -> None:
        """`save_now` in a thread."""
        # Encoded here: the state belongs to this thread, and may change meanwhile.
        await trio.to_thread.run_sync(replace_file, self.path, state.encode())
