"""Giving partitions back to the node that handed them over, when the target did not take them.

Usually the old active is active again, in its history. But a map that makes another node active may
be on its way, sent by this command or by an interrupted one before it. The nodes that may have it
are fenced first: they refuse the map if it arrives late. A node that did become active and accepted
changes has everything of the old active and more, so it is active again instead.

The node that becomes active after that begins a new history. A node that was active and was killed
no longer knows which sequence numbers it gave out; in the same history they would be given out
twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from upr_protocol.client.operator.errors import (
    MapRefusedError,
    NotDoneError,
    PartlyDoneError,
    UnreachableError,
)
from upr_protocol.client.operator.map_change import MapChange
from upr_protocol.client.operator.plan import (
    PartitionCopy,
    active_assignment,
    most_complete,
    partitions_text,
)
from upr_protocol.errors import UprError
from upr_protocol.ids import PartitionId
from upr_protocol.partition_map import Assignment, HistoryPoint, PartitionMap

WAS_ACTIVE: Final = "an interrupted command made another node active"
"""Why a takeover that finds such a node does not go to its target."""


class Handback:
    """The way back from a takeover.

    Attributes:
        is_resumed: Whether an earlier command was interrupted after it had handed partitions over.
        final_points: Where the old active stopped, for each partition; once they have been read.
    """

    def __init__(self, change: MapChange, source: str, target: str) -> None:
        self._change = change
        self._source = source
        self._target = target
        self._report = change.operator.on_progress
        self._fenced_copies: dict[PartitionId, list[PartitionCopy]] = {}
        # Whether another node may have been active in the history of any partition.
        self._is_history_shared = False
        self.is_resumed = any(a.handing_over for a in change.assignments.values())
        self.final_points: dict[PartitionId, HistoryPoint] = {}

    async def read_final_points(self) -> None:
        """Asks the old active where it stopped.

        Raises:
            PartlyDoneError: It does not answer.
        """
        change = self._change
        address = change.publisher.addresses[self._source]
        try:
            async with change.operator.connect(address) as client:
                rows = await client.seqnos(change.assignments, of_copies=True)
        except UprError as error:
            raise PartlyDoneError(
                f"{self._source} no longer answers ({error}), and may have handed over "
                f"{change.text}: repeat the command; or if it is gone, use `upr failover`"
            ) from error
        for row in rows:
            self.final_points[row.partition] = HistoryPoint(row.history_id, row.high_seq)

    async def fence_for_resuming(self, nodes: list[str]) -> None:
        """Fences nodes that an earlier command may have told to become active, for the partitions
        that it handed over."""
        assignments = self._change.assignments
        await self._fence(nodes, {n: a for n, a in assignments.items() if a.handing_over})

    async def _fence(self, nodes: list[str], assignments: Mapping[PartitionId, Assignment]) -> bool:
        """Fences nodes that may have been told to become active. What they have accepted stays, as
        they follow no node.

        Returns:
            Whether all of them are fenced.

        Raises:
            OvertakenError: One of them has the map of another command, which decides who is active.
        """
        change = self._change
        timeout_s = change.operator.ask_timeout_s
        failures, reports = await change.fence(nodes, assignments, timeout_s)
        for error in failures.values():
            self._report(f"{error}; it may have become active")
        for name, report in reports.items():
            if report.failure or not report.partitions:
                self._report(f"{name} does not say what it has: {report.failure}")
                continue
            for partition in assignments:
                self._fenced_copies.setdefault(partition, []).append(report.copy_of(partition))
        return not failures

    def copies_ahead(self) -> dict[PartitionId, PartitionCopy]:
        """Of the fenced nodes, one that was active and accepted changes, for each partition that
        has such a node. It has everything of the old active, and more.

        Raises:
            PartlyDoneError: Several have, and their histories have diverged.
        """
        copies_of_partitions: dict[PartitionId, PartitionCopy] = {}
        for partition, copies in self._fenced_copies.items():
            final_point = self.final_points[partition]
            candidates = [copy for copy in copies if copy.continues_past(final_point)]
            if not candidates:
                continue
            most_complete_copies = most_complete(candidates)
            if not most_complete_copies:
                raise PartlyDoneError(
                    f"{', '.join(copy.node for copy in candidates)} have different changes of "
                    f"partition {partition}: choose one of them with `upr failover`"
                )
            copies_of_partitions[partition] = next(
                (copy for copy in most_complete_copies if copy.node == self._target),
                most_complete_copies[0],
            )
        return copies_of_partitions

    def continued_history(self, partition: PartitionId, point: HistoryPoint) -> HistoryPoint | None:
        """Where the next active continues the history; None if it must begin a new one, because
        another node may have been active in it."""
        if self._is_history_shared or self._change.assignments[partition].handing_over:
            return None
        return point

    async def undo(self) -> PartitionMap:
        """Undoes an interrupted takeover, whose target is the old active itself.

        Raises:
            NotDoneError: Another node had become active, and is active again.
            PartlyDoneError: A node does not answer.
        """
        await self.read_final_points()
        holders = [name for name in self._change.holders() if name != self._source]
        return self._require_target(await self._give_back(holders), WAS_ACTIVE)

    async def give_back(
        self, reason: str, suspects: Iterable[str] = (), *, is_unknown: bool = False
    ) -> PartitionMap:
        """Makes the old active active again; or the target, where it was active and is ahead. The
        `suspects` may have been told to become active; with `is_unknown` one of them may be active.

        Returns:
            The map, if the target is active for everything by it.

        Raises:
            NotDoneError: It is not, which is as it was before.
            PartlyDoneError: A node does not answer.
        """
        self._is_history_shared |= is_unknown
        self._report(reason)
        return self._require_target(await self._give_back(list(suspects)), reason)

    def _require_target(self, restored_map: PartitionMap, reason: str) -> PartitionMap:
        """`restored`, if the target is active for everything; otherwise raises `NotDoneError`."""
        partitions_of: dict[str, list[PartitionId]] = {}
        for partition in self._change.assignments:
            partitions_of.setdefault(restored_map.partitions[partition].active, []).append(
                partition
            )
        actives = list(partitions_of)
        if actives == [self._target]:
            return restored_map
        outcome = " and ".join(
            f"{name} is active{' again' if name == self._source else ''} for "
            f"{partitions_text(partitions)}"
            for name, partitions in partitions_of.items()
        )
        advice = "" if actives == [self._source] else ". Repeat the command to continue from there"
        raise NotDoneError(f"{reason}; so {outcome}{advice}")

    async def _give_back(self, suspects: list[str]) -> PartitionMap:
        # Of all partitions: where an earlier command was resumed, this one may have told the
        # suspects to become active for more than that one handed over.
        if not await self._fence(suspects, self._change.assignments):
            self._is_history_shared = True
        copies_ahead = self.copies_ahead()
        try:
            restored_map = await self._restore(copies_ahead)
        except UnreachableError as error:
            raise PartlyDoneError(
                f"{error}. Possibly no node is active for {self._change.text}: repeat the command, "
                f"with --to {self._source} to leave it where it was; or if it is gone, use `upr "
                "failover`"
            ) from error
        actives = self._actives_of(restored_map)
        await self._change.publisher.announce(
            [name for name in restored_map.nodes if name not in actives], restored_map
        )
        return restored_map

    async def _restore(self, copies_ahead: Mapping[PartitionId, PartitionCopy]) -> PartitionMap:
        """Gives the nodes that are to be active their map; with new histories if one of them
        refuses to continue its own."""
        try:
            return await self._publish_restored(copies_ahead)
        except MapRefusedError:
            if self._is_history_shared:
                raise
        self._is_history_shared = True
        return await self._publish_restored(copies_ahead)

    async def _publish_restored(
        self, copies_ahead: Mapping[PartitionId, PartitionCopy]
    ) -> PartitionMap:
        restored_map = self._change.next_map(
            {
                partition: self._restored_assignment(partition, copies_ahead)
                for partition in self._change.assignments
            }
        )
        for name in self._actives_of(restored_map):
            await self._change.publisher.publish(name, restored_map)
            continues = all(
                restored_map.partitions[n].continues_from for n in self._change.assignments
            )
            history = "its history" if continues else "a new history"
            self._report(f"{name}: revision {restored_map.revision}, active again in {history}")
        return restored_map

    def _restored_assignment(
        self, partition: PartitionId, copies_ahead: Mapping[PartitionId, PartitionCopy]
    ) -> Assignment:
        node, point = self._source, self.final_points[partition]
        if partition in copies_ahead:
            node, point = copies_ahead[partition].node, copies_ahead[partition].point
        continues_from = self.continued_history(partition, point)
        promotion_point = point if continues_from is None or partition in copies_ahead else None
        return active_assignment(
            self._change.assignments[partition],
            node,
            continues_from,
            promotion_point=promotion_point,
        )

    def _actives_of(self, restored_map: PartitionMap) -> list[str]:
        return list(
            dict.fromkeys(restored_map.partitions[n].active for n in self._change.assignments)
        )
