"""How fresh a scan is to be, and waiting until the indexes are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import trio

from upr_protocol.errors import UprError
from upr_protocol.ids import HistoryId, PartitionId, SeqNo
from upr_server.indexer.index_file import IndexFile
from upr_server.indexer.pipeline import Pipeline, Ticket


class WriteLostError(UprError):
    """A change that a scan was to see is not part of the server's history: a failover has undone
    it."""


class _Round:
    """Those who wait for the same barrier."""

    __slots__ = ("done", "ticket")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.ticket: Ticket = ()


class Barriers:
    """Barriers for scans that want what the server has now; those that come together share one.

    A barrier that is on its way is of no use to who comes later: what was acknowledged meanwhile
    may not be behind it. So it waits for the next, with all who came by then.

    Args:
        barrier: Sends one and waits until all before it was put into the queues.
        pipeline: The queues.

    Attributes:
        sent: How many there were.
        shared: How many scans waited for them.
    """

    def __init__(self, barrier: Callable[[], Awaitable[object]], pipeline: Pipeline) -> None:
        self._barrier = barrier
        self._pipeline = pipeline
        self._next = _Round()
        self._wanted = trio.Event()
        self.sent = self.shared = 0

    async def run(self) -> None:
        """Sends barriers when somebody waits, for ever."""
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            # From here on it is too late for this one.
            round_, self._next = self._next, _Round()
            await self._barrier()
            self.sent += 1
            round_.ticket = self._pipeline.ticket()
            round_.done.set()

    async def wait(self) -> None:
        """Waits until the indexes have all that was acknowledged before the call."""
        round_ = self._next
        self.shared += 1
        self._wanted.set()
        await round_.done.wait()
        await self._pipeline.applied.until(lambda: self._pipeline.has_applied(round_.ticket))


AtLeast = Mapping[PartitionId, tuple[HistoryId, SeqNo]]
"""By partition a history and a number: what somebody wrote and was answered."""


def has_all(file: IndexFile, wanted: AtLeast) -> bool:
    """Whether an index has the changes that `wanted` names.

    Raises:
        WriteLostError: It never will.
    """
    has = True
    for partition, (history_id, seq) in wanted.items():
        mark = file.mark(partition)
        if mark.lost(history_id, seq):
            raise WriteLostError(
                f"change {seq} of partition {partition} is not part of the server's history any "
                "more: a failover has undone it; read it again, and write it again"
            )
        has = has and mark.has(history_id, seq)
    return has
