"""Asks other nodes for the users of the cluster, so that a change on one counts on all."""

from __future__ import annotations

from typing import Final

import structlog
import trio

from upr_protocol.client import Address
from upr_protocol.errors import UprError
from upr_server.replication.node_connections import ASK_TIMEOUT_S, NodeConnections
from upr_server.replication.partition_maps import PartitionMaps
from upr_server.user_store import UserStore

INTERVAL_S: Final = 0.5
"""How often other nodes are asked: what was revoked on one ends on the others within a second."""

NODES_PER_INTERVAL: Final = 16
"""In a larger cluster each node is asked less often: `INTERVAL_S` for each so many nodes. A node
that has heard of a change tells it, too."""

log = structlog.get_logger(__name__)


class UserExchange:
    """Keeps this node's users as new as those of the nodes that share a bucket with it.

    A node without users asks nobody: it is as open as it was started.

    Args:
        users: The users of this node.
        partition_maps: The maps of its buckets, which name the other nodes.
    """

    def __init__(self, users: UserStore, partition_maps: PartitionMaps) -> None:
        self._users = users
        self._partition_maps = partition_maps
        self._being_asked: set[Address] = set()
        self._refusals: dict[Address, str] = {}
        """Why nodes refuse to tell; each reason is logged once."""

    async def run(self) -> None:
        """Asks the other nodes, for ever."""
        if self._users.users.is_open:
            await trio.sleep_forever()
        partition_maps, node_index = self._partition_maps, 0
        async with trio.open_nursery() as nursery:
            identity = f"node:{partition_maps.node}"
            connections = NodeConnections(nursery, identity, partition_maps.system)
            while True:
                addresses = self._other_nodes()
                connections.close_others(addresses)
                for _ in range(min(len(addresses), NODES_PER_INTERVAL)):
                    node_index = (node_index + 1) % len(addresses)
                    # A node that does not answer holds nobody up.
                    if addresses[node_index] not in self._being_asked:
                        self._being_asked.add(addresses[node_index])
                        nursery.start_soon(self._ask, connections, addresses[node_index])
                await trio.sleep(INTERVAL_S)

    def _other_nodes(self) -> list[Address]:
        partition_maps = self._partition_maps
        # In an order that is the same in every run; each once, as many buckets share the nodes.
        host_ports = dict.fromkeys(
            host_port
            for partition_map in partition_maps.all_maps()
            for host_port in partition_maps.other_nodes(partition_map.bucket).values()
        )
        security = partition_maps.system.security
        addresses = (Address.of_bucket(host_port, "", security) for host_port in host_ports)
        return list(dict.fromkeys(addresses))

    async def _ask(self, connections: NodeConnections, address: Address) -> None:
        """Asks one node, and takes its users if they count for more."""
        try:
            with trio.move_on_after(ASK_TIMEOUT_S):
                own_users = self._users
                users = await connections.users(address, own_users.users, own_users.digest)
                if users is not None and await own_users.adopt_users(users):
                    log.info("users taken from another node", revision=users.revision)
                self._refusals.pop(address, None)
        except UprError as error:
            if self._refusals.get(address) != str(error):
                self._refusals[address] = str(error)
                log.warning(
                    "cannot get the users of a node", address=str(address), error=str(error)
                )
        finally:
            self._being_asked.discard(address)
