"""What the handlers of requests see of their connection and of the server, and nothing else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

import trio

from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.session import ServerSession, SessionState
from upr_protocol.users import Right
from upr_protocol.wire import Message, Mutate, SetFrames
from upr_server.engine import Bucket, BucketError, Partition
from upr_server.net.access import Access
from upr_server.net.backlog import ConnectionBacklog
from upr_server.net.credit import PublisherCredit
from upr_server.net.durability_waits import DurabilityWaits
from upr_server.net.log_in import LogInExchange
from upr_server.net.partition_request_queue import PartitionRequest
from upr_server.net.refusals import not_active_error, refusal_of
from upr_server.net.refused_task_runs import RefusedTaskRuns
from upr_server.net.replica_reports import ReplicaReports
from upr_server.net.replies import ReplyOrder
from upr_server.net.reply_tasks import ReplyTask, ReplyTaskQueue, start_reply_task
from upr_server.net.report_wait import ReportWait
from upr_server.net.resources import ServerResources
from upr_server.net.streamer import Streamer, streams_in_steps
from upr_server.storage.online.bucket_disk import BucketDisk


class RequestContext:
    """The requests of one connection: what they are about, and how they are answered.

    Args:
        resources: What all connections share.
        session: The connection's session.
        stream: The connection.
        peer: See below.
        wake: Has what is in the session sent.

    Attributes:
        peer: The other end's address, for logs and statistics.
        bucket: The bucket that the client opened; None before that, and once it was deleted.
        access: Who the client is, and what it may do.
        log_in: How the client proves who it is.
        usages: What each user has of this node.
        catalog: The buckets.
        users: The users of the cluster.
        partition_maps: The partition maps.
        events: The event bus; None on a server without one.
        time: Seconds since 1970.
        replication_timeout_s: How long replicas may take to have a batch.
        statistics_of: The figures of a bucket, or of the server for an empty name, in steps.
        streamer: The connection's streams.
        replica_reports: What the client reports as a replica.
        report_wait: The wait for a replica's report.
        reply_order: The replies to bundles that are owed.
        credit: The publisher's credit.
        backlog: What waits.
        streams_may_begin: Notified when streams may begin of partitions of which none could.
        young_objects: Is told of objects that are made, and live for some time.
        refused_task_runs: Runs of tasks that were refused.
        is_asking_for_events: Whether a question about events waits for its answer. There is one at
            a time, which bounds what a peer can have waiting.
    """

    def __init__(
        self,
        resources: ServerResources,
        session: ServerSession,
        stream: trio.abc.Stream,
        peer: str,
        wake: Callable[[], None],
    ) -> None:
        self.peer = peer
        self.bucket: Bucket | None = None
        self.access = Access(resources.users, peer, resources.audit_log)
        self.log_in = LogInExchange(resources.log_ins, session, stream, peer, self.access, wake)
        self.usages = resources.log_ins.usages
        self.catalog = resources.catalog
        self.users = resources.users
        self.partition_maps = resources.partition_maps
        self.events = resources.events
        self.time = resources.time
        self.replication_timeout_s = resources.replication_timeout_s
        self.statistics_of = resources.statistics_of
        self.streamer = Streamer(session, peer, wake)
        self.replica_reports = ReplicaReports(session, next(resources.connection_numbers))
        self.report_wait = ReportWait()
        self.backlog = ConnectionBacklog(session, wake)
        self.reply_order = ReplyOrder(resources.reply_steps, self.backlog)
        self.credit = PublisherCredit(resources.credit_shares, session, wake)
        self.streams_may_begin = resources.streams_may_begin
        self.young_objects = resources.young_objects
        self.is_asking_for_events = False
        self.refused_task_runs = RefusedTaskRuns()
        self._queues = resources.queues
        self._wait_turns = resources.wait_turns
        self._durability_waits: DurabilityWaits | None = None
        self._session = session
        self._wake = wake
        self._disk: BucketDisk | None = None
        self._nursery: trio.Nursery | None = None
        self._in_order = ReplyTaskQueue(counts_as_queued=True)
        self._streams_to_open = ReplyTaskQueue(counts_as_queued=False)
        """Requests for streams that wait for the end of a change."""

    # The connection's side.

    def begin(self, nursery: trio.Nursery) -> None:
        """The connection runs: answers that take time are tasks in `nursery`."""
        self._nursery = nursery

    def close(self) -> None:
        """The connection is over."""
        self.log_in.close()
        for _ in self.streamer.close():
            pass
        self.reply_order.close()
        self.replica_reports.forget()
        # Each refers to this object.
        self._durability_waits = None
        self._in_order.clear()
        self._streams_to_open.clear()
        self._nursery = None

    def leave_bucket(self) -> Iterator[None]:
        """The bucket was deleted: requests about it are refused from the first step on, and its
        streams end, some in each step."""
        self.credit.leave_bucket()
        # Requests that wait for durability are answered by a task that knows what it needs.
        self.bucket = self._disk = self._durability_waits = None
        yield from streams_in_steps(self.streamer.end_each(Status.BUCKET_DELETED))
        self._wake()

    def end_revoked(self) -> Iterator[None]:
        """The client has lost a right: streams end that it may not have any more, some in each
        step."""
        rights = self.access.rights.on_all_keys
        if self.bucket is not None:
            revoked = self.streamer.end_each(
                Status.RIGHT_REVOKED,
                of_consumers=Right.READ not in rights,
                of_replicas=Right.REPLICATE not in rights,
            )
            yield from streams_in_steps(revoked)

    # The bucket and the client.

    def open_bucket(self, bucket: Bucket) -> None:
        """The client chose its bucket."""
        self.bucket = bucket
        self.access.set_bucket(bucket.name)
        self._disk = self.catalog.disks[bucket]

    @property
    def disk(self) -> BucketDisk:
        """The disk of the bucket that the client opened.

        Raises:
            ServerError: The bucket was deleted.
        """
        if self._disk is None:
            raise ServerError(Status.NO_BUCKET, "the bucket was deleted")
        return self._disk

    @property
    def durability_waits(self) -> DurabilityWaits:
        """What the client waits for in the bucket that it opened.

        Raises:
            ServerError: The bucket was deleted.
        """
        if self._durability_waits is None:
            self._durability_waits = DurabilityWaits(self, self.disk, self._wait_turns)
        return self._durability_waits

    def partition(self, partition_id: PartitionId) -> Partition:
        """A partition of the bucket; `ServerError` when the bucket does not have it."""
        bucket = self.bucket
        if bucket is None:
            raise ServerError(Status.NO_BUCKET, "the bucket was deleted")
        if partition_id >= len(bucket.partitions):
            raise ServerError(
                Status.NOT_MY_PARTITION,
                f"bucket {bucket.name} has partitions 0 to {len(bucket.partitions) - 1}, "
                f"not {partition_id}",
            )
        return bucket.partitions[partition_id]

    def active_partition(self, partition_id: PartitionId) -> Partition:
        """A partition of the bucket; `ServerError` when this node is not active for it."""
        partition = self.partition(partition_id)
        if partition.state is not PartitionState.ACTIVE:
            raise not_active_error(partition)
        return partition

    @property
    def map_revision(self) -> int:
        """The revision of the bucket's map; 0 for none."""
        return 0 if self.bucket is None else self.partition_maps.revision(self.bucket.name)

    # Answering.

    def wake(self) -> None:
        """Wakes the writer, which writes what was sent."""
        self._wake()

    def send(self, message: Message) -> None:
        """Sends an answer, unless the session has ended."""
        if self._session.state is not SessionState.CLOSED:
            self._session.send(message)

    def refuse(self, request: Message, status: Status, sentence: str) -> None:
        """Refuses `request`, or what `request` is the answer to. One that is never answered is just
        dropped."""
        refusal = refusal_of(request, status, sentence, self.map_revision)
        if refusal is not None:
            self.send(refusal)

    def refuse_for(self, request: Message, error: ServerError | BucketError) -> None:
        """Refuses `request` with what `error` says."""
        sentence = error.sentence if isinstance(error, ServerError) else str(error)
        self.refuse(request, error.status, sentence)

    def fail(self, request: Message) -> None:
        """Ends the connection after the server failed to carry out `request`. The peer is told
        only that; the log has the cause."""
        self.fail_in(type(request))

    def fail_in(self, kind: type[Message]) -> None:
        """Ends the connection after the server failed to carry out a request of this kind."""
        self._session.fail(
            Status.INTERNAL, f"internal error in {kind.__name__}; the server's log has the cause"
        )

    def start_task(self, task: Callable[[], Awaitable[None]]) -> None:
        """Runs `task`, which must not raise, until the connection's end cancels it."""
        assert self._nursery is not None
        self._nursery.start_soon(task)

    def has_earlier(self, partition: Partition) -> bool:
        """Whether a request to this partition would have to wait behind others."""
        return self._queues.have_earlier(partition, self)

    @property
    def may_have_earlier(self) -> bool:
        """Whether a request to any partition may have to wait behind others."""
        return bool(self._queues)

    def submit(self, partition: Partition, request: PartitionRequest) -> None:
        """Applies `request` once what it needs from disk is there, in the order of the partition's
        requests."""
        self._queues.queue_of(self.disk, partition).submit(self, request)

    def read_sets(self) -> SetFrames | None:
        """The plain `SET`s that come next, if answers to them may be sent now."""
        if self.bucket is None or self.reply_order.newest or not self.access.may_change_all_keys:
            return None
        return self._session.read_sets(len(self.bucket.partitions))

    def answer_sets(self, sets: SetFrames, lines: bytes) -> None:
        """Sends the answers to the first of these `SET`s, a line for each."""
        self._session.answer_sets(sets, lines)
        self.credit.note_spent()

    def answer_bundle(self, request: Mutate, lines: bytes) -> None:
        """Sends the answer to a bundle of which every run succeeded, a line for each, unless the
        session has ended."""
        if self._session.state is not SessionState.CLOSED:
            self._session.answer_bundle(request.opaque, lines)

    def reply_later(self, request: Message, answer: ReplyTask) -> None:
        """Runs `answer` as a task of its own, which the connection's end cancels."""
        start_reply_task(self, request, answer)

    def reply_in_order(self, request: Message, answer: ReplyTask, nbytes: int = 0) -> None:
        """Runs `answer` as a task, once the requests given to this method before are answered, and
        if the client may still ask for it then. They count as queued: while there are too many,
        nothing more is read.

        Args:
            request: The request.
            answer: Answers it.
            nbytes: About what the request takes in memory, if that is much.
        """
        generation = self.users.generation

        async def answer_if_allowed() -> None:
            if self.users.generation != generation:
                # The right may have been revoked while the request waited.
                self.access.check_message(request, is_noted=True)
            await answer()

        self._in_order.submit(self, request, answer_if_allowed, nbytes)

    def open_later(self, request: Message, answer: ReplyTask) -> None:
        """Runs `answer`, for a stream that cannot be opened now, once those given to this method
        before are answered. There is one a partition at most, so they do not count as queued: what
        else the peer says is read."""
        self._streams_to_open.submit(self, request, answer)


Handler = Callable[[RequestContext, Any], Iterator[None] | None]
"""Answers one kind of request. One that raises `ServerError` or `BucketError` has it refused. One
that is not done after some 2 ms returns the rest, in steps of that length; nothing else that the
peer has sent is handled before they are done."""


_FINISHED: Final = object()


def remaining_steps(steps: Iterator[None]) -> Iterator[None] | None:
    """Does the next of a handler's steps; returns the others, None if it was the last. An error in
    the first one has the request refused."""
    return steps if next(steps, _FINISHED) is not _FINISHED else None
