"""The requests to a server: how each is made, and what its answer means."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar

import attrs
import msgspec

from upr_protocol.address import Address
from upr_protocol.bucket_event import EventKind
from upr_protocol.client.core.key_lookup import KeyRequest
from upr_protocol.client.core.results import NotDurableError, status_of
from upr_protocol.client.core.resume_state import ResumeState
from upr_protocol.errors import (
    LocalProtocolError,
    RemoteProtocolError,
    ServerError,
    Status,
    UprError,
)
from upr_protocol.failover import FailoverLog, Position
from upr_protocol.ids import Durability, HistoryId, PartitionId, PartitionState, SeqNo
from upr_protocol.users import UserChange, UserListing, UsersError
from upr_protocol.wire import (
    Await,
    ChangeUsers,
    CreateBucket,
    DeleteBucket,
    EventsReply,
    GetReply,
    GetUsers,
    Lease,
    LeaseAction,
    LeaseReply,
    ListBuckets,
    ListBucketsReply,
    ListUsers,
    Message,
    NextEvents,
    PartitionLog,
    Refusal,
    Seqnos,
    SeqnosAt,
    SeqnosAtReply,
    SeqnosReply,
    Stats,
    StatsReply,
    UsersReply,
)

T = TypeVar("T")
R = TypeVar("R", bound=Message)


@attrs.frozen
class Call(Generic[T]):
    """One request and its answer.

    Attributes:
        request: Makes the request; called with `opaque=`.
        result: Turns the answer into a result; raises if the server refused.
        partition: The partition that it is about; None when it is about no one partition.
    """

    request: Callable[..., Message]
    result: Callable[[Any], T]
    partition: PartitionId | None = None


def check_partition_count(partition_count: int) -> int:
    """The number of the bucket's partitions, unless no bucket was opened.

    Raises:
        LocalProtocolError: The client was given a URL without a bucket.
    """
    if not partition_count:
        raise LocalProtocolError("connect with a URL that names a bucket", Status.BAD_ARGUMENT)
    return partition_count


def over_quota_error(address: Address, timeout_s: float) -> ServerError:
    """The error when a server grants no credit for too long."""
    return ServerError(
        Status.TEMPORARY_FAILURE,
        f"the bucket {address.bucket!r} gives no credit for {timeout_s:g} s: it is over its memory "
        "quota, or its disk is full",
    )


def check_reply(reply: Message | UprError) -> Message:
    """The reply; raises what a refusal, or an error in place of a reply, says.

    Raises:
        ServerError: It is a refusal; the status says why.
        NotDurableError: The change was made, and may not be durable yet.
        UprError: The reason why there is no reply.
    """
    if isinstance(reply, UprError):
        raise reply
    if isinstance(reply, Refusal):
        if reply.status == Status.NOT_DURABLE_YET:
            raise NotDurableError
        raise ServerError(status_of(reply.status), reply.sentence, reply.map_revision)
    return reply


class BucketInfo(msgspec.Struct, frozen=True):
    """One bucket, and the memory that it may take."""

    name: str
    partition_count: int
    quota_bytes: int


class PartitionInfo(msgspec.Struct, frozen=True):
    """One partition, as the server described it when the bucket was opened.

    Attributes:
        is_held: Whether the server holds it; otherwise the attributes below mean nothing.
        state: Its state there.
        high_seq: Its highest sequence number then.
        persisted_seq: The last snapshot end on disk then.
        purge_seq: Deletions at or below it may be gone.
    """

    partition: PartitionId
    is_held: bool
    state: PartitionState
    high_seq: SeqNo
    persisted_seq: SeqNo
    purge_seq: SeqNo
    log: FailoverLog


class PartitionNumbers(msgspec.Struct, frozen=True):
    """The sequence numbers of one partition.

    Attributes:
        history_id: The history in which the numbers hold.
        high_seq: The highest one in use.
        persisted_seq: The last snapshot end on disk.
        replicated_seq: The last snapshot end that replicas have.
    """

    partition: PartitionId
    history_id: HistoryId
    high_seq: SeqNo
    persisted_seq: SeqNo
    replicated_seq: SeqNo


class SeqnoAtTime(msgspec.Struct, frozen=True):
    """Where a partition stood at a time.

    Attributes:
        history_id: The history in which the number holds.
        seq: The last number on disk from before the time; 0 for none.
    """

    partition: PartitionId
    history_id: HistoryId
    seq: SeqNo


PartitionRow = TypeVar("PartitionRow", PartitionNumbers, SeqnoAtTime)

PartitionCallFactory = Callable[[Iterable[int]], Call[list[PartitionRow]]]
"""Makes a request about partitions, which is answered with a row for each of them."""


def partition_infos(logs: Iterable[PartitionLog]) -> list[PartitionInfo]:
    """The partitions in the answer to `Open`, in order."""
    return [
        PartitionInfo(
            log.partition,
            log.status == 0,
            log.state,
            log.high_seq,
            log.persisted_seq,
            log.purge_seq,
            log.log,
        )
        for log in sorted(logs, key=lambda log: log.partition)
    ]


def _discard_reply(_: Message) -> None:
    """The answer says only that the request was carried out."""


def _whole_reply(reply: R) -> R:
    return reply


def create_bucket(name: str, partition_count: int, quota_bytes: int) -> Call[None]:
    """Creates a bucket; zeros leave the choice to the server."""
    return Call(partial(CreateBucket, name, partition_count, quota_bytes), _discard_reply)


def delete_bucket(name: str) -> Call[None]:
    """Deletes a bucket with its contents."""
    return Call(partial(DeleteBucket, name), _discard_reply)


def list_buckets() -> Call[list[BucketInfo]]:
    """Every bucket, by name."""

    def result(reply: ListBucketsReply) -> list[BucketInfo]:
        return [BucketInfo(*row) for row in reply.buckets]

    return Call(ListBuckets, result)


def stats(bucket: str) -> Call[dict[str, Any]]:
    """Statistics of a bucket, or of the server."""

    def result(reply: StatsReply) -> dict[str, Any]:
        try:
            return msgspec.json.decode(reply.json, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise RemoteProtocolError(f"the statistics cannot be read: {error}") from error

    return Call(partial(Stats, bucket), result)


def list_users() -> Call[UserListing]:
    """The users of the cluster."""

    def result(reply: UsersReply) -> UserListing:
        try:
            return UserListing.from_json(reply.document)
        except UsersError as error:
            raise RemoteProtocolError(str(error)) from error

    return Call(ListUsers, result)


def get_users(revision: int, digest: bytes) -> Call[str]:
    """The users of the cluster as JSON, for a node; empty if they are those that the node has, or
    older."""

    def result(reply: UsersReply) -> str:
        # Users of a lower revision never count.
        return reply.document if reply.revision >= revision else ""

    return Call(partial(GetUsers, revision, digest), result)


def change_users(change: UserChange) -> Call[int]:
    """Changes a user; the revision of the users after it."""

    def result(reply: UsersReply) -> int:
        return reply.revision

    return Call(partial(ChangeUsers, change.to_json()), result)


def next_events(
    consumer: str,
    acknowledged_batch: int,
    timeout_s: int,
    wait_s: float,
    kinds: EventKind,
    pattern: str,
) -> Call[EventsReply]:
    """Asks for the events of buckets since a consumer asked last."""
    wait_ms = int(wait_s * 1000)
    request = partial(NextEvents, consumer, acknowledged_batch, timeout_s, wait_ms, kinds, pattern)
    return Call(request, _whole_reply)


class LeasedRange(msgspec.Struct, frozen=True):
    """A range that a lease protects.

    Attributes:
        history_id: The history that the partition is in now.
        start: Where it begins, exclusive.
        end: Where it ends.
        nbytes: Its size on the server's disk, roughly.
    """

    partition: PartitionId
    history_id: HistoryId
    start: SeqNo
    end: SeqNo
    nbytes: int


class HeldLease(msgspec.Struct, frozen=True):
    """A lease that the server has granted.

    Attributes:
        lease_id: Its ID, to renew and release it with.
        time_to_live_s: How long it holds without renewal.
    """

    lease_id: int
    time_to_live_s: int
    ranges: tuple[LeasedRange, ...] = ()


def lease(
    action: LeaseAction,
    *,
    lease_id: int = 0,
    time_to_live_s: int = 0,
    owner: str = "",
    ranges: Iterable[tuple[int, int, int]] = (),
) -> Call[HeldLease]:
    """A lease acquired, renewed or released."""

    def result(reply: LeaseReply) -> HeldLease:
        return HeldLease(
            reply.lease_id,
            reply.time_to_live_s,
            tuple(
                LeasedRange(
                    PartitionId(partition), HistoryId(history_id), SeqNo(start), SeqNo(end), nbytes
                )
                for partition, history_id, start, end, nbytes in reply.ranges
            ),
        )

    return Call(partial(Lease, action, lease_id, time_to_live_s, owner, tuple(ranges)), result)


NEW_LEASE_TRIES: Final = 3
"""How many IDs are drawn for a new lease. Another one is needed if a partition moves, while the
lease is acquired, to a node that has granted its part already: a lease keeps its ranges. Each try
knows a newer map than the one before."""

LEASE_CLEANUP_S: Final = 2.0
"""How long nodes may take to end what they granted of a new lease that another node did not grant.
It ends by itself, too."""


@attrs.frozen
class LeaseRequest:
    """A lease to be acquired, possibly from several nodes.

    Attributes:
        ranges: (partition, start, end) of each range, start exclusive.
        lease_id: Its ID, the same at each node.
    """

    ranges: tuple[tuple[int, int, int], ...]
    time_to_live_s: int
    owner: str
    lease_id: int

    @property
    def partitions(self) -> set[PartitionId]:
        """The partitions of the ranges."""
        return {PartitionId(partition) for partition, _, _ in self.ranges}

    def call_for(self, partitions: Container[int]) -> Call[HeldLease]:
        """The request to the node that holds `partitions`."""
        return lease(
            LeaseAction.ACQUIRE,
            lease_id=self.lease_id,
            time_to_live_s=self.time_to_live_s,
            owner=self.owner,
            ranges=[one_range for one_range in self.ranges if one_range[0] in partitions],
        )

    def check_granted(self, lease: HeldLease, partitions: Collection[int]) -> None:
        """Makes sure that one of several nodes has granted just what it was asked for. A lease of
        this ID that the node had before keeps its ranges. If those are of other partitions, some
        have another active node since. To take them as they are would repeat or lack ranges.

        Raises:
            ServerError: `RANGE_GONE`.
        """
        if {leased_range.partition for leased_range in lease.ranges} != set(partitions):
            raise _moved_lease_error(lease)


def check_active(lease: HeldLease, partitions: Container[int]) -> None:
    """Makes sure that a node can still give what it holds under a lease.

    Raises:
        ServerError: `RANGE_GONE`.
    """
    if any(leased_range.partition not in partitions for leased_range in lease.ranges):
        raise _moved_lease_error(lease)


def _moved_lease_error(lease: HeldLease) -> ServerError:
    return ServerError(
        Status.RANGE_GONE,
        f"another node has become active for a partition of lease {lease.lease_id:016x}, and does "
        "not have this lease",
    )


def merge_leases(leases: Sequence[HeldLease]) -> HeldLease:
    """The leases of several nodes with one ID, as one lease: it lapses when the first does."""
    ranges = sorted(
        (leased_range for lease in leases for leased_range in lease.ranges),
        key=lambda leased_range: leased_range.partition,
    )
    time_to_live_s = min(lease.time_to_live_s for lease in leases)
    return HeldLease(leases[0].lease_id, time_to_live_s, tuple(ranges))


def _check_rows(partitions: Collection[int], rows: Iterable[tuple[int, ...]]) -> None:
    """Makes sure that an answer has a row for each partition that was asked about: a caller would
    ask again for what is missing, or take it for all that there is.

    Raises:
        RemoteProtocolError: It has not.
    """
    if partitions and set(partitions) != {row[0] for row in rows}:
        raise RemoteProtocolError("the answer is not about the partitions that were asked about")


def seqnos(partitions: Iterable[int], *, of_copies: bool = False) -> Call[list[PartitionNumbers]]:
    """The sequence numbers of partitions; of all when none are named."""
    partitions = tuple(partitions)

    def result(reply: SeqnosReply) -> list[PartitionNumbers]:
        _check_rows(partitions, reply.rows)
        return [
            PartitionNumbers(
                PartitionId(partition),
                HistoryId(history_id),
                SeqNo(high_seq),
                SeqNo(persisted_seq),
                SeqNo(replicated_seq),
            )
            for partition, history_id, high_seq, persisted_seq, replicated_seq in reply.rows
        ]

    return Call(partial(Seqnos, partitions, of_copies), result)


def seqnos_at_time(time_ns: int, partitions: Iterable[int]) -> Call[list[SeqnoAtTime]]:
    """Where partitions stood at a time, in nanoseconds since 1970; all when none are named."""
    partitions = tuple(partitions)

    def result(reply: SeqnosAtReply) -> list[SeqnoAtTime]:
        _check_rows(partitions, reply.rows)
        return [
            SeqnoAtTime(PartitionId(partition), HistoryId(history_id), SeqNo(seq))
            for partition, history_id, seq in reply.rows
        ]

    return Call(partial(SeqnosAt, time_ns, partitions), result)


def resume_state_at_time(
    infos: Iterable[PartitionInfo], rows: Iterable[SeqnoAtTime], bucket: str
) -> ResumeState:
    """The state of a consumer that has everything up to these numbers.

    Raises:
        ServerError: The histories of a partition differ: there was a failover in between.
    """
    log_of = {info.partition: info.log for info in infos}
    positions = {}
    for row in rows:
        log = log_of.get(row.partition)
        if log is None or log.current != row.history_id:
            raise ServerError(
                Status.HISTORY_CHANGED, f"partition {row.partition} began another history"
            )
        positions[row.partition] = Position(log, row.seq, row.seq, None)
    return ResumeState(bucket, positions)


def await_durable(
    partition: int,
    history_id: int,
    seq: int,
    durability: Durability,
    copies: int,
    time_left_s: Callable[[], float],
) -> Call[SeqNo]:
    """Waits until a sequence number is as durable as requested; gives the number reached then.

    Args:
        partition: The partition.
        history_id: The history that the number belongs to.
        seq: The number.
        durability: How durable it must be.
        copies: On how many replicas, for the replicated levels.
        time_left_s: How much longer to wait. It is asked whenever the request is made: a node that
            hands the partition over refuses it, and the next node has only the rest of the time.
    """

    def request(*, opaque: int) -> Await:
        return Await(
            HistoryId(history_id),
            SeqNo(seq),
            int(max(0.0, time_left_s()) * 1000),
            durability,
            copies,
            partition=PartitionId(partition),
            opaque=opaque,
        )

    return Call(request, attrgetter("seq"), PartitionId(partition))


def get(request: KeyRequest) -> Call[GetReply]:
    """Reads the keys of `request` that have no answer yet."""
    return Call(request.message, _whole_reply, request.partition)
