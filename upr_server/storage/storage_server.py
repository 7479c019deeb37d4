"""The side of the store that has the disk: the buckets that are open, and where they lie.

It runs where the disk is: in a process of its own over LMDB, or in the server's loop over simulated
disks. One carries out the calls that change something; others may only read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from upr_protocol.chunk import Chunk
from upr_server.storage.bucket_storage import BucketStorage
from upr_server.storage.errors import StorageError
from upr_server.storage.ordered_map import OrderedMap
from upr_server.storage.records import BucketRecord, PartitionRecord


class EventQueueStorage(Protocol):
    """Where a clean stop leaves the event queues for the next start."""

    def take(self) -> bytes:
        """What was saved, once; empty when there is nothing."""

    def save(self, data: bytes) -> None:
        """Saves them, in place of what was saved before."""


class UsersStorage(Protocol):
    """Where a node keeps the users of its cluster."""

    def load(self) -> bytes:
        """What was saved last; empty when there is nothing."""

    def save(self, data: bytes) -> None:
        """Saves them, in place of what was saved before."""


class BucketDirectory(Protocol):
    """Where the maps of buckets are kept, and the event queues and users of their node."""

    @property
    def event_queues(self) -> EventQueueStorage:
        """Where the event queues are saved."""

    @property
    def users(self) -> UsersStorage:
        """Where the users are kept."""

    def names(self) -> list[str]:
        """The buckets there are, sorted."""

    def remove_leftovers(self) -> dict[str, str]:
        """Removes what a crash left of buckets. Returns why something could not be removed, by its
        name."""

    def open(self, name: str) -> tuple[OrderedMap, OrderedMap]:
        """Log and index of a bucket."""

    def create(self, name: str, fill: Callable[[OrderedMap, OrderedMap], None]) -> None:
        """Makes a bucket: it is there, filled, or not at all."""

    def delete(self, name: str) -> None:
        """Deletes a bucket's files, which are closed."""


class StorageServer:
    """The open buckets of a directory. Calls run on it: `call.run_on(server)`.

    Args:
        directory: Where the buckets lie.
        copy_chunk: Copies a chunk that was read to where its reader takes it from.

    Attributes:
        event_queues: Where the event queues are saved.
        users: Where the users are kept.
    """

    def __init__(
        self, directory: BucketDirectory, copy_chunk: Callable[[Chunk], Chunk] = Chunk.copied
    ) -> None:
        self.event_queues = directory.event_queues
        self.users = directory.users
        self._directory = directory
        self._copy_chunk = copy_chunk
        self._open: dict[str, BucketStorage] = {}

    def names(self) -> list[str]:
        """The buckets there are, sorted."""
        return self._directory.names()

    def remove_leftovers(self) -> dict[str, str]:
        """Removes what a crash left of buckets. Returns why something could not be removed, by its
        name."""
        return self._directory.remove_leftovers()

    def bucket_storage(self, name: str) -> BucketStorage:
        """A bucket's disk; it is opened if it is not open yet.

        Raises:
            StorageError: It cannot be opened.
        """
        bucket = self._open.get(name)
        if bucket is None:
            log, index = self._directory.open(name)
            bucket = self._open[name] = BucketStorage(log, index, self._copy_chunk)
        return bucket

    def create(self, record: BucketRecord, partitions: Sequence[PartitionRecord]) -> None:
        """Makes a bucket with these records, and opens it.

        Raises:
            StorageError: It cannot be made, or not be opened; it is not there then.
        """

        def fill(log: OrderedMap, index: OrderedMap) -> None:
            BucketStorage(log, index).log.create(record, partitions)

        self._directory.create(record.name, fill)
        try:
            self.bucket_storage(record.name).open()
        except StorageError:
            # Nobody would know of it, and its name would be taken.
            self.delete(record.name)
            raise

    def delete(self, name: str) -> None:
        """Closes a bucket and deletes it.

        Raises:
            DataDirectoryError: It cannot be deleted.
        """
        self.close_bucket(name)
        self._directory.delete(name)

    def close_bucket(self, name: str) -> None:
        """Closes a bucket's files, if they are open."""
        bucket = self._open.pop(name, None)
        if bucket is not None:
            bucket.close()

    def close(self) -> None:
        """Closes every bucket."""
        for name in list(self._open):
            self.close_bucket(name)
