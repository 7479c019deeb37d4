"""Batches on their way: what may be sent now, what is unanswered, what is sent again.

No I/O: it says things through a session and takes in the answers. One outbox lives through any
number of connections to one node; a partition that moves to another node moves to its outbox, with
all that is unanswered. In each partition batches are sent in order, and after a lost connection, or
at the other node, all that are unanswered are sent again, in order and under their own tokens,
before any new one. So each has its effect once, however often it is sent.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final

import attrs

from upr_protocol.chunk import Chunk
from upr_protocol.client.backoff import Backoff
from upr_protocol.client.outcome import (
    Failure,
    NotDurableError,
    Written,
    failures,
    refused,
    status_of,
)
from upr_protocol.client.retry import passes
from upr_protocol.client.writer import Writer
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
                Written(self.partition, reply.history_id, reply.last_seq, reply.first_cas)
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


class Lane:
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
class OutboxLimits:
    """How much an outbox holds and how long it tries.

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


class Outbox:
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
        writer: Writer,
        limits: OutboxLimits,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.unanswered = 0
        self.nbytes = 0
        self.starved_since: float | None = None
        self.resent = 0
        self._writer = writer
        self._limits = limits
        self._draw = draw
        self._lanes: dict[PartitionId, Lane] = {}
        self._open: dict[int, Lane] = {}
        # Lanes that may send, in the order of their turns; and those that wait for a time.
        self._turns: dict[Lane, None] = {}
        self._resting: dict[Lane, None] = {}

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
        lane = self._lanes.get(partition)
        if lane is None:
            lane = self._lanes[partition] = Lane(self._draw)
        lane.waiting.append(batch)
        self.unanswered += 1
        self.nbytes += batch.nbytes
        if lane not in self._resting:
            self._line_up(lane)
        return batch

    def has(self, partition: PartitionId) -> bool:
        """Whether something of `partition` is unanswered."""
        lane = self._lanes.get(partition)
        return lane is not None and any(True for _ in lane.batches())

    def let_go(self, partition: PartitionId) -> Lane | None:
        """Gives away a partition: another node's outbox takes it over. Answers that still come to
        what was sent here are dropped. O(unanswered)."""
        lane = self._lanes.pop(partition, None)
        if lane is None:
            return None
        for opaque in lane.in_flight:
            del self._open[opaque]
        self._turns.pop(lane, None)
        self._resting.pop(lane, None)
        self._count(lane, -1)
        lane.gather()
        return lane

    def take_over(self, partition: PartitionId, lane: Lane) -> None:
        """Takes in what another outbox let go; it is sent again, in order and under the same
        tokens. O(unanswered)."""
        self._lanes[partition] = lane
        self._count(lane, 1)
        self._line_up(lane)

    def _count(self, lane: Lane, sign: int) -> None:
        for batch in lane.batches():
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
            lane = next(iter(self._turns))
            del self._turns[lane]
            self._send(session, lane)
            self._line_up(lane)
            sent = True
        starved = bool(self._turns) and not session.credit.open
        if not starved:
            self.starved_since = None
        elif sent or self.starved_since is None:
            self.starved_since = now
        return sent

    def _send(self, session: ClientSession, lane: Lane) -> None:
        batch = lane.waiting[0]
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
        lane.waiting.popleft()
        lane.in_flight[opaque] = batch
        self._open[opaque] = lane
        self.resent += batch.sent > 0
        batch.sent += 1

    def _line_up(self, lane: Lane) -> None:
        if lane.waiting and not lane.returned and len(lane.in_flight) < self._limits.in_flight:
            self._turns[lane] = None

    def _wake(self, now: float) -> None:
        for lane in [lane for lane in self._resting if lane.rests_until <= now]:
            del self._resting[lane]
            self._line_up(lane)

    @property
    def wakes_at(self) -> float | None:
        """When `pump` is to be called for the sake of what was refused; None when nothing was."""
        return min((lane.rests_until for lane in self._resting), default=None)

    def take(self, message: Message, now: float) -> Batch | None:
        """Takes in an answer.

        Returns:
            The batch that is done with; None when the message ends none.
        """
        lane = self._open.pop(message.opaque, None)
        if lane is None:
            return None
        batch = lane.in_flight.pop(message.opaque)
        status = status_of(message.status)
        if isinstance(message, MutateReply) and status is Status.OK:
            batch.reply = message
            lane.backoff.reset()
        elif isinstance(message, MutateReply | Refusal):
            if isinstance(message, MutateReply):
                batch.unsure = message
            if self._may_pass(batch, status, now):
                lane.returned.append(batch)
                self._turns.pop(lane, None)
            else:
                batch.refusal = status
        if lane.returned:
            if not lane.in_flight:
                lane.gather()
                lane.rests_until = now + lane.backoff.next_wait_s()
                self._resting[lane] = None
        elif lane not in self._resting:
            self._line_up(lane)
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
        passing = passes(ServerError(status)) or status is Status.NOT_DURABLE_YET
        return passing and now < batch.refused_at + self._limits.patience_s

    def disconnected(self) -> None:
        """The connection is gone: all that is unanswered is to be sent again. O(unanswered)."""
        self._open.clear()
        self._resting.clear()
        self._turns.clear()
        self.starved_since = None
        for lane in self._lanes.values():
            lane.gather()
            self._line_up(lane)
