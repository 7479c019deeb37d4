"""Sends a publisher's batches: each to the node that holds its partition."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import trio

from upr_protocol.address import Address
from upr_protocol.client.core.partition_batches import Batch
from upr_protocol.client.core.results import is_wrong_node
from upr_protocol.client.core.retry import RetryState
from upr_protocol.client.core.unanswered_batches import UnansweredBatches
from upr_protocol.client.trio.connection import TrioConnection, TrioOptions
from upr_protocol.client.trio.connection_pool import ConnectionPool, NodeHandler
from upr_protocol.concurrency import Notifier, without_traceback
from upr_protocol.errors import BrokenError, ClosedError, UprError
from upr_protocol.ids import PartitionId
from upr_protocol.wire import Message, MutateReply, Refusal


class NodePublisher(NodeHandler):
    """Publishes to one node, over one connection after another."""

    def __init__(self, nodes: PublisherNodes, retry: RetryState) -> None:
        self.retry = retry
        self.batches = nodes.unanswered_batches.new_node()
        self._nodes = nodes
        self._connection: TrioConnection | None = None

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None

    def connection_made(self, connection: TrioConnection) -> None:
        self._connection = connection
        self.send()

    def message_received(self, message: Message) -> None:
        nodes = self._nodes
        if isinstance(message, MutateReply | Refusal) and is_wrong_node(message):
            nodes.connections.request_map(message.map_revision)
        if finished_batches := self.batches.receive(message, trio.current_time()):
            self.retry.note_progress()
            nodes.finish_batches(finished_batches)
        self.send()

    def ready_to_write(self) -> None:
        if self.batches.is_blocked:
            self.send()

    def connection_lost(self, error: UprError) -> None:  # noqa: ARG002  ConnectionPool keeps it
        self._connection = None
        self.batches.connection_lost()
        self.send()

    def node_removed(self) -> None:
        """Other nodes are sent the unanswered batches, with the same tokens."""
        self._nodes.unanswered_batches.unplace_all(self.batches)

    def send(self, *, is_due: bool = False) -> None:
        """Sends as much as may be sent now; with `is_due`, bundles that are not full, too."""
        if refused_batches := self.batches.take_refused():
            self._nodes.finish_batches(refused_batches)
        connection = self._connection
        if connection is None:
            return
        if self.batches.send(connection.session, trio.current_time(), is_due=is_due):
            connection.flush()
        if self.batches.send_at is not None:
            self._nodes.send_later.notify()


class PublisherNodes:
    """A `NodePublisher` for each node that the partition map names.

    Attributes:
        on_done: Called with batches that are answered, or refused for good; set by the publisher.
        partition_count: The bucket's; 0 before the first connection.
        has_opened: Set once the first connection is made, or could not be made.
        send_later: Notified when a node has batches to send at some later time.
        room: The tasks that wait for room in the buffer. One of them is woken when there is some,
            and wakes the next.
        flush_events: By period (`BatchTotals.end_period`) the event of the task that waits
            until its batches are answered, the oldest first.
        answer_events: The events of the tasks that wait for one batch. They and the ones before
            are also set when no answer will come.
    """

    on_done: Callable[[Sequence[Batch]], None]

    def __init__(
        self, address: Address, options: TrioOptions, unanswered_batches: UnansweredBatches
    ) -> None:
        self.unanswered_batches = unanswered_batches
        self.is_finished = False
        self.error: UprError | None = None
        self.connection_count = 0
        self.partition_count = 0
        self.has_opened = trio.Event()
        self.send_later = Notifier()
        self.room = trio.lowlevel.ParkingLot()
        self.flush_events: dict[int, trio.Event] = {}
        self.answer_events: set[trio.Event] = set()
        self._new_retry_state = options.new_retry_state
        self.connections = ConnectionPool(address, options, self)

    # What the connections call; `PoolOwner` documents it.

    @property
    def partitions(self) -> Iterable[PartitionId]:
        return map(PartitionId, range(self.partition_count))

    def bucket_opened(self, connection: TrioConnection) -> None:
        count = connection.handshake.partition_count
        if self.partition_count not in (0, count):
            error = BrokenError(
                f"the bucket was deleted and created again, with {count} partitions instead of "
                f"{self.partition_count}"
            )
            self.stop(error)
            raise error
        self.partition_count = count
        self.connection_count += 1
        self.has_opened.set()

    def is_waiting_for(self, partition: PartitionId) -> bool:
        return self.unanswered_batches.is_unplaced(partition)

    def new_handler(self) -> NodePublisher:
        return NodePublisher(self, self._new_retry_state())

    def place(self, partition: PartitionId, handler: NodePublisher | None) -> None:
        node = self.unanswered_batches.unplaced_batches if handler is None else handler.batches
        if self.unanswered_batches.place(partition, node) and handler is not None:
            handler.send()

    # For the nodes' publishers.

    def finish_batches(self, batches: Sequence[Batch]) -> None:
        """Batches are answered, or refused for good."""
        router = self.connections.router
        if not router.is_settled:
            for batch in batches:
                router.note_succeeded(batch.partition)
        self.on_done(batches)
        if not self.unanswered_batches.is_full:
            self.room.unpark()
        while self.flush_events:
            period = next(iter(self.flush_events))
            if not self.unanswered_batches.totals.is_answered(period):
                break
            self.flush_events.pop(period).set()

    # For the publisher.

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to any node."""
        return any(publisher.is_connected for publisher in self.connections.handlers)

    @property
    def out_of_credit_since(self) -> float | None:
        """Since when the credit of some node keeps batches waiting; None while none does."""
        times = (publisher.batches.out_of_credit_since for publisher in self.connections.handlers)
        return min((time for time in times if time is not None), default=None)

    def send(self, *, is_due: bool = False) -> None:
        """Sends as much as may be sent now; with `is_due`, bundles that are not full, too."""
        for publisher in self.connections.handlers:
            publisher.send(is_due=is_due)

    def send_added(self) -> None:
        """Sends as much as may be sent now, where more may be because batches were added."""
        for publisher in self.connections.handlers:
            if publisher.batches.is_send_worth_trying:
                publisher.send()

    async def send_when_due(self) -> None:
        """Runs for ever: sends refused batches again, and bundles that are not full, when they have
        waited long enough."""
        while True:
            times = (publisher.batches.send_at for publisher in self.connections.handlers)
            send_at = min((time for time in times if time is not None), default=None)
            if send_at is None:
                await self.send_later.wait()
            else:
                await trio.sleep_until(send_at)
                self.send()

    def stop(self, error: UprError) -> None:
        """Sends nothing more, and wakes all tasks that wait. Only the first reason counts."""
        self.is_finished = True
        if self.error is None:
            self.error = error
        self.has_opened.set()
        self.room.unpark_all()
        for event in (*self.answer_events, *self.flush_events.values()):
            event.set()

    def close(self) -> None:
        """Forgets the nodes and the publisher, so that none of them is in a reference cycle. Call
        it when the connections have ended."""
        self.stop(ClosedError("the publisher was closed"))
        self.connections.close()
        self.unanswered_batches.close()
        del self.on_done
        assert self.error is not None
        self.error = without_traceback(self.error)
