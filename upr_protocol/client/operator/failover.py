"""Failover: replicas become active in place of a node that is gone.

The replicas are fenced first: a map without an active node stops them from accepting anything more
from the old one, which can then have nothing more acknowledged. So many are fenced that one of them
must have everything that was acknowledged. The most complete of them becomes active, in a new
history.

Two failovers that reach different nodes may both get so far. So before it makes a node active, each
fences its nodes again, with a revision of its own: of the two maps one has the higher revision, and
all nodes follow it when they meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from upr_protocol.client.operator.errors import NotDoneError, PartlyDoneError
from upr_protocol.client.operator.map_change import MapChange, choose_partitions
from upr_protocol.client.operator.plan import (
    PartitionCopy,
    acknowledging_replicas,
    active_assignment,
    fenced_assignment,
    fences_needed,
    first_failover_revision,
    last_active_of,
    most_complete,
    partitions_text,
)
from upr_protocol.client.operator.survey import NodeReport, Operator, Survey
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.partition_map import Assignment, PartitionMap

_PROBLEMS_SHOWN: Final = 3


async def fail_over(
    operator: Operator,
    *,
    partitions: Iterable[int] = (),
    all_of: str = "",
    to: str = "",
    acknowledged: int = 1,
    lose_acknowledged: bool = False,
) -> PartitionMap:
    """Makes replicas active in place of a node that is gone.

    Cancelled, or ended by an error, it may leave fenced partitions without an active node. The same
    command again continues from there.

    Args:
        operator: How to reach the nodes; by way of any node that is running.
        partitions: Which partitions.
        all_of: Or all for which this node is active by the map; without those that it serves, if
            others wait.
        to: The node that becomes active; empty for one that has everything, for each partition.
        acknowledged: How many replicas publishers waited for.
        lose_acknowledged: Whether to continue though acknowledged changes may be lost.

    Returns:
        The new map.

    Raises:
        NotDoneError: The command would do harm, or cannot be done. Nothing has changed.
        PartlyDoneError: The command could not finish.
    """
    survey = await operator.survey()
    partition_ids = choose_partitions(survey, partitions, all_of)
    if all_of:
        partition_ids = _without_served(operator, survey, partition_ids, all_of)
    failover = _Failover(operator, survey, partition_ids, acknowledged)
    failover.check_no_active()
    failover.report_lost_copies()
    if to:
        failover.check_target(to)
    if not lose_acknowledged:
        failover.check_replicas()
    await failover.fence()
    await failover.check_fenced(lose_acknowledged=lose_acknowledged)
    actives = await failover.choose_actives(to, lose_acknowledged=lose_acknowledged)
    await failover.fence_at_own_revision(actives, lose_acknowledged=lose_acknowledged)
    return await failover.promote(actives)


def _without_served(
    operator: Operator, survey: Survey, partitions: list[PartitionId], node: str
) -> list[PartitionId]:
    """The partitions of a node that wait; all if none does, or the node serves none. After a crash
    of all nodes the failover of one makes others active, which have partitions that still wait."""
    assignments = survey.require_map().partitions
    served_partitions = [
        partition
        for partition in partitions
        if _running_active_of(survey, partition, assignments[partition])
    ]
    if not served_partitions or len(served_partitions) == len(partitions):
        return partitions
    operator.on_progress(
        f"{node} is running, and stays active for {partitions_text(served_partitions)}"
    )
    return sorted(set(partitions) - set(served_partitions))


def _running_active_of(survey: Survey, partition: PartitionId, assignment: Assignment) -> str:
    """The node that runs and is active for a partition, or hands it over; empty if there is
    none."""
    name = last_active_of(assignment)
    if not survey.reaches(name):
        return ""
    state = survey.nodes[name].state_of(partition)
    is_handing_over = state is PartitionState.PENDING and name == assignment.handing_over
    return name if state is PartitionState.ACTIVE or is_handing_over else ""


class _Failover:
    """One failover."""

    def __init__(
        self,
        operator: Operator,
        survey: Survey,
        partitions: list[PartitionId],
        acknowledged: int,
    ) -> None:
        self._change = MapChange(
            operator, survey, partitions, first_failover_revision(survey.map.revision)
        )
        self._survey = survey
        self._acknowledged = acknowledged
        self._report = operator.on_progress
        self._copies: dict[PartitionId, list[PartitionCopy]] = {
            partition: [] for partition in partitions
        }
        self.fenced_nodes: list[str] = []
        # Of the fenced nodes those that lost a partition, and have not copied all of it again.
        self._incomplete_nodes: dict[PartitionId, set[str]] = {
            partition: set() for partition in partitions
        }

    def _reached_holders(self) -> list[str]:
        """The holders that answer and have the bucket. A fence would give the bucket to one that
        has lost it, and its new copy, which is empty, would pass for one that has all of it."""
        return [name for name in self._change.holders() if self._survey.nodes[name].has_copy]

    def report_lost_copies(self) -> None:
        """Reports the holders that answer, and have lost the bucket."""
        for name in self._change.holders():
            if self._survey.reaches(name) and not self._survey.nodes[name].has_copy:
                self._report(
                    f"{name} answers, but has lost its copy of the bucket: it counts as missing"
                )

    # Checks before anything is changed.

    def check_no_active(self) -> None:
        """Refuses while the active node is running."""
        running_actives: dict[str, list[int]] = {}
        for partition, assignment in self._change.assignments.items():
            name = _running_active_of(self._survey, partition, assignment)
            if name:
                running_actives.setdefault(name, []).append(partition)
        for name, partitions in running_actives.items():
            raise NotDoneError(
                f"{name} is running, and is active for {partitions_text(partitions)}: use `upr "
                "takeover`, which loses nothing; or stop that server first"
            )

    def check_target(self, to: str) -> None:
        """Refuses a node that has no copy, or does not answer."""
        self._change.require_copies_on(to, "choose another node")
        self._survey.require_answer(to)
        if not self._survey.nodes[to].has_copy:
            raise NotDoneError(f"{to} has lost its copy of the bucket: choose another node")

    def check_replicas(self) -> None:
        """Refuses if too few replicas answer."""
        reached_nodes = self._reached_holders()
        lacking_partitions, missing_replicas = self._missing_replicas(reached_nodes)
        if lacking_partitions:
            raise NotDoneError(self._too_few(lacking_partitions, missing_replicas))
        self.check_copies(reached_nodes)

    def check_copies(self, nodes: Iterable[str]) -> None:
        """Refuses if none of `nodes` has a copy of some partition."""
        available_nodes = set(nodes)
        lacking_partitions = [
            partition
            for partition, assignment in self._change.assignments.items()
            if not available_nodes & set(assignment.holders())
        ]
        if lacking_partitions:
            raise NotDoneError(
                f"no node that answers has a copy of {partitions_text(lacking_partitions)}: bring "
                "back a node that has one"
            )

    def _missing_replicas(
        self, nodes: Iterable[str], *, counts_incomplete: bool = False
    ) -> tuple[list[int], list[str]]:
        """The partitions of which `nodes` has too few acknowledging replicas, and those that are
        missing. One that copies the partition again may lack what it acknowledged: it counts only
        on request."""
        available_nodes = set(nodes)
        lacking_partitions: list[int] = []
        missing_replicas: dict[str, None] = {}
        for partition, assignment in self._change.assignments.items():
            replicas = acknowledging_replicas(assignment)
            counting_nodes = available_nodes
            if not counts_incomplete:
                counting_nodes = available_nodes - self._incomplete_nodes[partition]
            count = sum(name in counting_nodes for name in replicas)
            if count < fences_needed(assignment, self._acknowledged):
                lacking_partitions.append(partition)
                missing_replicas.update(
                    dict.fromkeys(name for name in replicas if name not in counting_nodes)
                )
        return lacking_partitions, list(missing_replicas)

    def _too_few(self, partitions: list[int], missing_replicas: list[str]) -> str:
        return (
            f"too few replicas of {partitions_text(partitions)} answer: a missing one "
            f"({', '.join(missing_replicas)}) may be the only one to have a change that was "
            f"acknowledged with {self._acknowledged} copies. Bring it back; or say --acknowledged "
            "NUMBER if publishers waited for more copies; or lose such changes, with "
            "--lose-acknowledged"
        )

    # Fencing.

    async def fence(self) -> None:
        """Stops every replica that answers from accepting more changes, and asks what it has.

        Raises:
            OvertakenError: One of them has the map of another command.
        """
        change, revision = self._change, self._change.revision
        failures, reports = await change.fence(self._reached_holders(), change.assignments)
        for name, error in failures.items():
            self._report(f"{name} is not fenced: {error}")
        for name, report in reports.items():
            if report.failure:
                self._report(f"{name} is fenced, but does not say what it has: {report.failure}")
                continue
            refused_partitions = self._refused_copies(report)
            if refused_partitions:
                # What it had acknowledged of them may be nowhere else.
                refused_text = partitions_text(refused_partitions)
                self._report(f"{name} is fenced, but does not serve its copies of {refused_text}")
                continue
            self.fenced_nodes.append(name)
            incomplete_partitions: list[PartitionId] = []
            for partition, assignment in change.assignments.items():
                if name in assignment.holders() and partition < len(report.partitions):
                    self._copies[partition].append(report.copy_of(partition))
                    # By the map that it has now it is a replica.
                    if report.state_of(partition) is PartitionState.PENDING:
                        incomplete_partitions.append(partition)
                        self._incomplete_nodes[partition].add(name)
            if incomplete_partitions:
                incomplete_text = partitions_text(incomplete_partitions)
                self._report(
                    f"{name} is fenced, but has lost its copy of {incomplete_text}, and has not "
                    "yet copied all of it again: it counts as missing"
                )
        self._report(
            f"{', '.join(self.fenced_nodes) or 'no node'}: revision {revision}, fenced for "
            f"{change.text}"
        )

    def _refused_copies(self, report: NodeReport) -> list[PartitionId]:
        """The partitions of which a node that was fenced should have a copy, and has none that it
        can read."""
        return [
            partition
            for partition, assignment in self._change.assignments.items()
            if report.name in assignment.holders()
            and partition < len(report.partitions)
            and report.state_of(partition) is PartitionState.DEAD
        ]

    async def check_fenced(self, *, lose_acknowledged: bool) -> None:
        """Restores the old assignments and refuses, if too few replicas were fenced; where
        acknowledged changes may be lost, only if there is no copy at all."""
        lacking_partitions, missing_replicas = self._missing_replicas(
            self.fenced_nodes, counts_incomplete=lose_acknowledged
        )
        if lose_acknowledged:
            try:
                self.check_copies(self.fenced_nodes)
            except NotDoneError as error:
                await self._restore(str(error))
            self._report_candidates(lacking_partitions, missing_replicas)
            return
        if lacking_partitions:
            await self._restore(self._too_few(lacking_partitions, missing_replicas))
        self._report_candidates(*self._other_candidates())

    def _other_candidates(self) -> tuple[list[int], list[str]]:
        """The partitions of which enough acknowledging replicas are not fenced for another failover
        like this one, and these replicas."""
        partitions: list[int] = []
        candidates: dict[str, None] = {}
        for partition, assignment in self._change.assignments.items():
            replicas = acknowledging_replicas(assignment)
            unfenced_replicas = [name for name in replicas if name not in self.fenced_nodes]
            needed_count = max(1, fences_needed(assignment, self._acknowledged))
            if len(unfenced_replicas) >= needed_count:
                partitions.append(partition)
                candidates.update(dict.fromkeys(unfenced_replicas))
        return partitions, list(candidates)

    def _report_candidates(self, partitions: list[int], replicas: list[str]) -> None:
        if partitions:
            self._report(
                f"{', '.join(replicas)} may take writes, too, for {partitions_text(partitions)}, "
                "if another failover reaches them: run no other one before they answer, or one of "
                "the two loses what it accepts"
            )

    async def _restore(self, reason: str) -> None:
        """Gives the fenced nodes their old assignments, and raises `NotDoneError`."""
        old_map = self._change.next_map(self._change.assignments)
        failures = await self._change.publisher.publish_to(self._reached_holders(), old_map)
        for name, error in failures.items():
            self._report(f"{name} is still fenced: {error}")
        self._report(f"revision {old_map.revision}: every partition is assigned as before")
        raise NotDoneError(reason)

    # The new active nodes.

    async def choose_actives(self, to: str, *, lose_acknowledged: bool) -> dict[PartitionId, str]:
        """The node that becomes active, for each partition.

        Raises:
            NotDoneError: A partition has none that fits; the old assignments are restored.
        """
        actives: dict[PartitionId, str] = {}
        problems: list[str] = []
        for partition in self._copies:
            candidates = self._candidates(partition, lose_acknowledged=lose_acknowledged)
            if to and (to in candidates or (lose_acknowledged and to in self.fenced_nodes)):
                actives[partition] = to
            elif candidates and not to:
                # Spreads the partitions over the nodes that fit.
                actives[partition] = candidates[partition % len(candidates)]
            else:
                problems.append(
                    f"partition {partition}: {self._problem(partition, candidates, to)}"
                )
        if problems:
            unshown_count = len(problems) - _PROBLEMS_SHOWN
            unshown_text = f"; and {unshown_count} more" if unshown_count > 0 else ""
            await self._restore(
                f"{'; '.join(problems[:_PROBLEMS_SHOWN])}{unshown_text}. Choose a node that has "
                "everything, or leave out --to; or say --to NODE and --lose-acknowledged, to lose "
                "what NODE does not have"
            )
        return actives

    def _candidates(self, partition: PartitionId, *, lose_acknowledged: bool) -> list[str]:
        """The nodes that have everything that was acknowledged, by name."""
        required_point = (
            None if lose_acknowledged else self._change.assignments[partition].promotion_point
        )
        # The most complete of those that answer may still be one that is being refilled, and lacks
        # what it once acknowledged.
        copies = self._most_complete(partition)
        return sorted(copy.node for copy in copies if copy.contains(required_point))

    def _most_complete(self, partition: PartitionId) -> list[PartitionCopy]:
        """The copies that have everything that any of them has. One that copies the partition again
        may be in a history of its own: then it is left out."""
        copies, incomplete_nodes = self._copies[partition], self._incomplete_nodes[partition]
        complete_copies = [copy for copy in copies if copy.node not in incomplete_nodes]
        return most_complete(copies) or most_complete(complete_copies)

    def _problem(self, partition: PartitionId, candidates: list[str], to: str) -> str:
        if candidates:
            return f"{to} has less than {', '.join(candidates)}"
        copies = self._most_complete(partition)
        if copies:
            names = ", ".join(sorted(copy.node for copy in copies))
            return (
                f"{names} lacks changes that the active node had when it became active, or when a "
                "replica was added last, and may lack what was acknowledged: bring back another "
                "node"
            )
        names = ", ".join(sorted(copy.node for copy in self._copies[partition]))
        return f"the histories of {names or 'no node'} have diverged"

    async def fence_at_own_revision(
        self, actives: Mapping[PartitionId, str], *, lose_acknowledged: bool
    ) -> None:
        """Fences the nodes again, so that another failover, which reaches other nodes, has nothing
        more acknowledged by them that this one would lose: of the two, the nodes follow the one
        with the higher revision.

        What they have has not changed since the first fence. Before it was known that this failover
        can be done, a fence with such a revision could have stopped one that can.

        Raises:
            OvertakenError: Another failover has made one of them follow it.
            PartlyDoneError: Too few of them take the fence.
        """
        failures = await self._change.fence_at_own_revision(self.fenced_nodes)
        self.fenced_nodes = [name for name in self.fenced_nodes if name not in failures]
        lacking_partitions, _ = self._missing_replicas(
            self.fenced_nodes, counts_incomplete=lose_acknowledged
        )
        if (lacking_partitions and not lose_acknowledged) or failures.keys() & actives.values():
            raise PartlyDoneError(
                f"{'; '.join(map(str, failures.values()))}. Repeat the command: until then no node "
                f"is active for {self._change.text}"
            )

    async def promote(self, actives: Mapping[PartitionId, str]) -> PartitionMap:
        """Gives the new active nodes their map first, and then all others.

        Raises:
            PartlyDoneError: Some of them do not take it.
        """
        change, publisher = self._change, self._change.publisher
        promoted_assignments = {
            partition: self._promoted_assignment(partition, actives[partition])
            for partition in actives
        }
        new_map = change.next_map(promoted_assignments)
        # Only the new active nodes hear of it at first. If one of them refused a map that all
        # others had, these would follow a node that is not active.
        nodes = list(dict.fromkeys(actives.values()))
        failures = await publisher.publish_to(nodes, new_map)
        for name in nodes:
            if name not in failures:
                text = partitions_text(
                    partition for partition, node in actives.items() if node == name
                )
                self._report(f"{name}: revision {new_map.revision}, active for {text}")
        if not failures:
            await publisher.announce([name for name in new_map.nodes if name not in nodes], new_map)
            return new_map
        if len(failures) < len(nodes):
            # Some nodes are active now, which stays. The partitions of the others stay fenced.
            partial_map = change.next_map(
                {
                    partition: fenced_assignment(change.assignments[partition])
                    if node in failures
                    else promoted_assignments[partition]
                    for partition, node in actives.items()
                }
            )
            await publisher.announce(
                [name for name in new_map.nodes if name not in failures], partial_map
            )
        text = partitions_text(n for n, node in actives.items() if node in failures)
        raise PartlyDoneError(
            f"{'; '.join(map(str, failures.values()))}. Repeat the command: until then no node is "
            f"active for {text}"
        )

    def _promoted_assignment(self, partition: PartitionId, node: str) -> Assignment:
        point = next(copy.point for copy in self._copies[partition] if copy.node == node)
        return active_assignment(
            self._change.assignments[partition],
            node,
            failover_revision=self._change.revision,
            promotion_point=point,
        )
