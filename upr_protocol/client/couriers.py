"""What a publisher sends, to each node what is its."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import trio

from upr_protocol.chunk import Chunk
from upr_protocol.client.courier import Courier
from upr_protocol.client.fleet import Fleet
from upr_protocol.client.outbox import Batch, Outbox
from upr_protocol.client.retry import Patience
from upr_protocol.errors import UprError
from upr_protocol.ids import PartitionId


class Couriers:
    """A courier for each node, and an outbox for partitions that are with none; the crew of a
    publisher's fleet.

    Args:
        new_outbox: Gives each node's.
        new_patience: The same.
        buffer_bytes: What all may hold before those who add more should wait.
        on_done: Called with each batch that is answered, or refused for good.

    Attributes:
        finished: Whether nothing more will be sent.
        error: Why.
        connections: Connections made.
        partition_count: The bucket's; 0 before the first connection.
        fleet: Who keeps the links; set by whoever makes it.
    """

    fleet: Fleet[Courier]

    def __init__(
        self,
        new_outbox: Callable[[], Outbox],
        new_patience: Callable[[], Patience],
        buffer_bytes: int,
        on_done: Callable[[Batch], None],
    ) -> None:
        self.finished = False
        self.error: UprError | None = None
        self.connections = 0
        self.partition_count = 0
        self._new_outbox = new_outbox
        self._new_patience = new_patience
        self._buffer_bytes = buffer_bytes
        self._on_done = on_done
        self._homeless = new_outbox()
        self._couriers: list[Courier] = []
        self._at: dict[PartitionId, Courier | None] = {}
        self._resent = 0
        self._changed = trio.Event()
        self._rest_changed = trio.Event()

    # The fleet's side.

    @property
    def partitions(self) -> Iterable[PartitionId]:
        """See `Crew`."""
        return map(PartitionId, range(self.partition_count))

    def waits_for(self, partition: PartitionId) -> bool:
        """See `Crew`."""
        return self._homeless.has(partition)

    def recruit(self) -> Courier:
        """See `Crew`."""
        courier = Courier(self._new_outbox(), self._new_patience(), self)
        self._couriers.append(courier)
        return courier

    def place(self, partition: PartitionId, member: Courier | None) -> None:
        """See `Crew`."""
        before = self._outbox_of(partition)
        self._at[partition] = member
        after = self._outbox_of(partition)
        if after is before:
            return
        lane = before.let_go(partition)
        if lane is not None:
            after.take_over(partition, lane)
        if member is not None:
            member.pump()
        self.notify()

    def dismiss(self, member: Courier) -> None:
        """See `Crew`."""
        for partition, courier in self._at.items():
            if courier is member:
                self.place(partition, None)
        self._resent += member.outbox.resent
        self._couriers.remove(member)

    # The couriers' side.

    def answered(self, batch: Batch) -> None:
        """A batch was answered, or refused for good."""
        self.fleet.works(batch.partition)
        self._on_done(batch)

    def notify(self) -> None:
        """Something has changed."""
        changed, self._changed = self._changed, trio.Event()
        changed.set()
        if self._wakes_at is not None:
            self._rest_changed.set()

    # The publisher's side.

    def _outbox_of(self, partition: PartitionId) -> Outbox:
        courier = self._at.get(partition)
        return self._homeless if courier is None else courier.outbox

    @property
    def _outboxes(self) -> list[Outbox]:
        return [self._homeless, *(courier.outbox for courier in self._couriers)]

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
        return self._outbox_of(partition).add(partition, chunk, on_answer)

    @property
    def unanswered(self) -> int:
        """Batches that were added and not answered."""
        return sum(outbox.unanswered for outbox in self._outboxes)

    @property
    def nbytes(self) -> int:
        """What they hold."""
        return sum(outbox.nbytes for outbox in self._outboxes)

    @property
    def full(self) -> bool:
        """Whether those who add should wait."""
        return self.nbytes >= self._buffer_bytes

    @property
    def resent(self) -> int:
        """How many times a batch was sent again."""
        return self._resent + sum(outbox.resent for outbox in self._outboxes)

    @property
    def starved_since(self) -> float | None:
        """Since when some node's credit keeps batches waiting."""
        times = [outbox.starved_since for outbox in self._outboxes]
        return min((time for time in times if time is not None), default=None)

    def pump(self) -> None:
        """Sends what may be sent now."""
        for courier in self._couriers:
            courier.pump()

    @property
    def _wakes_at(self) -> float | None:
        times = [courier.outbox.wakes_at for courier in self._couriers]
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
