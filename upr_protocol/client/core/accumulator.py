"""Batches on their way: what may be sent now, what is unanswered, what is sent again.

No I/O: it says things through a session and takes in the answers. One accumulator lives through any
number of connections to one node; a partition that moves to another node moves to its accumulator,
with all that is unanswered. In each partition batches are sent in order, and after a lost
connection, or at the other node, all that are unanswered are sent again, in order and under their
own tokens, before any new one. So each has its effect once, however often it is sent.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final

import attrs

from upr_protocol.chunk import Chunk
from upr_protocol.client.core.backoff import Backoff
from upr_protocol.client.core.results import (
    Failure,
    NotDurableError,
    WriteResult,
    failures,
    refused,
    status_of,
)
from upr_protocol.client.core.retry import is_retryable
from upr_protocol.client.core.writer_identity import WriterIdentity
from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import Durability, PartitionId
from upr_protocol.limits import FRAME_BODY_BYTES_MAX, REQUESTS_OPEN_MAX
from upr_protocol.session import ClientSession
from upr_protocol.wire import Message, Mutate, MutateReply, Refusal

IN_FLIGHT_MAX: Final = 16
"""Unanswered batches of one partition. The server remembers the last 64 answers of a writer: what
is in doubt after a lost connection must be among them."""

OUTGOING_BYTES_MAX: Final = 4 * 1024 * 1024
"""What may wait to be written before senders wait: enough for large sends to follow each other
without a gap."""

BUFFER_BYTES_DEFAULT: Final = 64 * 1024 * 1024
"""What a publisher holds, unsent or unanswered, before those who hand it more wait."""

IN_FLIGHT_LIMIT: Final = 64
"""As many answers of a writer and partition as the server remembers."""

CHUNK_BYTES_MAX: Final = FRAME_BODY_BYTES_MAX - 1024
"""A frame, without what stands beside the chunk."""

_REQUESTS_MAX: Final = REQUESTS_OPEN_MAX - 64
_BATCH_BYTES: Final = 512
"""What a batch takes beside its chunk, about."""


class Batch:
    """A batch on its way.

    Attributes:
        partition: Its partition.
        counter: Its number at this writer and partition.
        chain: What vouches for it and all before it; 0 for nothing.
        chunk: What is to be done.
        reply: The answer, once it came.
        refusal: Why the batch as a whole was not done; None when it was. `NOT_DURABLE_YET`: it was
            done, and is not as durable as was asked, as far as is known.
        unsure: What the server answered then, if it told more; the numbers in it can be awaited.
        on_answer: Called with the batch when it is answered or refused for good.
    """

    __slots__ = (
        "chain",
        "chunk",
        "counter",
        "on_answer",
        "partition",
        "refusal",
        "refused_at",
        "reply",
        "sent",
        "unsure",
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
        self.unsure: MutateReply | None = None
        self.refused_at: float | None = None
        """When it was first refused for what may pass."""
        self.sent = 0
        """How many times it was sent."""

    @property
    def nbytes(self) -> int:
        """What it holds, about."""
        return self.chunk.nbytes + _BATCH_BYTES

    def error(self, refusal: Status) -> ServerError:
        """The refusal of the whole batch as an exception."""
        if refusal is Status.NOT_DURABLE_YET:
            reply = self.unsure
            return NotDurableError(
                WriteResult(self.partition, reply.history_id, reply.last_seq, reply.first_cas)
                if reply is not None and reply.last_seq
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


class PartitionBatches:
    """The batches of one partition, in order."""

    __slots__ = ("backoff", "in_flight", "rests_until", "returned", "waiting")

    def __init__(self, draw: Callable[[], float]) -> None:
        self.waiting: deque[Batch] = deque()
        self.in_flight: dict[int, Batch] = {}
        self.returned: list[Batch] = []
        """Refused for what may pass; sent again once nothing is in flight, so as to keep order."""
        self.rests_until = 0.0
        self.backoff = Backoff(draw)

    def batches(self) -> Iterator[Batch]:
        """All that are unanswered."""
        return chain(self.waiting, self.in_flight.values(), self.returned)

    def gather(self) -> None:
        """Puts everything that is unanswered back, in order, to be sent again."""
        again = sorted((*self.in_flight.values(), *self.returned), key=_counter_of)
        self.waiting.extendleft(reversed(again))
        self.in_flight.clear()
        self.returned.clear()


def _counter_of(batch: Batch) -> int:
    return batch.counter


@attrs.frozen
class AccumulatorLimits:
    """How much an accumulator holds and how long it tries.

    Attributes:
        in_flight: Unanswered batches of one partition.
        buffer_bytes: Bytes unsent or unanswered before it is full.
        patience_s: How long a batch that is refused for what may pass is sent again.
        durability: What must hold before a batch is answered.
        copies: How many replicas beside the active, for the replicated levels.
    """

    in_flight: int = attrs.field(
        default=IN_FLIGHT_MAX,
        validator=[attrs.validators.ge(1), attrs.validators.le(IN_FLIGHT_LIMIT)],
    )
    buffer_bytes: int = BUFFER_BYTES_DEFAULT
    patience_s: float = 60.0
    durability: Durability = Durability.MEMORY
    copies: int = 0


class Accumulator:
    """Batches on their way.

    Args:
        writer: Gives them their tokens.
        limits: How much it holds and how long it tries.
        draw: Gives numbers in [0, 1), for the waits after refusals.

    Attributes:
        unanswered: Batches that were added and not answered.
        nbytes: What they hold.
        starved_since: Since when the server's credit keeps batches waiting; None while it does not.
        resent: How many times a batch was sent again.
    """

    def __init__(
        self,
        writer: WriterIdentity,
        limits: AccumulatorLimits,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.unanswered = 0
        self.nbytes = 0
        self.starved_since: float | None = None
        self.resent = 0
        self._writer = writer
        self._limits = limits
        self._draw = draw
        self._queues: dict[PartitionId, PartitionBatches] = {}
        self._open: dict[int, PartitionBatches] = {}
        # Lanes that may send, in the order of their turns; and those that wait for a time.
        self._turns: dict[PartitionBatches, None] = {}
        self._resting: dict[PartitionBatches, None] = {}

    @property
    def full(self) -> bool:
        """Whether those who add should wait."""
        return self.nbytes >= self._limits.buffer_bytes

    def add(
        self,
        partition: PartitionId,
        chunk: Chunk,
        on_answer: Callable[[Batch], None] | None = None,
    ) -> Batch:
        """Takes in a batch; `pump` sends it. O(1).

        Raises:
            ServerError: It is longer than a frame; nothing was taken in.
        """
        if chunk.nbytes > CHUNK_BYTES_MAX:
            raise ServerError(
                Status.TOO_LARGE, f"a batch of {chunk.nbytes} bytes; at most {CHUNK_BYTES_MAX}"
            )
        writer = self._writer
        vouches = writer.next_chain(partition, chunk)
        batch = Batch(partition, writer.next_counter(partition), chunk, on_answer, vouches)
        batches = self._queues.get(partition)
        if batches is None:
            batches = self._queues[partition] = PartitionBatches(self._draw)
        batches.waiting.append(batch)
        self.unanswered += 1
        self.nbytes += batch.nbytes
        if batches not in self._resting:
            self._line_up(batches)
        return batch

    def has(self, partition: PartitionId) -> bool:
        """Whether something of `partition` is unanswered."""
        batches = self._queues.get(partition)
        return batches is not None and any(True for _ in batches.batches())

    def let_go(self, partition: PartitionId) -> PartitionBatches | None:
        """Gives away a partition: another node's accumulator takes it over. Answers that still come
        to what was sent here are dropped. O(unanswered)."""
        batches = self._queues.pop(partition, None)
        if batches is None:
            return None
        for opaque in batches.in_flight:
            del self._open[opaque]
        self._turns.pop(batches, None)
        self._resting.pop(batches, None)
        self._count(batches, -1)
        batches.gather()
        return batches

    def take_over(self, partition: PartitionId, batches: PartitionBatches) -> None:
        """Takes in what another accumulator let go; it is sent again, in order and under the same
        tokens. O(unanswered)."""
        self._queues[partition] = batches
        self._count(batches, 1)
        self._line_up(batches)

    def _count(self, batches: PartitionBatches, sign: int) -> None:
        for batch in batches.batches():
            self.unanswered += sign
            self.nbytes += sign * batch.nbytes

    def pump(self, session: ClientSession, now: float) -> bool:
        """Sends what may be sent now, partitions taking turns.

        Returns:
            Whether anything was sent.
        """
        if self._resting:
            self._wake(now)
        sent = False
        while (
            self._turns
            and session.credit.open
            and len(self._open) < _REQUESTS_MAX
            and session.outgoing_bytes < OUTGOING_BYTES_MAX
        ):
            batches = next(iter(self._turns))
            del self._turns[batches]
            self._send(session, batches)
            self._line_up(batches)
            sent = True
        starved = bool(self._turns) and not session.credit.open
        if not starved:
            self.starved_since = None
        elif sent or self.starved_since is None:
            self.starved_since = now
        return sent

    def _send(self, session: ClientSession, batches: PartitionBatches) -> None:
        batch = batches.waiting[0]
        opaque = session.new_opaque()
        session.send(
            Mutate(
                batch.chunk,
                self._writer.id,
                batch.counter,
                self._limits.durability,
                self._limits.copies,
                self._writer.attempt,
                batch.chain,
                partition=batch.partition,
                opaque=opaque,
            )
        )
        batches.waiting.popleft()
        batches.in_flight[opaque] = batch
        self._open[opaque] = batches
        self.resent += batch.sent > 0
        batch.sent += 1

    def _line_up(self, batches: PartitionBatches) -> None:
        if (
            batches.waiting
            and not batches.returned
            and len(batches.in_flight) < self._limits.in_flight
        ):
            self._turns[batches] = None

    def _wake(self, now: float) -> None:
        for batches in [batches for batches in self._resting if batches.rests_until <= now]:
            del self._resting[batches]
            self._line_up(batches)

    @property
    def wakes_at(self) -> float | None:
        """When `pump` is to be called for the sake of what was refused; None when nothing was."""
        return min((batches.rests_until for batches in self._resting), default=None)

    def take(self, message: Message, now: float) -> Batch | None:
        """Takes in an answer.

        Returns:
            The batch that is done with; None when the message ends none.
        """
        batches = self._open.pop(message.opaque, None)
        if batches is None:
            return None
        batch = batches.in_flight.pop(message.opaque)
        status = status_of(message.status)
        if isinstance(message, MutateReply) and status is Status.OK:
            batch.reply = message
            batches.backoff.reset()
        elif isinstance(message, MutateReply | Refusal):
            if isinstance(message, MutateReply):
                batch.unsure = message
            if self._may_pass(batch, status, now):
                batches.returned.append(batch)
                self._turns.pop(batches, None)
            else:
                batch.refusal = status
        if batches.returned:
            if not batches.in_flight:
                batches.gather()
                batches.rests_until = now + batches.backoff.next_wait_s()
                self._resting[batches] = None
        elif batches not in self._resting:
            self._line_up(batches)
        if batch.reply is None and batch.refusal is None:
            return None
        self.unanswered -= 1
        self.nbytes -= batch.nbytes
        if batch.on_answer is not None:
            batch.on_answer(batch)
        return batch

    def _may_pass(self, batch: Batch, status: Status, now: float) -> bool:
        if batch.refused_at is None:
            batch.refused_at = now
        passing = is_retryable(ServerError(status)) or status is Status.NOT_DURABLE_YET
        return passing and now < batch.refused_at + self._limits.patience_s

    def disconnected(self) -> None:
        """The connection is gone: all that is unanswered is to be sent again. O(unanswered)."""
        self._open.clear()
        self._resting.clear()
        self._turns.clear()
        self.starved_since = None
        for batches in self._queues.values():
            batches.gather()
            self._line_up(batches)
