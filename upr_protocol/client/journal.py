"""A file of records, each whole or not there.

A record is its length, the length's complement, a CRC-32C of the contents, and the contents. They
are appended, and each is flushed to the disk before anybody builds on it. So only the last one can
be cut short, by a crash: it is cut off, as nobody has built on it. Anything else that does not fit
is damage, and said to be.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from struct import Struct
from typing import Final, Self

from crc32c import crc32c

from upr_protocol.client.whole_file import write_whole
from upr_protocol.errors import UprError

_HEAD: Final = Struct("<III")
_ONES: Final = 0xFFFF_FFFF


class JournalError(UprError, ValueError):
    """The file is none of ours, or damaged."""


class Journal:
    """The file, open for appending. `open` makes one.

    Attributes:
        path: Where it is.
        nbytes: How long it is.
    """

    def __init__(self, path: Path, file: int, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self._file = file

    @classmethod
    def open(cls, path: Path) -> tuple[Self, list[bytes]]:
        """The file, made when there is none, and its records.

        Raises:
            JournalError: It is damaged.
            OSError: It cannot be read or written.
        """
        if not path.exists():
            write_whole(path, b"")
        data = path.read_bytes()
        records, good = _records(path, data)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        if good < len(data):
            os.ftruncate(file, good)
            os.fsync(file)
        return cls(path, file, good), records

    def append(self, record: bytes) -> None:
        """Adds a record; when this returns it is on disk.

        Raises:
            OSError: It cannot be written. What is left of it is cut off again.
        """
        data = _encode(record)
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(self._file, left) :]
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self.nbytes)
            raise
        self.nbytes += len(data)

    def replace(self, records: Iterable[bytes]) -> None:
        """Has other records in the place of all there are, at once.

        Raises:
            OSError: It cannot be written; what was there still is.
        """
        data = b"".join(map(_encode, records))
        write_whole(self.path, data)
        os.close(self._file)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self.nbytes = len(data)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)


def _encode(record: bytes) -> bytes:
    return _HEAD.pack(len(record), len(record) ^ _ONES, crc32c(record)) + record


def _records(path: Path, data: bytes) -> tuple[list[bytes], int]:
    """The whole records, and where they end."""
    records: list[bytes] = []
    at = 0
    while len(data) - at >= _HEAD.size:
        length, complement, crc = _HEAD.unpack_from(data, at)
        end = at + _HEAD.size + length
        record = data[at + _HEAD.size : end]
        if length ^ complement != _ONES:
            # Of what was appended last the file may have the length and not the contents.
            if any(data[at + _HEAD.size :]):
                raise JournalError(f"{path} is damaged at byte {at}")
            break
        if end > len(data) or (end == len(data) and crc32c(record) != crc):
            break
        if crc32c(record) != crc:
            raise JournalError(f"{path} is damaged at byte {at}")
        records.append(record)
        at = end
    return records, at
