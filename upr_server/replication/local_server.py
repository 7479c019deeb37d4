"""What replication needs of the server that it runs in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Container, Iterator
from contextlib import asynccontextmanager
from typing import Protocol

import trio

from upr_protocol.errors import Status
from upr_protocol.ids import PartitionId
from upr_server.engine import Bucket, Partition
from upr_server.storage.online.bucket_disk import BucketDisk


class LocalServer(Protocol):
    """The server, as replication sees it: its buckets and its streams."""

    def disk_of(self, bucket: str) -> BucketDisk | None:
        """The disk of a bucket; None when there is no bucket with this name."""

    async def create_dead_bucket(self, name: str, partition_count: int) -> BucketDisk:
        """Creates a bucket whose partitions are dead, and hold nothing."""

    def end_streams(
        self,
        bucket: Bucket,
        partitions: Container[PartitionId],
        status: Status,
        *,
        of_replicas: bool = True,
    ) -> Iterator[None]:
        """Ends the streams of some partitions with `status`, those of replicas if `of_replicas`. In
        steps, between which others may have their turn."""

    def streams_may_begin(self) -> None:
        """Streams may begin of partitions of which none could: requests that wait for it go on."""


@asynccontextmanager
async def streams_ended(
    server: LocalServer, bucket: Bucket, partitions: Collection[Partition], status: Status
) -> AsyncIterator[None]:
    """While the state or the failover log of `partitions` changes: their streams have ended with
    `status`, and none begins: requests for them wait. While they end, the partitions are as before,
    so that what is still sent is true."""
    try:
        for partition in partitions:
            partition.begins_no_stream = True
        if partitions:
            numbers = {partition.id for partition in partitions}
            for _ in server.end_streams(bucket, numbers, status):
                await trio.lowlevel.checkpoint()
        yield
    finally:
        for partition in partitions:
            partition.begins_no_stream = False
        if partitions:
            server.streams_may_begin()
