"""What the observer of buckets is told: creations, deletions, updates and design documents."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest

from tests.engine.helpers import NOW, put, request, send
from tests.kit.placed_keys import key_in
from upr_protocol.chunk import RUN_BYTES, BundleRun, Chunk, chunk_of_plain_sets, encode_runs
from upr_protocol.errors import Status
from upr_protocol.ids import (
    DESIGN_PREFIX,
    NO_WRITER,
    HistoryId,
    Operation,
    PartitionId,
    PartitionState,
    SeqNo,
)
from upr_server.engine import Bucket, Buckets, CheckedChunk, Partition, apply_set_runs

DESIGN = DESIGN_PREFIX + b"one"
OTHER_DESIGN = DESIGN_PREFIX + b"other"


class Observer:
    """Records what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str] | list[bytes]] = []
        self.batch_counts: list[int] = []

    def bucket_created(self, bucket: Bucket) -> None:
        self.calls.append(("created", bucket.name))

    def bucket_deleted(self, bucket: Bucket) -> None:
        self.calls.append(("deleted", bucket.name))

    def bucket_updated(self, bucket: Bucket, designs: Sequence[bytes], batch_count: int) -> None:
        assert bucket.name == "b"
        self.calls.append(list(designs))
        self.batch_counts.append(batch_count)

    def news(self) -> list[tuple[str, str] | list[bytes]]:
        """What it was told since the last call."""
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def observer() -> Observer:
    return Observer()


@pytest.fixture
def buckets(observer: Observer) -> Buckets:
    ids = count(1)
    return Buckets(lambda: HistoryId(next(ids)), observer=observer)


@pytest.fixture
def partition(buckets: Buckets, observer: Observer) -> Partition:
    (new_partition,) = buckets.create("b", 1).partitions
    assert observer.news() == [("created", "b")]
    return new_partition


def test_runs_that_are_taken_in_together_are_told_of_together(
    buckets: Buckets, observer: Observer
) -> None:
    bucket = buckets.create("b", 2)
    keys = [key_in(0, 2, DESIGN), key_in(1, 2, b"a"), key_in(1, 2, b"b")]
    columns = CheckedChunk(chunk_of_plain_sets(keys, [b"v"] * 3))
    directory = encode_runs([BundleRun(PartitionId(partition), 1) for partition in (0, 1, 2)])
    observer.news()
    runs = apply_set_runs(bucket, columns, directory, NO_WRITER, 0, NOW)
    assert (observer.news(), observer.batch_counts) == ([[keys[0]]], [2])
    bucket.check_invariants()
    left = directory[RUN_BYTES * 2 :]
    assert runs.remaining_indexes == [2], "there is no such partition"
    apply_set_runs(bucket, columns, left, NO_WRITER, 0, NOW, first_row=2)
    assert not observer.news(), "nothing was taken in"


def test_creations_and_deletions_are_told_and_recovered_buckets_are_not(
    buckets: Buckets, observer: Observer
) -> None:
    buckets.create("new", 1)
    buckets.create("recovered", 1, is_new=False)
    buckets.delete("recovered")
    assert observer.news() == [("created", "new"), ("deleted", "recovered")]


def test_each_batch_that_changes_something_is_told_with_its_design_documents(
    partition: Partition, observer: Observer
) -> None:
    put(partition, b"k", DESIGN, b"l", OTHER_DESIGN)
    put(partition, b"k")
    assert observer.news() == [[DESIGN, OTHER_DESIGN], []]
    result = send(
        partition,
        request(Operation.ADD, DESIGN),
        request(Operation.DELETE, OTHER_DESIGN),
        request(Operation.ADD, b"new"),
    )
    assert result.failures == [(0, Status.EXISTS)]
    assert observer.news() == [[OTHER_DESIGN]], "what failed has not changed"
    send(partition, request(Operation.ADD, DESIGN))
    assert observer.news() == [], "nothing has changed"


def test_a_batch_with_a_row_that_fails_is_told_with_its_design_documents_and_expires(
    partition: Partition, observer: Observer
) -> None:
    """Whole columns say nothing of such a batch, so each row is looked at."""
    result = send(
        partition,
        request(Operation.SET, b""),
        request(Operation.SET, DESIGN),
        request(Operation.SET, b"k", expiry=int(NOW) + 1),
    )
    assert result.failures == [(0, Status.BAD_KEY)]
    assert observer.news() == [[DESIGN]]
    assert partition.has_expired(NOW + 1)


def test_expired_items_are_told(partition: Partition, observer: Observer) -> None:
    rows = [request(Operation.SET, key, expiry=int(NOW) + 5) for key in (b"k", DESIGN)]
    send(partition, *rows)
    observer.news()
    assert not partition.has_expired(NOW + 4)
    assert partition.expire(NOW + 4) == 0
    assert observer.news() == []
    assert partition.has_expired(NOW + 5)
    assert partition.expire(NOW + 5) == 2
    assert observer.news() == [[DESIGN]]


def test_only_the_active_has_something_to_expire(partition: Partition) -> None:
    send(partition, request(Operation.SET, b"k", expiry=int(NOW) + 5))
    assert partition.has_expired(NOW + 5)
    partition.change_state(PartitionState.REPLICA, partition.failover_log)
    assert not partition.has_expired(NOW + 5)


def test_what_a_replica_takes_in_and_undoes_is_told(
    partition: Partition, observer: Observer
) -> None:
    chunks = [
        chunk_of_plain_sets([b"k", DESIGN], [b""] * 2),
        chunk_of_plain_sets([b"not" + DESIGN, DESIGN_PREFIX[:1]], [b""] * 2),
        chunk_of_plain_sets([b"k"], [b""]),
    ]
    partition.updates.notify_chunks(chunks)
    partition.updates.notify_chunks(chunks[1:])
    assert observer.news() == [[DESIGN], []]
    partition.updates.notify_chunks(())
    assert observer.news() == []
    partition.truncate(SeqNo(0))
    assert observer.news() == [[DESIGN_PREFIX]], "any of them may have changed"


def test_a_deleted_bucket_tells_nothing_more(
    buckets: Buckets, partition: Partition, observer: Observer
) -> None:
    buckets.delete("b")
    observer.news()
    put(partition, DESIGN)
    partition.updates.notify_chunks([Chunk.build([request(Operation.SET, DESIGN)])])
    partition.updates.notify_undone()
    assert observer.news() == []
