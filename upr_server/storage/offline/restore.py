"""Preparing a copy of a data directory to take the place of its original.

The copy has the histories of its original. In them it would give sequence numbers a second time, to
other changes than those that consumers already have. So each bucket must begin new histories at the
next start. That start does so after any stop that was not clean: it is enough to remove the marks
of a clean stop, and the rule stays in one place (`recover_partitions`).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from upr_server.storage.chunk_log import ChunkLog
from upr_server.storage.directory import DataDirectory, lock_for_writing
from upr_server.storage.errors import CorruptionError


class RestoredBucket(msgspec.Struct, frozen=True):
    """A bucket that begins new histories at the next start.

    Attributes:
        name: The bucket.
        partition_count: How many partitions it has.
    """

    name: str
    partition_count: int


def begin_new_histories(path: Path) -> list[RestoredBucket]:
    """Has every bucket of a data directory begin new histories at the next start, and drops the
    queues of event consumers, which then look at everything. Repeating this changes nothing more.

    Raises:
        DataDirectoryError: It is not a data directory, a server uses it, or it cannot be written.
        CorruptionError: A bucket is damaged.
        DiskFullError: There is no room for a commit.
    """
    with lock_for_writing(path):
        directory = DataDirectory(path)
        with suppress(CorruptionError):  # a damaged file is removed as well
            directory.event_queues.take()
        return [_begin(path, directory, name) for name in directory.names()]


def _begin(path: Path, directory: DataDirectory, name: str) -> RestoredBucket:
    try:
        log, index = directory.open(name)
        try:
            chunk_log = ChunkLog(log)
            record = chunk_log.load().record
            chunk_log.remove_clean_mark()
        finally:
            log.close()
            index.close()
    except CorruptionError as error:
        raise CorruptionError(
            f"bucket {name} of the copy is damaged: {error}; copy it again, or move its folder out "
            f"of {path / 'buckets'}; then repeat the command for the other buckets"
        ) from error
    return RestoredBucket(name, record.partition_count)
