"""What the engine costs a mutation: `python benchmarks/engine_ingest.py [runs]`.

The work is the standard one of docs: 12-byte keys, 100-byte values, 100,000 keys drawn uniformly,
64 partitions (so about 1,562 keys in each), batches of one partition. Each line gives the median of
the runs and their spread, in nanoseconds of processor time a mutation.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from itertools import count
from random import Random
from statistics import median
from time import process_time_ns, time
from typing import Final

from upr_protocol.chunk import Bundle, BundleRun, Chunk, CounterDelta, Mutation, chunk_of_plain_sets
from upr_protocol.hashing import partition_of
from upr_protocol.ids import NO_PARTITION, HistoryId, Operation, PartitionId, SeqNo
from upr_protocol.wire import Mutate, encode_reply
from upr_server.engine import Bucket, BundleBatches, Partition, apply_set_runs, batch_of

KEYS: Final = 100_000
VALUE: Final = bytes(100)
WRITER: Final = b"writer of a load"


class Work:
    """Batches for each partition, encoded as they would come from a publisher."""

    def __init__(self, partitions: int, batch: int, total: int, seed: int = 1) -> None:
        random = Random(seed)
        keys: list[list[bytes]] = [[] for _ in range(partitions)]
        for index in range(KEYS if partitions > 1 else KEYS // 64):
            key = b"key:%08d" % index
            keys[partition_of(key, partitions)].append(key)
        self.mutations = total
        self.batches: list[tuple[int, bytes]] = []
        for index in range(total // batch):
            partition = index % partitions
            chosen_keys = random.choices(keys[partition], k=batch)
            self.batches.append(
                (partition, bytes(chunk_of_plain_sets(chosen_keys, [VALUE] * batch)))
            )


def new_bucket(partitions: int) -> Bucket:
    ids = count(1)
    return Bucket("bench", new_history_id=lambda: HistoryId(next(ids)), partition_count=partitions)


def ingest(work: Work, partitions: int) -> tuple[float, Bucket]:
    """Nanoseconds a mutation for taking in all batches, and the bucket afterwards."""
    bucket = new_bucket(partitions)
    members = bucket.partitions
    now = time()
    # One object a frame, as a connection would receive it.
    frames = [(members[partition], bytes(bytearray(frame))) for partition, frame in work.batches]
    started_at = process_time_ns()
    for partition, frame in frames:
        partition.mutate(batch_of(Chunk(frame)), now=now)
    return (process_time_ns() - started_at) / work.mutations, bucket


def ingest_of(partitions: int, batch: int, total: int) -> Callable[[], float]:
    work = Work(partitions, batch, total)
    return lambda: ingest(work, partitions)[0]


def bundles_of(partitions: int, rows: int, total: int) -> Callable[[], float]:
    """Bundles of random keys with tokens, from frame to reply."""
    random = Random(1)
    keys: list[list[bytes]] = [[] for _ in range(partitions)]
    for index in range(KEYS):
        key = b"key:%08d" % index
        keys[partition_of(key, partitions)].append(key)
    every_key = [(partition, key) for partition, members in enumerate(keys) for key in members]
    bodies: list[bytes] = []
    for counter in range(1, total // rows + 1):
        chosen_keys: dict[int, list[bytes]] = {}
        for partition, key in sorted(random.choices(every_key, k=rows)):
            chosen_keys.setdefault(partition, []).append(key)
        bundle = Bundle(
            chunk_of_plain_sets(
                [key for run in chosen_keys.values() for key in run], [VALUE] * rows
            ),
            [
                BundleRun(PartitionId(partition), len(run), counter)
                for partition, run in chosen_keys.items()
            ],
        )
        bodies.append(b"".join(map(bytes, Mutate(bundle, WRITER).body_buffers())))

    def run() -> float:
        bucket = new_bucket(partitions)
        now = time()
        frames = [bytes(bytearray(body)) for body in bodies]
        started_at = process_time_ns()
        for frame in frames:
            message = Mutate.parse(frame, NO_PARTITION, 1, 0)
            bundle, batches = message.bundle, BundleBatches(message.bundle, message.writer)
            runs = apply_set_runs(bucket, batches.columns, bundle.directory, batches.writer, 0, now)
            assert not runs.remaining_indexes, "each run is plain, short and new"
            encode_reply(message.opaque, runs.answer_rows)
        return (process_time_ns() - started_at) / total

    return run


def increments(batch: int, total: int) -> float:
    partition = new_bucket(1).partitions[0]
    delta = CounterDelta(1).encode()
    random = Random(2)
    rows = [Mutation(Operation.INCREMENT, b"counter:%04d" % n, delta) for n in range(1000)]
    chunks = [Chunk.build(random.choices(rows, k=batch)) for _ in range(total // batch)]
    now = time()
    started_at = process_time_ns()
    for chunk in chunks:
        partition.mutate(batch_of(chunk), now=now)
    return (process_time_ns() - started_at) / total


def read_all(partition: Partition) -> Iterator[Chunk]:
    cursor = partition.manager.register("bench", SeqNo(0)).cursor
    while (item := cursor.next()) is not None:
        if isinstance(item, Chunk):
            yield item


def streaming_of(work: Work, partitions: int) -> Callable[[], float]:
    def run() -> float:
        _, bucket = ingest(work, partitions)
        started_at = process_time_ns()
        rows = sum(chunk.count for member in bucket.partitions for chunk in read_all(member))
        return (process_time_ns() - started_at) / rows

    return run


def followed_of(work: Work, partitions: int) -> Callable[[], float]:
    """Ingest with a consumer that reads each partition after every batch, and collapsing."""

    def run() -> float:
        bucket = new_bucket(partitions)
        cursors = [m.manager.register("bench", SeqNo(0)).cursor for m in bucket.partitions]
        now = time()
        started_at = process_time_ns()
        for partition, frame in work.batches:
            bucket.partitions[partition].mutate(batch_of(Chunk(frame)), now=now)
            cursor = cursors[partition]
            while cursor.next() is not None:
                pass
            while bucket.collapse_step():
                pass
        return (process_time_ns() - started_at) / work.mutations

    return run


def distinct(total: int) -> Work:
    work = Work(1, 1000, 1000)
    work.mutations = total
    work.batches = [
        (
            0,
            bytes(
                chunk_of_plain_sets(
                    [b"key:%08d" % n for n in range(start, start + 1000)], [VALUE] * 1000
                )
            ),
        )
        for start in range(0, total, 1000)
    ]
    return work


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    rows: list[tuple[str, Callable[[], float]]] = [
        ("1,000 a batch, 64 partitions", ingest_of(64, 1000, 1_000_000)),
        ("1,000 a batch, 1 partition", ingest_of(1, 1000, 500_000)),
        ("16 a batch, 64 partitions", ingest_of(64, 16, 320_000)),
        ("16 a batch, 1 partition", ingest_of(1, 16, 320_000)),
        ("bundles of 1,024, 64 partitions", bundles_of(64, 1024, 320_000)),
        ("1 a batch, 64 partitions", ingest_of(64, 1, 64_000)),
        ("increments, 100 a batch", lambda: increments(100, 100_000)),
        ("increments, 1 a batch", lambda: increments(1, 20_000)),
        ("closing and encoding, deduplicated", streaming_of(Work(64, 1000, 640_000), 64)),
        ("closing and encoding, all distinct", streaming_of(distinct(200_000), 1)),
        ("1,000 a batch, followed and collapsed", followed_of(Work(64, 1000, 640_000), 64)),
        ("16 a batch, followed and collapsed", followed_of(Work(64, 16, 128_000), 64)),
    ]
    for name, run in rows:
        gc.collect()
        results = sorted(run() for _ in range(runs))
        print(f"{name:42}{median(results):9.0f} ns  ({results[0]:.0f} to {results[-1]:.0f})")


if __name__ == "__main__":
    main()
