"""A small data directory with every kind of record, and what reading it should return."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

import msgspec

from tests.kit.answer_rows import pack_rows
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.ids import Cas, Operation, PartitionState, SeqNo
from upr_server.engine import FetchRequest
from upr_server.storage.bucket_storage import BucketStorage
from upr_server.storage.compaction import Compaction
from upr_server.storage.directory import DataDirectory, prepare
from upr_server.storage.partition_write import PartitionWrite
from upr_server.storage.records import BucketRecord, LeaseRecord, PartitionRecord
from upr_server.storage.stored_bucket import StoredBucket

BUCKET: Final = "planes"
PARTITIONS: Final = 3
KEYS: Final = 90
EXPIRY: Final = 2_000_000_000
PLENTY: Final = 1 << 40


def key_of(key_number: int) -> bytes:
    return b"key %d %s" % (key_number, b"k" * (key_number % 40))


ABSENT: Final = [key_of(index) for index in range(1000, 1020)]


def make(path: Path) -> None:
    """Makes the directory: a bucket whose log has many versions, chunks of all sizes, tombstones,
    expiry times, answers to publishers, a lease, and a partition that was compacted."""
    prepare(path)
    directory = DataDirectory(path, bytes_max=1 << 30)
    record = BucketRecord(BUCKET, PARTITIONS, 1 << 26)
    start = PartitionRecord(PartitionState.ACTIVE, ((7, 0),), SeqNo(0), 0)

    def fill(log: object, index: object) -> None:
        storage = BucketStorage(log, index)  # type: ignore[arg-type]
        storage.log.create(record, [start] * PARTITIONS)

    directory.create(BUCKET, fill)
    storage = BucketStorage(*directory.open(BUCKET))
    storage.open()
    chance = random.Random(4)
    for turn in range(24):
        storage.commit(
            [_write(storage, partition, turn, chance) for partition in range(PARTITIONS)]
        )
        if turn % 4 == 2:
            for partition in range(PARTITIONS):
                storage.index.follow_log(partition, 1 << 20)
        if turn == 15:
            _compact(storage, 0, purge_before_cas=0)
            _compact(storage, 1, purge_before_cas=400)
    lease = LeaseRecord(5, "a consumer", ((1, 0, storage.log.high_seq(1)),), 60, EXPIRY)
    storage.log.put_lease(lease)
    for partition in range(PARTITIONS):
        storage.index.follow_log(partition, 1 << 20)
    storage.log.mark_clean_stop()
    storage.close()


def _write(
    storage: BucketStorage, partition: int, turn: int, chance: random.Random
) -> PartitionWrite:
    high = storage.log.high_seq(partition)
    count = chance.choice([1, 3, 20, 40])
    rows = []
    for position in range(count):
        seq = high + 1 + position
        operation = chance.choice([Operation.SET, Operation.SET, Operation.SET, Operation.DELETE])
        value, expiry = b"", 0
        if operation == Operation.SET:
            value = chance.randbytes(chance.choice([0, 8, 60, 200, 300 if turn % 5 else 3000]))
            expiry = chance.choice([0, 0, EXPIRY + seq])
        key = key_of(chance.randrange(KEYS))
        rows.append(Mutation(operation, key, value, SeqNo(seq), Cas(seq * 2), position, expiry))
    chunk = Chunk.build(rows, high, SeqNo(high + count))
    log = ((7, 0),) if turn < 10 else ((9, 1), (7, 0))
    record = PartitionRecord(PartitionState.ACTIVE, log, chunk.end, chunk.end * 2)
    writer = b"writer of %d......" % partition
    answers = [(writer, turn, b"answer %d" % turn)]
    if turn > 3:
        answers.append((writer, turn - 3, b""))
    return PartitionWrite(partition, record, [chunk], [pack_rows(answers)])


def _compact(storage: BucketStorage, partition: int, purge_before_cas: int) -> None:
    sweep = Compaction(
        storage.log, storage.index, partition, storage.index.watermark(partition).seq
    )
    is_done = False
    while not is_done:
        step = sweep.step(20_000, (), purge_before_cas)
        storage.index.apply_compaction(partition, step.purged_tombstones, 1 if step.is_done else -1)
        is_done = step.is_done


Item = Mutation | None


class Answers(msgspec.Struct):
    """What reading returns.

    Attributes:
        stored: The records.
        streams: The chunks of each partition, from 0 to its end.
        items: The item of every key, by partition.
    """

    stored: StoredBucket
    streams: list[list[bytes]]
    items: list[dict[bytes, Item]]


def wants() -> list[FetchRequest]:
    """Every key, and some keys that never existed."""
    keys = [*(key_of(index) for index in range(KEYS)), *ABSENT]
    return [FetchRequest(key, 0, True) for key in keys]


def answers(storage: BucketStorage) -> Answers:
    """What reading an undamaged directory returns."""
    stored_bucket = storage.log.load()
    streams = [
        [
            bytes(chunk)
            for chunk in storage.log.read_chunks(index, 0, partition.record.high, bytes_max=PLENTY)
        ]
        for index, partition in enumerate(stored_bucket.partitions)
    ]
    keys = [want.key for want in wants()]
    items = [
        dict(zip(keys, storage.items.find(partition, wants()), strict=True))
        for partition in range(PARTITIONS)
    ]
    return Answers(stored_bucket, streams, items)
