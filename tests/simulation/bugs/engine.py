"""Bugs in the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, Final

from tests.simulation.bugs.patch import replaced
from tests.simulation.bugs.planted_bug import planted
from tests.simulation.profiles import (
    FAILOVERS,
    LAGGING_REPLICAS,
    LOST_ANSWERS,
    REPEATED_TASKS,
    SLOW_CONSUMERS,
)
from upr_protocol.chunk import Chunk
from upr_protocol.ids import SEQ_MAX, SeqNo
from upr_server.engine.eviction import KeyEviction
from upr_server.engine.partition import Partition
from upr_server.engine.repeated_batches import RepeatedBatches
from upr_server.engine.replica_progress import ReplicaProgress
from upr_server.engine.snapshots import manager as managers
from upr_server.engine.snapshots.cursor import Cursor
from upr_server.engine.snapshots.snapshot_entry import SnapshotEntry
from upr_server.engine.snapshots.snapshot_list import SnapshotList


@planted(FAILOVERS)
def drop_last_row_of_chunk() -> Iterator[None]:
    """A cursor leaves out the last row of each chunk that has several."""
    read: Any = Cursor.next
    read_whole: Any = Cursor.next_whole_snapshot

    def next_item(self: Cursor) -> Any:
        return without_last_row(self, read(self))

    def next_whole_snapshot(self: Cursor) -> Any:
        return without_last_row(self, read_whole(self))

    def without_last_row(self: Cursor, item: Any) -> Any:
        if type(self) is Cursor and isinstance(item, Chunk):
            rows = list(item)
            if len(rows) > 1:
                return Chunk.build(rows[:-1], item.start, item.end)
        return item

    with (
        replaced(Cursor, "next", next_item),
        replaced(Cursor, "next_whole_snapshot", next_whole_snapshot),
    ):
        yield


@planted(FAILOVERS)
def collapse_under_cursor() -> Iterator[None]:
    """Snapshots are collapsed while cursors read them."""

    def entries_to_collapse(
        entries: Sequence[SnapshotEntry], entry: SnapshotEntry, **_: bool
    ) -> list[SnapshotEntry] | None:
        del entry
        return list(entries[:-1]) if len(entries) > 2 else None

    with (
        replaced(managers, "entries_to_collapse", entries_to_collapse),
        replaced(SnapshotList, "is_run_free", lambda _self, _run: True),
    ):
        yield


@planted(SLOW_CONSUMERS, seeds=20)
def evict_unindexed_key() -> Iterator[None]:
    """The key table evicts keys that the disk's index does not have yet."""
    # A new number each time: a sweep begins only when more may be forgotten than before.
    numbers = count(SEQ_MAX // 2)
    with replaced(KeyEviction, "pinned_seq", property(lambda _self: next(numbers))):
        yield


@planted(LOST_ANSWERS)
def apply_repeated_batch() -> Iterator[None]:
    """A batch that a publisher sends again is applied again."""
    with (
        replaced(RepeatedBatches, "is_new", lambda *_: True),
        replaced(RepeatedBatches, "answer_unless_new", lambda *_: None),
    ):
        yield


@planted(REPEATED_TASKS)
def lose_replicated_answers() -> Iterator[None]:
    """A replica does not store the answers that publishers were given."""
    with replaced(RepeatedBatches, "add_received", lambda *_: None):
        yield


@planted(FAILOVERS)
def fail_unexpectedly() -> Iterator[None]:
    """The server fails to apply a batch, and answers that its log has the cause."""

    def mutate(*_arguments: Any, **_options: Any) -> Any:
        raise RuntimeError("a planted bug")

    with replaced(Partition, "mutate", mutate):
        yield


@planted(LAGGING_REPLICAS)
def acknowledge_before_replication() -> Iterator[None]:
    """`replicated` writes are acknowledged before a replica has them."""

    def reached(_self: ReplicaProgress, _copies: int, *, persisted: bool = False) -> SeqNo:
        del persisted
        return SEQ_MAX

    with replaced(ReplicaProgress, "seq_reached_by", reached):
        yield


BUGS: Final = (
    drop_last_row_of_chunk,
    collapse_under_cursor,
    evict_unindexed_key,
    apply_repeated_batch,
    lose_replicated_answers,
    fail_unexpectedly,
    acknowledge_before_replication,
)
