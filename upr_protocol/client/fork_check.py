"""Forks: a process must not go on with what its parent has open.

Both would read from one connection, and each could take answers to the other for its own.
"""

from __future__ import annotations

import os


class ForkCheck:
    """Tells a process that was forked from the one that made this."""

    __slots__ = ("_process_id",)

    def __init__(self) -> None:
        self._process_id = os.getpid()

    def was_forked(self) -> bool:
        """Whether this process was forked since the last call, or since this was made: so True
        once in each forked process."""
        if os.getpid() == self._process_id:
            return False
        self._process_id = os.getpid()
        return True
