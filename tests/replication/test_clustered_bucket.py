"""How a node applies a partition map while its partitions change."""

from __future__ import annotations

from typing import Any, Final

import pytest
import trio
from trio.testing import MockClock

from upr_protocol.failover import FailoverLog
from upr_protocol.ids import HistoryId, PartitionId, PartitionState, SeqNo
from upr_protocol.partition_map import Assignment, PartitionMap
from upr_server.app import running_server
from upr_server.config import ServerConfig
from upr_server.engine import Partition
from upr_server.replication import roles
from upr_server.replication.roles import STEP_PARTITIONS
from upr_server.storage.simulated import SimulatedStore

LAST: Final = PartitionId(2 * STEP_PARTITIONS - 1)
PROMPT_S: Final = 60.0


async def test_a_log_that_becomes_another_while_a_map_is_prepared_is_not_taken_back(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """A replica that goes on hears of a new history between two steps, in which others have their
    turn. What was judged of it in the step before knew the log before."""
    config = ServerConfig(listen="127.0.0.1:0", node="b")
    async with running_server(config, SimulatedStore()) as server:
        nodes = {"a": "127.0.0.1:1", "b": f"127.0.0.1:{server.port}"}
        following = (Assignment("a", {"b": ""}),) * (LAST + 1)
        first = PartitionMap(bucket="b", revision=1, nodes=nodes, partitions=following)
        await server.partition_maps.set_map(0, first.encode())
        partitions = server.catalog.bucket("b").partitions
        of_first_step, of_second_step = partitions[0], partitions[STEP_PARTITIONS]
        new_log = FailoverLog().with_branch(HistoryId(7), SeqNo(0))
        failover_log_in = roles.failover_log_in

        def becomes_another(partition: Partition, *args: Any, **options: Any) -> FailoverLog:
            if partition is of_second_step:
                of_first_step.change_state(PartitionState.REPLICA, new_log)
            return failover_log_in(partition, *args, **options)

        monkeypatch.setattr(roles, "failover_log_in", becomes_another)
        second = first.with_assignments({LAST: Assignment("a")})
        with trio.fail_after(PROMPT_S):
            await server.partition_maps.set_map(1, second.encode())
        assert partitions[LAST].state is PartitionState.DEAD
        assert of_first_step.failover_log == new_log
