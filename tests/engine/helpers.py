"""Small things that the engine's tests share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count

from upr_protocol.chunk import Chunk, CounterDelta, Mutation, chunk_of_plain_sets
from upr_protocol.errors import Status
from upr_protocol.ids import HistoryId, Operation, SeqNo
from upr_server.engine import (
    NOTHING_FETCHED,
    Bucket,
    Cursor,
    CursorItem,
    FetchedItems,
    MutateResult,
    Partition,
    SnapshotEndItem,
    SnapshotStartItem,
    WriterToken,
    batch_of,
)

NOW = 1_000.0


def new_bucket(partitions: int = 1) -> Bucket:
    ids = count(1)
    return Bucket("b", new_history_id=lambda: HistoryId(next(ids)), partition_count=partitions)


def new_partition() -> Partition:
    return new_bucket().partitions[0]


def put(partition: Partition, *keys: bytes, value: bytes = b"v", now: float = NOW) -> MutateResult:
    """One batch that sets `keys`."""
    return partition.mutate(batch_of(chunk_of_plain_sets(keys, [value] * len(keys))), now=now)


def send(partition: Partition, *rows: Mutation, now: float = NOW) -> MutateResult:
    """One batch of `rows`."""
    return partition.mutate(batch_of(Chunk.build(rows)), now=now)


def get_item(
    partition: Partition, key: bytes, now: float = NOW, fetched: FetchedItems = NOTHING_FETCHED
) -> Mutation | None:
    """What the key holds, for which nothing may be missing."""
    assert not partition.missing_keys([key], now, fetched)
    (row,) = partition.get([key], now, fetched_items=fetched)
    return row if row.op == Operation.SET else None


def request(
    op: Operation, key: bytes = b"k", value: bytes = b"", *, cas: int = 0, expiry: int = 0
) -> Mutation:
    return Mutation(op, key, value, cas=cas, expiry=expiry)  # type: ignore[arg-type]


def cursor_at(partition: Partition, start: int = 0, end_at_least: int = 0) -> Cursor:
    registration = partition.manager.register(
        "test", SeqNo(start), end_at_least=SeqNo(end_at_least)
    )
    assert registration.backfill is None
    return registration.cursor


def items(cursor: Cursor) -> Iterator[CursorItem]:
    """What the cursor hands on until it waits."""
    while (item := cursor.next()) is not None:
        yield item


def persist(partition: Partition) -> None:
    """The disk takes all there is, and commits it."""
    disk = partition.manager.persistence
    list(items(disk))
    if disk.seq > disk.committed_seq:
        disk.commit(disk.seq)


def free(partition: Partition) -> int:
    """Frees all that may be freed; returns how many snapshots."""
    freed = 0
    while partition.manager.free_oldest():
        freed += 1
        partition.check_invariants()
    return freed


def chunks(partition: Partition) -> list[Chunk]:
    """All chunks, as a new cursor is handed them."""
    cursor = cursor_at(partition)
    chunks_read = [item for item in items(cursor) if isinstance(item, Chunk)]
    cursor.close()
    return chunks_read


def transcript(handed_on: Iterable[CursorItem]) -> str:
    """What a cursor handed on, in one line: `(0,3] key@2 other@3 .` and so on.

    A tombstone has a minus before its key, an expiry a tilde; a range in which keys may repeat ends
    with an asterisk; a dot is the snapshot's end.
    """
    words: list[str] = []
    marks = {Operation.SET: "", Operation.DELETE: "-", Operation.EXPIRE: "~"}
    for item in handed_on:
        if isinstance(item, SnapshotStartItem):
            words.append(f"({item.start},{item.end}]{'*' if item.may_repeat else ''}")
        elif isinstance(item, Chunk):
            words += [f"{marks[row.op]}{row.key.decode()}@{row.seq}" for row in item]
        elif isinstance(item, SnapshotEndItem):
            words.append(".")
        else:
            words.append(f"backfill ({item.start},{item.end}]")
    return " ".join(words)


def read(partition: Partition, start: int = 0) -> str:
    """The transcript of a new cursor that reads all there is."""
    cursor = cursor_at(partition, start)
    text = transcript(items(cursor))
    cursor.close()
    return text


MAXIMUM = (1 << 64) - 1
SET, DELETE, ADD, REPLACE = Operation.SET, Operation.DELETE, Operation.ADD, Operation.REPLACE
APPEND, PREPEND, TOUCH = Operation.APPEND, Operation.PREPEND, Operation.TOUCH
INCREMENT, DECREMENT = Operation.INCREMENT, Operation.DECREMENT


def delta(by: int = 1, initial: int = 0, create: bool = True) -> bytes:
    return CounterDelta(by, initial, create).encode()


def value_of(partition: Partition, key: bytes = b"k", now: float = NOW) -> bytes | None:
    item = get_item(partition, key, now)
    return None if item is None else item.value


def failures_of(
    partition: Partition, *rows: Mutation, now: float = NOW
) -> Sequence[tuple[int, Status]]:
    return send(partition, *rows, now=now).failures


def put_as(partition: Partition, counter: int, writer: int = 0) -> MutateResult:
    token = WriterToken(writer.to_bytes(16, "little"), counter)
    return partition.mutate(batch_of(chunk_of_plain_sets([b"k"], [b"v"]), token), now=NOW)
