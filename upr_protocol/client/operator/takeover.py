"""Takeover: another node becomes active in place of one that is there, and nothing is lost.

1. The target is close: it has nearly everything.
2. The old active hands over: it takes no writes any more, has all on disk, and is still followed.
3. The target has exactly what the old active has.
4. The target becomes active, in the same history, which it refuses unless it has just that.
5. The old active and all others learn of it.

When 3 takes too long, or 4 is refused, the old active goes on in its history. When nobody can say
what became of 4, or a command before this one was interrupted there, others may have been told to
become active: they are held back first, and who took something in is active again. Whoever becomes
active after that begins a new history: one that was active may have given numbers that it lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import attrs
import trio

from upr_protocol.client.core.calls import PartitionNumbers
from upr_protocol.client.operator.errors import (
    MapRefusedError,
    NotDoneError,
    PartlyDoneError,
    UnreachableError,
)
from upr_protocol.client.operator.failover import chosen_partitions
from upr_protocol.client.operator.giver import Giver
from upr_protocol.client.operator.plan import (
    Copy,
    fenced,
    first_revision,
    furthest,
    handed_over,
    holders_of,
    led_by,
    master_of,
    partitions_text,
    revised,
)
from upr_protocol.client.operator.survey import Operator, Survey
from upr_protocol.errors import UprError
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.partition_map import Assignment, HistoryPoint, PartitionMap

CLOSE_CHANGES: Final = 256
"""How many changes a target may be behind in any case, over all partitions, when the active hands
over to it."""

CLOSE_S: Final = 0.25
"""Or how long it takes for what it is behind, as fast as it was just now."""

_CLOSE_POLL_S: Final = 0.1
_POLL_S: Final = 0.01

_UNTOLD_S: Final = 0.3
"""A target that has everything by then need not be told that the active hands over: its streams go
on. One whose streams broke can only connect again when it knows."""

_WAS_ACTIVE: Final = "an interrupted command had another node become active"


@attrs.frozen
class Limits:
    """How long things may take.

    Attributes:
        close_s: For the target to come close, while the active takes writes.
        handover_s: For it to have everything, while nobody takes writes.
    """

    close_s: float = 300.0
    handover_s: float = 10.0


async def take_over(
    operator: Operator,
    *,
    to: str,
    partitions: Iterable[int] = (),
    all_of: str = "",
    limits: Limits | None = None,
) -> PartitionMap:
    """Makes a replica active in place of the active. Cancelled, it may leave partitions that are
    handed over and that nobody is active for; the same command again goes on from there. Cancelled
    in its turn, that may leave them fenced: `fail_over` goes on from there, and loses nothing.

    Args:
        operator: How to ask; at any node.
        to: The replica.
        partitions: Which partitions.
        all_of: Or all that this node is active for.
        limits: How long things may take.

    Returns:
        The map.

    Raises:
        NotDoneError: It cannot be; everything is owned as before.
        PartlyDoneError: It could not be finished.
    """
    limits = limits or Limits()
    survey = await operator.survey()
    base = survey.mapped()
    by_master: dict[str, list[PartitionId]] = {}
    for number in chosen_partitions(survey, partitions, all_of):
        assignment = base.partitions[number]
        if assignment.active != to:
            by_master.setdefault(master_of(assignment), []).append(number)
    if not by_master:
        raise NotDoneError(f"{to} is active for all of them already")
    found = base
    for at, (master, numbers) in enumerate(by_master.items()):
        if at:
            survey = await operator.survey()
        found = await _Takeover(operator, survey, master, to, numbers, limits).run()
    return found


class _Takeover:
    """From one node to another."""

    def __init__(
        self,
        operator: Operator,
        survey: Survey,
        old: str,
        to: str,
        partitions: list[PartitionId],
        limits: Limits,
    ) -> None:
        self._operator = operator
        self._tell = operator.tell
        self._survey = survey
        self._old = old
        self._to = to
        self._limits = limits
        self._base = survey.mapped()
        self._assignments: dict[PartitionId, Assignment] = {
            number: self._base.partitions[number] for number in partitions
        }
        self._text = partitions_text(partitions)
        self._revision = first_revision(self._base.revision)
        self._giver = Giver(operator, survey)
        self._keeps: dict[PartitionId, HistoryPoint] = {}
        self._held_back: dict[PartitionId, list[Copy]] = {}
        self._new_histories = False
        self._resumed = any(assignment.handing_over for assignment in self._assignments.values())

    async def run(self) -> PartitionMap:
        self._check()
        if self._to == self._old:
            return await self._go_back()
        if not self._resumed:
            with trio.move_on_after(self._limits.close_s) as scope:
                await self._come_close()
            if scope.cancelled_caught:
                raise NotDoneError(
                    f"{self._to} does not come close to {self._old}: it has "
                    f"{self._lag():,} changes less; see `upr partitions`, or give it longer"
                )
        others = self._others()
        if self._resumed:
            self._tell(
                "an earlier command was interrupted: what it handed over begins new histories"
            )
            await self._hold_back(others)
        given = await self._hand_over()
        if self._ahead():
            return await self._return(_WAS_ACTIVE)
        if self._resumed:
            await self._giver.spread(others, given)
        with trio.move_on_after(self._limits.handover_s) as scope:
            await self._catch_up(given)
        if scope.cancelled_caught:
            return await self._return(
                f"{self._to} did not have everything within {self._limits.handover_s:g} s"
            )
        return await self._activate()

    # Before anything is changed.

    def _check(self) -> None:
        survey, old, to = self._survey, self._old, self._to
        if not old or any(assignment.lost for assignment in self._assignments.values()):
            raise NotDoneError(f"nobody is active for {self._text}: use `upr failover`")
        without = [
            n for n, assignment in self._assignments.items() if to not in holders_of(assignment)
        ]
        if without:
            raise NotDoneError(
                f"{to} has no copy of {partitions_text(without)}: make it a replica first, with "
                "`upr replicas add`"
            )
        if not survey.reaches(old):
            why = survey.nodes[old].trouble
            raise NotDoneError(
                f"{old} cannot be reached ({why}): if it is gone, use `upr failover`"
            )
        survey.check_reaches(to)
        for number, assignment in self._assignments.items():
            state = survey.nodes[old].state(number)
            if assignment.active and state is not PartitionState.ACTIVE:
                raise NotDoneError(
                    f"{old} is {state.name.lower()} for partition {number}, though the map says "
                    "active. If it was stopped cleanly, repeat this once another node has "
                    "confirmed its map; if it was killed, use `upr failover`"
                )

    def _lag(self) -> int:
        old, to = self._survey.nodes[self._old], self._survey.nodes[self._to]
        if to.trouble or old.trouble or len(to.partitions) != len(old.partitions):
            return -1
        lag = 0
        for number in self._assignments:
            theirs, its = old.partitions[number], to.partitions[number]
            same = theirs.log == its.log
            lag += theirs.high_seq - (its.high_seq if same else 0)
            if not same and not theirs.high_seq:
                return -1
        return lag

    def _has(self) -> int:
        """The changes that the target has, over all partitions."""
        partitions = self._survey.nodes[self._to].partitions
        return sum(info.high_seq for info in partitions if info.partition in self._assignments)

    async def _come_close(self) -> None:
        """Waits until the target has nearly everything, in the same histories."""
        told = False
        close = CLOSE_CHANGES
        has, at = self._has(), trio.current_time()
        while not 0 <= self._lag() <= close:
            if not told:
                self._tell(f"{self._to} is behind {self._old}; waiting until it is close")
                told = True
            await trio.sleep(_CLOSE_POLL_S)
            places = {name: self._giver.addresses[name] for name in (self._old, self._to)}
            reports = {**self._survey.nodes, **await self._operator.reports(places)}
            self._survey = attrs.evolve(self._survey, nodes=reports)
            before, has, since, at = has, self._has(), at, trio.current_time()
            close = max(CLOSE_CHANGES, int(CLOSE_S * (has - before) / (at - since)))

    # Handing over.

    def _map(self, changed: dict[PartitionId, Assignment]) -> PartitionMap:
        found = revised(self._base, self._revision, changed)
        self._revision += 1
        return found

    def _others(self) -> list[str]:
        """All who have a copy, but for the old active."""
        found = dict.fromkeys(
            n for assignment in self._assignments.values() for n in holders_of(assignment)
        )
        return [name for name in found if name != self._old]

    async def _hand_over(self) -> PartitionMap:
        given = self._map(
            {n: handed_over(assignment) for n, assignment in self._assignments.items()}
        )
        try:
            await self._giver.give(self._old, given)
        except UnreachableError as error:
            raise PartlyDoneError(
                f"{error}. It may have stopped taking writes for {self._text}: repeat the command; "
                "or if it is gone, use `upr failover`"
            ) from error
        except MapRefusedError as error:
            raise NotDoneError(str(error)) from error
        for row in await self._numbers(self._old):
            self._keeps[row.partition] = HistoryPoint(row.history_id, row.high_seq)
        self._tell(f"{self._old}: revision {given.revision}, hands over {self._text}")
        return given

    async def _numbers(self, node: str) -> list[PartitionNumbers]:
        """How far a node is."""
        address = self._giver.addresses[node]
        try:
            async with self._operator.talk(address) as client:
                return await client.seqnos(self._assignments)
        except UprError as error:
            raise PartlyDoneError(
                f"{node} does not answer any more ({error}), and {self._text} may be handed over: "
                "repeat the command; or if it is gone, use `upr failover`"
            ) from error

    def _has_everything(self, rows: list[PartitionNumbers]) -> bool:
        return all(
            HistoryPoint(row.history_id, row.high_seq) == self._keeps[row.partition]
            and row.persisted_seq == row.high_seq
            for row in rows
        )

    async def _catch_up(self, given: PartitionMap) -> None:
        """Waits until the target has exactly what the old active has."""
        untold_until = trio.current_time() + _UNTOLD_S
        told = self._resumed
        while True:
            try:
                async with self._operator.talk(self._giver.addresses[self._to]) as client:
                    while not self._has_everything(await client.seqnos(self._assignments)):
                        if not told and trio.current_time() > untold_until:
                            told = True
                            await self._giver.spread([self._to], given)
                        await trio.sleep(_POLL_S)
                    return
            except UprError as error:
                self._tell(f"{self._to} does not say how far it is: {error}")
                await trio.sleep(_CLOSE_POLL_S)

    # Who may have become active.

    async def _hold_back(self, nodes: list[str]) -> bool:
        """Fences `nodes`, any of which may have been told to become active: they refuse that from
        now on, and take nothing more. What they took in stays, as they follow nobody.

        Returns:
            Whether all are.
        """
        handed = {n: o for n, o in self._assignments.items() if o.handing_over or not self._resumed}
        given = self._map({number: fenced(assignment) for number, assignment in handed.items()})
        failed = await self._giver.give_each(nodes, given, self._operator.tell_timeout_s)
        for error in failed.values():
            self._tell(f"{error}; it may have become active")
        places = {name: self._giver.addresses[name] for name in nodes if name not in failed}
        for name, report in (await self._operator.reports(places)).items():
            if report.trouble or not report.partitions:
                self._tell(f"{name} does not say what it has: {report.trouble}")
                continue
            for number in handed:
                self._held_back.setdefault(number, []).append(report.copy(number))
        return not failed

    def _ahead(self) -> dict[PartitionId, Copy]:
        """Who was active meanwhile, of those that are held back, and took something in: they have
        everything of the old active, and more."""
        found: dict[PartitionId, Copy] = {}
        for number, copies in self._held_back.items():
            ahead = [copy for copy in copies if copy.goes_on_from(self._keeps[number])]
            if not ahead:
                continue
            best = furthest(ahead)
            if not best:
                raise PartlyDoneError(
                    f"{', '.join(copy.node for copy in ahead)} have changes of partition {number} "
                    "that the others do not have: choose one of them with `upr failover`"
                )
            found[number] = next((copy for copy in best if copy.node == self._to), best[0])
        return found

    # The new active.

    def _kept(self, number: PartitionId, place: HistoryPoint) -> HistoryPoint | None:
        """Where a history goes on; None where another may have been active in it meanwhile. One
        that was, and was killed, does not know any more which numbers it has given."""
        if self._new_histories or self._assignments[number].handing_over:
            return None
        return place

    async def _activate(self) -> PartitionMap:
        given = self._map(
            {
                n: led_by(assignment, self._to, self._kept(n, self._keeps[n]), floor=self._keeps[n])
                for n, assignment in self._assignments.items()
            }
        )
        try:
            await self._giver.give(self._to, given)
        except MapRefusedError as error:
            return await self._return(str(error), [self._to])
        except UnreachableError as error:
            self._new_histories = True
            return await self._return(f"{error}; it may be active now, or not", [self._to])
        self._tell(f"{self._to}: revision {given.revision}, active for {self._text}")
        await self._giver.spread([name for name in given.nodes if name != self._to], given)
        return given

    # Back.

    async def _go_back(self) -> PartitionMap:
        """Has the old active be it again, as the operator wishes."""
        for row in await self._numbers(self._old):
            self._keeps[row.partition] = HistoryPoint(row.history_id, row.high_seq)
        return self._checked(await self._give_back(self._others()), _WAS_ACTIVE)

    async def _return(self, why: str, refusers: Iterable[str] = ()) -> PartitionMap:
        """Has the old active be it again, and says why."""
        self._tell(why)
        return self._checked(await self._give_back(list(refusers)), why)

    def _checked(self, given: PartitionMap, why: str) -> PartitionMap:
        """Raises `NotDoneError` unless the target is active for everything."""
        led: dict[str, list[PartitionId]] = {}
        for number in self._assignments:
            led.setdefault(given.partitions[number].active, []).append(number)
        if list(led) == [self._to]:
            return given
        how = " and ".join(
            f"{name} is active{' again' if name == self._old else ''} for {partitions_text(found)}"
            for name, found in led.items()
        )
        goes_on = "" if list(led) == [self._old] else ". Repeat the command to go on from there"
        raise NotDoneError(f"{why}; so {how}{goes_on}")

    def _led_again(self, ahead: Mapping[PartitionId, Copy]) -> dict[PartitionId, Assignment]:
        """The old active leads, but where another is ahead of it."""
        found = {}
        for number, assignment in self._assignments.items():
            node, place = self._old, self._keeps[number]
            if number in ahead:
                node, place = ahead[number].node, ahead[number].place
            keeps = self._kept(number, place)
            floor = place if keeps is None or number in ahead else None
            found[number] = led_by(assignment, node, keeps, floor=floor)
        return found

    async def _give_back(self, refusers: list[str]) -> PartitionMap:
        """Makes the old active it again, once `refusers` are held back; or who was active
        meanwhile and took something in."""
        if not await self._hold_back(refusers):
            self._new_histories = True
        ahead = self._ahead()
        try:
            try:
                given = await self._give_actives(ahead)
            except MapRefusedError:
                if self._new_histories:
                    raise
                self._new_histories = True
                given = await self._give_actives(ahead)
        except UnreachableError as error:
            raise PartlyDoneError(
                f"{error}. Nobody may be active for {self._text}: repeat the command, with --to "
                f"{self._old} to leave it where it was; or if it is gone, use `upr failover`"
            ) from error
        await self._giver.spread(
            [name for name in given.nodes if name not in self._actives_of(given)], given
        )
        return given

    def _actives_of(self, given: PartitionMap) -> list[str]:
        return list(dict.fromkeys(given.partitions[number].active for number in self._assignments))

    async def _give_actives(self, ahead: Mapping[PartitionId, Copy]) -> PartitionMap:
        """Gives the map that comes of it to those who are active by it."""
        given = self._map(self._led_again(ahead))
        for name in self._actives_of(given):
            await self._giver.give(name, given)
            goes_on = all(given.partitions[n].keeps for n in self._assignments)
            history = "its history" if goes_on else "a new history"
            self._tell(f"{name}: revision {given.revision}, active again in {history}")
        return given
