"""What replication needs of the server that it runs in."""

from __future__ import annotations

from typing import Protocol

from upr_protocol.errors import Status
from upr_protocol.ids import PartitionId
from upr_server.engine import Bucket
from upr_server.storage.online.bucket_disk import BucketDisk


class LocalServer(Protocol):
    """The server, as replication sees it: its buckets and its streams."""

    def disk_of(self, bucket: str) -> BucketDisk | None:
        """The disk of a bucket; None when there is no bucket with this name."""

    async def create_held(self, name: str, partition_count: int) -> BucketDisk:
        """Creates a bucket whose partitions are dead, and hold nothing."""

    def end_streams(
        self, bucket: Bucket, partition: PartitionId, status: Status, *, of_replicas: bool = True
    ) -> None:
        """Ends the streams of a partition with `status`; those of replicas if `of_replicas`."""
