"""A takeover that is interrupted, and resumed while its target becomes active."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.server_group import PARTITIONS, MapInterrupter, ServerGroup
from upr_protocol.client import NodeClient
from upr_protocol.client.operator import NotDoneError, TakeoverTimeouts, take_over
from upr_protocol.client.operator.plan import active_assignment
from upr_protocol.failover import FailoverLog
from upr_protocol.hashing import partition_of
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.partition_map import HistoryPoint


class ResumedTakeover:
    """A takeover from `a` to `b` is interrupted after the handover, and another command resumes it.
    After that command has looked at the nodes, the first command's last map reaches `b`, which
    becomes active and accepts a write.

    Args:
        group: The servers `a`, `b` and `c`.
        monkeypatch: Interrupts the commands.
        to: The target of the second command.

    Attributes:
        partition: The partition of the write that `b` accepted.
    """

    def __init__(self, group: ServerGroup, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
        self._group = group
        self._monkeypatch = monkeypatch
        self._to = to
        self._before: list[FailoverLog] = []
        self.partition = PartitionId(partition_of(b"acknowledged", PARTITIONS))

    async def resume(self, *, handover_s: float = 10.0) -> str:
        """Plays everything up to the second command's refusal, and returns its sentence.

        Args:
            handover_s: How long the second command waits for its target to catch up.
        """
        group = self._group
        await group.set("a", {f"key {n}": "0" for n in range(20)})
        self._before = self._logs("a")
        interrupter = MapInterrupter(self._monkeypatch)
        interrupter.reset(1)
        with interrupter.scope:
            await take_over(group.operator(), to="b", all_of="a")
        interrupter.stop_at = -1
        await group.until(lambda: self._highs("b") == self._highs("a"))
        self._activate_late()
        timeouts = TakeoverTimeouts(handover_s=handover_s)
        with pytest.raises(NotDoneError) as refusal:
            await take_over(group.operator("c"), to=self._to, all_of="a", timeouts=timeouts)
        return str(refusal.value)

    async def finish(self) -> None:
        """Gives the second command again, for each node that is active."""
        for name in {"a", "b"} - {self._to}:
            await take_over(self._group.operator("c"), to=self._to, all_of=name)

    def histories_begun(self) -> list[int]:
        """How many histories each partition has begun since the first command."""
        logs = zip(self._logs(self._to), self._before, strict=True)
        return [len(log) - len(before) for log, before in logs]

    def _activate_late(self) -> None:
        group, set_map = self._group, NodeClient.set_map
        handover_map = group.map("a")
        points = [
            HistoryPoint(log.current, high)
            for log, high in zip(self._before, self._highs("a"), strict=True)
        ]

        async def set_map_late(*arguments: Any) -> None:
            self._monkeypatch.setattr(NodeClient, "set_map", set_map)
            active = [
                active_assignment(assignment, "b", point)
                for assignment, point in zip(handover_map.partitions, points, strict=True)
            ]
            assignments = dict(enumerate(active))
            await group.set_map("b", handover_map.revision + 1, assignments, handover_map)
            await group.set("b", {"acknowledged": "1"})
            await set_map(*arguments)

        self._monkeypatch.setattr(NodeClient, "set_map", set_map_late)

    def _logs(self, name: str) -> list[FailoverLog]:
        return [self._group.partition(name, n).failover_log for n in range(PARTITIONS)]

    def _highs(self, name: str) -> list[SeqNo]:
        return [self._group.partition(name, n).high_seq for n in range(PARTITIONS)]
