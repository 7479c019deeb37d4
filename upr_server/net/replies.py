"""Replies to batches: in the order of their batches, each when it is as durable as was asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import attrs

from upr_protocol.errors import Status
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.wire import Message
from upr_server.engine import Partition
from upr_server.net.level import Level

if TYPE_CHECKING:
    from upr_server.net.connection import Connection

_NOT_ON_DISK: Final = (
    Status.TEMPORARY_FAILURE,
    "the batch was taken in, but cannot be put on disk now",
)

_NOT_REPLICATED: Final = (
    Status.NOT_DURABLE_YET,
    "the batch was taken in, but there are not as many replicas that have it as were asked for",
)


@attrs.define
class _Reply:
    message: Message
    awaited: int = 0
    """Conditions that are not met yet."""
    failure: tuple[Status, str] | None = None


class Replies:
    """The replies that one connection is owed.

    Args:
        connection: The connection.
        send: Sends a message.
    """

    def __init__(self, connection: Connection, send: Callable[[Message], None]) -> None:
        self._connection = connection
        self._send = send
        self._owed: dict[PartitionId, deque[_Reply]] = {}

    def add(self, partition: Partition, message: Message, seq: SeqNo, level: Level) -> None:
        """Sends `message` when everything up to `seq` is as durable as `level` says, behind what
        the same partition owes from before."""
        owed = self._owed.get(partition.id)
        if owed is None:
            if level.reached(partition) >= seq:
                self._send(message)
                return
            owed = self._owed[partition.id] = deque()
        reply = _Reply(message, awaited=1)
        owed.append(reply)
        if level.persists:
            reply.awaited += 1
            flusher = self._connection.disk.flusher
            flusher.when_persisted(
                partition, seq, partial(self._is_met, partition.id, reply, _NOT_ON_DISK)
            )
        if level.copies:
            reply.awaited += 1
            partition.replicas.when(
                seq,
                level.copies,
                persisted=level.persists,
                deadline=level.deadline,
                call=partial(self._is_met, partition.id, reply, _NOT_REPLICATED),
            )
        # What was asked for may have been met at once; it was not to be sent before all was asked.
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
                self._connection.refuse(due.message, *due.failure)
        if not owed:
            self._owed.pop(partition, None)
        self._connection.wake()
