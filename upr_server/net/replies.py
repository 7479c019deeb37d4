"""Replies to batches: in the order of their batches, each when it is as durable as was asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import attrs

from upr_protocol.errors import Status
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.wire import Message
from upr_server.engine import Partition

if TYPE_CHECKING:
    from upr_server.net.connection import Connection


@attrs.define
class _Reply:
    message: Message
    is_due: bool = False
    is_durable: bool = True


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

    def add(self, partition: Partition, message: Message, persisted: SeqNo) -> None:
        """Sends `message` when everything up to `persisted` is on disk, behind what the same
        partition owes from before; 0 asks for nothing."""
        owed = self._owed.get(partition.id)
        if owed is None:
            if partition.manager.persistence.committed >= persisted:
                self._send(message)
                return
            owed = self._owed[partition.id] = deque()
        reply = _Reply(message)
        owed.append(reply)
        flusher = self._connection.disk.flusher
        flusher.when_persisted(partition, persisted, partial(self._is_due, partition.id, reply))

    def _is_due(self, partition: PartitionId, reply: _Reply, durable: bool) -> None:
        reply.is_due = True
        reply.is_durable = durable
        owed = self._owed.get(partition)
        while owed and owed[0].is_due:
            due = owed.popleft()
            if due.is_durable:
                self._send(due.message)
            else:
                self._connection.refuse(
                    due.message,
                    Status.TEMPORARY_FAILURE,
                    "the batch was taken in, but cannot be put on disk now",
                )
        if not owed:
            self._owed.pop(partition, None)
        self._connection.wake()
