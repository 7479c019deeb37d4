"""Standard output for a stream that may have a slow reader."""

from __future__ import annotations

import os
import select
import stat
from typing import Final

import trio

STANDARD_OUTPUT: Final = 1

_WATCH_S: Final = 0.2
"""How soon `upr tail | head` ends once `head` has."""


class Output:
    """Writes to a descriptor, without a buffer of its own: what was written has left the process.

    Args:
        descriptor: Where to write.
    """

    def __init__(self, descriptor: int = STANDARD_OUTPUT) -> None:
        self._descriptor = descriptor

    async def write(self, data: bytes) -> None:
        """Writes all of `data`, however long its reader takes; other tasks go on meanwhile.

        Cancelled, some of it may have been written or still be.

        Raises:
            BrokenPipeError: Nobody reads any more.
            OSError: It cannot be written, for instance as the disk is full.
        """
        if len(data) <= select.PIPE_BUF and self._is_writable():
            # So little fits whole, and a thread would cost more than the write.
            _write_all(self._descriptor, data)
            await trio.lowlevel.checkpoint()
        else:
            await trio.to_thread.run_sync(
                _write_all, self._descriptor, data, abandon_on_cancel=True
            )

    def _is_writable(self) -> bool:
        return bool(select.select((), (self._descriptor,), (), 0)[1])

    async def watch(self) -> None:
        """Runs until nobody reads any more, also while there is nothing to write.

        Raises:
            BrokenPipeError: Then.
        """
        poll = select.poll()
        poll.register(self._descriptor, 0)  # errors are told unasked
        while not poll.poll(0):  # noqa: ASYNC110  the system tells nobody
            await trio.sleep(_WATCH_S)
        raise BrokenPipeError

    def end_line(self) -> None:
        """Ends the last line of a file that is appended to, if it was cut in its middle.

        A process that is killed may leave one; what is written next must not become its end.
        """
        status = os.fstat(self._descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_size and not self._ends_with_newline():
            _write_all(self._descriptor, b"\n")

    def _ends_with_newline(self) -> bool:
        # The descriptor is for writing only; the system has another way to the same file.
        try:
            with open(f"/dev/fd/{self._descriptor}", "rb") as file:
                file.seek(-1, os.SEEK_END)
                return file.read(1) == b"\n"
        except OSError:
            return False


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            select.select((), (descriptor,), ())
