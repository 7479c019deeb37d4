"""The state of a partition on this node, in words."""

from __future__ import annotations

from upr_protocol.ids import PartitionState
from upr_server.engine import Partition


def state_text(partition: Partition, wanted: str = "") -> str:
    """What a refusal says of the state of `partition`, without its subject: "is dead here, not
    active", if `wanted` is "active". Of a pending one it says what it waits for."""
    text = f"is {partition.state.name.lower()} here"
    if wanted:
        text += f", not {wanted}"
    if partition.state is PartitionState.PENDING:
        text += (
            "; it waits for the end of a takeover, for another node, or for `upr failover`: see "
            "`upr partitions`"
        )
    return text
