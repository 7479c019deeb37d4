"""What replication needs of the server that it runs in."""

from __future__ import annotations

from typing import Protocol

from upr_protocol.errors import Status
from upr_protocol.ids import PartitionId
from upr_server.engine import Bucket
from upr_server.storage.online.bucket_disk import BucketDisk


class Host(Protocol):
    """The server."""

    def disk_of(self, bucket: str) -> BucketDisk | None:
        """The disk of the bucket with this name, if there is one."""

    async def create_held(self, name: str, partition_count: int) -> BucketDisk:
        """Makes a bucket whose partitions are dead, and hold nothing."""

    def end_streams(
        self, bucket: Bucket, partition: PartitionId, status: Status, *, of_replicas: bool = True
    ) -> None:
        """Ends the streams of a partition, and says why; perhaps but those of replicas."""
