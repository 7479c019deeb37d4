"""Bugs in what is kept in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Final

from tests.simulation.bugs.patch import replaced
from upr_protocol.chunk import Chunk
from upr_protocol.ids import SEQ_MAX, SeqNo
from upr_server.engine.eviction import KeyEviction
from upr_server.engine.repeated_batches import RepeatedBatches
from upr_server.engine.replica_progress import ReplicaProgress
from upr_server.engine.snapshots import manager as managers
from upr_server.engine.snapshots.cursor import Cursor
from upr_server.engine.snapshots.snapshot_entry import SnapshotEntry
from upr_server.engine.snapshots.snapshot_list import SnapshotList


@contextmanager
def ends_a_snapshot_one_early() -> Iterator[None]:
    """The last change of a snapshot is left out."""
    read: Any = Cursor.next

    def next_item(self: Cursor) -> Any:
        item = read(self)
        if type(self) is Cursor and isinstance(item, Chunk) and item.end == self._end:
            rows = list(item)
            if len(rows) > 1:
                return Chunk.build(rows[:-1], item.start, item.end)
        return item

    with replaced(Cursor, "next", next_item):
        yield


@contextmanager
def collapses_past_a_cursor() -> Iterator[None]:
    """Snapshots are collapsed in which somebody reads."""

    def run_to_collapse(
        entries: Sequence[SnapshotEntry], entry: SnapshotEntry, *, shortest: bool = False
    ) -> list[SnapshotEntry] | None:
        del entry, shortest
        return list(entries[:-1]) if len(entries) > 2 else None

    with (
        replaced(managers, "run_to_collapse", run_to_collapse),
        replaced(SnapshotList, "is_run_free", lambda _self, _run: True),
    ):
        yield


@contextmanager
def evicts_an_unindexed_key() -> Iterator[None]:
    """Keys are forgotten that the disk's index does not know yet."""
    # A new number each time: a sweep begins only when more may be forgotten than before.
    numbers = count(SEQ_MAX // 2)
    with replaced(KeyEviction, "pinned", property(lambda _self: next(numbers))):
        yield


@contextmanager
def forgets_its_answers() -> Iterator[None]:
    """A batch that is sent again has its effect again."""
    with (
        replaced(RepeatedBatches, "is_new", lambda *_: True),
        replaced(RepeatedBatches, "answer_unless_new", lambda *_: None),
    ):
        yield


@contextmanager
def forgets_answers_on_replicas() -> Iterator[None]:
    """A replica does not keep what publishers were answered."""
    with replaced(RepeatedBatches, "add_received", lambda *_: None):
        yield


@contextmanager
def counts_itself_as_a_replica() -> Iterator[None]:
    """What is to be replicated is acknowledged before a replica has it."""

    def reached(_self: ReplicaProgress, _copies: int, *, persisted: bool = False) -> SeqNo:
        del persisted
        return SEQ_MAX

    with replaced(ReplicaProgress, "reached", reached):
        yield


BUGS: Final = (
    ends_a_snapshot_one_early,
    collapses_past_a_cursor,
    evicts_an_unindexed_key,
    forgets_its_answers,
    forgets_answers_on_replicas,
    counts_itself_as_a_replica,
)
