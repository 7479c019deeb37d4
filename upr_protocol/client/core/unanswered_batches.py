"""The batches of a publisher: what may be sent now, what has no answer yet, what to send again.

No I/O: a node's batches are sent through a session, and its answers are given back here. Each
partition has a queue, and each queue is placed with one node, or with none while the partition has
no node. A node is sent bundles, each with the next batch of as many of its partitions as fit.

In each partition, batches are sent in order. After a lost connection, or once the partition has
moved to another node, all unanswered batches are sent again before any new one, in order and with
the same tokens, in whatever bundles come of it. So each batch takes effect once, however often it
is sent. An answer judges each batch of its bundle on its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, islice
from operator import attrgetter
from typing import Final, NamedTuple

import attrs
import msgspec

from upr_protocol.chunk import Bundle, Chunk
from upr_protocol.client.core.batcher import BUNDLE_BYTES, BUNDLE_MUTATIONS
from upr_protocol.client.core.results import (
    STATUS_OK,
    Failure,
    NotDurableError,
    PartitionBatchResult,
    WriteResult,
    failed_operations,
    failures_of_refused,
    split_reply,
    status_of,
)
from upr_protocol.client.core.retry import Backoff, is_retryable
from upr_protocol.client.core.writer_identity import WriterIdentity
from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import Cas, Durability, HistoryId, PartitionId, SeqNo
from upr_protocol.limits import BUNDLE_MUTATIONS_MAX, FRAME_BODY_BYTES_MAX, REQUESTS_OPEN_MAX
from upr_protocol.session import ClientSession
from upr_protocol.wire import Message, Mutate, MutateReply, Refusal

IN_FLIGHT_DEFAULT: Final = 16
"""Unanswered batches of one partition. The server remembers the last 64 answers of a writer: what
is in doubt after a lost connection must be among them."""

OUTGOING_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bytes queued for writing before senders wait: enough for large sends to follow each other without
a gap."""

BUFFER_BYTES_DEFAULT: Final = 64 * 1024 * 1024
"""Bytes that a publisher holds, unsent or unanswered, before its callers wait."""

IN_FLIGHT_LIMIT: Final = 64
"""As many answers of a writer and partition as the server remembers."""

CHUNK_BYTES_MAX: Final = FRAME_BODY_BYTES_MAX - 1024
"""A frame, less the fields beside the chunk."""

BUSY_NODE_ROWS: Final = 4 * BUNDLE_MUTATIONS
"""A server with so many unanswered operations has enough to do for some milliseconds. What is sent
to it meanwhile is not answered earlier for being sent at once. An answer lets just the partitions
of its own bundle send again: sent each time, small bundles would stay small for ever."""

VERY_BUSY_NODE_ROWS: Final = 8 * BUNDLE_MUTATIONS
"""With so many unanswered operations, answers come whatever is sent, and each lets more partitions
send. So only full bundles are sent: a bundle's own cost is that of a dozen runs."""

_MOSTLY_FULL_ROWS: Final = BUNDLE_MUTATIONS * 3 // 4
_MOSTLY_FULL_BYTES: Final = BUNDLE_BYTES * 3 // 4

_FULL_ROWS: Final = BUNDLE_MUTATIONS * 15 // 16
_FULL_BYTES: Final = BUNDLE_BYTES * 15 // 16

_REQUESTS_MAX: Final = REQUESTS_OPEN_MAX - 64
BATCH_OVERHEAD_BYTES: Final = 512
"""Memory of a batch beside its chunk, roughly."""


