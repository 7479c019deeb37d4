"""The file with the users of the cluster.

Whoever reads it can try passwords, and nothing more: it has verifiers, and no passwords. So nobody
but the server's user may read it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from upr_protocol.durable_files import replace_file
from upr_server.storage.errors import DataDirectoryError, DiskFullError
from upr_server.storage.lmdb_map import FULL
from upr_server.storage.records import seal, unseal

_KEY: Final = b"users"
_MODE: Final = 0o600


class UsersFile:
    """The file.

    Args:
        folder: The data directory.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "users"

    def load(self) -> bytes:
        """Reads the file; empty when it is not there. A symbolic link that leads to no file is an
        error: its disk may be missing, and without users a server serves everybody.

        Raises:
            CorruptionError: It is damaged.
            DataDirectoryError: It cannot be read, or others can read it, too.
        """
        try:
            self._path.lstat()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise self._unreadable(error) from error
        try:
            mode = self._path.stat().st_mode & 0o777
            sealed = self._path.read_bytes()
        except OSError as error:
            raise self._unreadable(error) from error
        if mode & 0o077:
            raise DataDirectoryError(
                f"{self._path} has the mode {mode:o}: others can read or change who may do what; "
                f"run chmod {_MODE:o} on it, and change the passwords if somebody may have read it"
            )
        return unseal(_KEY, sealed)

    def _unreadable(self, error: OSError) -> DataDirectoryError:
        return DataDirectoryError(f"{self._path} cannot be read: {error.strerror}")

    def save(self, data: bytes) -> None:
        """Writes the file: all of it, or nothing.

        Raises:
            DiskFullError: There is no room.
            DataDirectoryError: It cannot be written.
        """
        try:
            replace_file(self._path, seal(_KEY, data), mode=_MODE)
        except OSError as error:
            if error.errno in FULL:
                raise DiskFullError(f"the disk is full: {error}") from error
            raise DataDirectoryError(f"{self._path} cannot be written: {error.strerror}") from error
