"""What the handlers of requests see of their connection and of the server, and nothing else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from upr_protocol.bucket_event import BucketEvent, EventFilter
from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.partition_map import PartitionMap
from upr_protocol.wire import Get, Message, Mutate
from upr_server.buckets import BucketCatalog
from upr_server.engine import Bucket, Partition
from upr_server.net.credit import PublisherCredit
from upr_server.net.partition_queue import Apply
from upr_server.net.replies import Replies
from upr_server.net.streamer import Streamer
from upr_server.storage.online.bucket_disk import BucketDisk

REPLICA_PREFIX: Final = "replica:"
"""What the identity of a replica begins with; the name of its node follows."""


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

    def statistics(self, bucket: str) -> dict[str, object]:
        """Figures of a bucket."""


class Events(Protocol):
    """The event bus: tells consumers what became of buckets."""

    async def next_events(
        self,
        consumer: str,
        event_filter: EventFilter,
        *,
        timeout_s: float,
        acknowledged: int,
        wait_s: float,
    ) -> tuple[int, bool, tuple[BucketEvent, ...]]:
        """Waits for something to tell a consumer: the number of the batch, or 0; whether it must
        look at everything; and what became of buckets.

        Raises:
            ServerError: `FENCED`, `LIMIT_REACHED`, `UNSUPPORTED`.
            StorageError: What is to be told cannot be read.
        """

    def statistics(self) -> dict[str, object]:
        """Figures."""


class RequestContext(Protocol):
    """One connection, and what it shares with the others.

    Attributes:
        bucket: The bucket that the client opened; None before that, and once it was deleted.
        streamer: The connection's streams.
        replies: Replies that wait until a batch is durable.
        credit: The publisher's credit.
        is_asking_for_events: Whether a question about events waits for its answer. There is one at
            a time, which bounds what a peer can have waiting.
    """

    bucket: Bucket | None
    streamer: Streamer
    replies: Replies
    credit: PublisherCredit
    is_asking_for_events: bool

    # What the server has.

    @property
    def catalog(self) -> BucketCatalog:
        """The buckets."""

    @property
    def cluster(self) -> Cluster:
        """The partition maps."""

    @property
    def events(self) -> Events | None:
        """The event bus; None on a server without one."""

    @property
    def replication_timeout_s(self) -> float:
        """How long replicas may take to have a batch."""

    def time(self) -> float:
        """Seconds since 1970."""

    def statistics_of(self, bucket: str) -> dict[str, object]:
        """The figures of a bucket, or of the server for an empty name."""

    # What the connection has.

    @property
    def disk(self) -> BucketDisk:
        """The disk of the bucket that the client opened.

        Raises:
            ServerError: The bucket was deleted.
        """

    @property
    def map_revision(self) -> int:
        """The revision of that bucket's map; 0 for none."""

    @property
    def client_identity(self) -> str:
        """What the client calls itself."""

    def open_bucket(self, bucket: Bucket) -> None:
        """The client chose its bucket."""

    def note_replica(self, partition: Partition, replica: str) -> None:
        """The client is a replica, and reports what it has of a partition."""

    # Answering.

    def send(self, message: Message) -> None:
        """Sends an answer, unless the session has ended."""

    def answer_when_fetched(
        self, partition: Partition, request: Get | Mutate, apply: Apply
    ) -> None:
        """Has `apply` answer `request` once what it needs from disk is there, in the order of the
        partition's requests."""

    def answer_later(self, request: Message, answer: Callable[[], Awaitable[None]]) -> None:
        """Runs `answer` as a task of its own, which the connection's end cancels."""

    def answer_in_turn(self, request: Message, answer: Callable[[], Awaitable[None]]) -> None:
        """The same, behind those before it that were to be answered in turn."""


Handler = Callable[[RequestContext, Any], None]
"""Answers one kind of request. One that raises `ServerError` or `BucketError` has it refused."""


def find_partition(context: RequestContext, partition_id: PartitionId) -> Partition:
    """The partition; `ServerError` when the bucket does not have it."""
    bucket = context.bucket
    if bucket is None:
        raise ServerError(Status.NO_BUCKET, "the bucket was deleted")
    if partition_id >= len(bucket.partitions):
        raise ServerError(
            Status.NOT_MY_PARTITION,
            f"bucket {bucket.name} has partitions 0 to {len(bucket.partitions) - 1}, "
            f"not {partition_id}",
        )
    return bucket.partitions[partition_id]


def find_active(context: RequestContext, partition_id: PartitionId) -> Partition:
    """The partition; `ServerError` when this node is not active for it."""
    partition = find_partition(context, partition_id)
    if partition.state is not PartitionState.ACTIVE:
        raise not_active_error(partition)
    return partition


def not_active_error(partition: Partition) -> ServerError:
    """Says that this node is not active for a partition."""
    return ServerError(
        Status.NOT_MY_PARTITION,
        f"partition {partition.id} is {partition.state.name.lower()} here, not active",
    )
