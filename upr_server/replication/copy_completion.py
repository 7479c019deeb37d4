"""Asks active nodes how far they are, for copies here that may lack what this node acknowledged and
that follow another replica: only the active node's number says when such a copy is complete."""

from __future__ import annotations

from typing import Final

import structlog
import trio

from upr_protocol.client import Address, NodeClient
from upr_protocol.errors import UprError
from upr_protocol.partition_map import PartitionMap
from upr_server.replication.node_connections import ASK_TIMEOUT_S
from upr_server.replication.partition_maps import PartitionMaps

ASK_INTERVAL_S: Final = 2.0
"""How often each active node is asked, while a copy needs its number."""

log = structlog.get_logger(__name__)


class CopyCompletion:
    """Has copies that follow another replica lose their mark once they are complete.

    Args:
        partition_maps: The maps of this node's buckets.
    """

    def __init__(self, partition_maps: PartitionMaps) -> None:
        self._partition_maps = partition_maps

    async def run(self) -> None:
        """Asks the active nodes, for ever."""
        while True:
            for bucket in [
                partition_map.bucket for partition_map in self._partition_maps.all_maps()
            ]:
                await trio.lowlevel.checkpoint()
                # Only now: while others were asked, the bucket may have got a map with other nodes.
                partition_map = self._partition_maps.map_of(bucket)
                if partition_map is not None:
                    for node in self._partition_maps.actives_of_incomplete(bucket):
                        await self._ask(node, partition_map)
            await trio.sleep(ASK_INTERVAL_S)

    async def _ask(self, node: str, partition_map: PartitionMap) -> None:
        """Asks one node. What it says counts only under the map by which this node has followed
        another one since before: then it has acknowledged nothing meanwhile."""
        system = self._partition_maps.system
        address = Address.of_bucket(
            partition_map.nodes[node], partition_map.bucket, system.security
        )
        client = NodeClient(
            address, f"node:{self._partition_maps.node}", ASK_TIMEOUT_S, system.dial
        )
        try:
            system.log_in_pauses.check(address)
            status = await client.status_with_partitions()
        except UprError as error:
            system.log_in_pauses.note_error(address, error)
            log.debug("cannot ask an active node", address=str(address), error=str(error))
            return
        system.log_in_pauses.note_success(address)
        if status.node == node and status.map == partition_map:
            self._partition_maps.note_active_numbers(partition_map, status.partitions)
