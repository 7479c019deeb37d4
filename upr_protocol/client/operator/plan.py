"""The next partition maps, and which copy of a partition has everything. Pure.

A command takes its revisions from a block of its own, which begins at the next multiple of
`COMMAND_REVISIONS`. If a command is interrupted, or an answer is lost, the next command's revisions
are higher than any that the first can have used, provided that it has seen one of its maps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final
from zlib import crc32

import attrs

from upr_protocol.failover import FailoverLog
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.partition_map import Assignment, HistoryPoint, PartitionMap

COMMAND_REVISIONS: Final = 16
"""More than the maps that one command makes."""


def first_revision(newest: int) -> int:
    """The first revision of a command that finds the revision `newest`."""
    return (newest // COMMAND_REVISIONS + 1) * COMMAND_REVISIONS


FAILOVER_STEP: Final = 4096
"""The maps of a failover count more than those of so many revisions of other commands. Such maps
may have reached nodes that the failover does not reach, or reach them later. They know nothing of
what was acknowledged since the failover."""

FAILOVER_STEPS: Final = 256
"""The steps of the block of revisions that a failover takes. It fences at the first revision, and
makes nodes active in a step of its own."""

FAILOVER_REVISIONS: Final = FAILOVER_STEP * FAILOVER_STEPS
"""The revisions of such a block."""


def first_failover_revision(newest: int) -> int:
    """The first revision of a failover that finds the revision `newest`."""
    return (newest // FAILOVER_REVISIONS + 1) * FAILOVER_REVISIONS


def own_failover_revision(first: int, command: str) -> int:
    """The first revision that a failover has to itself, by the name of its command. Of two that
    began at the revision `first`, and reach different nodes, one then counts more than the other,
    except in one case of 254."""
    # The last step stays free: other commands may take its revisions before the next failover.
    step = 1 + crc32(command.encode()) % (FAILOVER_STEPS - 2)
    return first + step * FAILOVER_STEP


# Assignments.


def last_active_of(assignment: Assignment) -> str:
    """The node that takes writes, or that was the last to do so; empty if none ever did."""
    return assignment.active or assignment.handing_over or assignment.lost_active


def active_partitions_of(partition_map: PartitionMap, node: str) -> list[PartitionId]:
    """The partitions for which a node takes writes, or was the last to do so. O(partitions)."""
    return [
        PartitionId(partition_number)
        for partition_number, assignment in enumerate(partition_map.partitions)
        if last_active_of(assignment) == node
    ]


def acknowledging_replicas(assignment: Assignment) -> list[str]:
    """The replicas that follow the last active directly: it counts only their acknowledgements."""
    active = last_active_of(assignment)
    return [
        name
        for name, source in assignment.replicas.items()
        if name != assignment.lost_active and source in ("", active)
    ]


def _followers(assignment: Assignment, active: str) -> dict[str, str]:
    """Every holder but `active`, with its source. Those that followed the last active, or `active`
    by name, follow whichever node is active."""
    last_active = last_active_of(assignment)
    direct_sources = ("", last_active, active)
    replicas = assignment.replicas
    return {
        name: "" if replicas.get(name, "") in direct_sources else replicas[name]
        for name in (*replicas, *filter(None, [last_active]))
        if name != active
    }


def fenced_assignment(assignment: Assignment) -> Assignment:
    """No node is active, and the replicas accept no more changes from the last active."""
    return Assignment(
        replicas=_followers(assignment, ""),
        lost_active=last_active_of(assignment),
        failover_revision=assignment.failover_revision,
        promotion_point=assignment.promotion_point,
    )


def active_assignment(
    assignment: Assignment,
    node: str,
    continues_from: HistoryPoint | None = None,
    *,
    failover_revision: int = 0,
    promotion_point: HistoryPoint | None = None,
) -> Assignment:
    """`node` is active, and every other holder follows it, the last active too.

    It goes on from the point `continues_from`, or begins a new history; and has everything up to
    the promotion point. A failover gives the revision of the map that names it. The last two stay
    as they were unless they are given.
    """
    return Assignment(
        active=node,
        replicas=_followers(assignment, node),
        continues_from=continues_from,
        failover_revision=failover_revision or assignment.failover_revision,
        promotion_point=promotion_point or assignment.promotion_point,
    )


def handover_assignment(assignment: Assignment) -> Assignment:
    """The active node takes no more writes, and the replicas still follow it."""
    active = last_active_of(assignment)
    return Assignment(
        replicas=_followers(assignment, active),
        handing_over=active,
        failover_revision=assignment.failover_revision,
        promotion_point=assignment.promotion_point,
    )


def fences_needed(assignment: Assignment, acknowledged: int) -> int:
    """How many of the acknowledging replicas must be fenced, so that one of them has every change
    that `acknowledged` of them have acknowledged."""
    # A change is on any `acknowledged` of the replicas. If all but fewer than that are fenced, one
    # of the fenced has it.
    return max(0, len(acknowledging_replicas(assignment)) - acknowledged + 1)


# Copies.


@attrs.frozen
class PartitionCopy:
    """What a node has of a partition, up to the end of its last complete snapshot."""

    node: str
    log: FailoverLog
    high_seq: SeqNo

    @property
    def branch(self) -> FailoverLog:
        """The log up to the node's last change. A replica stores its active's log before any data:
        of a branch that begins above its last change, it has nothing."""
        return self.log.up_to(self.high_seq)

    @property
    def point(self) -> HistoryPoint:
        """The point up to which the copy has everything."""
        return HistoryPoint(self.branch.current, self.high_seq)

    def has_all_of(self, other: PartitionCopy) -> bool:
        """Whether the copy has every change of `other` that can have been acknowledged.

        It does if it is as far in the same history, or if it is in a later one. A later history
        began with a failover, which kept what was acknowledged; changes of `other` above the
        sequence number at which it began were not.
        """
        own_branch, other_branch = self.branch, other.branch
        if own_branch.current == other_branch.current:
            return self.high_seq >= other.high_seq
        return not other_branch.entries or any(
            other_branch.current == entry.history_id for entry in own_branch
        )

    def contains(self, point: HistoryPoint | None) -> bool:
        """Whether the copy has everything up to `point`: it is as far in the same history, or in
        one that began there or later. None stands for the beginning."""
        if point is None or not point.seq:
            return True
        end = self.high_seq
        for entry in self.branch:
            if entry.history_id == point.history_id:
                return end >= point.seq
            end = entry.seq
        return False

    def continues_past(self, point: HistoryPoint) -> bool:
        """Whether the copy has everything up to `point` and more, in the same history or in one
        that began there or later."""
        shares_history = any(entry.history_id == point.history_id for entry in self.branch)
        return shares_history and self.high_seq > point.seq and self.contains(point)


def most_complete(copies: Sequence[PartitionCopy]) -> list[PartitionCopy]:
    """The copies that have everything that any of them has. Empty when the histories of two have
    diverged, or when there are no copies. O(copies² × log)."""
    return [copy for copy in copies if all(copy.has_all_of(other_copy) for other_copy in copies)]


# Texts.


def ranges_text(partitions: Iterable[int]) -> str:
    """`0-3, 7` for 0, 1, 2, 3 and 7."""
    runs: list[list[int]] = []
    for partition in sorted(partitions):
        if runs and partition == runs[-1][1] + 1:
            runs[-1][1] = partition
        else:
            runs.append([partition, partition])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def partitions_text(partitions: Iterable[int]) -> str:
    """`partition 7` or `partitions 0-3`."""
    numbers = sorted(partitions)
    return f"partition{'s' if len(numbers) != 1 else ''} {ranges_text(numbers)}"
