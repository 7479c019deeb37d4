"""What can go wrong with a disk, and what it means for the server."""

from __future__ import annotations

from upr_protocol.errors import UprError


class StorageError(UprError):
    """The root of what goes wrong with a disk."""


class DataDirectoryError(StorageError):
    """The data directory cannot be used; nothing in it was changed."""


class DiskFullError(StorageError):
    """There is no room. What was to be written was not, and may be written again later."""


class CorruptionError(StorageError):
    """What was read is not what was written: its checksum says so. It is never served."""


class StoreFailedError(StorageError):
    """The store has failed and says nothing any more: the server must stop.

    What it had acknowledged is on disk; whether what was under way is, nobody knows before the next
    start.
    """
