"""The batches that one node is sent: which go into the next bundle, and what became of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, islice
from operator import attrgetter
from typing import Final, NamedTuple

from upr_protocol.chunk import Bundle
from upr_protocol.client.core.batch_totals import BatchTotals
from upr_protocol.client.core.batcher import BUNDLE_BYTES, BUNDLE_MUTATIONS
from upr_protocol.client.core.partition_batches import (
    BATCH_OVERHEAD_BYTES,
    Batch,
    PartitionBatches,
    SentBundle,
)
from upr_protocol.client.core.publish_options import PublishOptions
from upr_protocol.client.core.results import (
    STATUS_OK,
    PartitionBatchResult,
    split_reply,
    status_of,
)
from upr_protocol.client.core.retry import is_retryable
from upr_protocol.client.core.writer_identity import WriterIdentity
from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import Cas, Durability, HistoryId, SeqNo
from upr_protocol.limits import REQUESTS_OPEN_MAX
from upr_protocol.session import ClientSession
from upr_protocol.wire import Message, Mutate, MutateReply, Refusal

OUTGOING_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bytes queued for writing before senders wait: enough for large sends to follow each other without
a gap."""

BUSY_NODE_ROWS: Final = 4 * BUNDLE_MUTATIONS
"""A server with so many unanswered operations has enough to do for some milliseconds. What is sent
to it meanwhile is not answered earlier for being sent at once. An answer lets just the partitions
of its own bundle send again: sent each time, small bundles would stay small for ever."""

VERY_BUSY_NODE_ROWS: Final = 8 * BUNDLE_MUTATIONS
"""With so many unanswered operations, answers come whatever is sent, and each lets more partitions
send. So only full bundles are sent: a bundle's own cost is that of a dozen runs."""

JOINED_MUTATIONS_MAX: Final = 2 * BUNDLE_MUTATIONS
"""Operations of a bundle with several batches, at most. With two batches of 1,000 operations, an
operation costs a server a tenth less than with one. With three it costs as much as with one,
probably as their bytes leave the processor's cache before they are copied."""

_JOINED_BYTES_MAX: Final = 2 * BUNDLE_BYTES

_MOSTLY_FULL_ROWS: Final = BUNDLE_MUTATIONS * 3 // 4
_MOSTLY_FULL_BYTES: Final = BUNDLE_BYTES * 3 // 4

_FULL_ROWS: Final = BUNDLE_MUTATIONS * 15 // 16
_FULL_BYTES: Final = BUNDLE_BYTES * 15 // 16

_REQUESTS_MAX: Final = REQUESTS_OPEN_MAX - 64

_APPLIED_STATUSES: Final = frozenset({Status.NOT_DURABLE_YET, Status.TOKEN_TOO_OLD})
"""Refusals of batches that were applied, or may have been."""

_NO_RESULT: Final = PartitionBatchResult(HistoryId(0), SeqNo(0), SeqNo(0), Cas(0))

_PARTITION: Final = attrgetter("partition")


class _NextBundle(NamedTuple):
    """Queues of which the next batches make a bundle, their operations and bytes."""

    queues: list[PartitionBatches]
    rows: int
    nbytes: int


class NodeBatches:
    """The unanswered batches that go to one node, over one connection after another.

    Args:
        writer: Who publishes.
        options: How batches are applied.
        totals: Counts the batches of all nodes.

    Attributes:
        count: How many of its batches have no final answer.
        out_of_credit_since: Since when batches wait for the server's credit; None while none does.
    """

    def __init__(
        self, writer: WriterIdentity, options: PublishOptions, totals: BatchTotals
    ) -> None:
        self.count = 0
        self.out_of_credit_since: float | None = None
        self._writer = writer
        self._options = options
        self._totals = totals
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
        # Otherwise it was scheduled when the batch before came, or may not send now.
        if len(queue.waiting_batches) == 1:
            self._schedule(queue)

    @property
    def is_blocked(self) -> bool:
        """Whether batches might be sent that the session did not take when `send` was called."""
        return self._unsent_thresholds is None

    @property
    def is_send_worth_trying(self) -> bool:
        """Whether `send` or `take_refused` may have something to do because batches were added.
        The other events that they may wait for call them directly. O(1)."""
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
            and queue.in_flight < self._options.in_flight
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
        has_lingered = now >= self._unsent_since + self._options.linger_s
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
        is_busy = self._options.durability is Durability.MEMORY
        return is_busy and self._unanswered_rows >= rows

    def _choose_next_bundle(self) -> _NextBundle:
        """The queues whose next batches go into the next bundle."""
        queues, rows, nbytes = list[PartitionBatches](), 0, 0
        for queue in self._sendable_queues:
            chunk = queue.waiting_batches[0].chunk
            next_rows, next_bytes = rows + chunk.count, nbytes + chunk.nbytes
            if queues and (next_rows > JOINED_MUTATIONS_MAX or next_bytes > _JOINED_BYTES_MAX):
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
        in_flight_max = self._options.in_flight
        for queue in queues:
            if rows >= _MOSTLY_FULL_ROWS or nbytes >= _MOSTLY_FULL_BYTES:
                break
            for batch in islice(queue.waiting_batches, 1, in_flight_max - queue.in_flight):
                rows += batch.chunk.count
                nbytes += batch.chunk.nbytes
        return rows, nbytes

    def _send_bundle(self, session: ClientSession, next_bundle: _NextBundle) -> None:
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
                self._writer.id,
                self._options.durability,
                self._options.copies,
                self._writer.attempt,
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
        in_flight_max, sendable = self._options.in_flight, self._sendable_queues
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
                self._totals.resent_count += 1
            batch.was_sent = True

    @property
    def send_at(self) -> float | None:
        """When to call `send` next, though nothing arrives: refused batches are sent again, or a
        batch has waited for others long enough. None when neither is to come."""
        times = [queue.resend_at for queue in self._backing_off_queues]
        if self._unsent_since is not None and not self._is_node_busy:
            times.append(self._unsent_since + self._options.linger_s)
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
                if queue.backoff.failures:
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
        if len(finished_batches) == len(batches):
            self._totals.remove_answered(finished_batches, bundle.row_count, bundle.nbytes)
        else:
            self._remove_answered(finished_batches)
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
        if self._writer.attempt and status not in _APPLIED_STATUSES:
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
        self._remove_answered(batches)
        return batches

    def _remove_answered(self, batches: Sequence[Batch]) -> None:
        mutations = sum(batch.chunk.count for batch in batches)
        self._totals.remove_answered(batches, mutations, sum(batch.nbytes for batch in batches))

    def _may_retry(self, queue: PartitionBatches, batch: Batch, status: Status, now: float) -> bool:
        if batch.refused_at is None:
            batch.refused_at = now
        if queue.refusal is not None:
            return False
        may_pass = is_retryable(ServerError(status)) or status is Status.NOT_DURABLE_YET
        return may_pass and now < batch.refused_at + self._options.retry_timeout_s

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
