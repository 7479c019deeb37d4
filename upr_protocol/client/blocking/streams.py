"""A consumer's streams in a thread of their own, for a caller that blocks.

Deliveries cross between the threads many at a time, and so do acknowledgements: a crossing costs
about as much as a chunk does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import trio

from upr_protocol.client.core.delivery_tracker import Delivery
from upr_protocol.client.core.retry import RetryState
from upr_protocol.client.trio.streams import ConsumerStreams, EndOfStreamsError
from upr_protocol.errors import UprError
from upr_protocol.ids import PartitionId, SeqNo

_DELIVERIES_MAX: Final = 256
"""Deliveries that cross at once."""

WINDOW_SHARE: Final = 4
"""At most this part of the window crosses at once. The acknowledgements go back with the next
crossing; meanwhile the server sends the rest of the window."""


class StreamsInThread:
    """The half of a `BlockingConsumer` that lives in the thread. It does not refer to the consumer,
    so that one that nobody uses any more ends its thread.

    Args:
        bytes_max: How many bytes of chunks may cross at once.

    Attributes:
        deliveries: The deliveries that have crossed. The caller takes them while it has no call in
            the thread.
        is_finished: Whether every stream has ended for good, and every delivery has crossed.
    """

    def __init__(self, new_streams: Callable[[], ConsumerStreams], bytes_max: int) -> None:
        self.deliveries: deque[Delivery] = deque()
        self.is_connected = False
        self.is_finished = False
        self._acknowledged_deliveries: list[Delivery] = []
        self._new_streams = new_streams
        self._bytes_max = bytes_max
        self._streams: ConsumerStreams | None = None

    # In the calling thread.

    def acknowledge(self, delivery: Delivery) -> None:
        """The application has processed a delivery: its node may send as many bytes again. The
        server hears of it at the next crossing. After Ctrl-C it may be told again."""
        deliveries = self._acknowledged_deliveries
        if delivery.nbytes and not (deliveries and deliveries[-1] is delivery):
            deliveries.append(delivery)

    # In the streams' thread.

    async def connect(self, nursery: trio.Nursery, retry: RetryState | None = None) -> None:
        """Connects to any node; without `retry` it tries once. A cancelled call goes on in the next
        one.

        Raises:
            UprError: No node could be reached.
        """
        while not self.is_connected:
            if self._streams is None:
                self._streams = self._new_streams()
                nursery.start_soon(self._streams.run)
            try:
                await self._streams.wait_opened()
                self.is_connected = True
            except UprError as error:
                self._streams = None
                if retry is None:
                    raise
                await trio.sleep(retry.wait_after_failure_s(error, trio.current_time()))

    async def receive(self, timeout_s: float) -> None:
        """Waits until there is a delivery, every stream has ended, or the time is over. Ctrl-C
        loses none.

        Raises:
            UprError: Going on is of no use.
        """
        streams, queue = self._require_streams(), self._require_streams().queue
        deliveries, self._acknowledged_deliveries = self._acknowledged_deliveries, []
        for delivery in deliveries:
            streams.acknowledge(delivery)
        try:
            with trio.move_on_after(timeout_s):
                await queue.wait()
        except EndOfStreamsError:
            self.is_finished = True
        nbytes = 0
        while len(self.deliveries) < _DELIVERIES_MAX and nbytes < self._bytes_max:
            next_delivery = queue.take()
            if next_delivery is None:
                break
            self.deliveries.append(next_delivery)
            nbytes += next_delivery.nbytes
        self.is_finished |= streams.state.is_finished and not len(queue)

    async def note_rolled_back(self, partition: PartitionId, to: SeqNo) -> None:
        """The application has rolled back to `to`; see `ConsumerStreams.note_rolled_back`. What
        that returns takes the place of the first delivery, which asked for it."""
        self.deliveries[0] = self._require_streams().note_rolled_back(partition, to)

    async def send_barrier(self, cookie: bytes) -> None:
        """Sends a barrier through all nodes; see `ConsumerStreams.send_barrier`."""
        self._require_streams().send_barrier(cookie)

    def _require_streams(self) -> ConsumerStreams:
        assert self._streams is not None
        return self._streams