class Batch(msgspec.Struct, eq=False, gc=False):
    """One batch of a publisher: a run of whatever bundle it is sent in.

    Python's collector does not look at batches: of tens of thousands that wait it would look at
    each several times. So what it refers to must not be left in a reference cycle with it:
    `UnansweredBatches` forgets the callback and the bundle once they are done with.

    Attributes:
        counter: Its number among the batches of this writer and partition.
        chunk: The operations.
        on_answer: Called with the batch once it is answered or refused for good; None after that.
        chain: Vouches for it and all batches before it; 0 when the writer keeps no chain.
        period: When it was added; see `UnansweredBatches.end_period`.
        refusal: Why no server applied the batch; None when one did. `NOT_DURABLE_YET`: it was
            applied, but had not reached the requested durability in time.
        sentence: What the server said when it last refused the batch with others as a whole.
        not_durable: What a server said beside `NOT_DURABLE_YET`.
        refused_at: When a server first refused it for a reason that may pass.
        bundle: The bundle that it was last sent in; None while it is not in flight. The answer to
            any other bundle does not concern it any more.
    """

    partition: PartitionId
    counter: int
    chunk: Chunk
    on_answer: Callable[[Batch], None] | None
    chain: int = 0
    period: int = 0
    result: PartitionBatchResult | None = None
    refusal: Status | None = None
    sentence: str = ""
    not_durable: PartitionBatchResult | None = None
    refused_at: float | None = None
    bundle: SentBundle | None = None
    was_sent: bool = False

    @property
    def nbytes(self) -> int:
        """Its memory, roughly."""
        return self.chunk.nbytes + BATCH_OVERHEAD_BYTES

    @property
    def is_done(self) -> bool:
        """Whether it is answered, or refused for good."""
        return self.result is not None or self.refusal is not None

    def error(self, refusal: Status) -> ServerError:
        """The refusal of the whole batch as an exception."""
        if refusal is Status.NOT_DURABLE_YET:
            result = self.not_durable
            return NotDurableError(
                WriteResult(self.partition, result.history_id, result.last_seq, result.first_cas)
                if result is not None and result.last_seq
                else None
            )
        return ServerError(refusal, self.sentence)

    def failures(self) -> list[Failure]:
        """The operations that failed. O(failures), or O(count) of a batch that was refused."""
        if self.refusal is not None:
            return failures_of_refused(self.partition, self.chunk, self.refusal, self.sentence)
        return (
            []
            if self.result is None
            else failed_operations(self.partition, self.chunk, self.result)
        )


class SentBundle(msgspec.Struct, eq=False):
    """Batches that were sent together.

    Attributes:
        queues: Their queues, by partition.
        batches: The batches, by partition.
        row_count: How many operations they have.
        nbytes: Their memory, roughly.
    """

    queues: Sequence[PartitionBatches]
    batches: Sequence[Batch]
    row_count: int
    nbytes: int


@attrs.frozen
class PublishOptions:
    """How a publisher has its batches applied: how many at once, how durably, how long it retries.
    See also the arguments of `publisher`.

    Attributes:
        retry_timeout_s: How long it resends a batch that servers refuse for a reason that may pass.
        linger_s: How long batches wait for others to fill a bundle with, at most, unless
            `BUSY_NODE_ROWS` are unanswered at level memory. They wait only while an
            earlier bundle is on its way.
    """

    in_flight: int = attrs.field(
        default=IN_FLIGHT_DEFAULT,
        validator=[attrs.validators.ge(1), attrs.validators.le(IN_FLIGHT_LIMIT)],
    )
    buffer_bytes: int = BUFFER_BYTES_DEFAULT
    retry_timeout_s: float = 60.0
    durability: Durability = Durability.MEMORY
    copies: int = 0
    linger_s: float = 0.0


class PartitionBatches:
    """The batches of one partition that have no final answer, in order.

    Attributes:
        node: The node that they are placed with.
        sent_batches: The batches that were sent since, by counter: those in flight, and those that
            a server refused for a reason that may pass. The refused ones go back to
            `waiting_batches` once nothing is in flight: resent before that, they could come after a
            later batch.
        refusal: Why a batch of a task was refused for good; None if none was. Nothing more is sent
            then: a server would apply what comes behind it, after a lost connection.
        resend_at: When refused ones may be sent again.
    """

    __slots__ = (
        "backoff",
        "in_flight",
        "node",
        "partition",
        "refusal",
        "resend_at",
        "sent_batches",
        "waiting_batches",
    )

    def __init__(
        self, partition: PartitionId, node: NodeBatches, draw: Callable[[], float]
    ) -> None:
        self.partition = partition
        self.node = node
        self.waiting_batches: deque[Batch] = deque()
        self.sent_batches: dict[int, Batch] = {}
        self.in_flight = 0
        self.refusal: Status | None = None
        self.resend_at = 0.0
        self.backoff = Backoff(draw)

    def __len__(self) -> int:
        return len(self.waiting_batches) + len(self.sent_batches)

    @property
    def has_refused(self) -> bool:
        """Whether a batch was refused, and is to be sent again before any that waits."""
        return len(self.sent_batches) > self.in_flight

    def requeue(self) -> None:
        """Puts every unanswered batch back into `waiting_batches`, in order."""
        for batch in self.sent_batches.values():
            batch.bundle = None
        self.waiting_batches.extendleft(reversed(self.sent_batches.values()))
        self.sent_batches.clear()
        self.in_flight = 0


