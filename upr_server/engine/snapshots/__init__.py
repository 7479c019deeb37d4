"""The snapshots of one partition in memory, and the cursors that read them."""

from upr_server.engine.snapshots.cursor import (
    BackfillNeeded,
    Cursor,
    CursorItem,
    PersistenceCursor,
    SnapshotEndItem,
    SnapshotStartItem,
)
from upr_server.engine.snapshots.manager import MutationManager, Registration
from upr_server.engine.snapshots.snapshot_list import NotInMemory, SnapshotList

__all__ = [
    "BackfillNeeded",
    "Cursor",
    "CursorItem",
    "MutationManager",
    "NotInMemory",
    "PersistenceCursor",
    "Registration",
    "SnapshotEndItem",
    "SnapshotList",
    "SnapshotStartItem",
]
