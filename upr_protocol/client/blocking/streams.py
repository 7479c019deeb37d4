"""A consumer's streams in a thread of their own, for a caller that blocks.

Deliveries cross between the threads many at a time, and so do acknowledgements: a crossing costs
about as much as a chunk does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import trio

from upr_protocol.client.blocking.trio_thread import TrioThread
from upr_protocol.client.core.delivery_tracker import Delivery
from upr_protocol.client.core.retry import RetryState
from upr_protocol.client.trio.streams import ConsumerStreams, EndOfStreamsError
from upr_protocol.errors import UprError
from upr_protocol.ids import PartitionId, SeqNo

_DELIVERIES_MAX: Final = 256
"""Deliveries that cross at once."""

_WINDOW_SHARE: Final = 4
"""At most this part of the window crosses at once. The acknowledgements go back with the next
crossing; meanwhile the server sends the rest of the window."""


class _StreamsInThread:
    """The half that lives in the thread. It does not refer to the other half, so that a consumer
    that nobody uses any more ends its thread.

    Attributes:
        deliveries: The deliveries that have crossed. The caller takes them while it has no call in
            the thread.
        acknowledged: The deliveries that the application has processed since the last crossing.
        is_finished: Whether every stream has ended for good, and every delivery has crossed.
    """

    def __init__(self, new_streams: Callable[[], ConsumerStreams], bytes_max: int) -> None:
        self.deliveries: deque[Delivery] = deque()
        self.acknowledged: list[Delivery] = []
        self.is_finished = False
        self._new_streams = new_streams
        self._bytes_max = bytes_max
        self._streams: ConsumerStreams | None = None

    async def connect(self, nursery: trio.Nursery) -> None:
        """Connects, unless that was done. A cancelled call goes on in the next one."""
        if self._streams is None:
            self._streams = self._new_streams()
            nursery.start_soon(self._streams.run)
        try:
            await self._streams.wait_opened()
        except UprError:
            self._streams = None
            raise

    async def connect_with_retries(self, nursery: trio.Nursery, retry: RetryState) -> None:
        while True:
            try:
                await self.connect(nursery)
            except UprError as error:
                await trio.sleep(retry.wait_s(error, trio.current_time()))
            else:
                retry.progress()
                return

    async def receive(self, nursery: trio.Nursery, timeout_s: float) -> None:
        await self.connect(nursery)
        streams, queue = self._connected(), self._connected().queue
        acknowledged, self.acknowledged = self.acknowledged, []
        for delivery in acknowledged:
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

    async def rolled_back(self, partition: PartitionId, to: SeqNo) -> Delivery:
        return self._connected().rolled_back(partition, to)

    async def send_barrier(self, nursery: trio.Nursery, cookie: bytes) -> None:
        await self.connect(nursery)
        self._connected().send_barrier(cookie)

    def _connected(self) -> ConsumerStreams:
        assert self._streams is not None
        return self._streams


class BlockingStreams:
    """The streams of all nodes. The thread starts with the first call that connects.

    Args:
        new_streams: Makes streams that were not connected yet.
        window_bytes: How many bytes of a node may be in flight or wait for the application.
    """

    def __init__(self, new_streams: Callable[[], ConsumerStreams], window_bytes: int) -> None:
        self._in_thread = _StreamsInThread(new_streams, window_bytes // _WINDOW_SHARE)
        self._thread: TrioThread | None = None

    @property
    def thread(self) -> TrioThread:
        """The thread; starts it."""
        if self._thread is None:
            self._thread = TrioThread()
        return self._thread

    @property
    def is_finished(self) -> bool:
        """Whether every stream has ended for good, and `take` gave every delivery."""
        return self._in_thread.is_finished and not self._in_thread.deliveries

    @property
    def has_deliveries(self) -> bool:
        """Whether `take` would give a delivery."""
        return bool(self._in_thread.deliveries)

    def connect(self, retry: RetryState) -> None:
        """Connects to any node, if that was not done yet.

        Raises:
            UprError: No node could be reached, and `retry` gives up.
        """
        self.thread.run(self._in_thread.connect_with_retries, self.thread.nursery, retry)

    def close(self) -> None:
        """Closes all connections."""
        if self._thread is not None:
            self._thread.close()

    def take(self) -> Delivery | None:
        """The next delivery that has crossed, if there is one."""
        deliveries = self._in_thread.deliveries
        return deliveries.popleft() if deliveries else None

    def receive(self, timeout_s: float) -> None:
        """Waits until there is a delivery, every stream has ended, or the time is over. Ctrl-C
        loses none.

        Raises:
            UprError: Going on is of no use; or there was no connection yet, and none can be made.
        """
        self.thread.run(self._in_thread.receive, self.thread.nursery, timeout_s)

    def acknowledge(self, delivery: Delivery) -> None:
        """The application has processed a delivery: its node may send as many bytes again. The
        server hears of it at the next crossing."""
        if delivery.nbytes:
            self._in_thread.acknowledged.append(delivery)

    def rolled_back(self, partition: PartitionId, to: SeqNo) -> Delivery:
        """The application has rolled back to `to`; see `ConsumerStreams.rolled_back`."""
        return self.thread.run(self._in_thread.rolled_back, partition, to)

    def send_barrier(self, cookie: bytes) -> None:
        """Sends a barrier through all nodes; see `ConsumerStreams.send_barrier`."""
        self.thread.run(self._in_thread.send_barrier, self.thread.nursery, cookie)
