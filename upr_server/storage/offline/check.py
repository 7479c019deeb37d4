"""Checking a bucket: whether its two maps hold what was written, all of it, in order.

It goes through the bucket in stages: the log's records from end to end, the chunks of one partition
after the other with their index entries, the index from end to end. A stage that cannot be read to
its end is a problem like any other, and the next one goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from upr_server.storage.errors import StorageError
from upr_server.storage.lmdb_ordered_map import LmdbOrderedMap
from upr_server.storage.offline.bucket_files import partition_count
from upr_server.storage.offline.check_index import check_entries, check_index, read_watermark
from upr_server.storage.offline.check_log import (
    PartitionLogCheck,
    check_records,
    read_partition_record,
)
from upr_server.storage.offline.findings import (
    INDEX_ADVICE,
    LOG_ADVICE,
    Damage,
    Finding,
    Problem,
    Progress,
    Report,
    Stage,
)
from upr_server.storage.records import PURGE, partition_key, read_seq

PROBLEMS_MAX: Final = 20
"""The most problems of one stage that are reported one by one; the others are counted."""


class BucketCheck:
    """A check of one bucket.

    Args:
        name: The bucket's name.
        log: Its log.
        index: Its index.
    """

    def __init__(self, name: str, log: LmdbOrderedMap, index: LmdbOrderedMap) -> None:
        self._name = name
        self._log = log
        self._index = index

    def run(self, first_stage: int = 0) -> Iterator[Finding]:
        """Goes through the stages from `first_stage` on."""
        try:
            count = partition_count(self._log)
        except StorageError as error:
            yield self._problem(Damage(str(error)))
            return
        for stage in range(first_stage, count + 2):
            if stage == 0:
                yield Stage(stage, "the log's records")
                yield from self._findings(check_records(self._log, self._name))
            elif stage <= count:
                partition = stage - 1
                yield Stage(stage, "the chunks", partition)
                yield from self._findings(self._check_partition(partition))
            else:
                yield Stage(stage, "the index", is_index=True)
                yield from self._findings(check_index(self._index, count), is_in_index=True)

    def _findings(
        self, reports: Iterator[Report], *, is_in_index: bool = False
    ) -> Iterator[Finding]:
        problems = 0
        try:
            for report in reports:
                if isinstance(report, Progress):
                    yield report
                    continue
                problems += 1
                if problems <= PROBLEMS_MAX:
                    yield self._problem(report)
        except Exception as error:  # noqa: BLE001  # damage may end a parser in any way
            yield self._problem(
                Damage(f"it cannot be read to its end ({error})", None, is_in_index)
            )
        if problems > PROBLEMS_MAX:
            text = f"and {problems - PROBLEMS_MAX} problems more there"
            yield self._problem(Damage(text, None, is_in_index))

    def _problem(self, damage: Damage) -> Problem:
        advice = INDEX_ADVICE if damage.is_in_index else LOG_ADVICE
        return Problem(self._name, damage.partition, damage.description, advice)

    def _check_partition(self, partition: int) -> Iterator[Report]:
        log = PartitionLogCheck(self._log, partition)
        high = purge_seq = 0
        received_seq: int | None = None
        try:
            with self._log.read() as transaction:
                record = read_partition_record(transaction, partition)
                high, received_seq = record.high, record.received_seq
                purge_seq = read_seq(transaction, partition_key(PURGE, partition))
        except StorageError:
            # The stage of the log's records reports it. Without the record, nothing says what the
            # index should hold.
            log.is_whole = False
        watermark = read_watermark(self._index, partition)
        yield from log.check_chunks(received_seq, watermark.seq)
        if received_seq is not None and watermark.seq > high:
            text = f"the index is at {watermark.seq}, beyond the log's end at {high}"
            yield Damage(text, partition, is_in_index=True)
        if log.is_whole:
            yield from check_entries(self._index, partition, log.newest, watermark, purge_seq)
