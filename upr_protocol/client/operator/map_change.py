"""The maps of one command: each changes the assignments of the same partitions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from upr_protocol.client.operator.errors import NotDoneError, OvertakenError, PartlyDoneError
from upr_protocol.client.operator.map_publisher import MapPublisher
from upr_protocol.client.operator.plan import (
    active_partitions_of,
    fenced_assignment,
    own_failover_revision,
    partitions_text,
)
from upr_protocol.client.operator.survey import NodeReport, Operator, Survey
from upr_protocol.ids import PartitionId
from upr_protocol.partition_map import Assignment, PartitionMap


class MapChange:
    """What a takeover and a failover share.

    Attributes:
        revision: The revision of the next map.
        assignments: The partitions that the command is about, as they were at first.
        text: The partitions, for people.
    """

    def __init__(
        self,
        operator: Operator,
        survey: Survey,
        partitions: Iterable[PartitionId],
        first_revision: int,
    ) -> None:
        self._base_map = survey.require_map()
        self._first_revision = self.revision = first_revision
        self._command = operator.draw_command()
        self.operator = operator
        self.survey = survey
        self.assignments: dict[PartitionId, Assignment] = {
            partition: self._base_map.partitions[partition] for partition in partitions
        }
        self.publisher = MapPublisher(operator, survey)
        self.text = partitions_text(self.assignments)

    def next_map(self, assignments: Mapping[PartitionId, Assignment]) -> PartitionMap:
        """The map at first, with these assignments and the next revision."""
        new_map = self._base_map.with_assignments(assignments, self.revision, self._command)
        self.revision += 1
        return new_map

    async def fence(
        self,
        nodes: Sequence[str],
        assignments: Mapping[PartitionId, Assignment],
        timeout_s: float | None = None,
    ) -> tuple[Mapping[str, PartlyDoneError], Mapping[str, NodeReport]]:
        """Has nodes accept nothing more of partitions, and asks them what they have. What a node
        said before may be too little: it may have accepted, and acknowledged, more since.

        Returns:
            The nodes that are not known to be fenced, and why; and the reports of the others.

        Raises:
            OvertakenError: One of them has the map of another command. If both went on, with
                different nodes that they have fenced, they might make different nodes active.
        """
        failures = await self._publish_fence(nodes, assignments, timeout_s)
        addresses = {n: self.publisher.addresses[n] for n in nodes if n not in failures}
        return failures, await self.operator.node_reports(addresses)

    async def fence_at_own_revision(self, nodes: Sequence[str]) -> Mapping[str, PartlyDoneError]:
        """Fences nodes that are fenced again, with a revision that no other failover has. From then
        on they follow another failover that began at the same time only if that has a higher one.

        Returns:
            The nodes that are not known to have this fence, and why.

        Raises:
            OvertakenError: One of them has the map of another command by now.
        """
        self.revision = own_failover_revision(self._first_revision, self._command)
        return await self._publish_fence(nodes, self.assignments)

    async def _publish_fence(
        self,
        nodes: Sequence[str],
        assignments: Mapping[PartitionId, Assignment],
        timeout_s: float | None = None,
    ) -> Mapping[str, PartlyDoneError]:
        fencing_map = self.next_map({n: fenced_assignment(a) for n, a in assignments.items()})
        failures = await self.publisher.publish_to(nodes, fencing_map, timeout_s)
        for error in failures.values():
            if isinstance(error, OvertakenError):
                raise error
        return failures

    def holders(self) -> list[str]:
        """Every node that has a copy of one of the partitions."""
        return list(
            dict.fromkeys(
                name for assignment in self.assignments.values() for name in assignment.holders()
            )
        )

    def require_copies_on(self, node: str, advice: str) -> None:
        """Raises `NotDoneError` if `node` does not have a copy of each partition."""
        lacking_partitions = [
            partition
            for partition, assignment in self.assignments.items()
            if node not in assignment.holders()
        ]
        if lacking_partitions:
            raise NotDoneError(
                f"{node} has no copy of {partitions_text(lacking_partitions)}: {advice}"
            )


def require_partitions(survey: Survey, partitions: Iterable[int]) -> list[PartitionId]:
    """`partitions` in order; all of the bucket's when none are named.

    Raises:
        NotDoneError: The bucket does not have one of them.
    """
    count = len(survey.map.partitions)
    numbers = sorted(set(partitions)) or list(range(count))
    if numbers[-1] >= count:
        raise NotDoneError(f"the bucket has partitions 0 to {count - 1}, not {numbers[-1]}")
    return [PartitionId(partition_number) for partition_number in numbers]


def choose_partitions(survey: Survey, partitions: Iterable[int], all_of: str) -> list[PartitionId]:
    """`partitions` in order; or all for which the node `all_of` is active, or was the last.

    Raises:
        NotDoneError: `all_of` is active for no partition.
    """
    base = survey.require_map()
    if not all_of:
        return require_partitions(survey, partitions)
    survey.require_node(all_of)
    partition_ids = active_partitions_of(base, all_of)
    if not partition_ids:
        raise NotDoneError(f"{all_of} is not active for any partition; nothing to do")
    return partition_ids
