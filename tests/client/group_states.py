"""The states, histories and numbers of the partitions of a group of servers."""

from __future__ import annotations

from tests.kit.server_group import (
    PARTITIONS,
    ServerGroup,
)
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import PartitionState, SeqNo

ACTIVE = [PartitionState.ACTIVE] * PARTITIONS
REPLICA = [PartitionState.REPLICA] * PARTITIONS
PENDING = [PartitionState.PENDING] * PARTITIONS


def logs(group: ServerGroup, name: str) -> list[FailoverLog]:
    return [group.partition(name, partition).failover_log for partition in range(PARTITIONS)]


def highs(group: ServerGroup, name: str) -> list[SeqNo]:
    return [group.partition(name, partition).high_seq for partition in range(PARTITIONS)]
