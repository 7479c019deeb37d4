"""Opening the files of a bucket that no server uses."""

from __future__ import annotations

from pathlib import Path

from upr_server.storage.errors import CorruptionError, StorageError
from upr_server.storage.lmdb_ordered_map import LmdbOrderedMap
from upr_server.storage.ordered_map import ReadTransaction
from upr_server.storage.records import (
    BUCKET,
    PARTITION,
    PARTITIONS_END,
    BucketRecord,
    parse_record,
    partition_key,
)


def open_map(path: Path) -> LmdbOrderedMap:
    """Opens the folder `log` or `index` of a bucket to read it. Nobody else may use it meanwhile.

    Raises:
        StorageError: It cannot be opened.
    """
    return LmdbOrderedMap(path, readonly=True, is_alone=True, is_summed=path.name == "log")


def open_bucket(path: Path) -> tuple[LmdbOrderedMap, LmdbOrderedMap]:
    """Opens log and index in a bucket's folder to read them.

    Raises:
        StorageError: One of them cannot be opened.
    """
    log = open_map(path / "log")
    try:
        return log, open_map(path / "index")
    except BaseException:
        log.close()
        raise


def read_bucket_record(transaction: ReadTransaction) -> BucketRecord:
    """The bucket's record in its log.

    Raises:
        CorruptionError: It is damaged or missing.
    """
    stored_value = transaction.get(BUCKET)
    if stored_value is None:
        raise CorruptionError("the log has no record of its bucket")
    return parse_record(BUCKET, stored_value, BucketRecord)


def partition_count(log: LmdbOrderedMap) -> int:
    """How many partitions a bucket has, even if the record that says so is damaged.

    Raises:
        StorageError: The log cannot be read.
    """
    try:
        with log.read() as transaction:
            return read_bucket_record(transaction).partition_count
    except StorageError:
        pass
    with log.read() as transaction:
        last_record = transaction.last(
            partition_key(PARTITION, 0), partition_key(PARTITION, PARTITIONS_END - 1)
        )
        return 0 if last_record is None else int.from_bytes(last_record[0][1:3]) + 1
