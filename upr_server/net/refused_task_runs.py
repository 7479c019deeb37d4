"""The runs of tasks that were refused on one connection, and not applied.

A task that runs again takes `TOKEN_TOO_OLD` to mean that its run was applied and its result
forgotten. So of a task, no run may be applied behind one that was refused: what was sent behind it
before the refusal arrived is refused, too. That is on the same connection, and so is this note: a
task that is never run again leaves nothing.

Runs that a partition refuses for a passing reason are noted by the partition (`PublisherAnswers`).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from upr_protocol.ids import PartitionId
from upr_server.engine import MutationBatch

NOTES_MAX: Final = 1024
"""Tasks and partitions that one connection notes; the oldest are forgotten. A connection has one
task at a time, and a bucket at most as many partitions."""


class RefusedTaskRuns:
    """By writer and partition, the lowest run that was refused. Those behind it are refused, too,
    and may be sent again before it."""

    __slots__ = ("_counters",)

    def __init__(self) -> None:
        self._counters: OrderedDict[tuple[bytes, PartitionId], int] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._counters)

    def note(self, batch: MutationBatch, partition: PartitionId) -> None:
        """A run was refused, and not applied. O(1)."""
        if batch.token is None or not batch.attempt:
            return
        self._counters.setdefault((batch.token.writer, partition), batch.token.counter)
        if len(self._counters) > NOTES_MAX:
            self._counters.popitem(last=False)

    def is_behind(self, batch: MutationBatch, partition: PartitionId) -> bool:
        """Whether the run comes behind a refused one. If it is that one, or one before it, the task
        has begun again, and the note is dropped. O(1)."""
        if not self._counters or batch.token is None or not batch.attempt:
            return False
        task = batch.token.writer, partition
        if batch.token.counter > self._counters.get(task, batch.token.counter):
            return True
        self._counters.pop(task, None)
        return False
