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

from collections.abc import Callable, Sequence
from typing import Final

from upr_protocol.chunk import Chunk
from upr_protocol.client.core.batch_totals import BatchTotals
from upr_protocol.client.core.node_batches import NodeBatches
from upr_protocol.client.core.partition_batches import (
    BATCH_OVERHEAD_BYTES,
    Batch,
    PartitionBatches,
)
from upr_protocol.client.core.publish_options import PublishOptions
from upr_protocol.client.core.writer_identity import WriterIdentity
from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import PartitionId
from upr_protocol.limits import BUNDLE_MUTATIONS_MAX, FRAME_BODY_BYTES_MAX

CHUNK_BYTES_MAX: Final = FRAME_BODY_BYTES_MAX - 1024
"""A frame, less the fields beside the chunk."""


class UnansweredBatches:
    """The unanswered batches of one publisher, by partition.

    Args:
        writer: Gives each batch its token.
        options: How batches are applied.
        draw: A random number in [0, 1), for the waits before refused batches are sent again.

    Attributes:
        unplaced_batches: The batches of partitions that have no node. Nothing sends them.
        totals: How many batches there are, and how many bytes.
    """

    def __init__(
        self, writer: WriterIdentity, options: PublishOptions, draw: Callable[[], float]
    ) -> None:
        self.writer = writer
        self.options = options
        self.totals = BatchTotals()
        self.unplaced_batches = self.new_node()
        self._draw = draw
        self._queues: dict[PartitionId, PartitionBatches] = {}
        self._nodes: dict[PartitionId, NodeBatches] = {}
        """Where the queues are placed."""

    @property
    def is_full(self) -> bool:
        """Whether callers should wait before they add more."""
        return self.totals.nbytes >= self.options.buffer_bytes

    def add_all(
        self,
        chunks: Sequence[tuple[PartitionId, Chunk]],
        on_answer: Callable[[Batch], None] | None = None,
    ) -> list[Batch]:
        """Adds a batch for each chunk; `NodeBatches.send` sends them. O(1) for each.

        Raises:
            ServerError: A chunk is empty, longer than a frame, or has more operations than a bundle
                may have; nothing was added.
        """
        all_bytes = 0
        for _, chunk in chunks:
            nbytes = chunk.nbytes
            if not 0 < chunk.count <= BUNDLE_MUTATIONS_MAX or nbytes > CHUNK_BYTES_MAX:
                raise _unfit_error(chunk)
            all_bytes += nbytes + BATCH_OVERHEAD_BYTES
        next_token, period = self.writer.next_token, self.totals.period
        queues, nodes = self._queues, self._nodes
        batches = []
        for partition, chunk in chunks:
            counter, chain = next_token(partition, chunk)
            batch = Batch(partition, counter, chunk, on_answer, chain, period)
            queue = queues.get(partition)
            if queue is None:
                queue = self.queue_of(partition)
            queue.waiting_batches.append(batch)
            nodes[partition].note_added(queue, chunk.count, chunk.nbytes)
            batches.append(batch)
        self.totals.note_added(len(batches), all_bytes)
        return batches

    def queue_of(self, partition: PartitionId) -> PartitionBatches:
        """The queue of a partition."""
        queue = self._queues.get(partition)
        if queue is None:
            queue = PartitionBatches(partition, self._draw)
            self._queues[partition] = queue
            self._nodes[partition] = self.unplaced_batches
            self.unplaced_batches.attach_partition(queue)
        return queue

    def is_unplaced(self, partition: PartitionId) -> bool:
        """Whether `partition` has batches to send, and no node to send them to."""
        node = self._nodes.get(partition)
        return node is self.unplaced_batches and len(self._queues[partition]) > 0

    def new_node(self) -> NodeBatches:
        """The part for one more node; `place` gives it partitions."""
        return NodeBatches(self.writer, self.options, self.totals)

    def place(self, partition: PartitionId, node: NodeBatches) -> bool:
        """Has `node` send the batches of `partition` from now on. Unanswered batches are sent
        again there; answers that the node before still gives to them are dropped. O(unanswered).

        Returns:
            Whether it was another node before.
        """
        queue = self.queue_of(partition)
        node_before = self._nodes[partition]
        if node_before is node:
            return False
        node_before.detach_partition(queue)
        self._nodes[partition] = node
        node.attach_partition(queue)
        return True

    def unplace_all(self, node: NodeBatches) -> None:
        """Takes all partitions from a node that is not needed any more. O(unanswered)."""
        for queue in node.queues():
            self.place(queue.partition, self.unplaced_batches)

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