class UnansweredBatches:
    """The unanswered batches of one publisher, by partition.

    Attributes:
        unplaced_batches: The batches of partitions that have no node. Nothing sends them.
        count: How many batches were added and have no final answer.
    """

    def __init__(
        self, writer: WriterIdentity, options: PublishOptions, draw: Callable[[], float]
    ) -> None:
        self.writer = writer
        self.options = options
        self.unplaced_batches = NodeBatches(self)
        self.count = 0
        self.nbytes = 0
        self.resent_count = 0
        self._draw = draw
        self._queues: dict[PartitionId, PartitionBatches] = {}
        self._period = 0
        self._period_counts: dict[int, int] = {}
        """By period how many batches have no final answer, if any; the oldest comes first."""

    @property
    def is_full(self) -> bool:
        """Whether callers should wait before they add more."""
        return self.nbytes >= self.options.buffer_bytes

    def add(
        self,
        partition: PartitionId,
        chunk: Chunk,
        on_answer: Callable[[Batch], None] | None = None,
    ) -> Batch:
        """Adds a batch; `NodeBatches.send` sends it. O(1).

        Raises:
            ServerError: The chunk is empty, longer than a frame, or has more operations than a
                bundle may have; nothing was added.
        """
        rows, nbytes = chunk.count, chunk.nbytes
        if not 0 < rows <= BUNDLE_MUTATIONS_MAX or nbytes > CHUNK_BYTES_MAX:
            raise _unfit_error(chunk)
        counter, chain = self.writer.next_token(partition, chunk)
        period = self._period
        batch = Batch(partition, counter, chunk, on_answer, chain, period)
        queue = self._queues.get(partition)
        if queue is None:
            queue = self.queue_of(partition)
        queue.waiting_batches.append(batch)
        queue.node.note_added(queue, rows, nbytes)
        self._period_counts[period] = self._period_counts.get(period, 0) + 1
        self.count += 1
        self.nbytes += nbytes + BATCH_OVERHEAD_BYTES
        return batch

    def end_period(self) -> int:
        """Ends a period: `is_answered` tells when all that was added up to now is answered."""
        self._period += 1
        return self._period - 1

    def is_answered(self, period: int) -> bool:
        """Whether each batch of a period that has ended, and of those before, has its final answer.
        O(1)."""
        return next(iter(self._period_counts), self._period) > period

    def queue_of(self, partition: PartitionId) -> PartitionBatches:
        """The queue of a partition."""
        queue = self._queues.get(partition)
        if queue is None:
            queue = PartitionBatches(partition, self.unplaced_batches, self._draw)
            self._queues[partition] = queue
            self.unplaced_batches.attach_partition(queue)
        return queue

    def is_send_worth_trying(self, partition: PartitionId) -> bool:
        """Whether `NodeBatches.send` may have something to do because a batch was added for this
        partition. O(1)."""
        return self._queues[partition].node.is_send_worth_trying

    def is_unplaced(self, partition: PartitionId) -> bool:
        """Whether `partition` has batches to send, and no node to send them to."""
        queue = self._queues.get(partition)
        return queue is not None and queue.node is self.unplaced_batches and len(queue) > 0

    def new_node(self) -> NodeBatches:
        """The part for one more node; `place` gives it partitions."""
        return NodeBatches(self)

    def place(self, partition: PartitionId, node: NodeBatches) -> bool:
        """Has `node` send the batches of `partition` from now on. Unanswered batches are sent
        again there; answers that the node before still gives to them are dropped. O(unanswered).

        Returns:
            Whether it was another node before.
        """
        queue = self.queue_of(partition)
        if queue.node is node:
            return False
        queue.node.detach_partition(queue)
        node.attach_partition(queue)
        return True

    def unplace_all(self, node: NodeBatches) -> None:
        """Takes all partitions from a node that is not needed any more. O(unanswered)."""
        for queue in node.queues():
            self.place(queue.partition, self.unplaced_batches)

    def remove_answered(self, batches: Sequence[Batch], nbytes: int) -> None:
        """Counts out batches that have their final answer, and so many bytes of memory."""
        self.count -= len(batches)
        self.nbytes -= nbytes
        counts = self._period_counts
        for batch in batches:
            counts[batch.period] -= 1
            if not counts[batch.period]:
                del counts[batch.period]
            on_answer = batch.on_answer
            if on_answer is not None:
                batch.on_answer = None
                on_answer(batch)

    def close(self) -> None:
        """Breaks the reference cycles of what has no answer: nothing is sent any more, and nobody
        is told. O(unanswered)."""
        for queue in self._queues.values():
            for batch in (*queue.waiting_batches, *queue.sent_batches.values()):
                batch.on_answer = batch.bundle = None


