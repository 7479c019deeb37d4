"""Which role a partition map gives to a node, decided without a server, a disk or a clock."""

from __future__ import annotations

import pytest

from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import HistoryId, PartitionId, PartitionState, SeqNo
from upr_protocol.limits import FAILOVER_ENTRIES_MAX
from upr_protocol.partition_map import Assignment, HistoryPoint, PartitionMap
from upr_server.engine import Partition
from upr_server.replication.roles import (
    ReplicationSource,
    check_hand_over,
    failover_log_in,
    has_taken_over,
    is_still_suspect,
    sources_in,
    state_in,
    suspects_in,
)

P0, P1 = PartitionId(0), PartitionId(1)
NEW_HISTORY = HistoryId(99)
NODES = {"a": "host-a:1", "b": "host-b:1", "c": "host-c:1"}


def map_of(*assignments: Assignment, revision: int = 5) -> PartitionMap:
    return PartitionMap(bucket="b", revision=revision, nodes=NODES, partitions=assignments)


def replica_at(seq: int) -> Partition:
    """A replica in history 7 whose newest change is `seq`."""
    partition = Partition(P0, lambda: HistoryId(7), state=PartitionState.REPLICA)
    partition.restart_at(SeqNo(seq))
    return partition


def log_after(
    partition: Partition,
    assignment: Assignment,
    *,
    was_active: bool = False,
    has_taken_over: bool = False,
    is_confirming: bool = False,
    is_clean: bool,
) -> list[tuple[int, int]]:
    failover_log = failover_log_in(
        partition,
        PartitionState.ACTIVE,
        assignment,
        was_active=was_active,
        has_taken_over=has_taken_over,
        is_confirming=is_confirming,
        is_clean=is_clean,
        new_history_id=lambda: NEW_HISTORY,
    )
    return [(int(history), int(seq)) for history, seq in failover_log.pairs()]


@pytest.mark.parametrize(
    ("assignment", "suspect_since", "state"),
    [
        (Assignment("a"), None, PartitionState.ACTIVE),
        (Assignment("b", {"a": ""}), None, PartitionState.REPLICA),
        (Assignment("b"), None, PartitionState.DEAD),
        (Assignment(handing_over="a", replicas={"b": ""}), None, PartitionState.PENDING),
        # A map that only restores the earlier assignment does not make a suspect copy active,
        (Assignment("a", {"b": ""}), 5, PartitionState.PENDING),
        # nor does a failover from before the doubt;
        (Assignment("a", {"b": ""}, failover_revision=5), 5, PartitionState.PENDING),
        # one that compared all copies since does.
        (Assignment("a", {"b": ""}, failover_revision=6), 5, PartitionState.ACTIVE),
        # A node with a suspect copy may always be a replica.
        (Assignment("b", {"a": ""}), 5, PartitionState.REPLICA),
    ],
)
def test_a_node_becomes_what_the_map_says_unless_its_copy_is_suspect(
    assignment: Assignment, suspect_since: int | None, state: PartitionState
) -> None:
    assert state_in(assignment, "a", suspect_since) is state


@pytest.mark.parametrize(
    ("assignment", "is_suspect"),
    [
        (Assignment("a"), True),
        (Assignment(), True),
        (Assignment(handing_over="a"), True),
        (Assignment("b", {"a": ""}), False),
        (Assignment("a", failover_revision=6), False),
    ],
)
def test_a_copy_stays_suspect_until_another_was_active_or_a_failover_chose_it(
    assignment: Assignment, is_suspect: bool
) -> None:
    assert is_still_suspect(assignment, "a", 5) is is_suspect


def test_a_node_without_its_memory_suspects_the_partitions_that_it_wrote_for_replicas() -> None:
    written = Assignment("a", {"b": ""})
    alone = Assignment("a")
    followed = Assignment("b", {"a": ""})
    handed_over = Assignment(handing_over="a", replicas={"b": ""})
    failed_over = Assignment(replicas={"a": "", "b": ""}, lost_active="a")
    partition_map = map_of(written, alone, followed, handed_over, failed_over, revision=5)
    assert suspects_in(partition_map, "a") == {0: 5, 3: 5, 4: 5}


def test_a_suspect_partition_is_not_handed_over() -> None:
    active = Assignment("a", {"b": ""})
    handing_over = Assignment(handing_over="a", replicas={"b": ""})
    check_hand_over(map_of(active), map_of(handing_over), "a", suspects={})
    with pytest.raises(ServerError, match="upr failover") as refusal:
        check_hand_over(map_of(active), map_of(handing_over), "a", suspects={P0: 5})
    assert refusal.value.status is Status.WRONG_STATE
    # The node had handed it over before, with everything on disk.
    check_hand_over(map_of(handing_over), map_of(handing_over), "a", suspects={P0: 5})


