"""The snapshots of one partition in memory, and the cursors that read them."""

from upr_server.engine.snapshots.cursor import (
    BackfillNeeded,
    Cursor,
    CursorItem,
    PersistenceCursor,
    SnapshotEndItem,
    SnapshotStartItem,
)
from upr_server.engine.snapshots.document_arrays import (
    ARRAY_BYTES_MAX,
    ARRAY_MUTATIONS_MAX,
    ARRAY_SPAN_MAX,
    SingleArray,
)
from upr_server.engine.snapshots.document_list import (
    LARGE_VALUE_BYTES,
    PUBLISHED_BYTES_MIN,
    PUBLISHED_MUTATIONS_MIN,
)
from upr_server.engine.snapshots.manager import MutationManager, Registration
from upr_server.engine.snapshots.open_snapshot import EvaluatedArray
from upr_server.engine.snapshots.snapshot_list import RETURNED_BYTES, NotInMemory, SnapshotList

__all__ = [
    "ARRAY_BYTES_MAX",
    "ARRAY_MUTATIONS_MAX",
    "ARRAY_SPAN_MAX",
    "LARGE_VALUE_BYTES",
    "PUBLISHED_BYTES_MIN",
    "PUBLISHED_MUTATIONS_MIN",
    "RETURNED_BYTES",
    "BackfillNeeded",
    "Cursor",
    "CursorItem",
    "EvaluatedArray",
    "MutationManager",
    "NotInMemory",
    "PersistenceCursor",
    "Registration",
    "SingleArray",
    "SnapshotEndItem",
    "SnapshotList",
    "SnapshotStartItem",
]
