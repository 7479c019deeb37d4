"""The file in which a clean stop leaves the queues of the event bus for the next start.

It exists only while no server runs. If a crash left an older one behind, the next start would
take it for the present, and consumers would miss what they were told in between. So the start
removes the file before anything is told.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from upr_protocol.durable_files import FULL_DISK_ERRORS, replace_file, sync_path
from upr_server.storage.errors import DataDirectoryError, DiskFullError
from upr_server.storage.records import with_checksum, without_checksum

_KEY: Final = b"event-queues"


class EventQueueFile:
    """The file.

    Args:
        folder: The data directory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "event-queues"

    def take(self) -> bytes:
        """Reads the file and removes it; empty when it is not there.

        Raises:
            CorruptionError: It is damaged; it is removed nevertheless.
            DataDirectoryError: It cannot be read, or not be removed.
        """
        try:
            if not self._path.exists():
                return b""
            stored_value = self._path.read_bytes()
            self._path.unlink()
            sync_path(self._folder)
        except OSError as error:
            raise DataDirectoryError(
                f"{self._path} cannot be read and removed: {error.strerror}; remove it, and event "
                "consumers start over"
            ) from error
        return without_checksum(_KEY, stored_value)

    def save(self, data: bytes) -> None:
        """Writes the file: all of it, or nothing.

        Raises:
            DiskFullError: There is no room.
            DataDirectoryError: It cannot be written.
        """
        try:
            replace_file(self._path, with_checksum(_KEY, data))
        except OSError as error:
            if error.errno in FULL_DISK_ERRORS:
                raise DiskFullError(f"the disk is full: {error}; make room there") from error
            raise DataDirectoryError(f"{self._path} cannot be written: {error.strerror}") from error