def test_a_replica_that_becomes_active_begins_a_new_history() -> None:
    assert log_after(replica_at(20), Assignment("a"), is_clean=True) == [(99, 20), (7, 0)]


def test_a_replica_at_the_named_end_continues_the_history() -> None:
    at_the_end = Assignment("a", continues_from=HistoryPoint(HistoryId(7), SeqNo(20)))
    assert log_after(replica_at(20), at_the_end, is_clean=True) == [(7, 0)]
    with pytest.raises(ServerError, match="continue history 7 at 20") as refusal:
        log_after(replica_at(19), at_the_end, is_clean=True)
    assert refusal.value.status is Status.WRONG_STATE


def test_a_restarted_active_goes_on_from_beyond_the_end_at_which_it_once_took_over() -> None:
    """The map names that sequence number until a command changes the partition."""
    taken_over = Assignment("a", continues_from=HistoryPoint(HistoryId(7), SeqNo(20)))
    with pytest.raises(ServerError, match="continue history 7 at 20"):
        log_after(replica_at(25), taken_over, is_clean=True)
    assert log_after(replica_at(25), taken_over, was_active=True, is_clean=True) == [
        (99, 25),
        (7, 0),
    ]
    # Its data must have come from that takeover.
    for other_end in (HistoryPoint(HistoryId(7), SeqNo(26)), HistoryPoint(HistoryId(8), SeqNo(0))):
        elsewhere = Assignment("a", continues_from=other_end)
        with pytest.raises(ServerError, match="use `upr failover`"):
            log_after(replica_at(25), elsewhere, was_active=True, is_clean=True)


def test_a_restarted_active_goes_on_though_its_log_no_longer_names_the_takeover() -> None:
    """Since the takeover it has begun more histories than fit into a failover log."""
    taken_over = Assignment("a", {"b": ""}, continues_from=HistoryPoint(HistoryId(7), SeqNo(20)))
    partition = replica_at(25)
    failover_log = partition.failover_log
    for seq in range(1, 1 + FAILOVER_ENTRIES_MAX):
        failover_log = failover_log.with_branch(HistoryId(100 + seq), SeqNo(seq))
    partition.change_state(PartitionState.REPLICA, failover_log)
    pairs = log_after(partition, taken_over, was_active=True, has_taken_over=True, is_clean=True)
    assert pairs[0] == (99, 25)
    with pytest.raises(ServerError, match="use `upr failover`"):
        log_after(partition, taken_over, was_active=True, is_clean=True)
    # The node lacks changes before the takeover.
    too_low = replica_at(19)
    with pytest.raises(ServerError, match="use `upr failover`"):
        log_after(too_low, taken_over, was_active=True, has_taken_over=True, is_clean=True)


def test_a_node_has_taken_over_if_its_map_named_the_same_takeover() -> None:
    point, other_point = (HistoryPoint(HistoryId(history), SeqNo(20)) for history in (7, 8))
    taken_over = Assignment("a", {"b": ""}, continues_from=point)
    assert has_taken_over(taken_over, Assignment("a", continues_from=point), "a")
    assert not has_taken_over(taken_over, taken_over, "b")
    assert not has_taken_over(taken_over, Assignment("a", continues_from=other_point), "a")
    assert not has_taken_over(Assignment("b", {"a": ""}, continues_from=point), taken_over, "a")


@pytest.mark.parametrize(("is_clean", "pairs"), [(True, [(7, 0)]), (False, [(99, 20), (7, 0)])])
def test_a_restarted_active_continues_its_history_only_after_a_clean_stop(
    is_clean: bool, pairs: list[tuple[int, int]]
) -> None:
    assert (
        log_after(replica_at(20), Assignment("a"), is_confirming=True, is_clean=is_clean) == pairs
    )


def test_a_node_replicates_from_each_source_what_the_map_says() -> None:
    partition_map = map_of(
        Assignment("b", {"a": ""}),
        Assignment("b", {"c": "", "a": "c"}),
        Assignment("a", {"b": ""}),
    )
    partitions = [PartitionId(partition) for partition in range(3)]
    steps = sources_in(partition_map, "a", partitions)
    with pytest.raises(StopIteration) as stop:
        next(steps)
    assert stop.value.value == {
        "b": ReplicationSource("host-b:1", {P0: PartitionState.ACTIVE}),
        "c": ReplicationSource("host-c:1", {P1: PartitionState.REPLICA}),
    }
