"""What a publisher sends, to each node what is its."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import trio

from upr_protocol.chunk import Chunk
from upr_protocol.client.core.accumulator import Accumulator, Batch
from upr_protocol.client.core.retry import RetryPolicy
from upr_protocol.client.trio.connection_pool import ConnectionPool
from upr_protocol.client.trio.node_publisher import NodePublisher
from upr_protocol.errors import UprError
from upr_protocol.ids import PartitionId


class PublisherRouter:
    """A publisher for each node, and an accumulator for partitions that are with none; the client
    of a publisher's pool.

    Args:
        new_accumulator: Gives each node's.
        new_patience: The same.
        buffer_bytes: What all may hold before those who add more should wait.
        on_done: Called with each batch that is answered, or refused for good.

    Attributes:
        finished: Whether nothing more will be sent.
        error: Why.
        connections: Connections made.
        partition_count: The bucket's; 0 before the first connection.
        pool: Who keeps the connections; set by whoever makes it.
    """

    pool: ConnectionPool[NodePublisher]

    def __init__(
        self,
        new_accumulator: Callable[[], Accumulator],
        new_patience: Callable[[], RetryPolicy],
        buffer_bytes: int,
        on_done: Callable[[Batch], None],
    ) -> None:
        self.finished = False
        self.error: UprError | None = None
        self.connections = 0
        self.partition_count = 0
        self._new_accumulator = new_accumulator
        self._new_patience = new_patience
        self._buffer_bytes = buffer_bytes
        self._on_done = on_done
        self._unplaced = new_accumulator()
        self._publishers: list[NodePublisher] = []
        self._at: dict[PartitionId, NodePublisher | None] = {}
        self._resent = 0
        self._changed = trio.Event()
        self._rest_changed = trio.Event()

    # The pool's side.

    @property
    def partitions(self) -> Iterable[PartitionId]:
        """See `PoolClient`."""
        return map(PartitionId, range(self.partition_count))

    def is_waiting_for(self, partition: PartitionId) -> bool:
        """See `PoolClient`."""
        return self._unplaced.has(partition)

    def new_handler(self) -> NodePublisher:
        """See `PoolClient`."""
        publisher = NodePublisher(self._new_accumulator(), self._new_patience(), self)
        self._publishers.append(publisher)
        return publisher

    def place(self, partition: PartitionId, handler: NodePublisher | None) -> None:
        """See `PoolClient`."""
        before = self._accumulator_of(partition)
        self._at[partition] = handler
        after = self._accumulator_of(partition)
        if after is before:
            return
        batches = before.let_go(partition)
        if batches is not None:
            after.take_over(partition, batches)
        if handler is not None:
            handler.pump()
        self.notify()

    def remove_handler(self, handler: NodePublisher) -> None:
        """See `PoolClient`."""
        for partition, publisher in self._at.items():
            if publisher is handler:
                self.place(partition, None)
        self._resent += handler.accumulator.resent
        self._publishers.remove(handler)

    # The publishers' side.

    def answered(self, batch: Batch) -> None:
        """A batch was answered, or refused for good."""
        self.pool.works(batch.partition)
        self._on_done(batch)

    def notify(self) -> None:
        """Something has changed."""
        changed, self._changed = self._changed, trio.Event()
        changed.set()
        if self._wakes_at is not None:
            self._rest_changed.set()

    # The publisher's side.

    def _accumulator_of(self, partition: PartitionId) -> Accumulator:
        publisher = self._at.get(partition)
        return self._unplaced if publisher is None else publisher.accumulator

    @property
    def _accumulators(self) -> list[Accumulator]:
        return [self._unplaced, *(publisher.accumulator for publisher in self._publishers)]

    def add(
        self,
        partition: PartitionId,
        chunk: Chunk,
        on_answer: Callable[[Batch], None] | None = None,
    ) -> Batch:
        """Takes in a batch; `pump` sends it.

        Raises:
            ServerError: It is longer than a frame; nothing was taken in.
        """
        return self._accumulator_of(partition).add(partition, chunk, on_answer)

    @property
    def unanswered(self) -> int:
        """Batches that were added and not answered."""
        return sum(accumulator.unanswered for accumulator in self._accumulators)

    @property
    def nbytes(self) -> int:
        """What they hold."""
        return sum(accumulator.nbytes for accumulator in self._accumulators)

    @property
    def full(self) -> bool:
        """Whether those who add should wait."""
        return self.nbytes >= self._buffer_bytes

    @property
    def resent(self) -> int:
        """How many times a batch was sent again."""
        return self._resent + sum(accumulator.resent for accumulator in self._accumulators)

    @property
    def starved_since(self) -> float | None:
        """Since when some node's credit keeps batches waiting."""
        times = [accumulator.starved_since for accumulator in self._accumulators]
        return min((time for time in times if time is not None), default=None)

    def pump(self) -> None:
        """Sends what may be sent now."""
        for publisher in self._publishers:
            publisher.pump()

    @property
    def _wakes_at(self) -> float | None:
        times = [publisher.accumulator.wakes_at for publisher in self._publishers]
        return min((time for time in times if time is not None), default=None)

    async def pump_rested(self) -> None:
        """Pumps whenever batches that were refused have waited long enough."""
        while True:
            wakes_at = self._wakes_at
            if wakes_at is None:
                self._rest_changed = trio.Event()
                await self._rest_changed.wait()
            else:
                await trio.sleep_until(wakes_at)
                self.pump()

    def stop(self, error: UprError | None) -> None:
        """Nothing more will be sent."""
        self.finished = True
        if self.error is None:
            self.error = error
        self.notify()

    async def change(self, deadline: float) -> None:
        """Waits until something has changed, or the deadline."""
        with trio.move_on_at(deadline):
            await self._changed.wait()
