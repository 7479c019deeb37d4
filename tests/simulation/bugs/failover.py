"""Bugs around who is active, and in which history."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from tests.simulation.bugs.patch import replaced
from upr_protocol.client.operator import Operator
from upr_protocol.client.operator.handback import Handback
from upr_protocol.client.operator.plan import PartitionCopy
from upr_protocol.client.operator.survey import NodeReport
from upr_protocol.errors import BrokenError
from upr_protocol.ids import HistoryId, PartitionState
from upr_protocol.partition_map import Assignment, HistoryPoint
from upr_server.engine import Partition
from upr_server.replication import roles
from upr_server.replication.partition_maps import PartitionMaps
from upr_server.runtime import System
from upr_server.storage.online.bucket_disk import BucketDisk


@contextmanager
def forgets_the_failover_entry() -> Iterator[None]:
    """A new active goes on in the history of the old one."""

    def same_log(partition: Partition, *_arguments: Any, **_options: Any) -> Any:
        return partition.failover_log

    with replaced(roles, "failover_log_in", same_log):
        yield


@contextmanager
def reuses_a_history_id() -> Iterator[None]:
    """There are four history IDs."""

    def new_id(self: System) -> HistoryId:
        return HistoryId(1 + self.random_bits(2))

    with replaced(System, "new_id", new_id):
        yield


@contextmanager
def promotes_the_highest_number() -> Iterator[None]:
    """Who has the highest number becomes active, whatever its history."""
    with replaced(PartitionCopy, "has_all_of", lambda self, other: self.high_seq >= other.high_seq):
        yield


@contextmanager
def promotes_who_is_being_filled() -> Iterator[None]:
    """A replica that began again from nothing counts as if it had what it once acknowledged; found
    by the simulation."""
    with replaced(PartitionCopy, "contains", lambda _self, _point: True):
        yield


@contextmanager
def is_active_at_once_after_a_restart() -> Iterator[None]:
    """A node that was active is so again when it is back, and asks nobody."""
    restore: Any = PartitionMaps.restore

    def restore_as_before(
        self: PartitionMaps, disk: BucketDisk, document: str, *arguments: Any, **options: Any
    ) -> None:
        restore(self, disk, document, *arguments, **options)
        mapped = self._buckets[disk.bucket.name]
        mapped.is_confirmed = True
        mapped.suspects.clear()
        for partition in disk.bucket.partitions:
            if partition.state is PartitionState.PENDING:
                partition.become(PartitionState.ACTIVE, partition.failover_log)

    with replaced(PartitionMaps, "restore", restore_as_before):
        yield


@contextmanager
def takes_writes_while_it_hands_over() -> Iterator[None]:
    """Who hands over goes on until it hears that another is active."""
    become: Any = Partition.become

    def become_later(self: Partition, state: PartitionState, failover_log: Any) -> None:
        if self.state is PartitionState.ACTIVE and state is PartitionState.PENDING:
            return
        become(self, state, failover_log)

    with replaced(Partition, "become", become_later):
        yield


@contextmanager
def trusts_a_lost_memory() -> Iterator[None]:
    """A node that was killed while it was active takes what it has on disk for all that it gave."""

    def state_in(assignment: Assignment, node: str, _suspect_since: Any) -> PartitionState:
        return assignment.state_of(node)

    with replaced(roles, "state_in", state_in):
        yield


@contextmanager
def is_trusted_once_it_was_fenced() -> Iterator[None]:
    """A node that has lost its memory is active again with a map that puts back what was before a
    failover that failed; found by the simulation."""

    def is_still_suspect(assignment: Assignment, node: str, _suspect_since: Any) -> bool:
        return assignment.active == node

    with replaced(roles, "is_still_suspect", is_still_suspect):
        yield


@contextmanager
def hands_over_what_it_doubts() -> Iterator[None]:
    """A node that was killed while a takeover waited hands over as if it had all that it gave
    others; found by the simulation."""
    with replaced(roles, "check_hand_over", lambda *_: None):
        yield


@contextmanager
def gives_up_what_another_took_in() -> Iterator[None]:
    """A takeover that goes on from one that was interrupted does not look at who became active by
    that, and what he acknowledged is rolled back; found by the simulation."""
    with replaced(Handback, "copies_ahead", lambda _self: {}):
        yield


@contextmanager
def goes_on_where_another_was_active() -> Iterator[None]:
    """A takeover that goes on from one that was interrupted keeps the history; found by the
    simulation."""

    def continued_history(
        self: Handback, _partition: Any, point: HistoryPoint
    ) -> HistoryPoint | None:
        return None if self._is_history_shared else point

    with replaced(Handback, "continued_history", continued_history):
        yield


@contextmanager
def asks_only_the_first_node() -> Iterator[None]:
    """An operator takes the word of the first node that answers, though it has nothing; found by
    the simulation."""

    async def entry_report(self: Operator) -> NodeReport:
        for address in self.address.each():
            report = await self.node_report(address)
            if not report.failure:
                return report
        raise BrokenError("nobody answers")

    with replaced(Operator, "entry_report", entry_report):
        yield


BUGS: Final = (
    asks_only_the_first_node,
    gives_up_what_another_took_in,
    goes_on_where_another_was_active,
    hands_over_what_it_doubts,
    is_trusted_once_it_was_fenced,
    forgets_the_failover_entry,
    reuses_a_history_id,
    promotes_the_highest_number,
    promotes_who_is_being_filled,
    is_active_at_once_after_a_restart,
    takes_writes_while_it_hands_over,
    trusts_a_lost_memory,
)
