"""An input without an end, which must not be read completely."""

from __future__ import annotations

import io
from typing import Any


class EndlessInput(io.RawIOBase):
    """Gives some bytes, and then the letter x for ever.

    Args:
        first_bytes: The bytes before the letters.
        nbytes_max: Reading more bytes than this raises an error.
    """

    def __init__(self, first_bytes: bytes, nbytes_max: int) -> None:
        self._first_bytes = first_bytes
        self._nbytes_left = nbytes_max

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data, self._first_bytes = self._first_bytes or b"x" * len(buffer), b""
        buffer[: len(data)] = data
        self._nbytes_left -= len(data)
        assert self._nbytes_left >= 0, "more is read than the limit asks for"
        return len(data)


def endless_input(first_bytes: bytes, nbytes_max: int) -> io.BufferedReader:
    """An `EndlessInput` with a buffer."""
    return io.BufferedReader(EndlessInput(first_bytes, nbytes_max))
