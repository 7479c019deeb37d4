"""What a partition map makes of this node, partition by partition. Pure: decides, changes nothing.

A copy is *suspect* while this node may lack mutations that it gave to others, though the map has it
active: the node was killed, or its disk was lost, or another node was active meanwhile. `suspects`
holds such partitions, each with the revision of the map that the node had when the doubt began. A
suspect copy does not become active before another copy was, or a failover has compared all copies
and chosen this one: a newer map that only restores the earlier assignment knows nothing of what was
lost.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Final

import attrs

from upr_protocol.errors import ServerError, Status
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import HistoryId, PartitionId, PartitionState
from upr_protocol.partition_map import Assignment, HistoryPoint, PartitionMap
from upr_server.engine import Partition

STEP_PARTITIONS: Final = 64
"""Partitions that one step of replication looks at or changes: below 2 ms."""

Suspects = Mapping[PartitionId, int]
"""By each suspect partition, the map's revision when the doubt began."""


@attrs.frozen
class ReplicationSource:
    """A node that this node replicates from.

    Attributes:
        address: Its `HOST:PORT`.
        partitions: What is replicated from it, each with its state there.
    """

    address: str
    partitions: Mapping[PartitionId, PartitionState]


@attrs.frozen
class RoleChange:
    """What a partition becomes.

    Attributes:
        partition: The partition, as it still is.
        state: Its state afterwards.
        failover_log: Its failover log afterwards.
        damage: What is damaged of its record on disk, which could not be changed; empty for
            nothing. Then the partition is refused instead.
    """

    partition: Partition
    state: PartitionState
    failover_log: FailoverLog
    damage: str = ""

    @property
    def ends_streams(self) -> bool:
        """Whether streams of the partition must end, and begin again."""
        return (
            self.failover_log != self.partition.failover_log
            or self.state is not self.partition.state
        )


def state_in(assignment: Assignment, node: str, suspect_since: int | None) -> PartitionState:
    """What `node` becomes for a partition: what the map says, but that a suspect copy does not
    become active."""
    state = assignment.state_of(node)
    if (
        state is PartitionState.ACTIVE
        and suspect_since is not None
        and is_still_suspect(assignment, node, suspect_since)
    ):
        return PartitionState.PENDING
    return state


def is_still_suspect(assignment: Assignment, node: str, suspect_since: int) -> bool:
    """Whether a copy that became suspect at revision `suspect_since` is so under another map."""
    # Once another node is active, this one follows it, and loses what only itself has. Revisions
    # only rise, so a failover with a higher one has seen this copy as it is since the doubt began.
    return assignment.active in ("", node) and assignment.failover_revision <= suspect_since


def was_last_active(assignment: Assignment, node: str) -> bool:
    """Whether `node` was the last to take writes, and others replicate them."""
    # Without replicas nobody can have what this node lacks: it need not wait for an operator. A
    # `lost_active` is not active in this map, but is again if the command is undone.
    return bool(assignment.replicas) and node in (
        assignment.active,
        assignment.handing_over,
        assignment.lost_active,
    )


def has_taken_over(before: Assignment, after: Assignment, node: str) -> bool:
    """Whether `node` was active by its map, `before`, since the takeover that `after` names."""
    return before.active == node and before.continues_from == after.continues_from


def suspects_in(new_map: PartitionMap, node: str) -> dict[PartitionId, int]:
    """The partitions that are suspect when `node` gets `new_map` and has lost what it had."""
    return {
        PartitionId(partition): new_map.revision
        for partition, assignment in enumerate(new_map.partitions)
        if was_last_active(assignment, node)
    }


def taken_back_in(before: PartitionMap, after: PartitionMap, node: str) -> dict[PartitionId, int]:
    """The partitions that are suspect because `after`, of which another node has told, makes `node`
    active again although another node is so by `before`.

    Only an undone failover leaves such a map, if it did not reach the nodes of a takeover. Commands
    themselves give a node the map by which it becomes active; or a failover has chosen the node.
    """
    assignments = zip(before.partitions, after.partitions, strict=True)
    return {
        PartitionId(partition): after.revision
        for partition, (old, new) in enumerate(assignments)
        if new.active == node
        and old.active not in ("", node)
        and new.failover_revision <= old.failover_revision
    }


