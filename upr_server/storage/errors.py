"""The errors of the disk, and what each means for the server."""

from __future__ import annotations

from upr_protocol.errors import UprError


def encodable(text: str) -> str:
    """A text that names a file, with escapes in place of bytes of the name that are no UTF-8. As
    Python gives such a name, it cannot be sent from one process to another."""
    return text.encode(errors="backslashreplace").decode()


class StorageError(UprError):
    """The base of all errors of the disk."""


class DataDirectoryError(StorageError):
    """The data directory cannot be used; nothing in it was changed."""


class DiskFullError(StorageError):
    """There is not enough space. Nothing was written, and the caller may retry later."""


class CorruptionError(StorageError):
    """What was read is not what was written: its checksum does not match. It is never served."""


class StoreFailedError(StorageError):
    """The store has failed and acknowledges nothing more: the server must stop.

    What it had acknowledged is on disk. Whether the changes under way are on disk shows only at the
    next start.
    """
