"""A bucket as its log has it, without the chunks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from upr_protocol.ids import SeqNo
from upr_server.storage.records import BucketRecord, LeaseRecord, PartitionRecord


class StoredAnswer(msgspec.Struct, frozen=True):
    """The answer to a publisher's batch, to be stored or deleted.

    Attributes:
        writer: The publisher's ID.
        counter: The batch's number.
        answer: The answer, encoded; empty to delete it.
    """

    writer: bytes
    counter: int
    answer: bytes


class StoredPartition(msgspec.Struct, frozen=True):
    """A partition as the disk has it.

    Attributes:
        record: Its record.
        purge_seq: Its purge number.
        tokens: Answers to publishers, by publisher and rising counter.
        indexed_seq: How far the index has followed the log.
        item_count: How many keys exist at `indexed_seq`.
        damage: Which of its records is damaged; empty for none. Then nothing is known of the
            partition, and the other fields are those of an empty one.
    """

    record: PartitionRecord
    purge_seq: SeqNo
    tokens: Sequence[StoredAnswer]
    indexed_seq: SeqNo = SeqNo(0)
    item_count: int = 0
    damage: str = ""


class StoredBucket(msgspec.Struct, frozen=True):
    """A bucket as the disk has it.

    Attributes:
        record: Its name and settings.
        is_clean: Whether it was stopped cleanly.
        partitions: Its partitions, in order.
        leases: Its leases, without those that are damaged.
        partition_map: Its partition map, as JSON; empty for none.
        reindex_reasons: Why the key index of partitions was damaged; it is built again.
        damaged_leases: Why leases cannot be read, by their IDs.
    """

    record: BucketRecord
    is_clean: bool
    partitions: Sequence[StoredPartition]
    leases: Sequence[LeaseRecord]
    partition_map: str = ""
    reindex_reasons: dict[int, str] = {}
    damaged_leases: dict[int, str] = {}
