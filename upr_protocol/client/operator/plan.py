"""What the next maps are, and which copy of a partition has everything. Pure.

A command takes its revisions from a block of its own, which begins at the next multiple of
`RUN_REVISIONS`. So when a command was interrupted, or an answer was lost, what the next command
gives is above everything that the one before can have given, as soon as it has seen any of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import attrs
import msgspec

from upr_protocol.failover import FailoverLog
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.partition_map import Assignment, HistoryPoint, PartitionMap

RUN_REVISIONS: Final = 16
"""More than the maps that one command gives."""


def first_revision(newest: int) -> int:
    """The first revision of a command that finds `newest`."""
    return (newest // RUN_REVISIONS + 1) * RUN_REVISIONS


def revised(
    base: PartitionMap, revision: int, changed: Mapping[PartitionId, Assignment]
) -> PartitionMap:
    """`base` with other owners of some partitions.

    Raises:
        PartitionMapError: It would be no map.
    """
    partitions = list(base.partitions)
    for number, assignment in changed.items():
        partitions[number] = assignment
    found = msgspec.structs.replace(base, revision=revision, partitions=tuple(partitions))
    found.check()
    return found


# Assignment.


def master_of(assignment: Assignment) -> str:
    """The node that was the last to take writes, if it does no more; empty for none."""
    return assignment.active or assignment.handing_over or assignment.lost


def witnesses_of(assignment: Assignment) -> list[str]:
    """The replicas that follow the master itself: those that acknowledge to it."""
    master = master_of(assignment)
    return [
        name
        for name, source in assignment.replicas.items()
        if name != assignment.lost and source in ("", master)
    ]


def holders_of(assignment: Assignment) -> list[str]:
    """Every node that has a copy, the master first."""
    return list(
        dict.fromkeys(name for name in (master_of(assignment), *assignment.replicas) if name)
    )


def _followers(assignment: Assignment, led_by: str) -> dict[str, str]:
    """All who hold a partition, but for `led_by`, with whom they follow; nobody follows the old
    master, or names the new one."""
    nobody = ("", master_of(assignment), led_by)
    return {
        name: "" if assignment.replicas.get(name, "") in nobody else assignment.replicas[name]
        for name in (*assignment.replicas, *filter(None, [master_of(assignment)]))
        if name != led_by
    }


def fenced(assignment: Assignment) -> Assignment:
    """Nobody is active, and nobody takes anything any more from the one that was."""
    return Assignment(
        replicas=_followers(assignment, ""),
        lost=master_of(assignment),
        chosen=assignment.chosen,
        floor=assignment.floor,
    )


def led_by(
    assignment: Assignment,
    node: str,
    keeps: HistoryPoint | None = None,
    *,
    chosen: int = 0,
    floor: HistoryPoint | None = None,
) -> Assignment:
    """`node` is active, and all others follow, the old master too; `chosen` in the map of this
    revision, or handed to it. It has everything up to `floor`, if that is given."""
    return Assignment(
        active=node,
        replicas=_followers(assignment, node),
        keeps=keeps,
        chosen=chosen or assignment.chosen,
        floor=floor or assignment.floor,
    )


def handed_over(assignment: Assignment) -> Assignment:
    """The active takes no writes any more, and is followed."""
    master = master_of(assignment)
    return Assignment(
        replicas=_followers(assignment, master),
        handing_over=master,
        chosen=assignment.chosen,
        floor=assignment.floor,
    )


# Copies.


@attrs.frozen
class Copy:
    """What a node has of a partition.

    Attributes:
        node: The node.
        log: The failover log there.
        high: The last complete snapshot's end there.
    """

    node: str
    log: FailoverLog
    high: SeqNo

    @property
    def branch(self) -> FailoverLog:
        """The log up to where its changes go. A replica puts its master's log on disk before any
        data: of a branch that begins above what it has, it has nothing."""
        return self.log.until(self.high)

    def has_all_of(self, other: Copy) -> bool:
        """Whether it has everything of `other` that can have been acknowledged: it is as far in the
        same history, or in a later one. What the other has above the number at which that began was
        left behind by a failover that kept what was acknowledged then."""
        mine, its = self.branch, other.branch
        if mine.current == its.current:
            return self.high >= other.high
        return not its.entries or any(its.current == entry.history_id for entry in mine)

    @property
    def place(self) -> HistoryPoint:
        """Up to where it has everything."""
        return HistoryPoint(self.branch.current, self.high)

    def reaches(self, floor: HistoryPoint | None) -> bool:
        """Whether it has everything up to there: it is as far in the same history, or in one that
        began there or later."""
        if floor is None or not floor.seq:
            return True
        end = self.high
        for entry in self.branch:
            if entry.history_id == floor.history_id:
                return end >= floor.seq
            end = entry.seq
        return False

    def goes_on_from(self, place: HistoryPoint) -> bool:
        """Whether it has everything up to there, and more: in the same history, or in one that
        began there or later."""
        shares = any(entry.history_id == place.history_id for entry in self.branch)
        return shares and self.high > place.seq and self.reaches(place)


def furthest(copies: Sequence[Copy]) -> list[Copy]:
    """Those that have everything that any of them has; none when two have histories that parted,
    or where there are none. O(copies² × log)."""
    return [one for one in copies if all(one.has_all_of(other) for other in copies)]


def fences_needed(assignment: Assignment, acknowledged: int) -> int:
    """How many of the replicas that acknowledge must be fenced, so that one of them has everything
    that `acknowledged` of them have acknowledged."""
    return max(0, len(witnesses_of(assignment)) - acknowledged + 1)


# Sentences.


def ranges_text(numbers: Iterable[int]) -> str:
    """`0-3, 7` for the numbers 0, 1, 2, 3 and 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def partitions_text(numbers: Iterable[int]) -> str:
    """`partition 7` or `partitions 0-3`."""
    found = sorted(numbers)
    return f"partition{'s' if len(found) != 1 else ''} {ranges_text(found)}"
