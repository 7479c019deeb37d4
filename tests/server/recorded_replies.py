"""Replies that record when they are sent."""

from __future__ import annotations

from upr_protocol.ids import PartitionId
from upr_protocol.session import ServerSession
from upr_server.net.backlog import ConnectionBacklog
from upr_server.net.replies import OrderedReply, ReplyOrder, ReplySteps


class Reply(OrderedReply):
    """Notes that it was sent."""

    def __init__(
        self, opaque: int, partitions: list[int], sent_opaques: list[int], row_count: int = 0
    ) -> None:
        super().__init__(list(map(PartitionId, partitions)))
        self._number = opaque
        self._row_count = row_count
        self._sent = sent_opaques

    def send(self) -> int:
        self._sent.append(self._number)
        return self._row_count


def new_order(steps: ReplySteps) -> ReplyOrder:
    return ReplyOrder(steps, ConnectionBacklog(ServerSession("server", now=0.0), lambda: None))
