"""How durable a change must be before it is answered."""

from __future__ import annotations

from typing import Final

import trio

from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import Durability, PartitionId
from upr_server.engine import Partition
from upr_server.net.replies import IN_MEMORY, PERSISTED, DurabilityTarget
from upr_server.net.request_context import RequestContext

WITHOUT_REPLICAS: Final = {Durability.MEMORY: IN_MEMORY, Durability.PERSISTED: PERSISTED}
"""The levels that are not about replicas."""


def durability_target(
    context: RequestContext, partition: Partition, durability: Durability, copies: int
) -> DurabilityTarget:
    """How durable a change to a partition must be.

    Args:
        context: The client's requests.
        partition: The partition.
        durability: The level that was asked for.
        copies: How many replicas must have the change, if the level is about replicas.

    Raises:
        ServerError: The change never can be so durable.
    """
    if durability in WITHOUT_REPLICAS:
        return WITHOUT_REPLICAS[durability]
    count = replica_count(context, partition.id)
    if max(copies, 1) > count:
        raise ServerError(
            Status.TOO_FEW_REPLICAS,
            f"partition {partition.id} has {count} replicas that follow this node, "
            f"not {max(copies, 1)}",
        )
    if copies < 1:
        raise ServerError(
            Status.BAD_ARGUMENT, f"a replicated level needs 1 or more copies, not {copies}"
        )
    return replicated_target(context, durability, copies)


def replicated_target(
    context: RequestContext, durability: Durability, copies: int
) -> DurabilityTarget:
    """What a replicated level asks of a change that is waited for from now on."""
    deadline = trio.current_time() + context.replication_timeout_s
    return DurabilityTarget(durability, copies, deadline)


def replica_count(context: RequestContext, partition: PartitionId) -> int:
    """How many replicas of a partition of the client's bucket follow this node."""
    assert context.bucket is not None
    return len(context.partition_maps.replicas(context.bucket.name, partition))
