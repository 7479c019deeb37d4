"""Replies to batches: in the order of their batches, each when it is as durable as was asked."""

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
from upr_protocol.wire import Message
from upr_server.engine import Partition
from upr_server.storage.online.flusher import Flusher

NO_DEADLINE_S: Final = 1e9
"""Longer than anybody waits."""

_NOT_ON_DISK: Final = (
    Status.TEMPORARY_FAILURE,
    "the batch was taken in, but cannot be put on disk now",
)

_NOT_REPLICATED: Final = (
    Status.NOT_DURABLE_YET,
    "the batch was taken in, but fewer replicas have it than were asked for",
)


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


@attrs.define
class _Reply:
    message: Message
    awaited: int = 0
    """Conditions that are not met yet."""
    failure: tuple[Status, str] | None = None


class Replies:
    """The replies that one connection owes its peer.

    Args:
        send: Sends a message.
        refuse: Sends a refusal in place of a message.
        wake: Has what was sent written.
    """

    def __init__(
        self,
        send: Callable[[Message], None],
        refuse: Callable[[Message, Status, str], None],
        wake: Callable[[], None],
    ) -> None:
        self._send = send
        self._refuse = refuse
        self._wake = wake
        self._owed: dict[PartitionId, deque[_Reply]] = {}

    def send_when_durable(
        self,
        message: Message,
        partition: Partition,
        flusher: Flusher,
        seq: SeqNo,
        target: DurabilityTarget,
    ) -> None:
        """Sends `message` when everything up to `seq` is as durable as `target` says, behind what
        the same partition owes from before."""
        owed = self._owed.get(partition.id)
        if owed is None:
            if target.reached(partition) >= seq:
                self._send(message)
                return
            owed = self._owed[partition.id] = deque()
        reply = _Reply(message, awaited=1)
        owed.append(reply)
        if target.persists:
            reply.awaited += 1
            flusher.call_when_persisted(
                partition, seq, partial(self._is_met, partition.id, reply, _NOT_ON_DISK)
            )
        if target.copies:
            reply.awaited += 1
            partition.replicas.call_when_reached(
                seq,
                target.copies,
                persisted=target.persists,
                deadline=target.deadline,
                call=partial(self._is_met, partition.id, reply, _NOT_REPLICATED),
            )
        # Either may have been met at once, and the reply must not go before both were asked for:
        # that is the one condition more that it began with.
        self._is_met(partition.id, reply, None, True)

    def _is_met(
        self,
        partition: PartitionId,
        reply: _Reply,
        failure: tuple[Status, str] | None,
        is_met: bool,
    ) -> None:
        reply.awaited -= 1
        if not is_met:
            reply.failure = reply.failure or failure
        owed = self._owed.get(partition)
        while owed and not owed[0].awaited:
            due = owed.popleft()
            if due.failure is None:
                self._send(due.message)
            else:
                self._refuse(due.message, *due.failure)
        if not owed:
            self._owed.pop(partition, None)
        self._wake()
