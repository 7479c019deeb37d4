"""An append-only file of records, each of which is whole or absent.

A record is its length, the length's complement, a CRC-32C of the contents, and the contents. Each
record is flushed to disk before anything depends on it. So a crash can cut short only the last
record; opening the file truncates it there. Any other mismatch is damage and raises an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from struct import Struct
from typing import Final, Self

from crc32c import crc32c

from upr_protocol.durable_files import replace_file, sync_path
from upr_protocol.errors import UprError

_HEADER: Final = Struct("<III")
_ONES: Final = 0xFFFF_FFFF


class DamagedFileError(UprError, ValueError):
    """The file is damaged, or another program wrote it."""


class ChecksummedFile:
    """The file, open for appending; `open` makes one."""

    def __init__(self, path: Path, file: int, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self._file = file
        self._is_folder_synced = True
        """Whether it is known that the file's name survives a crash."""

    @classmethod
    def open(cls, path: Path) -> tuple[Self, list[bytes]]:
        """Opens the file, or creates it; gives its records, too.

        Raises:
            DamagedFileError: It is damaged.
            OSError: It cannot be read or written.
        """
        if not path.exists():
            replace_file(path, b"")
        data = path.read_bytes()
        records, end = _decode(path, data)
        file = cls(path, os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), end)
        if end < len(data):
            try:
                os.ftruncate(file._file, end)
                os.fsync(file._file)
            except BaseException:
                file.close()
                raise
        return file, records

    def append(self, record: bytes) -> None:
        """Appends a record, which is on disk when this returns.

        Raises:
            OSError: It cannot be written. The file is as it was before.
        """
        data = _encode(record)
        if not self._is_folder_synced:
            sync_path(self.path.parent)
            self._is_folder_synced = True
        try:
            unwritten_data = memoryview(data)
            while unwritten_data:
                unwritten_data = unwritten_data[os.write(self._file, unwritten_data) :]
            os.fsync(self._file)
            self.nbytes += len(data)
        except BaseException:
            # This is done after Ctrl-C, too. Otherwise a later failure would cut off a part of what
            # was written before.
            os.ftruncate(self._file, self.nbytes)
            raise

    def replace(self, records: Iterable[bytes]) -> None:
        """Replaces all records by others, atomically.

        Raises:
            OSError: The file cannot be written; it is as it was before. Or it is replaced, but
                a crash may bring back what it was: then nothing is appended before that is settled.
        """
        data = b"".join(map(_encode, records))
        try:
            replace_file(self.path, data)
        except OSError:
            if not os.path.samestat(os.stat(self.path), os.fstat(self._file)):
                self._reopen(len(data))
                self._is_folder_synced = False
            raise
        self._reopen(len(data))
        self._is_folder_synced = True

    def _reopen(self, nbytes: int) -> None:
        self.close()
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self.nbytes = nbytes

    def close(self) -> None:
        """Closes the file. May be called again. To append is an error from then on, and also where
        `replace` could not open the file: another one may have its number by then."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def _encode(record: bytes) -> bytes:
    return _HEADER.pack(len(record), len(record) ^ _ONES, crc32c(record)) + record


def _decode(path: Path, data: bytes) -> tuple[list[bytes], int]:
    """The whole records, and where the last of them ends."""
    records: list[bytes] = []
    start = 0
    while len(data) - start >= _HEADER.size:
        length, complement, crc = _HEADER.unpack_from(data, start)
        end = start + _HEADER.size + length
        record = data[start + _HEADER.size : end]
        if length ^ complement != _ONES:
            # A crash may leave the file with its new length and without its new contents: zeros.
            if any(data[start + _HEADER.size :]):
                raise _damage(path, start)
            break
        if end > len(data) or (end == len(data) and crc32c(record) != crc):
            break
        if crc32c(record) != crc:
            raise _damage(path, start)
        records.append(record)
        start = end
    return records, start


def _damage(path: Path, start: int) -> DamagedFileError:
    return DamagedFileError(
        f"{path} is damaged at byte {start}: restore it, or remove it together with the copy and "
        "the resume state that belong to it, and begin anew"
    )
