"""Asking all nodes of a bucket what they hold, and finding the newest partition map."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Final

import attrs
import trio

from upr_protocol.address import Address
from upr_protocol.client.core.calls import PartitionInfo
from upr_protocol.client.operator.errors import NotDoneError
from upr_protocol.client.operator.plan import PartitionCopy
from upr_protocol.client.options import IDENTITY_DEFAULT
from upr_protocol.client.trio.client import Client, connect
from upr_protocol.client.trio.node_client import NodeClient, NodeStatus
from upr_protocol.errors import BrokenError, ServerError, Status, UprError
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.partition_map import PartitionMap, newest_map
from upr_protocol.transport import Dial, dial_tcp

NODE_ANSWER_TIMEOUT_S: Final = 2.0
"""How long a node may take to answer before it counts as unreachable."""

MAP_APPLY_TIMEOUT_S: Final = 5.0
"""How long a node that must have a map may take to apply it."""


@attrs.frozen
class NodeReport:
    """What one node says.

    Attributes:
        address: Where it was asked.
        partitions: Its partitions; empty when it does not have the bucket.
        failure: Why it could not be asked; empty when it could.
    """

    name: str
    address: Address
    map: PartitionMap | None = None
    partitions: tuple[PartitionInfo, ...] = ()
    failure: str = ""

    @property
    def revision(self) -> int:
        """The revision of its map; 0 when it has none."""
        return 0 if self.map is None else self.map.revision

    @property
    def has_copy(self) -> bool:
        """Whether it answers, and has the bucket with a map. A node that a map names has lost its
        disk if it has no map itself, even if it has a bucket of this name: that is a new one."""
        return self.map is not None and bool(self.partitions)

    def state_of(self, partition: PartitionId) -> PartitionState:
        """Its own state for a partition; dead when it does not answer."""
        if partition >= len(self.partitions):
            return PartitionState.DEAD
        return self.partitions[partition].state

    def copy_of(self, partition: PartitionId) -> PartitionCopy:
        """What it has of a partition that it holds."""
        info = self.partitions[partition]
        return PartitionCopy(self.name, info.log, info.high_seq)


@attrs.frozen
class Survey:
    """What all nodes of a bucket say.

    Attributes:
        map: The newest map. A bucket that one node holds alone has none; then it is a map of this
            node, with revision 0.
        nodes: Every node's report by its name, also of nodes that do not answer.
    """

    bucket: str
    first_node: str
    map: PartitionMap
    nodes: Mapping[str, NodeReport]

    @property
    def is_single_node(self) -> bool:
        """Whether one node holds the bucket alone, without a map."""
        return not self.map.revision

    def reaches(self, name: str) -> bool:
        """Whether a node answers."""
        return name in self.nodes and not self.nodes[name].failure

    def require_map(self) -> PartitionMap:
        """The newest map.

        Raises:
            NotDoneError: One node holds the bucket alone.
        """
        if self.is_single_node:
            raise NotDoneError(
                f"{self.first_node} holds {self.bucket!r} alone: give it a replica first, with "
                "`upr replicas add`"
            )
        return self.map

    def require_node(self, name: str) -> None:
        """Raises `NotDoneError` if the map does not name a node."""
        if name not in self.map.nodes:
            names = ", ".join(sorted(self.map.nodes))
            raise NotDoneError(f"unknown node {name!r}; the nodes are {names}")

    def require_answer(self, name: str) -> None:
        """Raises `NotDoneError` if a node does not answer."""
        if not self.reaches(name):
            reason = self.nodes[name].failure if name in self.nodes else "no map names it"
            raise NotDoneError(
                f"node {name} is needed, but cannot be reached: {reason}; start it, or correct its "
                "address, and repeat the command"
            )


def _ignore(_: str) -> None:
    pass


def _draw_command() -> str:
    return secrets.token_hex(8)


@attrs.frozen
class Operator:
    """How commands reach the nodes of a bucket, and where they report progress.

    Attributes:
        address: One or more of the nodes, and the bucket.
        identity: `what:who`, for the servers' logs.
        on_progress: Called with a sentence for each step that was done.
        ask_timeout_s: How long a node may take to answer.
        apply_timeout_s: How long it may take to apply a map.
        draw_command: Gives a name that no other command has, for the maps of a takeover or a
            failover.
    """

    address: Address
    identity: str = IDENTITY_DEFAULT
    on_progress: Callable[[str], None] = _ignore
    ask_timeout_s: float = NODE_ANSWER_TIMEOUT_S
    apply_timeout_s: float = MAP_APPLY_TIMEOUT_S
    dial: Dial = dial_tcp
    draw_command: Callable[[], str] = _draw_command

    def connect(self, address: Address) -> AbstractAsyncContextManager[Client]:
        """A client of just this node, whatever the map says."""
        return connect(
            address,
            identity=self.identity,
            connect_timeout_s=self.ask_timeout_s,
            retry_timeout_s=self.ask_timeout_s,
            follow_map=False,
            dial=self.dial,
        )

    def node_client(self, address: Address, timeout_s: float | None = None) -> NodeClient:
        """The node at `address`; by default with `ask_timeout_s` for each call."""
        return NodeClient(
            address,
            identity=self.identity,
            timeout_s=self.ask_timeout_s if timeout_s is None else timeout_s,
            dial=self.dial,
        )

    async def node_status(self, address: Address) -> NodeStatus:
        """A node's name and map; no map when it does not have the bucket.

        Raises:
            BrokenError: The node cannot be reached.
            NotDoneError: The node has no name.
        """
        try:
            status = await self.node_client(address).status()
        except ServerError as error:
            if error.status is not Status.NO_BUCKET:
                raise
            status = await self.node_client(attrs.evolve(address, bucket="")).status()
        return _require_name(status, address)

    async def node_report(self, address: Address, name: str = "") -> NodeReport:
        """What the node at `address` says. Reports a failure instead of raising it, also if another
        node than `name` answers."""
        try:
            report = await self._report(address)
        except UprError as error:
            return NodeReport(name, address, failure=str(error))
        if name and report.name != name:
            failure = f"node {report.name!r} answers at {address}"
            return NodeReport(name, address, failure=failure)
        return report

    async def _report(self, address: Address) -> NodeReport:
        status = await self._full_status(address)
        return NodeReport(status.node, address, status.map, status.partitions)

    async def _full_status(self, address: Address) -> NodeStatus:
        try:
            status = await self.node_client(address).status_with_partitions()
        except ServerError as error:
            if error.status is not Status.NO_BUCKET:
                raise
            return await self.node_status(address)
        return _require_name(status, address)

    async def node_reports(self, nodes: Mapping[str, Address]) -> dict[str, NodeReport]:
        """What several nodes say, asked at the same time."""
        reports: dict[str, NodeReport] = {}

        async def ask(name: str, address: Address) -> None:
            reports[name] = await self.node_report(address, name)

        async with trio.open_nursery() as nursery:
            for name, address in nodes.items():
                nursery.start_soon(ask, name, address)
        return {name: reports[name] for name in nodes}

    async def first_report(self) -> NodeReport:
        """The report of the first node in `address` that has the bucket; if none has, of the first
        that answers. A node that lost its disk does not know of the bucket, though others do.

        Raises:
            BrokenError: No node answers.
            UprError: None that answers says what it has; it refuses the user, for instance.
        """
        failures: list[UprError] = []
        without_bucket: list[NodeReport] = []
        for address in self.address.each_node():
            try:
                report = await self._report(address)
            except UprError as error:
                failures.append(error)
                continue
            if report.map is not None or report.partitions:
                return report
            without_bucket.append(report)
        if without_bucket:
            return without_bucket[0]
        for failure in failures:
            if not isinstance(failure, BrokenError):
                raise failure
        raise BrokenError("; ".join(map(str, failures)))

    async def survey(self, more_addresses: Mapping[str, str] | None = None) -> Survey:
        """Asks a node at `address`, every node that any map names, and `more_addresses`,
        `HOST:PORT` by name.

        Raises:
            BrokenError: No node at `address` answers.
            ServerError: No node has the bucket.
        """
        entry = await self.first_report()
        reports = {entry.name: entry}
        # Nodes that were asked again, as a command may have given them a newer map meanwhile.
        asked_again: set[str] = set()
        of_node = self.address.of_node
        addresses = {name: of_node(host_port) for name, host_port in (more_addresses or {}).items()}
        while True:
            partition_map = newest_map(
                report.map for report in reports.values() if report.map is not None
            )
            if partition_map is not None:
                addresses |= {
                    name: of_node(host_port) for name, host_port in partition_map.nodes.items()
                }
            names = [name for name in addresses if name not in reports]
            if not names and partition_map is not None:
                names = _outdated_nodes(reports, partition_map, asked_again)
                asked_again.update(names)
            if not names:
                break
            reports.update(await self.node_reports({name: addresses[name] for name in names}))
        bucket = self.address.bucket
        if not any(report.partitions for report in reports.values()):
            raise ServerError(Status.NO_BUCKET, f"there is no bucket {bucket!r}")
        if partition_map is None:
            count = len(entry.partitions)
            partition_map = PartitionMap.of_one_node(
                bucket, count, entry.name, entry.address.host_ports, revision=0
            )
        else:
            self._report_other_maps(partition_map, reports.values())
        return Survey(bucket, entry.name, partition_map, reports)

    def _report_other_maps(self, newest: PartitionMap, reports: Iterable[NodeReport]) -> None:
        """Reports the nodes whose maps have the same revision as `newest`, and say something else.
        None of these nodes takes another one's map."""
        of_newest = [report for report in reports if report.revision == newest.revision]
        names = [report.name for report in of_newest if report.map == newest]
        other_names = [report.name for report in of_newest if report.map != newest]
        if other_names:
            self.on_progress(
                f"{', '.join(names)} and {', '.join(other_names)} have different maps of revision "
                f"{newest.revision}, as two commands ran at the same time, or a node was restored "
                f"from a backup. This command continues from the map of {names[0]}: name another "
                "node first if its map counts"
            )


def _outdated_nodes(
    reports: Mapping[str, NodeReport], newest: PartitionMap, asked_again: Container[str]
) -> list[str]:
    """The nodes of `newest` that said to have an older map, and were not asked again yet. What they
    said of their partitions was true under that map."""
    return [
        name
        for name in newest.nodes
        if 0 < reports[name].revision < newest.revision and name not in asked_again
    ]


def _require_name(status: NodeStatus, address: Address) -> NodeStatus:
    if not status.node:
        raise NotDoneError(f"the server at {address} has no name: set `node` in its configuration")
    return status
