"""The batches of a publisher: what may be sent now, what has no answer yet, what to send again.

No I/O: a node's batches are sent through a session, and its answers are given back here. Each
partition has a queue, and each queue is placed with one node, or with none while the partition has
no node. In each partition, batches are sent in order. After a lost connection, or once the
partition has moved to another node, all unanswered batches are sent again before any new one, in
order and with the same tokens. So each batch takes effect once, however often it is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final

import attrs

from upr_protocol.chunk import Bundle, Chunk
from upr_protocol.client.core.results import (
    Failure,
    NotDurableError,
    WriteResult,
    failures,
    refused,
    status_of,
)
from upr_protocol.client.core.retry import Backoff, is_retryable
from upr_protocol.client.core.writer_identity import WriterIdentity
from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import Durability, PartitionId
from upr_protocol.limits import FRAME_BODY_BYTES_MAX, REQUESTS_OPEN_MAX
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

_REQUESTS_MAX: Final = REQUESTS_OPEN_MAX - 64
_BATCH_BYTES: Final = 512
"""Memory of a batch beside its chunk, roughly."""


class Batch:
    """One batch of a publisher.

    Attributes:
        partition: Its partition.
        counter: Its number among the batches of this writer and partition.
        chain: Vouches for it and all batches before it; 0 when the writer keeps no chain.
        chunk: The operations.
        reply: The server's answer, once it has arrived.
        refusal: Why the server did not apply the batch; None when it did. `NOT_DURABLE_YET`: it did
            apply it, but had not reached the requested durability when it answered.
        not_durable_reply: The server's answer with `NOT_DURABLE_YET`, if it sent numbers that
            can be awaited.
        on_answer: Called with the batch once it is answered or refused for good.
    """

    __slots__ = (
        "chain",
        "chunk",
        "counter",
        "not_durable_reply",
        "on_answer",
        "partition",
        "refusal",
        "refused_at",
        "reply",
        "sent",
    )

    def __init__(
        self,
        partition: PartitionId,
        counter: int,
        chunk: Chunk,
        on_answer: Callable[[Batch], None] | None,
        chain: int = 0,
    ) -> None:
        self.chain = chain
        self.partition = partition
        self.counter = counter
        self.chunk = chunk
        self.on_answer = on_answer
        self.reply: MutateReply | None = None
        self.refusal: Status | None = None
        self.not_durable_reply: MutateReply | None = None
        self.refused_at: float | None = None
        """When a server first refused it for a reason that may pass."""
        self.sent = 0
        """How many times it was sent."""

    @property
    def nbytes(self) -> int:
        """Its memory, roughly."""
        return self.chunk.nbytes + _BATCH_BYTES

    @property
    def is_done(self) -> bool:
        """Whether it is answered, or refused for good."""
        return self.reply is not None or self.refusal is not None

    def error(self, refusal: Status) -> ServerError:
        """The refusal of the whole batch as an exception."""
        if refusal is Status.NOT_DURABLE_YET:
            run = None if self.not_durable_reply is None else self.not_durable_reply.runs[0]
            return NotDurableError(
                WriteResult(self.partition, run.history_id, run.last_seq, run.first_cas)
                if run is not None and run.last_seq
                else None
            )
        return ServerError(refusal)

    def failures(self) -> list[Failure]:
        """The operations that failed. O(failures), or O(count) of a batch that was refused."""
        if self.refusal is not None:
            return refused(self.partition, self.chunk, self.refusal)
        if self.reply is None or not self.reply.failures:
            return []
        return failures(self.partition, self.chunk, self.reply)


@attrs.frozen
class PublishOptions:
    """How a publisher has its batches applied: how many at once, how durably, how long it retries.

    Attributes:
        in_flight: Unanswered batches of one partition.
        buffer_bytes: Bytes unsent or unanswered before it is full.
        retry_timeout_s: How long it resends a batch that servers refuse for a reason that may pass.
        durability: The durability that servers answer a batch at.
        copies: How many replicas beside the active, for the replicated levels.
    """

    in_flight: int = attrs.field(
        default=IN_FLIGHT_DEFAULT,
        validator=[attrs.validators.ge(1), attrs.validators.le(IN_FLIGHT_LIMIT)],
    )
    buffer_bytes: int = BUFFER_BYTES_DEFAULT
    retry_timeout_s: float = 60.0
    durability: Durability = Durability.MEMORY
    copies: int = 0


class PartitionBatches:
    """The batches of one partition that have no final answer, in order.

    Attributes:
        partition: The partition.
        node: The node that they are placed with.
        waiting: The batches to send.
        in_flight: The batches without an answer, by opaque.
        refused: The batches that a server refused for a reason that may pass. They go back to
            `waiting` once nothing is in flight: resent before that, they could come after a later
            batch.
        resend_at: When the refused ones may be sent again.
        backoff: Spreads the times of resending.
    """

    __slots__ = (
        "backoff",
        "in_flight",
        "node",
        "partition",
        "refused",
        "resend_at",
        "waiting",
    )

    def __init__(
        self, partition: PartitionId, node: NodeBatches, draw: Callable[[], float]
    ) -> None:
        self.partition = partition
        self.node = node
        self.waiting: deque[Batch] = deque()
        self.in_flight: dict[int, Batch] = {}
        self.refused: list[Batch] = []
        self.resend_at = 0.0
        self.backoff = Backoff(draw)

    def __iter__(self) -> Iterator[Batch]:
        return chain(self.waiting, self.in_flight.values(), self.refused)

    def __len__(self) -> int:
        return len(self.waiting) + len(self.in_flight) + len(self.refused)

    def requeue(self) -> None:
        """Puts every unanswered batch back into `waiting`, in order."""
        unanswered = sorted((*self.in_flight.values(), *self.refused), key=_counter_of)
        self.waiting.extendleft(reversed(unanswered))
        self.in_flight.clear()
        self.refused.clear()


def _counter_of(batch: Batch) -> int:
    return batch.counter


class UnansweredBatches:
    """The unanswered batches of one publisher, by partition.

    Args:
        writer: Gives batches their tokens.
        options: How many batches at once, how durable, how long to retry.
        draw: Gives numbers in [0, 1), for the waits after refusals.

    Attributes:
        writer: See above.
        options: See above.
        unplaced: The batches of partitions that have no node. Nothing sends them.
        count: How many batches were added and have no final answer.
        nbytes: Their memory.
        resent: How many times a batch was sent again.
    """

    def __init__(
        self, writer: WriterIdentity, options: PublishOptions, draw: Callable[[], float]
    ) -> None:
        self.writer = writer
        self.options = options
        self.unplaced = NodeBatches(self)
        self.count = 0
        self.nbytes = 0
        self.resent = 0
        self._draw = draw
        self._queues: dict[PartitionId, PartitionBatches] = {}

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
            ServerError: The chunk is longer than a frame; nothing was added.
        """
        if chunk.nbytes > CHUNK_BYTES_MAX:
            raise ServerError(
                Status.TOO_LARGE,
                f"the batch has {chunk.nbytes} bytes, the limit is {CHUNK_BYTES_MAX}: split it",
            )
        chained = self.writer.next_chain(partition, chunk)
        counter = self.writer.next_counter(partition)
        batch = Batch(partition, counter, chunk, on_answer, chained)
        queue = self._queue_of(partition)
        queue.waiting.append(batch)
        queue.node.count += 1
        queue.node.schedule(queue)
        self.count += 1
        self.nbytes += batch.nbytes
        return batch

    def _queue_of(self, partition: PartitionId) -> PartitionBatches:
        queue = self._queues.get(partition)
        if queue is None:
            queue = PartitionBatches(partition, self.unplaced, self._draw)
            self._queues[partition] = queue
            self.unplaced.attach(queue)
        return queue

    def is_unplaced(self, partition: PartitionId) -> bool:
        """Whether `partition` has batches to send, and no node to send them to."""
        queue = self._queues.get(partition)
        return queue is not None and queue.node is self.unplaced and len(queue) > 0

    def new_node(self) -> NodeBatches:
        """The part for one more node; `place` gives it partitions."""
        return NodeBatches(self)

    def place(self, partition: PartitionId, node: NodeBatches) -> bool:
        """Has `node` send the batches of `partition` from now on. Unanswered batches are sent
        again there; answers that the node before still gives to them are dropped. O(unanswered).

        Returns:
            Whether it was another node before.
        """
        queue = self._queue_of(partition)
        if queue.node is node:
            return False
        queue.node.detach(queue)
        node.attach(queue)
        return True

    def unplace_all(self, node: NodeBatches) -> None:
        """Takes all partitions from a node that is not needed any more. O(unanswered)."""
        for queue in node.queues():
            self.place(queue.partition, self.unplaced)

    def finish(self, batch: Batch) -> None:
        """Counts out a batch that has its final answer."""
        self.count -= 1
        self.nbytes -= batch.nbytes
        if batch.on_answer is not None:
            batch.on_answer(batch)


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
        self._queue_by_opaque: dict[int, PartitionBatches] = {}
        # The queues that may send, the one that has waited longest first; and those that wait
        # before they send refused batches again.
        self._sendable: dict[PartitionBatches, None] = {}
        self._backing_off: dict[PartitionBatches, None] = {}

    # Placement: called by `UnansweredBatches`.

    def queues(self) -> list[PartitionBatches]:
        """The queues of the partitions that are placed here."""
        return list(self._queues)

    def attach(self, queue: PartitionBatches) -> None:
        """Takes over a partition."""
        queue.node = self
        self._queues[queue] = None
        self.count += len(queue)
        self.schedule(queue)

    def detach(self, queue: PartitionBatches) -> None:
        """Gives up a partition. O(unanswered)."""
        for opaque in queue.in_flight:
            del self._queue_by_opaque[opaque]
        self._sendable.pop(queue, None)
        self._backing_off.pop(queue, None)
        del self._queues[queue]
        self.count -= len(queue)
        queue.requeue()

    def schedule(self, queue: PartitionBatches) -> None:
        """Lets a queue send, after the others, if it may."""
        in_flight_max = self._all_batches.options.in_flight
        may_send = queue.waiting and not queue.refused and len(queue.in_flight) < in_flight_max
        if may_send and queue not in self._backing_off:
            self._sendable[queue] = None

    # Sending.

    def send(self, session: ClientSession, now: float) -> bool:
        """Sends as much as may be sent now: a batch of each partition, then again.

        Returns:
            Whether it sent anything.
        """
        if self._backing_off:
            self._end_backoffs(now)
        sent = False
        while (
            self._sendable
            and session.credit.open
            and len(self._queue_by_opaque) < _REQUESTS_MAX
            and session.outgoing_bytes < OUTGOING_BYTES_MAX
        ):
            queue = next(iter(self._sendable))
            del self._sendable[queue]
            self._send_next_of(session, queue)
            self.schedule(queue)
            sent = True
        out_of_credit = bool(self._sendable) and not session.credit.open
        if not out_of_credit:
            self.out_of_credit_since = None
        elif sent or self.out_of_credit_since is None:
            self.out_of_credit_since = now
        return sent

    def _send_next_of(self, session: ClientSession, queue: PartitionBatches) -> None:
        all_batches, batch = self._all_batches, queue.waiting[0]
        opaque = session.new_opaque()
        session.send(
            Mutate(
                Bundle.of_one(batch.partition, batch.chunk, batch.counter, batch.chain),
                all_batches.writer.id,
                all_batches.options.durability,
                all_batches.options.copies,
                all_batches.writer.attempt,
                opaque=opaque,
            )
        )
        # Only now, as a session that refuses to send must leave the batch where it was.
        queue.waiting.popleft()
        queue.in_flight[opaque] = batch
        self._queue_by_opaque[opaque] = queue
        all_batches.resent += batch.sent > 0
        batch.sent += 1

    @property
    def resend_at(self) -> float | None:
        """When `send` is to be called next because of refused batches; None when there are none."""
        return min((queue.resend_at for queue in self._backing_off), default=None)

    def _end_backoffs(self, now: float) -> None:
        for queue in [queue for queue in self._backing_off if queue.resend_at <= now]:
            del self._backing_off[queue]
            self.schedule(queue)

    # Receiving.

    def receive(self, message: Message, now: float) -> Batch | None:
        """Takes in an answer.

        Returns:
            The batch that has its final answer now; None when the message ends no batch.
        """
        queue = self._queue_by_opaque.pop(message.opaque, None)
        if queue is None:
            return None
        batch = queue.in_flight.pop(message.opaque)
        status = status_of(
            message.runs[0].status if isinstance(message, MutateReply) else message.status
        )
        if isinstance(message, MutateReply) and status is Status.OK:
            batch.reply = message
            queue.backoff.reset()
        elif isinstance(message, MutateReply | Refusal):
            if isinstance(message, MutateReply):
                batch.not_durable_reply = message
            if self._may_retry(batch, status, now):
                queue.refused.append(batch)
                self._sendable.pop(queue, None)
            else:
                batch.refusal = status
        if not queue.refused:
            self.schedule(queue)
        elif not queue.in_flight:
            queue.requeue()
            queue.resend_at = now + queue.backoff.next_wait_s()
            self._backing_off[queue] = None
        if not batch.is_done:
            return None
        self.count -= 1
        self._all_batches.finish(batch)
        return batch

    def _may_retry(self, batch: Batch, status: Status, now: float) -> bool:
        if batch.refused_at is None:
            batch.refused_at = now
        may_pass = is_retryable(ServerError(status)) or status is Status.NOT_DURABLE_YET
        return may_pass and now < batch.refused_at + self._all_batches.options.retry_timeout_s

    def disconnected(self) -> None:
        """The connection is lost: every unanswered batch is to be sent again. O(unanswered)."""
        self._queue_by_opaque.clear()
        self._backing_off.clear()
        self._sendable.clear()
        self.out_of_credit_since = None
        for queue in self._queues:
            queue.requeue()
            self.schedule(queue)
