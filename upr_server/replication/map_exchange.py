"""Asks other nodes for their partition maps: a node that was away learns from them what it is now,
and tells its own map to a node that has lost it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable
from typing import Final

import structlog
import trio

from upr_protocol.client import Address, NodeClient, NodeStatus
from upr_protocol.errors import CredentialsError, ServerError, Status, UprError
from upr_protocol.partition_map import PartitionMap
from upr_server.replication.node_connections import ASK_TIMEOUT_S, NodeConnections
from upr_server.replication.partition_maps import PartitionMaps
from upr_server.storage.errors import DiskFullError

ASK_INTERVAL_S: Final = 2.0
"""How often one of the other nodes is asked, each in its turn."""

CONFIRM_INTERVAL_S: Final = 0.25
"""How often all are asked, while this node does not know whether it still is what it was."""

MAPS_TOLD_AT_ONCE: Final = 8
"""Maps that one node is told at a time. It may take long to apply one, and may have lost many."""

_NOT_LET_IN: Final = frozenset({Status.LOG_IN_NEEDED, Status.LOG_IN_FAILED, Status.NOT_ALLOWED})

log = structlog.get_logger(__name__)


class MapExchange:
    """Keeps this node's maps as new as those of the other nodes.

    Args:
        partition_maps: The maps of this node's buckets.
    """

    def __init__(self, partition_maps: PartitionMaps) -> None:
        self._partition_maps = partition_maps
        self._last_asked: dict[str, int] = defaultdict(int)
        self._logged: set[str] = set()
        # By bucket a map that cannot be applied, and why: logged once.
        self._refusals: dict[str, tuple[int, str]] = {}
        # Nodes that did not answer in this round: waited for once, not again for each bucket.
        self._silent_nodes: set[str] = set()
        # The buckets whose map is being told, by each node.
        self._being_told: defaultdict[str, set[str]] = defaultdict(set)
        self._nursery: trio.Nursery

    async def run(self) -> None:
        """Asks the other nodes, for ever."""
        partition_maps = self._partition_maps
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            connections = NodeConnections(nursery, self._identity, partition_maps.system)
            while True:
                self._silent_nodes.clear()
                unconfirmed_buckets = partition_maps.unconfirmed_buckets()
                for bucket in unconfirmed_buckets:
                    await self._confirm(connections, bucket)
                for partition_map in partition_maps.all_maps():
                    if partition_map.bucket not in unconfirmed_buckets:
                        await self._ask_next(connections, partition_map.bucket)
                connections.close_others(self._other_nodes())
                await trio.sleep(
                    CONFIRM_INTERVAL_S if partition_maps.unconfirmed_buckets() else ASK_INTERVAL_S
                )

    @property
    def _identity(self) -> str:
        return f"node:{self._partition_maps.node}"

    def _address(self, host_port: str, bucket: str) -> Address:
        return Address.of_bucket(host_port, bucket, self._partition_maps.system.security)

    def _other_nodes(self) -> list[Address]:
        # Each node's once: to make one takes some microseconds, and many buckets share the nodes.
        host_ports = dict.fromkeys(
            host_port
            for partition_map in self._partition_maps.all_maps()
            for host_port in self._partition_maps.other_nodes(partition_map.bucket).values()
        )
        return [self._address(host_port, "") for host_port in host_ports]

    async def _ask_next(self, connections: NodeConnections, bucket: str) -> None:
        """Asks the next of the bucket's other nodes, and adopts its map if that is newer."""
        nodes = list(self._partition_maps.other_nodes(bucket).items())
        if nodes:
            index = self._last_asked[bucket] = (self._last_asked[bucket] + 1) % len(nodes)
            their_map = await self._fetch(connections, *nodes[index], bucket)
            if their_map is not None:
                await self._adopt(their_map)

    async def _confirm(self, connections: NodeConnections, bucket: str) -> None:
        """Asks all other nodes of the bucket. The newest map counts, and one answer is enough: each
        change of a map was applied by the nodes that it concerns."""
        partition_maps = self._partition_maps
        revision = partition_maps.revision(bucket)
        nodes = partition_maps.other_nodes(bucket)
        if not nodes:
            await self._try(bucket, revision, partition_maps.confirm_map(bucket, revision))
            return
        answers: list[PartitionMap] = []

        async def ask(name: str, host_port: str) -> None:
            their_map = await self._fetch(connections, name, host_port, bucket)
            if their_map is not None:
                answers.append(their_map)

        async with trio.open_nursery() as nursery:
            for name, host_port in nodes.items():
                nursery.start_soon(ask, name, host_port)
        if not answers:
            if bucket not in self._logged:
                self._logged.add(bucket)
                log.warning(
                    "no other node answers; partitions that were active here wait until one "
                    "confirms the partition map, or name the actives with `upr failover`",
                    bucket=bucket,
                    revision=revision,
                )
            return
        # Another map of the same revision neither confirms this node's map nor replaces it.
        newest_map = max(answers, key=lambda their_map: their_map.revision)
        if newest_map.revision > revision:
            await self._adopt(newest_map)
        elif newest_map.revision < revision or newest_map == partition_maps.map_of(bucket):
            await self._try(bucket, revision, partition_maps.confirm_map(bucket, revision))

    async def _adopt(self, their_map: PartitionMap) -> None:
        adoption = self._partition_maps.adopt_map(their_map, replaces_only=True)
        await self._try(their_map.bucket, their_map.revision, adoption)

    async def _fetch(
        self, connections: NodeConnections, name: str, host_port: str, bucket: str
    ) -> PartitionMap | None:
        """The map of the node `name`; None when it does not answer, has no map, or contradicts this
        node's."""
        if host_port in self._silent_nodes:
            return None
        status: NodeStatus | None = None
        try:
            with trio.move_on_after(ASK_TIMEOUT_S):
                status = await connections.status(self._address(host_port, bucket))
                own_map = self._partition_maps.map_of(bucket)
                if status.node != name:
                    self._warn_once(
                        f"{host_port} is node {status.node}, but the partition map says {name}"
                    )
                elif status.map is None:
                    # One that the map does not name was removed: it cannot say where it is.
                    if own_map is not None and self._partition_maps.node in own_map.nodes:
                        self._begin_telling(name, host_port, own_map)
                elif (
                    own_map is None
                    or status.map == own_map
                    or status.map.revision != own_map.revision
                ):
                    return status.map
                else:
                    self._warn_once(
                        f"{name} has a different map of revision {own_map.revision}: two commands "
                        "ran at the same time, or a node was restored from a backup; repeat the "
                        "command that counts, and ask the node that has its map"
                    )
            if status is None:
                self._silent_nodes.add(host_port)
        except UprError as error:
            self._log_error(name, host_port, error)
        return None

    def _log_error(self, name: str, host_port: str, error: UprError) -> None:
        if isinstance(error, CredentialsError) or (
            isinstance(error, ServerError) and error.status in _NOT_LET_IN
        ):
            # Nobody but an operator can mend it.
            self._warn_once(f"cannot exchange maps with node {name} at {host_port}: {error}")
        log.debug("cannot exchange a partition map", address=host_port, error=str(error))

    def _begin_telling(self, name: str, host_port: str, own_map: PartitionMap) -> None:
        """Tells a node a map, beside what else it is asked."""
        buckets = self._being_told[host_port]
        if own_map.bucket not in buckets and len(buckets) < MAPS_TOLD_AT_ONCE:
            buckets.add(own_map.bucket)
            self._nursery.start_soon(self._tell, name, host_port, own_map)

    async def _tell(self, name: str, host_port: str, own_map: PartitionMap) -> None:
        try:
            await self._tell_own_map(name, host_port, own_map)
        except UprError as error:
            if isinstance(error, ServerError) and error.status is Status.BAD_ARGUMENT:
                self._warn_once(
                    f"node {name} does not take the map of {own_map.bucket!r}: {error.sentence}"
                )
            self._log_error(name, host_port, error)
        finally:
            self._being_told[host_port].discard(own_map.bucket)

    async def _tell_own_map(self, name: str, host_port: str, own_map: PartitionMap) -> None:
        """Sends a node the map that it has lost with its disk. Until then the node holds the
        bucket alone, created again, and accepts writes that no other node will ever have."""
        warning = (
            f"node {name} has no partition map of {own_map.bucket!r}, as if its disk was lost; "
            "telling it the map"
        )
        self._warn_once(warning)
        node = NodeClient(
            self._address(host_port, own_map.bucket),
            identity=self._identity,
            dial=self._partition_maps.system.dial,
        )
        await node.join(own_map.nodes[self._partition_maps.node])
        self._logged.discard(warning)

    def _warn_once(self, sentence: str) -> None:
        if sentence not in self._logged:
            self._logged.add(sentence)
            log.warning(sentence)

    async def _try(self, bucket: str, revision: int, application: Awaitable[object]) -> None:
        try:
            await application
            self._refusals.pop(bucket, None)
        except UprError as error:
            # How full a disk is changes all the time.
            reason = "full disk" if isinstance(error, DiskFullError) else str(error)
            if self._refusals.get(bucket) != (revision, reason):
                self._refusals[bucket] = revision, reason
                log.error("cannot apply the partition map", bucket=bucket, error=str(error))