def check_hand_over(
    before: PartitionMap, after: PartitionMap, node: str, suspects: Suspects
) -> None:
    """Refuses a map by which `node` would hand over a suspect partition. To hand over means to have
    all that was given to others.

    Raises:
        ServerError: `WRONG_STATE`.
    """
    for partition in suspects:
        # A partition that was handed over before is on disk, whatever has happened since.
        was_handed_over = before.partitions[partition].handing_over == node
        if after.partitions[partition].handing_over == node and not was_handed_over:
            raise ServerError(
                Status.WRONG_STATE,
                f"{node} was killed while it was active for partition {partition}, or has lost "
                "its disk; its replicas may have more: use `upr failover`",
            )


def failover_log_in(
    partition: Partition,
    state: PartitionState,
    assignment: Assignment,
    *,
    was_active: bool,
    has_taken_over: bool,
    is_confirming: bool,
    is_clean: bool,
    new_history_id: Callable[[], HistoryId],
) -> FailoverLog:
    """The failover log with which `partition` enters `state`.

    Args:
        partition: The partition, as it still is.
        state: What it becomes.
        assignment: What the map says of it.
        was_active: Whether this node was the last active by the map that it has.
        has_taken_over: Whether it was active by that map since the takeover that this map names.
        is_confirming: Whether the map only confirms what this node was before it was restarted.
        is_clean: Whether it was stopped cleanly then.
        new_history_id: Draws a fresh one.

    Raises:
        ServerError: `WRONG_STATE` when the map has the node continue a history that it has not to
            the end.
    """
    failover_log = partition.failover_log
    if state is not PartitionState.ACTIVE or partition.state is PartitionState.ACTIVE:
        # A node that is active already stays in its history, whatever point the map names: its
        # clients may have numbers above it.
        return failover_log
    # A new active begins a new history, because others may have received of the old one what it
    # does not have. It continues the old one only where it certainly has everything: it was the
    # active itself and lost nothing, or the map names the exact end and this copy stands there.
    if is_confirming:
        has_everything = is_clean
    elif assignment.continues_from is not None:
        end = assignment.continues_from
        has_everything = _stands_at(partition, end)
        # A map keeps the point of an earlier takeover while commands change other partitions. A
        # node that was active since has gone past it, and may have been restarted. What it has
        # above the point only itself can have given. Its log need not name the point's history any
        # more, if its map says that it took over there.
        has_gone_past = partition.high_seq >= end.seq and (
            has_taken_over or (was_active and _knows(partition, end))
        )
        if not has_everything and not has_gone_past:
            raise _end_is_missing(partition, end)
    else:
        has_everything = False
    # A new copy has no history that it could continue.
    if has_everything and failover_log.entries:
        return failover_log
    return failover_log.with_branch(new_history_id(), partition.high_seq)


def _stands_at(partition: Partition, point: HistoryPoint) -> bool:
    return (partition.failover_log.current, partition.high_seq) == (point.history_id, point.seq)


def _knows(partition: Partition, point: HistoryPoint) -> bool:
    failover_log = partition.failover_log
    knows_history = any(entry.history_id == point.history_id for entry in failover_log)
    return knows_history and failover_log.contains(point.history_id, point.seq)


def _end_is_missing(partition: Partition, end: HistoryPoint) -> ServerError:
    # Refused, and not answered with a new history: the command then gives the partition back to
    # the node that has everything, and nothing is lost.
    return ServerError(
        Status.WRONG_STATE,
        f"partition {partition.id} is to continue history {end.history_id:x} at {end.seq}, but "
        f"this copy is in history {partition.failover_log.current:x} at {partition.high_seq}; use "
        "`upr failover`",
    )


def sources_in(
    partition_map: PartitionMap, node: str, partitions: Iterable[PartitionId]
) -> Generator[None, None, dict[str, ReplicationSource]]:
    """The nodes that `node` replicates from, by name. A map that fences a partition names no active
    node for it, so nobody replicates it. O(partitions), in steps between which others may have
    their turn."""
    by_node: dict[str, dict[PartitionId, PartitionState]] = {}
    for count, partition in enumerate(partitions, 1):
        if count % STEP_PARTITIONS == 0:
            yield
        assignment = partition_map.partitions[partition]
        source = assignment.source_of(node)
        if source:
            by_node.setdefault(source, {})[partition] = assignment.state_of(source)
    return {
        name: ReplicationSource(partition_map.nodes[name], states)
        for name, states in by_node.items()
    }
