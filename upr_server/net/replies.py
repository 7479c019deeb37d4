"""Replies to changes: each when the change is as durable as was asked, in order a partition."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

import attrs
import msgspec

from upr_protocol.errors import Status
from upr_protocol.ids import Durability, PartitionId, SeqNo
from upr_server.engine import Partition
from upr_server.storage.online.flusher import Flusher

NO_DEADLINE_S: Final = 1e9
"""Longer than anybody waits."""

_NOT_ON_DISK: Final = Status.TEMPORARY_FAILURE
"""A change was made, but cannot be put on disk now."""

_NOT_REPLICATED: Final = Status.NOT_DURABLE_YET
"""A change was made, but fewer replicas have it than were asked for."""


class DurabilityTarget(msgspec.Struct, frozen=True):
    """How durable a change must be before it is answered.

    Attributes:
        durability: The level.
        copies: How many replicas beside the active, for the replicated levels; else 0.
        deadline: When replicas are waited for no more.
    """

    durability: Durability
    copies: int = 0
    deadline: float = math.inf

    @property
    def persists(self) -> bool:
        """Whether it is about the disk."""
        return self.durability in (Durability.PERSISTED, Durability.REPLICATED_AND_PERSISTED)

    def reached(self, partition: Partition) -> SeqNo:
        """The number up to which a partition has reached this target."""
        seq = partition.manager.persistence.committed if self.persists else partition.high_seq
        if self.copies:
            seq = min(seq, partition.replicas.reached(self.copies, persisted=self.persists))
        return seq


IN_MEMORY: Final = DurabilityTarget(Durability.MEMORY)


@attrs.define
class _Waiting:
    call: Callable[[Status], None]
    awaited: int = 0
    """Conditions that are not met yet."""
    status: Status = Status.OK


class Replies:
    """The changes of one connection that must be durable before they are answered.

    Args:
        wake: Has what was sent written.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._waiting: dict[PartitionId, deque[_Waiting]] = {}

    def call_when_durable(
        self,
        call: Callable[[Status], None],
        partition: Partition,
        flusher: Flusher,
        seq: SeqNo,
        target: DurabilityTarget,
    ) -> None:
        """Calls `call` when everything up to `seq` is as durable as `target` says, and after what
        waits for the same partition already.

        Args:
            call: Called with `OK`; with `TEMPORARY_FAILURE` where the disk does not take the
                change, or `NOT_DURABLE_YET` where replicas do not have it in time.
            partition: The partition.
            flusher: The flusher of its bucket.
            seq: The number.
            target: How durable it must be.
        """
        waiting = self._waiting.get(partition.id)
        if waiting is None:
            if target is IN_MEMORY or target.reached(partition) >= seq:
                call(Status.OK)
                return
            waiting = self._waiting[partition.id] = deque()
        change = _Waiting(call, awaited=1)
        waiting.append(change)
        if target.persists:
            change.awaited += 1
            flusher.call_when_persisted(
                partition, seq, partial(self._is_met, partition.id, change, _NOT_ON_DISK)
            )
        if target.copies:
            change.awaited += 1
            partition.replicas.call_when_reached(
                seq,
                target.copies,
                persisted=target.persists,
                deadline=target.deadline,
                call=partial(self._is_met, partition.id, change, _NOT_REPLICATED),
            )
        # Either may have been met at once, and the call must not be made before both were asked
        # for: that is the one condition more that it began with.
        self._is_met(partition.id, change, Status.OK, True)

    def _is_met(
        self, partition: PartitionId, change: _Waiting, failure: Status, is_met: bool
    ) -> None:
        change.awaited -= 1
        if not is_met and change.status is Status.OK:
            change.status = failure
        waiting = self._waiting.get(partition)
        while waiting and not waiting[0].awaited:
            due = waiting.popleft()
            due.call(due.status)
        if not waiting:
            self._waiting.pop(partition, None)
        self._wake()
