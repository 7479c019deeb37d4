"""One snapshot's entry in the list, and how many cursors stand there."""

from __future__ import annotations

from upr_protocol.ids import SeqNo
from upr_server.engine.snapshots.closed_snapshot import ClosedSnapshot
from upr_server.engine.snapshots.open_snapshot import OpenSnapshot


class SnapshotEntry:
    """One snapshot in the list, with the counts of the cursors that stand there.

    The entry stays when its snapshot is closed, or is replaced by a collapsed one.

    A cursor stands at the front of a snapshot, of which it has read nothing, or inside, at a
    number. The two are counted apart, because a snapshot with a cursor at its front may still take
    part in a collapse, as the first; one with a cursor inside may not.

    Attributes:
        start: The snapshot's start, which never changes.
        snapshot: The snapshot.
        front_count: Cursors that have read nothing of it.
        inside_count: Cursors that began to read it, or will from a number inside it.
        next_entry: The entry behind it; None for that of the open snapshot.
    """

    __slots__ = ("front_count", "inside_count", "next_entry", "snapshot", "start")

    def __init__(self, snapshot: OpenSnapshot) -> None:
        self.start = snapshot.start
        self.snapshot: OpenSnapshot | ClosedSnapshot = snapshot
        self.front_count = 0
        self.inside_count = 0
        self.next_entry: SnapshotEntry | None = None

    @property
    def end(self) -> SeqNo:
        """The snapshot's end; of the open one, as of now."""
        snapshot = self.snapshot
        return snapshot.end if isinstance(snapshot, ClosedSnapshot) else snapshot.high_seq

    @property
    def is_free(self) -> bool:
        """Whether no cursor stands here."""
        return not self.front_count and not self.inside_count
