"""A consumer for a server that keeps replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Unpack

from upr_protocol.address import Address
from upr_protocol.client.core.delivery_tracker import SaveLimits
from upr_protocol.client.core.subscription import Subscription
from upr_protocol.client.trio.connection import ConnectOptions, TrioOptions
from upr_protocol.client.trio.consumer import Consumer, Resume, UndoCallback, open_consumer
from upr_protocol.ids import HistoryId, PartitionId, PartitionState, SeqNo


class ReplicaConsumer(Consumer):
    """A consumer that reports what it has; `consume_as_replica` makes it.

    `AnswersReceived` and `StreamAccepted` are among its events.
    """

    def report(
        self,
        partition: PartitionId,
        history_id: HistoryId,
        received_seq: SeqNo,
        persisted_seq: SeqNo,
    ) -> None:
        """Reports to the server which complete snapshot ends of a history a replica has. Reports
        that are made before the writer's next turn leave in one message, the newest of each
        partition. Without a connection the report is dropped; report again after a stream was
        accepted."""
        self._streams.report((partition, history_id, received_seq, persisted_seq))


@asynccontextmanager
async def consume_as_replica(
    target: str | Address,
    *,
    partitions: Sequence[int] | None = None,
    state: PartitionState,
    resume: Resume = None,
    undo: UndoCallback | None = None,
    retry_timeout_s: float,
    save_limits: SaveLimits | None = None,
    **options: Unpack[ConnectOptions],
) -> AsyncIterator[ReplicaConsumer]:
    """A consumer of one node, also of the answers that it gave to publishers; see `consume`."""
    subscription = Subscription(
        partitions,
        state=state,
        with_answers=True,
        with_logs=True,
        has_undo=undo is not None,
    )
    async with open_consumer(
        ReplicaConsumer,
        Address.parse(target) if isinstance(target, str) else target,
        subscription,
        TrioOptions(**options, retry_timeout_s=retry_timeout_s, follow_map=False),
        resume=resume,
        undo=undo,
        save_limits=save_limits,
    ) as consumer:
        yield consumer
