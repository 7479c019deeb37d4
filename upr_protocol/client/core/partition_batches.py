"""The batches of one partition that have no final answer, and the bundles that they are sent in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from upr_protocol.chunk import Chunk
from upr_protocol.client.core.results import (
    Failure,
    NotDurableError,
    PartitionBatchResult,
    WriteResult,
    failed_operations,
    failures_of_refused,
)
from upr_protocol.client.core.retry import Backoff
from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import PartitionId

BATCH_OVERHEAD_BYTES: Final = 512
"""Memory of a batch beside its chunk, roughly."""


class Batch(msgspec.Struct, eq=False, gc=False):
    """One batch of a publisher: a run of whatever bundle it is sent in.

    Python's collector does not look at batches: of tens of thousands that wait it would look at
    each several times. So what it refers to must not be left in a reference cycle with it:
    `BatchTotals` and `NodeBatches` forget the callback and the bundle once they are done with.

    Attributes:
        counter: Its number among the batches of this writer and partition.
        chunk: The operations.
        on_answer: Called with the batch once it is answered or refused for good; None after that.
        chain: Vouches for it and all batches before it; 0 when the writer keeps no chain.
        period: When it was added; see `BatchTotals.end_period`.
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


class PartitionBatches:
    """The batches of one partition that have no final answer, in order.

    Attributes:
        waiting_batches: The batches that are to be sent, in order.
        sent_batches: The batches that were sent since the partition was placed with its node, by
            counter: those in flight, and those that a server refused for a reason that may pass.
            The refused ones go back to `waiting_batches` once nothing is in flight: resent before
            that, they could come after a later batch.
        in_flight: How many batches are sent, and neither answered nor refused.
        refusal: Why a batch of a task was refused for good; None if none was. Nothing more is sent
            then: a server would apply what comes behind it, after a lost connection.
        resend_at: When refused ones may be sent again.
        backoff: How long to wait before that.
    """

    __slots__ = (
        "backoff",
        "in_flight",
        "partition",
        "refusal",
        "resend_at",
        "sent_batches",
        "waiting_batches",
    )

    def __init__(self, partition: PartitionId, draw: Callable[[], float]) -> None:
        self.partition = partition
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
