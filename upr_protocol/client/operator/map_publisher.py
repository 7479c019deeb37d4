"""Giving nodes a map, and finding out whether they have applied it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import trio

from upr_protocol.client.operator.errors import (
    MapRefusedError,
    OvertakenError,
    PartlyDoneError,
    UnreachableError,
)
from upr_protocol.client.operator.survey import Operator, Survey
from upr_protocol.errors import ServerError, Status, UprError
from upr_protocol.partition_map import PartitionMap

_RETRY_S: Final = 0.05
"""How soon a node that did not answer is asked again."""

_RETRYABLE: Final = frozenset({Status.SHUTTING_DOWN, Status.REVISION_CONFLICT})
"""Refusals that leave open whether the node has the map, or will take it later."""


class MapPublisher:
    """Gives nodes, which are at `addresses`, maps: each in place of the map that the node has."""

    def __init__(self, operator: Operator, survey: Survey) -> None:
        self._operator = operator
        self.addresses = {name: report.address for name, report in survey.nodes.items()}
        self._unreachable = {name for name, report in survey.nodes.items() if report.failure}
        self._revisions = {name: report.revision for name, report in survey.nodes.items()}
        # The nodes that have taken a map from here.
        self._updated_nodes: set[str] = set()

    async def publish(
        self, node: str, partition_map: PartitionMap, timeout_s: float | None = None
    ) -> None:
        """Has a node apply a map. If the node does not answer, it is asked which map it has, and
        given this one again; it refuses the first one if that arrives late.

        If this is cancelled, the node may have applied the map, or may do so later.

        Raises:
            MapRefusedError: The node refused the map, and has not applied it.
            OvertakenError: The node has another map, of the same or a higher revision; or one of
                another command in place of one that it has got from here.
            UnreachableError: The node did not say in time whether it applied the map.
        """
        if timeout_s is None:
            timeout_s = self._operator.apply_timeout_s
        deadline = trio.current_time() + timeout_s
        while True:
            left_s = max(deadline - trio.current_time(), 0.01)
            client = self._operator.node_client(self.addresses[node], left_s)
            try:
                await client.set_map(self._revisions[node], partition_map)
            except UprError as error:
                if isinstance(error, ServerError) and error.status not in _RETRYABLE:
                    raise MapRefusedError(f"node {node} refuses: {error}") from error
                failure = error
            else:
                self._revisions[node] = partition_map.revision
                self._updated_nodes.add(node)
                return
            has_applied = await self._has_applied(node, partition_map)
            if has_applied:
                return
            if trio.current_time() + _RETRY_S >= deadline:
                problem = "does not answer" if has_applied is None else "has not applied the map"
                raise UnreachableError(f"node {node} {problem}: {failure}") from failure
            await trio.sleep(_RETRY_S)

    async def _has_applied(self, node: str, partition_map: PartitionMap) -> bool | None:
        """Whether a node has this map; None if it does not answer, or does not say it: another
        program may answer there, or its certificate may have expired. Records the revision that it
        has."""
        try:
            status = await self._operator.node_status(self.addresses[node])
        except UprError:
            return None
        has_applied = status.map == partition_map
        revision = 0 if status.map is None else status.map.revision
        is_overtaken = revision >= partition_map.revision or (
            # It has taken another command's map in place of one of this command.
            node in self._updated_nodes
            and status.map is not None
            and status.map.command != partition_map.command
        )
        if is_overtaken and not has_applied:
            raise OvertakenError(
                f"node {node} has revision {revision} from another command: check the state with "
                "`upr partitions`, and repeat this command"
            )
        self._revisions[node] = revision
        if has_applied:
            self._updated_nodes.add(node)
        return has_applied

    async def publish_to(
        self, nodes: Iterable[str], partition_map: PartitionMap, timeout_s: float | None = None
    ) -> dict[str, PartlyDoneError]:
        """Gives several nodes a map, at the same time.

        Returns:
            The nodes that are not known to have applied the map, and why.
        """
        failures: dict[str, PartlyDoneError] = {}

        async def publish(node: str) -> None:
            try:
                await self.publish(node, partition_map, timeout_s)
            except PartlyDoneError as error:
                failures[node] = error

        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(publish, node)
        return failures

    async def announce(self, nodes: Iterable[str], partition_map: PartitionMap) -> None:
        """Gives the remaining nodes a map, and reports which have it. A node that does not take it
        is no error: nodes ask each other for newer maps.

        Raises:
            OvertakenError: A node has another map, of the same or a higher revision. The nodes may
                never agree by themselves.
        """
        known_nodes = [node for node in nodes if node in self.addresses]
        unreachable = [node for node in known_nodes if node in self._unreachable]
        if unreachable:
            self._operator.on_progress(
                f"{', '.join(unreachable)}: unreachable; will ask for the map when back"
            )
        reachable = [node for node in known_nodes if node not in unreachable]
        # A node that stops following another one first saves what it has received.
        failures = await self.publish_to(reachable, partition_map)
        for node, error in failures.items():
            if isinstance(error, OvertakenError):
                continue
            future = "will ask for it"
            if isinstance(error, UnreachableError):
                future = f"may be about to apply it, else {future}"
            self._operator.on_progress(
                f"{node}: not yet at revision {partition_map.revision}; {future} ({error})"
            )
        updated_nodes = [node for node in reachable if node not in failures]
        if updated_nodes:
            self._operator.on_progress(
                f"{', '.join(updated_nodes)}: revision {partition_map.revision}"
            )
        for error in failures.values():
            if isinstance(error, OvertakenError):
                raise error
