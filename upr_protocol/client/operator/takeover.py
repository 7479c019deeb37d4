"""Takeover: a replica becomes active in place of a running node, and no change is lost.

1. The target is close: it has nearly every change of the old active.
2. The old active hands over: it takes no more writes, stores everything, and is still followed.
3. The target catches up: it has exactly what the old active has.
4. The target becomes active in the same history. It refuses unless it has exactly that.
5. The old active and all other nodes get the new map.

If step 3 takes too long, or step 4 is refused, the partitions are handed back: see `handback`. The
same is done if the outcome of step 4 is unknown, or if an earlier command was interrupted there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import attrs
import trio

from upr_protocol.client.core.calls import PartitionNumbers
from upr_protocol.client.operator.errors import (
    MapRefusedError,
    NotDoneError,
    OvertakenError,
    PartlyDoneError,
    UnreachableError,
)
from upr_protocol.client.operator.handback import WAS_ACTIVE, Handback
from upr_protocol.client.operator.map_change import MapChange, choose_partitions
from upr_protocol.client.operator.plan import (
    active_assignment,
    first_revision,
    handover_assignment,
    last_active_of,
)
from upr_protocol.client.operator.survey import Operator, Survey
from upr_protocol.errors import UprError
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.partition_map import HistoryPoint, PartitionMap

HANDOVER_LAG_CHANGES: Final = 256
"""A handover begins once its target lacks at most this many changes, over all partitions."""

HANDOVER_LAG_S: Final = 0.25
"""Or if it would catch up in this time, at its recent speed."""

_APPROACH_POLL_S: Final = 0.1
_CATCH_UP_POLL_S: Final = 0.01

_ANNOUNCE_HANDOVER_AFTER_S: Final = 0.3
"""After this time the target gets the map of the handover. Usually it has caught up by then, and
its streams continue. A target whose streams broke can reconnect only once it has the map."""


@attrs.frozen
class TakeoverTimeouts:
    """How long the waits of a takeover may take.

    Attributes:
        approach_s: For the target to come close, while the old active takes writes.
        handover_s: For the target to catch up, while no node takes writes.
    """

    approach_s: float = 300.0
    handover_s: float = 10.0


async def take_over(
    operator: Operator,
    *,
    to: str,
    partitions: Iterable[int] = (),
    all_of: str = "",
    timeouts: TakeoverTimeouts | None = None,
) -> PartitionMap:
    """Makes the replica `to` active in place of a running node, for some partitions or for all of
    one node (`all_of`).

    Cancelled, it may leave partitions handed over, without an active node. The same command again
    continues from there. If that is cancelled too, it may leave them fenced; `fail_over` continues
    from there, and loses nothing.

    Returns:
        The new map.

    Raises:
        NotDoneError: It cannot be done. Every partition is assigned as before.
        PartlyDoneError: The command could not finish.
    """
    survey = await operator.survey()
    base = survey.require_map()
    partitions_of: dict[str, list[PartitionId]] = {}
    chosen_partitions = choose_partitions(survey, partitions, all_of)
    for partition in chosen_partitions:
        assignment = base.partitions[partition]
        if assignment.active != to:
            partitions_of.setdefault(last_active_of(assignment), []).append(partition)
    if not partitions_of:
        for partition in chosen_partitions:
            _check_is_active(survey, to, partition)
        raise NotDoneError(f"{to} is already active for all of them; nothing to do")
    newest = base
    for index, (source, its_partitions) in enumerate(partitions_of.items()):
        if index:
            survey = await operator.survey()
        takeover = _Takeover(operator, survey, source, to, its_partitions)
        newest = await takeover.run(timeouts or TakeoverTimeouts())
    return newest


def _check_is_active(survey: Survey, node: str, partition: PartitionId) -> None:
    """Raises `NotDoneError` if a node is not what the map says of it."""
    survey.require_answer(node)
    state = survey.nodes[node].state_of(partition)
    if state is not PartitionState.ACTIVE:
        raise NotDoneError(
            f"{node} is {state.name.lower()} for partition {partition}, but active in the map. If "
            "it was stopped cleanly, repeat this once another node has confirmed its map; if it "
            "was killed, use `upr failover`"
        )


class _Takeover:
    """A takeover from one node, `source`, by another, `target`."""

    def __init__(
        self,
        operator: Operator,
        survey: Survey,
        source: str,
        target: str,
        partitions: list[PartitionId],
    ) -> None:
        self._operator = operator
        self._report = operator.on_progress
        self._survey = survey
        self._source = source
        self._target = target
        self._change = MapChange(operator, survey, partitions, first_revision(survey.map.revision))
        self._publisher = self._change.publisher
        self._handback = Handback(self._change, source, target)

    async def run(self, timeouts: TakeoverTimeouts) -> PartitionMap:
        self._check()
        if self._target == self._source:
            return await self._handback.undo()
        holders = [name for name in self._change.holders() if name != self._source]
        is_resumed = self._handback.is_resumed
        if is_resumed:
            self._report(
                "an earlier command was interrupted: the partitions that it handed over begin new "
                "histories"
            )
            await self._handback.fence_for_resuming(holders)
        else:
            with trio.move_on_after(timeouts.approach_s) as scope:
                await self._approach()
            if scope.cancelled_caught:
                lag = self._lag()
                lag_text = "an unknown number of" if lag is None else f"{lag:,}"
                raise NotDoneError(
                    f"{self._target} does not come close to {self._source}: it lacks {lag_text} "
                    "changes; see `upr partitions`, or give it more time"
                )
        handover_map = await self._hand_over()
        if self._handback.copies_ahead():
            return await self._handback.give_back(WAS_ACTIVE)
        if is_resumed:
            await self._publisher.announce(holders, handover_map)
        with trio.move_on_after(timeouts.handover_s) as scope:
            await self._catch_up(handover_map)
        if scope.cancelled_caught:
            return await self._handback.give_back(
                f"{self._target} did not catch up within {timeouts.handover_s:g} s"
            )
        return await self._activate()

    # Before anything is changed.

    def _check(self) -> None:
        survey, source, target = self._survey, self._source, self._target
        assignments = self._change.assignments
        if not source or any(assignment.lost_active for assignment in assignments.values()):
            raise NotDoneError(f"no node is active for {self._change.text}: use `upr failover`")
        self._change.require_copies_on(target, "make it a replica first, with `upr replicas add`")
        if not survey.reaches(source):
            reason = survey.nodes[source].failure
            raise NotDoneError(
                f"{source} cannot be reached ({reason}): if it is gone, use `upr failover`"
            )
        survey.require_answer(target)
        for partition, assignment in assignments.items():
            if assignment.active:
                _check_is_active(survey, source, partition)

    # 1. The target is close.

    def _lag(self) -> int | None:
        """The changes that the target lacks; None if that is not known."""
        source, target = self._survey.nodes[self._source], self._survey.nodes[self._target]
        if target.failure or source.failure or len(target.partitions) != len(source.partitions):
            return None
        if not source.partitions:
            return None  # Both have lost the bucket.
        lag = 0
        for partition in self._change.assignments:
            active, replica = source.partitions[partition], target.partitions[partition]
            shares_history = active.log == replica.log
            lag += active.high_seq - (replica.high_seq if shares_history else 0)
            if not shares_history and not active.high_seq:
                return None
        return lag

    def _target_changes(self) -> int:
        """The changes that the target has, over all partitions."""
        partitions = self._survey.nodes[self._target].partitions
        return sum(
            info.high_seq for info in partitions if info.partition in self._change.assignments
        )

    async def _approach(self) -> None:
        """Waits until the target is close, in the same histories."""
        is_reported = False
        limit = HANDOVER_LAG_CHANGES
        changes, asked_at = self._target_changes(), trio.current_time()
        while (lag := self._lag()) is None or lag > limit:
            if not is_reported:
                self._report(f"{self._target} is behind {self._source}; waiting until it is close")
                is_reported = True
            await trio.sleep(_APPROACH_POLL_S)
            addresses = {n: self._publisher.addresses[n] for n in (self._source, self._target)}
            reports = {**self._survey.nodes, **await self._operator.node_reports(addresses)}
            self._survey = attrs.evolve(self._survey, nodes=reports)
            changes_before, changes = changes, self._target_changes()
            since, asked_at = asked_at, trio.current_time()
            limit = max(
                HANDOVER_LAG_CHANGES,
                int(HANDOVER_LAG_S * (changes - changes_before) / (asked_at - since)),
            )

    # 2. The old active hands over.

    async def _hand_over(self) -> PartitionMap:
        handover_map = self._change.next_map(
            {n: handover_assignment(a) for n, a in self._change.assignments.items()}
        )
        try:
            await self._publisher.publish(self._source, handover_map)
        except UnreachableError as error:
            raise PartlyDoneError(
                f"{error}. It may have stopped taking writes for {self._change.text}: repeat the "
                "command; or if it is gone, use `upr failover`"
            ) from error
        except MapRefusedError as error:
            raise NotDoneError(str(error)) from error
        await self._handback.read_final_points()
        self._report(
            f"{self._source}: revision {handover_map.revision}, hands over {self._change.text}"
        )
        return handover_map

    # 3. The target catches up.

    def _has_everything(self, rows: list[PartitionNumbers]) -> bool:
        return all(
            HistoryPoint(row.history_id, row.high_seq) == self._handback.final_points[row.partition]
            and row.persisted_seq == row.high_seq
            for row in rows
        )

    async def _catch_up(self, handover_map: PartitionMap) -> None:
        """Waits until the target has exactly what the old active has."""
        announce_at = trio.current_time() + _ANNOUNCE_HANDOVER_AFTER_S
        is_announced = self._handback.is_resumed
        while True:
            try:
                async with self._operator.connect(
                    self._publisher.addresses[self._target]
                ) as client:
                    while not self._has_everything(
                        await client.seqnos(self._change.assignments, of_copies=True)
                    ):
                        if not is_announced and trio.current_time() > announce_at:
                            is_announced = True
                            await self._publisher.announce([self._target], handover_map)
                        await trio.sleep(_CATCH_UP_POLL_S)
                    return
            except OvertakenError:
                raise
            except UprError as error:
                self._report(f"{self._target} does not say how far it is: {error}")
                await trio.sleep(_APPROACH_POLL_S)

    # 4. The target becomes active, and 5. all others get the map.

    async def _activate(self) -> PartitionMap:
        new_map = self._change.next_map(
            {
                partition: active_assignment(
                    assignment,
                    self._target,
                    self._handback.continued_history(
                        partition, self._handback.final_points[partition]
                    ),
                    promotion_point=self._handback.final_points[partition],
                )
                for partition, assignment in self._change.assignments.items()
            }
        )
        try:
            await self._publisher.publish(self._target, new_map)
        except MapRefusedError as error:
            return await self._handback.give_back(str(error), [self._target])
        except UnreachableError as error:
            return await self._handback.give_back(
                f"{error}; it may or may not be active now", [self._target], is_unknown=True
            )
        self._report(f"{self._target}: revision {new_map.revision}, active for {self._change.text}")
        await self._publisher.announce(
            [name for name in new_map.nodes if name != self._target], new_map
        )
        return new_map