def _unfit_error(chunk: Chunk) -> ServerError:
    """Why a chunk cannot be a batch."""
    if not chunk.count:
        return ServerError(Status.BAD_ARGUMENT, "the batch has no operations")
    if chunk.nbytes > CHUNK_BYTES_MAX:
        return ServerError(
            Status.TOO_LARGE,
            f"the batch has {chunk.nbytes} bytes, the limit is {CHUNK_BYTES_MAX}: split it",
        )
    return ServerError(
        Status.TOO_LARGE,
        f"the batch has {chunk.count} operations, the limit is {BUNDLE_MUTATIONS_MAX}: split it",
    )


class _NextBundle(NamedTuple):
    """Queues of which the next batches make a bundle, their operations and bytes."""

    queues: list[PartitionBatches]
    rows: int
    nbytes: int


class NodeBatches:
    """The unanswered batches that go to one node, over one connection after another.

    Attributes:
        count: How many of its batches have no final answer.
        out_of_credit_since: Since when batches wait for the server's credit; None while none does.
    """

    def __init__(self, all_batches: UnansweredBatches) -> None:
        self.count = 0
        self.out_of_credit_since: float | None = None
        self._all_batches = all_batches
        self._queues: dict[PartitionBatches, None] = {}
        self._bundles: dict[int, SentBundle] = {}
        self._unanswered_rows = 0
        # The queues that may send, the one that has waited longest first; and those that wait
        # before they send refused batches again.
        self._sendable_queues: dict[PartitionBatches, None] = {}
        self._backing_off_queues: dict[PartitionBatches, None] = {}
        # The queues whose batches are not to be sent any more, as one was refused for good.
        self._refused_queues: dict[PartitionBatches, None] = {}
        # Operations and bytes of all batches that wait here, and since when they wait for others.
        self._unsent_rows = 0
        self._unsent_bytes = 0
        self._unsent_since: float | None = None
        # From so many unsent rows or bytes on, most of a bundle may be filled with what may be
        # sent; None while the session takes nothing.
        self._unsent_thresholds: tuple[int, int] | None = (0, 0)

    # Placement: called by `UnansweredBatches`.

    def queues(self) -> list[PartitionBatches]:
        """The queues of the partitions that are placed here."""
        return list(self._queues)

    def attach_partition(self, queue: PartitionBatches) -> None:
        """Takes over a partition. O(unanswered)."""
        queue.node = self
        self._queues[queue] = None
        self.count += len(queue)
        self._count_unsent(queue.waiting_batches)
        self._schedule(queue)

    def detach_partition(self, queue: PartitionBatches) -> None:
        """Gives up a partition. O(unanswered)."""
        self._sendable_queues.pop(queue, None)
        self._backing_off_queues.pop(queue, None)
        self._refused_queues.pop(queue, None)
        del self._queues[queue]
        self.count -= len(queue)
        self._count_unsent(queue.waiting_batches, -1)
        queue.requeue()

    def note_added(self, queue: PartitionBatches, rows: int, nbytes: int) -> None:
        """A queue that is placed here has one more batch, with so many operations and bytes."""
        self.count += 1
        self._unsent_rows += rows
        self._unsent_bytes += nbytes
        # Else it was scheduled when the one before came, or may not send now.
        if len(queue.waiting_batches) == 1:
            self._schedule(queue)

    @property
    def is_blocked(self) -> bool:
        """Whether batches might be sent that the session did not take when `send` was called."""
        return self._unsent_thresholds is None

    @property
    def is_send_worth_trying(self) -> bool:
        """Whether `send` or `take_refused` may have something to do because batches were added.
        What else they may wait for calls them itself. O(1)."""
        if self._refused_queues:
            return True
        if self._unsent_thresholds is None or not self._sendable_queues:
            return False
        rows, nbytes = self._unsent_thresholds
        return (
            not self._bundles
            or self._unsent_since is None
            or self._unsent_rows >= rows
            or self._unsent_bytes >= nbytes
        )

    def _count_unsent(self, batches: Iterable[Batch], sign: int = 1) -> None:
        for batch in batches:
            self._unsent_rows += sign * batch.chunk.count
            self._unsent_bytes += sign * batch.chunk.nbytes

    def _requeue(self, queue: PartitionBatches) -> None:
        self._count_unsent(queue.sent_batches.values())
        queue.requeue()

    def _schedule(self, queue: PartitionBatches) -> None:
        """Lets a queue send, after the others, if it may."""
        if queue.refusal is not None:
            self._sendable_queues.pop(queue, None)
            if queue.waiting_batches:
                self._refused_queues[queue] = None
        elif (
            queue.waiting_batches
            and queue.in_flight < self._all_batches.options.in_flight
            and not queue.has_refused
            and queue not in self._backing_off_queues
        ):
            self._sendable_queues[queue] = None

    # Sending.

    def send(self, session: ClientSession, now: float, *, is_due: bool = False) -> bool:
        """Sends as much as may be sent now, in bundles; with `is_due` also batches that would wait
        for others to fill a bundle with.

        Returns:
            Whether it sent anything.
        """
        self._end_backoffs(now)
        if self._unsent_since is None:
            self._unsent_since = now
        has_lingered = now >= self._unsent_since + self._all_batches.options.linger_s
        has_sent = False
        while self._may_send(session):
            is_late = has_lingered and not self._is_node_busy
            next_bundle = self._choose_next_bundle()
            if not (is_due or is_late or self._is_worth_sending(next_bundle)):
                break
            self._send_bundle(session, next_bundle)
            self._unsent_since = now
            has_sent = True
        else:
            self._unsent_since = None
            self._unsent_thresholds = None if self._sendable_queues else (0, 0)
        if not self._sendable_queues or session.credit.is_open:
            self.out_of_credit_since = None
        elif has_sent or self.out_of_credit_since is None:
            self.out_of_credit_since = now
        return has_sent

    def _may_send(self, session: ClientSession) -> bool:
        return (
            bool(self._sendable_queues)
            and session.credit.is_open
            and len(self._bundles) < _REQUESTS_MAX
            and session.outgoing_bytes < OUTGOING_BYTES_MAX
        )

    @property
    def _is_node_busy(self) -> bool:
        return self._has_unanswered(BUSY_NODE_ROWS)

    def _has_unanswered(self, rows: int) -> bool:
        """Whether the server works on so many operations at least."""
        # What waits for a disk or for replicas is unanswered, and keeps no server busy.
        is_busy = self._all_batches.options.durability is Durability.MEMORY
        return is_busy and self._unanswered_rows >= rows

    def _choose_next_bundle(self) -> _NextBundle:
        """The queues whose next batches go into the next bundle."""
        queues, rows, nbytes = list[PartitionBatches](), 0, 0
        for queue in self._sendable_queues:
            chunk = queue.waiting_batches[0].chunk
            next_rows, next_bytes = rows + chunk.count, nbytes + chunk.nbytes
            if queues and (next_rows > BUNDLE_MUTATIONS or next_bytes > BUNDLE_BYTES):
                break
            rows, nbytes = next_rows, next_bytes
            queues.append(queue)
        return _NextBundle(queues, rows, nbytes)

    def _is_worth_sending(self, next_bundle: _NextBundle) -> bool:
        """Whether nothing is gained by waiting for more batches: the node has nothing else to do,
        or what may be sent now fills most of a bundle."""
        queues, rows, nbytes = next_bundle
        if not self._bundles or len(queues) < len(self._sendable_queues):
            return True
        if self._has_unanswered(VERY_BUSY_NODE_ROWS):
            rows_enough, bytes_enough = _FULL_ROWS, _FULL_BYTES
        else:
            rows_enough, bytes_enough = _MOSTLY_FULL_ROWS, _MOSTLY_FULL_BYTES
            rows, nbytes = self._with_later_batches(next_bundle)
        if rows >= rows_enough or nbytes >= bytes_enough:
            return True
        self._unsent_thresholds = (
            self._unsent_rows + rows_enough - rows,
            self._unsent_bytes + bytes_enough - nbytes,
        )
        return False

    def _with_later_batches(self, next_bundle: _NextBundle) -> tuple[int, int]:
        """The operations and bytes that the chosen queues may send now: a partition's batches go
        one after the other, in as many bundles. Counts no further than is worth sending."""
        queues, rows, nbytes = next_bundle
        in_flight_max = self._all_batches.options.in_flight
        for queue in queues:
            if rows >= _MOSTLY_FULL_ROWS or nbytes >= _MOSTLY_FULL_BYTES:
                break
            for batch in islice(queue.waiting_batches, 1, in_flight_max - queue.in_flight):
                rows += batch.chunk.count
                nbytes += batch.chunk.nbytes
        return rows, nbytes

    def _send_bundle(self, session: ClientSession, next_bundle: _NextBundle) -> None:
        all_batches = self._all_batches
        queues, rows, nbytes = next_bundle
        queues.sort(key=_PARTITION)
        batches = [queue.waiting_batches[0] for queue in queues]
        bundle = Bundle.of_parts(
            [(batch.partition, batch.chunk, batch.counter, batch.chain) for batch in batches]
        )
        opaque = session.new_opaque()
        session.send(
            Mutate(
                bundle,
                all_batches.writer.id,
                all_batches.options.durability,
                all_batches.options.copies,
                all_batches.writer.attempt,
                opaque=opaque,
            )
        )
        # Only now, as a session that refuses to send must leave the batches where they were.
        all_bytes = nbytes + BATCH_OVERHEAD_BYTES * len(batches)
        sent_bundle = SentBundle(queues, batches, rows, all_bytes)
        self._bundles[opaque] = sent_bundle
        self._unanswered_rows += rows
        self._unsent_rows -= rows
        self._unsent_bytes -= nbytes
        in_flight_max, sendable = all_batches.options.in_flight, self._sendable_queues
        for queue, batch in zip(queues, batches, strict=True):
            waiting_batches = queue.waiting_batches
            waiting_batches.popleft()
            queue.sent_batches[batch.counter] = batch
            queue.in_flight += 1
            # Those that may send more go behind the others.
            del sendable[queue]
            if waiting_batches and queue.in_flight < in_flight_max:
                sendable[queue] = None
            batch.bundle = sent_bundle
            if batch.was_sent:
                all_batches.resent_count += 1
            batch.was_sent = True

    @property
    def send_at(self) -> float | None:
        """When to call `send` next, though nothing arrives: refused batches are sent again, or a
        batch has waited for others long enough. None when neither is to come."""
        times = [queue.resend_at for queue in self._backing_off_queues]
        if self._unsent_since is not None and not self._is_node_busy:
            times.append(self._unsent_since + self._all_batches.options.linger_s)
        return min(times, default=None)

    def _end_backoffs(self, now: float) -> None:
        for queue in [queue for queue in self._backing_off_queues if queue.resend_at <= now]:
            del self._backing_off_queues[queue]
            self._schedule(queue)

    # Receiving.

    def receive(self, message: Message, now: float) -> list[Batch]:
        """Takes in an answer; gives the batches that have their final answer now. Raises
        `RemoteProtocolError` if it does not fit the bundle."""
        bundle = self._bundles.get(message.opaque)
        if bundle is None:
            return []
        batches = bundle.batches
        sentence = message.sentence if isinstance(message, Refusal) else ""
        if isinstance(message, MutateReply):
            bounds: Sequence[int] = ()
            if message.failures or message.counters:
                bounds = list(accumulate([batch.chunk.count for batch in batches], initial=0))
            answers = split_reply(message, list(map(_PARTITION, batches)), bounds)
        else:
            assert isinstance(message, Refusal), "the session accepts no other answer to a Mutate"
            answers = [(status_of(message.status), _NO_RESULT)] * len(batches)
        del self._bundles[message.opaque]
        self._unanswered_rows -= bundle.row_count
        finished_batches = list[Batch]()
        sendable = self._sendable_queues
        for queue, batch, (status, result) in zip(bundle.queues, batches, answers, strict=True):
            # The answer may tell of a batch that was meanwhile sent again, in another bundle.
            if batch.bundle is not bundle:
                continue
            batch.bundle = None
            queue.in_flight -= 1
            if status is STATUS_OK:
                batch.result = result
                queue.backoff.reset()
                is_final = True
            else:
                batch.sentence = sentence
                is_final = self._note_refused(queue, batch, status, result, now)
            if is_final:
                del queue.sent_batches[batch.counter]
                finished_batches.append(batch)
            if queue.refusal is not None or len(queue.sent_batches) > queue.in_flight:
                self._go_on_refused(queue, now)
            elif queue.waiting_batches:
                sendable[queue] = None
        self.count -= len(finished_batches)
        nbytes = bundle.nbytes
        if len(finished_batches) < len(batches):
            nbytes = sum(batch.nbytes for batch in finished_batches)
        self._all_batches.remove_answered(finished_batches, nbytes)
        return finished_batches

    def _note_refused(
        self,
        queue: PartitionBatches,
        batch: Batch,
        status: Status,
        result: PartitionBatchResult,
        now: float,
    ) -> bool:
        """A server has refused a batch; whether that is final."""
        if status is Status.NOT_DURABLE_YET:
            batch.not_durable = result
        if self._may_retry(queue, batch, status, now):
            self._sendable_queues.pop(queue, None)
            return False
        batch.refusal = queue.refusal or status
        if self._all_batches.writer.attempt and status not in _APPLIED_STATUSES:
            queue.refusal = batch.refusal
        return True

    def _go_on_refused(self, queue: PartitionBatches, now: float) -> None:
        """A batch was answered of a queue of which a server has refused one."""
        if not queue.in_flight and queue.has_refused:
            self._requeue(queue)
            if queue.refusal is None:
                queue.resend_at = now + queue.backoff.next_wait_s()
                self._backing_off_queues[queue] = None
        self._schedule(queue)

    def take_refused(self) -> list[Batch]:
        """Takes out the batches that are not sent any more, because the server refused one of their
        partition for good. They have its refusal. O(the answer).

        Call it after everything that changes the batches, as `send`, also without a connection."""
        batches: list[Batch] = []
        for queue in self._refused_queues:
            self._count_unsent(queue.waiting_batches, -1)
            batches += queue.waiting_batches
            for batch in queue.waiting_batches:
                batch.refusal = queue.refusal
            queue.waiting_batches.clear()
        self._refused_queues.clear()
        self.count -= len(batches)
        self._all_batches.remove_answered(batches, sum(batch.nbytes for batch in batches))
        return batches

    def _may_retry(self, queue: PartitionBatches, batch: Batch, status: Status, now: float) -> bool:
        if batch.refused_at is None:
            batch.refused_at = now
        if queue.refusal is not None:
            return False
        may_pass = is_retryable(ServerError(status)) or status is Status.NOT_DURABLE_YET
        return may_pass and now < batch.refused_at + self._all_batches.options.retry_timeout_s

    def connection_lost(self) -> None:
        """The connection is lost: every unanswered batch is to be sent again. O(unanswered)."""
        self._bundles.clear()
        self._unanswered_rows = 0
        self._backing_off_queues.clear()
        self._sendable_queues.clear()
        self.out_of_credit_since = self._unsent_since = None
        self._unsent_thresholds = 0, 0
        for queue in self._queues:
            self._requeue(queue)
            self._schedule(queue)


_APPLIED_STATUSES: Final = frozenset({Status.NOT_DURABLE_YET, Status.TOKEN_TOO_OLD})
"""Refusals of batches that were applied, or may have been."""

_NO_RESULT: Final = PartitionBatchResult(HistoryId(0), SeqNo(0), SeqNo(0), Cas(0))

_PARTITION: Final = attrgetter("partition")
