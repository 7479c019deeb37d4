"""Failover: another node becomes active in place of one that is gone.

The replicas are fenced first: with a map without an active they stop taking what the old one may
still send, so that it can get nothing acknowledged any more. Of so many that one of them must have
everything that was acknowledged, the furthest is made active, in a new history.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from upr_protocol.client.operator.errors import NotDoneError, PartlyDoneError
from upr_protocol.client.operator.giver import Giver
from upr_protocol.client.operator.plan import (
    Copy,
    fenced,
    fences_needed,
    first_revision,
    furthest,
    holders_of,
    led_by,
    master_of,
    partitions_text,
    revised,
    witnesses_of,
)
from upr_protocol.client.operator.replicas import checked_partitions
from upr_protocol.client.operator.survey import Operator, Survey
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.partition_map import Assignment, HistoryPoint, PartitionMap


def chosen_partitions(survey: Survey, partitions: Iterable[int], all_of: str) -> list[PartitionId]:
    """The partitions that a command is about: those named, or those that a node leads.

    Raises:
        NotDoneError: There are none.
    """
    base = survey.mapped()
    if not all_of:
        return checked_partitions(survey, partitions)
    if all_of not in base.nodes:
        raise NotDoneError(
            f"there is no node {all_of!r}; there are {', '.join(sorted(base.nodes))}"
        )
    found = [
        PartitionId(number)
        for number, assignment in enumerate(base.partitions)
        if master_of(assignment) == all_of
    ]
    if not found:
        raise NotDoneError(f"{all_of} is active for nothing: there is nothing to do")
    return found


async def fail_over(
    operator: Operator,
    *,
    partitions: Iterable[int] = (),
    all_of: str = "",
    to: str = "",
    acknowledged: int = 1,
    lose_acknowledged: bool = False,
) -> PartitionMap:
    """Makes other nodes active. Cancelled, or ended by an error, it leaves nobody active in what it
    has fenced; the same command again goes on from there.

    Args:
        operator: How to ask; at any node that is up.
        partitions: Which partitions.
        all_of: Or all that this node is active for.
        to: The node that becomes active; empty for one that has everything, for each partition.
        acknowledged: What publishers counted on: the copies that a change had on replicas when it
            was acknowledged.
        lose_acknowledged: Whether to go on though something that was acknowledged may be lost.

    Returns:
        The map.

    Raises:
        NotDoneError: It would be wrong, or cannot be; everything is as it was.
        PartlyDoneError: It could not be finished.
    """
    survey = await operator.survey()
    wanted = chosen_partitions(survey, partitions, all_of)
    run = _Failover(operator, survey, wanted, acknowledged)
    run.check_nobody_leads()
    run.check_target(to)
    if not lose_acknowledged:
        run.check_enough()
    await run.fence()
    if lose_acknowledged:
        run.check_anybody()
    else:
        await run.check_fenced()
    chosen = await run.choose(to, lose_acknowledged=lose_acknowledged)
    return await run.promote(chosen)


class _Failover:
    def __init__(
        self,
        operator: Operator,
        survey: Survey,
        partitions: list[PartitionId],
        acknowledged: int,
    ) -> None:
        self._operator = operator
        self._survey = survey
        self._base = survey.mapped()
        self._assignments: dict[PartitionId, Assignment] = {
            number: self._base.partitions[number] for number in partitions
        }
        self._acknowledged = acknowledged
        self._revision = first_revision(self._base.revision)
        self._giver = Giver(operator, survey)
        self._copies: dict[PartitionId, list[Copy]] = {number: [] for number in partitions}
        self._fenced: list[str] = []

    def _holders(self) -> list[str]:
        found = dict.fromkeys(
            n for assignment in self._assignments.values() for n in holders_of(assignment)
        )
        return list(found)

    # Before anything is changed.

    def check_nobody_leads(self) -> None:
        """Refuses while the active is there."""
        alive: dict[str, list[int]] = {}
        for number, assignment in self._assignments.items():
            master = master_of(assignment)
            if not self._survey.reaches(master):
                continue
            state = self._survey.nodes[master].state(number)
            if state is PartitionState.ACTIVE or (
                state is PartitionState.PENDING and master == assignment.handing_over
            ):
                alive.setdefault(master, []).append(number)
        for master, numbers in alive.items():
            raise NotDoneError(
                f"{master} is there, and leads {partitions_text(numbers)}: use `upr takeover`, "
                "which loses nothing; or stop that server first"
            )

    def check_target(self, to: str) -> None:
        """Refuses a node that holds nothing."""
        if not to:
            return
        without = [
            n for n, assignment in self._assignments.items() if to not in holders_of(assignment)
        ]
        if without:
            raise NotDoneError(
                f"{to} has no copy of {partitions_text(without)}: choose another node"
            )
        self._survey.check_reaches(to)

    def _missing(self, has: Iterable[str]) -> tuple[list[int], list[str]]:
        there = set(has)
        numbers: list[int] = []
        away: dict[str, None] = {}
        for number, assignment in self._assignments.items():
            witnesses = witnesses_of(assignment)
            found = sum(name in there for name in witnesses)
            if found < fences_needed(assignment, self._acknowledged):
                numbers.append(number)
                away.update(dict.fromkeys(name for name in witnesses if name not in there))
        return numbers, list(away)

    def check_enough(self) -> None:
        """Refuses where too few replicas answer."""
        reached = [name for name in self._holders() if self._survey.reaches(name)]
        numbers, away = self._missing(reached)
        if numbers:
            raise NotDoneError(self._too_few(numbers, away))
        self.check_anybody(reached)

    def _too_few(self, numbers: list[int], away: list[str]) -> str:
        return (
            f"too few replicas of {partitions_text(numbers)} answer: one that does not "
            f"({', '.join(away)}) may alone have what was acknowledged with {self._acknowledged} "
            "copies. Bring it back; or say --acknowledged NUMBER if publishers waited for more "
            "copies; or lose what it alone has, with --lose-acknowledged"
        )

    def check_anybody(self, has: Iterable[str] | None = None) -> None:
        """Refuses where nobody has a copy."""
        there = set(self._fenced if has is None else has)
        bare = [
            n
            for n, assignment in self._assignments.items()
            if not there & set(holders_of(assignment))
        ]
        if bare:
            raise NotDoneError(
                f"nobody who answers has a copy of {partitions_text(bare)}: bring back a node that "
                "has"
            )

    # Fencing.

    def _map(self, changed: Mapping[PartitionId, Assignment]) -> PartitionMap:
        found = revised(self._base, self._revision, dict(changed))
        self._revision += 1
        return found

    async def fence(self) -> None:
        """Has all who answer take nothing more from the old active, and looks at what they have."""
        given = self._map(
            {number: fenced(assignment) for number, assignment in self._assignments.items()}
        )
        there = [name for name in self._holders() if self._survey.reaches(name)]
        failed = await self._giver.give_each(there, given)
        for name, error in failed.items():
            self._operator.tell(f"{name} is not fenced: {error}")
        accepted = {n: self._giver.addresses[n] for n in there if n not in failed}
        for name, report in (await self._operator.reports(accepted)).items():
            if report.trouble:
                self._operator.tell(
                    f"{name} is fenced, and does not say what it has: {report.trouble}"
                )
                continue
            self._fenced.append(name)
            for number, assignment in self._assignments.items():
                if name in holders_of(assignment) and number < len(report.partitions):
                    self._copies[number].append(report.copy(number))
        self._operator.tell(
            f"{', '.join(self._fenced) or 'nobody'}: revision {given.revision}, fenced for "
            f"{partitions_text(self._assignments)}"
        )

    async def check_fenced(self) -> None:
        """Puts all back where too few were fenced."""
        numbers, away = self._missing(self._fenced)
        if numbers:
            await self.put_back(self._too_few(numbers, away))

    async def put_back(self, why: str) -> None:
        """Has the fenced be what they were, and says why."""
        given = self._map(self._assignments)
        failed = await self._giver.give_each(
            [name for name in self._holders() if self._survey.reaches(name)], given
        )
        for name, error in failed.items():
            self._operator.tell(f"{name} is still fenced: {error}")
        self._operator.tell(f"revision {given.revision}: everything is owned as before")
        raise NotDoneError(why)

    # The new active.

    async def choose(self, to: str, *, lose_acknowledged: bool) -> dict[PartitionId, str]:
        """Who becomes active for each partition."""
        chosen: dict[PartitionId, str] = {}
        behind: list[str] = []
        for number, copies in self._copies.items():
            floor = None if lose_acknowledged else self._assignments[number].floor
            whole = furthest(copies)
            best = sorted(copy.node for copy in whole if copy.reaches(floor))
            if to and (to in best or (lose_acknowledged and to in self._fenced)):
                chosen[number] = to
            elif best and not to:
                chosen[number] = best[number % len(best)]
            elif whole and not best:
                names = ", ".join(sorted(copy.node for copy in whole))
                behind.append(
                    f"partition {number}: {names} is being filled anew, and has less than the last "
                    "failover kept: bring back another node"
                )
            elif not best:
                behind.append(
                    f"partition {number}: the histories of "
                    f"{', '.join(sorted(copy.node for copy in copies)) or 'nobody'} have parted"
                )
            else:
                behind.append(f"partition {number}: {to} has less than {', '.join(best)}")
        if behind:
            more = f"; and {len(behind) - 3} more" if len(behind) > 3 else ""
            await self.put_back(
                f"{'; '.join(behind[:3])}{more}. Choose a node that has everything, or leave out "
                "--to; or say --to NODE and --lose-acknowledged, to lose what NODE does not have"
            )
        return chosen

    def _place(self, number: PartitionId, node: str) -> HistoryPoint:
        return next(copy.place for copy in self._copies[number] if copy.node == node)

    async def promote(self, chosen: Mapping[PartitionId, str]) -> PartitionMap:
        """Tells the new actives, and then all others."""
        revision = self._revision
        led = {
            number: led_by(
                self._assignments[number], node, chosen=revision, floor=self._place(number, node)
            )
            for number, node in chosen.items()
        }
        given = self._map(led)
        actives = list(dict.fromkeys(chosen.values()))
        failed = await self._giver.give_each(actives, given)
        for name in actives:
            if name not in failed:
                its = partitions_text(n for n, node in chosen.items() if node == name)
                self._operator.tell(f"{name}: revision {given.revision}, active for {its}")
        if failed:
            said = "; ".join(map(str, failed.values()))
            if len(failed) < len(actives):
                # What was done holds; the rest is as it was before.
                assignments = {
                    n: fenced(self._assignments[n]) if node in failed else led[n]
                    for n, node in chosen.items()
                }
                await self._giver.spread(
                    [name for name in given.nodes if name not in failed], self._map(assignments)
                )
            raise PartlyDoneError(
                f"{said}. Repeat the command: until then nobody is active for "
                f"{partitions_text(n for n, node in chosen.items() if node in failed)}"
            )
        await self._giver.spread([name for name in given.nodes if name not in actives], given)
        return given
