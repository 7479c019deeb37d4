"""Bugs in failover and takeover: which node is active, and in which history."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import trio

from tests.simulation.bugs.patch import replaced
from tests.simulation.bugs.planted_bug import planted
from tests.simulation.operator import SimulatedOperator
from tests.simulation.profiles import (
    COMPETING_FAILOVERS,
    DIVERGED,
    HANDOVERS,
    MOVING_COPIES,
    OLD_HISTORIES,
    REFILLING,
    REFUSED_FAILOVERS,
    REPEATED_FAILOVERS,
    RESTARTED_LEADERS,
    RESTARTED_SOURCES,
    ROTTEN_DISKS,
)
from upr_protocol.client.operator import Operator
from upr_protocol.client.operator.handback import Handback
from upr_protocol.client.operator.plan import PartitionCopy
from upr_protocol.client.operator.survey import NodeReport
from upr_protocol.client.operator.takeover import _Takeover
from upr_protocol.errors import BrokenError
from upr_protocol.ids import HistoryId, PartitionState
from upr_protocol.partition_map import Assignment, HistoryPoint
from upr_server.engine import Evaluation, MutationBatch, Partition
from upr_server.replication import partition_maps, roles
from upr_server.replication.clustered_bucket import ClusteredBucket
from upr_server.replication.partition_maps import PartitionMaps
from upr_server.runtime import System
from upr_server.storage.online.bucket_disk import BucketDisk


@planted(DIVERGED)
def omit_failover_entry() -> Iterator[None]:
    """A new active node continues the history of the old one."""

    def same_log(partition: Partition, *_arguments: Any, **_options: Any) -> Any:
        return partition.failover_log

    with replaced(roles, "failover_log_in", same_log):
        yield


@planted(COMPETING_FAILOVERS)
def name_no_commands() -> Iterator[None]:
    """Two failovers at the same time have one fence, and each makes another node active."""

    def no_name(self: SimulatedOperator) -> str:
        return ""

    with replaced(SimulatedOperator, "_draw_command", no_name):
        yield


@planted(REPEATED_FAILOVERS)
def reuse_history_ids() -> Iterator[None]:
    """There are only two history IDs."""

    def new_id(self: System) -> HistoryId:
        return HistoryId(1 + self.random_bits(1))

    with replaced(System, "new_id", new_id):
        yield


@planted(OLD_HISTORIES)
def promote_highest_seq() -> Iterator[None]:
    """A failover compares copies by sequence number and ignores their histories."""
    with replaced(PartitionCopy, "has_all_of", lambda self, other: self.high_seq >= other.high_seq):
        yield


@planted(REFILLING)
def promote_refilling_replica() -> Iterator[None]:
    """A failover promotes a replica that began again from nothing, though it once acknowledged
    more. The simulation found this fault."""
    with replaced(PartitionCopy, "contains", lambda _self, _point: True):
        yield


@planted(REFUSED_FAILOVERS)
def stay_active_after_restart() -> Iterator[None]:
    """A restarted node is active again without asking another node."""
    restore: Any = PartitionMaps.restore_map

    def confirmed_bucket(*arguments: Any, **options: Any) -> ClusteredBucket:
        return ClusteredBucket(*arguments, **{**options, "is_confirmed": True, "suspects": {}})

    def restore_as_before(
        self: PartitionMaps, disk: BucketDisk, document: str, *arguments: Any, **options: Any
    ) -> None:
        restore(self, disk, document, *arguments, **options)
        for partition in disk.bucket.partitions:
            if partition.state is PartitionState.PENDING:
                partition.change_state(PartitionState.ACTIVE, partition.failover_log)

    with (
        replaced(partition_maps, "ClusteredBucket", confirmed_bucket),
        replaced(PartitionMaps, "restore_map", restore_as_before),
    ):
        yield


@planted(HANDOVERS)
def accept_writes_during_handover() -> Iterator[None]:
    """The source of a takeover accepts writes until it hears that the target is active."""
    become: Any = Partition.change_state

    def become_later(self: Partition, state: PartitionState, failover_log: Any) -> None:
        if self.state is PartitionState.ACTIVE and state is PartitionState.PENDING:
            return
        become(self, state, failover_log)

    with replaced(Partition, "change_state", become_later):
        yield


@planted(HANDOVERS, seeds=16)
def expire_during_handover() -> Iterator[None]:
    """The source of a takeover evaluates batches, and so deletes what has expired, though it hands
    over. The simulation found this fault."""

    def evaluate(self: Partition, batch: MutationBatch, *, now: float) -> Evaluation | None:
        if batch.is_plain or not self.repeated_batches.is_new(batch):
            return None
        return Evaluation(batch, self, self._lookup, now)

    def expire_due(self: Partition, now: float) -> int:
        if self._expiries.is_due(now):
            self._expire_due(now)
            self.snapshots.wake()
        return 0

    with replaced(Partition, "evaluate", evaluate), replaced(Partition, "expire_due", expire_due):
        yield


@planted(RESTARTED_LEADERS)
def trust_lost_memory() -> Iterator[None]:
    """A node that was killed while it was active becomes active again with what it has on disk."""

    def state_in(assignment: Assignment, node: str, _suspect_since: Any) -> PartitionState:
        return assignment.state_of(node)

    with replaced(roles, "state_in", state_in):
        yield


@planted(REFUSED_FAILOVERS)
def trust_fenced_node() -> Iterator[None]:
    """A suspect node becomes active when a refused failover restores the old assignments. The
    simulation found this fault."""

    def is_still_suspect(assignment: Assignment, node: str, _suspect_since: Any) -> bool:
        return assignment.active == node

    with replaced(roles, "is_still_suspect", is_still_suspect):
        yield


@planted(RESTARTED_SOURCES, seeds=14)
def hand_over_after_crash() -> Iterator[None]:
    """A node that was killed during a takeover hands over without having everything that it gave to
    others. The simulation found this fault."""
    with replaced(roles, "check_hand_over", lambda *_: None):
        yield


@planted(MOVING_COPIES)
def activate_copy_that_is_behind() -> Iterator[None]:
    """A takeover does not wait until the copy has everything, and its node does not check that."""

    async def at_once(*_: Any) -> None:
        await trio.lowlevel.checkpoint()

    with (
        replaced(_Takeover, "_approach", at_once),
        replaced(_Takeover, "_catch_up", at_once),
        replaced(roles, "_stands_at", lambda *_: True),
    ):
        yield


@planted(HANDOVERS)
def discard_interrupted_takeover() -> Iterator[None]:
    """A takeover that resumes an interrupted one does not look for a node that became active. What
    that node acknowledged is rolled back. The simulation found this fault."""
    with replaced(Handback, "copies_ahead", lambda _self: {}):
        yield


@planted(HANDOVERS)
def continue_shared_history() -> Iterator[None]:
    """A takeover that resumes an interrupted one continues the history, though another node may
    have been active in it. The simulation found this fault."""

    def continued_history(_self: Handback, _partition: Any, point: HistoryPoint) -> HistoryPoint:
        return point

    with replaced(Handback, "continued_history", continued_history):
        yield


@planted(ROTTEN_DISKS)
def trust_first_node() -> Iterator[None]:
    """An operator believes the first node that answers, though it may have lost its disk. The
    simulation found this fault."""

    async def entry_report(self: Operator) -> NodeReport:
        for address in self.address.each_node():
            report = await self.node_report(address)
            if not report.failure:
                return report
        raise BrokenError("nobody answers")

    with replaced(Operator, "first_report", entry_report):
        yield


BUGS: Final = (
    activate_copy_that_is_behind,
    trust_first_node,
    discard_interrupted_takeover,
    continue_shared_history,
    hand_over_after_crash,
    trust_fenced_node,
    omit_failover_entry,
    name_no_commands,
    reuse_history_ids,
    promote_highest_seq,
    promote_refilling_replica,
    stay_active_after_restart,
    accept_writes_during_handover,
    expire_during_handover,
    trust_lost_memory,
)
