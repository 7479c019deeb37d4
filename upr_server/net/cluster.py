"""What connections need to know of the cluster that this node is part of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import PartitionId
from upr_protocol.partition_map import PartitionMap
from upr_server.storage.online.bucket_disk import BucketDisk
from upr_server.storage.records import PartialRecord


class Cluster(Protocol):
    """The partition maps, by bucket."""

    @property
    def node(self) -> str:
        """What maps call this node."""

    def map_of(self, bucket: str) -> PartitionMap | None:
        """The bucket's map; None while this node holds it alone."""

    def revision(self, bucket: str) -> int:
        """The map's revision; 0 for none."""

    def replicas(self, bucket: str, partition: PartitionId) -> list[str]:
        """The nodes that replicate a partition from this one."""

    def is_replica(self, bucket: str, partition: PartitionId, name: str) -> bool:
        """Whether the node `name` replicates a partition from this one."""

    async def set_map(self, expected_revision: int, document: str) -> PartitionMap:
        """Applies a map in place of the one with `expected_revision`."""

    async def join(self, bucket: str, address: str) -> PartitionMap:
        """Asks another node for a bucket's map, and applies it."""

    def restore(
        self,
        disk: BucketDisk,
        document: str,
        partials: Mapping[PartitionId, PartialRecord],
        *,
        is_clean: bool,
    ) -> None:
        """A bucket was found on disk, with this map."""

    def drop_bucket(self, bucket: str) -> None:
        """A bucket was deleted."""

    async def stop(self) -> None:
        """Stops replicating; what was received is on disk then."""

    def is_suspect(self, bucket: str) -> bool:
        """Whether this node's stop must not count as a clean one."""

    def statistics(self, bucket: str) -> dict[str, object]:
        """Figures of a bucket."""


class Alone:
    """A node that is part of no cluster, and takes no maps."""

    node = ""

    def map_of(self, bucket: str) -> PartitionMap | None:  # noqa: ARG002
        """See `Cluster`."""
        return None

    def revision(self, bucket: str) -> int:  # noqa: ARG002
        """See `Cluster`."""
        return 0

    def replicas(self, bucket: str, partition: PartitionId) -> list[str]:  # noqa: ARG002
        """See `Cluster`."""
        return []

    def is_replica(self, bucket: str, partition: PartitionId, name: str) -> bool:  # noqa: ARG002
        """See `Cluster`."""
        return False

    async def set_map(self, expected_revision: int, document: str) -> PartitionMap:  # noqa: ARG002
        """See `Cluster`."""
        raise ServerError(Status.UNSUPPORTED, "this server takes no partition maps")

    async def join(self, bucket: str, address: str) -> PartitionMap:  # noqa: ARG002
        """See `Cluster`."""
        raise ServerError(Status.UNSUPPORTED, "this server takes no partition maps")

    def restore(
        self,
        disk: BucketDisk,  # noqa: ARG002
        document: str,  # noqa: ARG002
        partials: Mapping[PartitionId, PartialRecord],  # noqa: ARG002
        *,
        is_clean: bool,  # noqa: ARG002
    ) -> None:
        """See `Cluster`."""
        raise ServerError(Status.UNSUPPORTED, "this server takes no partition maps")

    def drop_bucket(self, bucket: str) -> None:
        """See `Cluster`."""

    async def stop(self) -> None:
        """See `Cluster`."""

    def is_suspect(self, bucket: str) -> bool:  # noqa: ARG002
        """See `Cluster`."""
        return False

    def statistics(self, bucket: str) -> dict[str, object]:  # noqa: ARG002
        """See `Cluster`."""
        return {}
