"""How fresh a scan must be, and waiting until the indexes are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping

import trio

from upr_protocol.concurrency import Notifier
from upr_protocol.errors import UprError
from upr_protocol.ids import HistoryId, PartitionId, SeqNo
from upr_server.indexer.index_file import IndexFile
from upr_server.indexer.mark import NO_MARK, Mark
from upr_server.indexer.pipeline import Pipeline


class WriteLostError(UprError):
    """A change that a scan must see is not in the server's history: a failover has undone it."""


class _SharedBarrier:
    """One barrier, and the scans that wait for it.

    Attributes:
        returned: Set when the barrier has come back.
        put_count: How many batches had been put into the queues when it came back.
    """

    __slots__ = ("put_count", "returned")

    def __init__(self) -> None:
        self.returned = trio.Event()
        self.put_count = 0


class ScanBarriers:
    """Barriers for scans that ask for everything that the server has now. Scans that come together
    share one.

    A barrier under way is useless to a scan that comes later: a change may have been acknowledged
    in between, and does not lie before the barrier. So such a scan shares the next one.

    Args:
        send: Sends a barrier, and waits until all before it was put into the queues.
        pipeline: The queues.

    Attributes:
        sent_count: How many barriers were sent.
        waits: How many scans waited for them.
    """

    def __init__(self, send: Callable[[], Awaitable[object]], pipeline: Pipeline) -> None:
        self._send = send
        self._pipeline = pipeline
        self._next: _SharedBarrier | None = None
        self._requested = Notifier()
        self.sent_count = self.waits = 0

    async def run(self) -> None:
        """Sends a barrier whenever scans wait, for ever."""
        while True:
            await self._requested.wait_until(lambda: self._next is not None)
            barrier, self._next = self._next, None
            assert barrier is not None
            await self._send()
            self.sent_count += 1
            barrier.put_count = self._pipeline.put_count
            barrier.returned.set()

    async def wait_until_received(self) -> int:
        """Waits until all that was acknowledged before the call has been received. Gives how many
        batches had been put into the queues by then."""
        if self._next is None:
            self._next = _SharedBarrier()
        barrier = self._next
        self.waits += 1
        self._requested.notify()
        await barrier.returned.wait()
        return barrier.put_count

    async def wait_until_applied(self) -> None:
        """Waits until the indexes have all that was acknowledged before the call."""
        put_count = await self.wait_until_received()
        await self._pipeline.wait_until(lambda: self._pipeline.has_applied(put_count))


RequiredWrites = Mapping[PartitionId, Mapping[HistoryId, SeqNo]]
"""By partition and history, the number of the newest change that a scan must see. A client that has
written through a failover names changes of the histories before and after it."""


def _changes(writes: RequiredWrites) -> Iterator[tuple[PartitionId, HistoryId, SeqNo]]:
    for partition, seqs in writes.items():
        for history_id, seq in seqs.items():
            yield partition, history_id, seq


def has_writes(marks: Mapping[PartitionId, Mark], writes: RequiredWrites) -> bool:
    """Whether an index has these changes.

    Args:
        marks: How far the index is in each partition.
        writes: The changes.

    Raises:
        WriteLostError: It never will have one of them.
    """
    has_all = True
    for partition, history_id, seq in _changes(writes):
        mark = marks.get(partition, NO_MARK)
        if mark.has_lost(history_id, seq):
            raise WriteLostError(
                f"change {seq} of partition {partition} is no longer part of the server's history: "
                "a failover has undone it; read the document again, and write it again"
            )
        has_all = has_all and mark.has_change(history_id, seq)
    return has_all


def knows_histories(file: IndexFile, writes: RequiredWrites) -> bool:
    """Whether an index has met the histories of these changes. O(changes)."""
    return all(
        file.mark(partition).knows_history(history_id)
        for partition, history_id, _ in _changes(writes)
    )


def check_histories(file: IndexFile, writes: RequiredWrites) -> None:
    """Refuses changes of histories that an index has not met, though it has everything that the
    server has.

    Raises:
        WriteLostError: There is one.
    """
    for partition, history_id, seq in _changes(writes):
        if not file.mark(partition).knows_history(history_id):
            raise WriteLostError(
                f"change {seq} of partition {partition} is of history {history_id:016x}, which the "
                "server does not know: a failover has undone it, or the server has lost its data; "
                "read the document again, and write it again"
            )
