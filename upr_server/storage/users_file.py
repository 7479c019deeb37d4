"""The file with the users of the cluster, and the mark that there must be one.

Somebody who reads it can try passwords, and nothing more: it has verifiers, and no passwords. So
nobody but the server's user may read it.

Without users a server serves everybody. So an empty file beside it says that there were users once:
if only the file with the users is deleted, nothing is served.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

from upr_protocol.durable_files import FULL_DISK_ERRORS, replace_file
from upr_server.storage.errors import CorruptionError, DataDirectoryError, DiskFullError
from upr_server.storage.records import with_checksum, without_checksum

_KEY: Final = b"users"
_MODE: Final = 0o600


class UsersFile:
    """The file.

    Args:
        folder: The data directory.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "users"
        self._mark = folder / "had-users"

    def load(self) -> bytes:
        """Reads the file; empty if there never were users. A symbolic link that leads to no file is
        an error: its disk may be missing.

        Raises:
            CorruptionError: It is damaged.
            DataDirectoryError: It was deleted, cannot be read, or others can read it, too.
        """
        if self.is_missing():
            if not self._mark.exists():
                return b""
            raise DataDirectoryError(
                f"{self._path} was deleted, or `upr-server init` did not finish; without it "
                "everybody could do everything: copy it from a backup, or run `upr-server init` to "
                "get the users from another node or to "
                f"begin with new ones; to serve without users, remove {self._mark}, too"
            )
        data = self._read()
        # A directory may be older than the mark. A full disk does not keep it from serving.
        with suppress(DiskFullError):
            self._make_mark()
        return data

    def is_missing(self) -> bool:
        """Whether there is no file, and no symbolic link in its place.

        Raises:
            DataDirectoryError: The folder cannot be read.
        """
        try:
            self._path.lstat()
        except FileNotFoundError:
            return True
        except OSError as error:
            raise self._unreadable(error) from error
        return False

    def _read(self) -> bytes:
        try:
            mode = self._path.stat().st_mode & 0o777
            stored_value = self._path.read_bytes()
        except OSError as error:
            raise self._unreadable(error) from error
        if mode & 0o077:
            raise DataDirectoryError(
                f"{self._path} has the mode {mode:o}: others can read or change who may do what; "
                f"run chmod {_MODE:o} on it, and change the passwords if somebody may have read it"
            )
        try:
            return without_checksum(_KEY, stored_value)
        except CorruptionError as error:
            raise CorruptionError(
                f"{self._path} is damaged; copy it from a backup, or move it away, and run "
                "`upr-server init` to get the users from another node or to begin with new ones"
            ) from error

    def _unreadable(self, error: OSError) -> DataDirectoryError:
        return DataDirectoryError(f"{self._path} cannot be read: {error.strerror}")

    def save(self, data: bytes) -> None:
        """Writes the file: all of it, or nothing. It must be there from now on.

        Raises:
            DiskFullError: There is no room.
            DataDirectoryError: It cannot be written.
        """
        self._make_mark()
        self._replace(self._path, with_checksum(_KEY, data))

    def _make_mark(self) -> None:
        if not self._mark.exists():
            self._replace(self._mark, b"")

    def _replace(self, path: Path, data: bytes) -> None:
        try:
            replace_file(path, data, mode=_MODE)
        except OSError as error:
            if error.errno in FULL_DISK_ERRORS:
                raise DiskFullError(f"the disk is full: {error}; make room there") from error
            raise DataDirectoryError(f"{path} cannot be written: {error.strerror}") from error
