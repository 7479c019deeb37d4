"""The choice of a node for each partition, and giving up on one that has none."""

from __future__ import annotations

import pytest

from upr_protocol.address import Address
from upr_protocol.client.core.metadata import ClusterMetadata
from upr_protocol.client.core.retry import FIRST_WAIT_S
from upr_protocol.client.core.routing import PartitionRouter
from upr_protocol.errors import BrokenError, ServerError, Status
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.partition_map import Assignment, PartitionMap

ADDRESS = Address.parse("upr://a:1/b")
PARTITIONS = [PartitionId(0), PartitionId(1)]
TIMEOUT_S = 10.0
REFUSAL = ServerError(Status.WRONG_STATE, "not active here")


@pytest.fixture
def metadata() -> ClusterMetadata:
    metadata = ClusterMetadata(ADDRESS)
    metadata.update(map_of(1, Assignment(active="a"), Assignment()))
    return metadata


@pytest.fixture
def router(metadata: ClusterMetadata) -> PartitionRouter:
    return PartitionRouter(metadata, PartitionState.ACTIVE, TIMEOUT_S, lambda: 1.0)


def map_of(revision: int, *assignments: Assignment) -> PartitionMap:
    nodes = {"a": "a:1", "b": "b:2"}
    return PartitionMap(bucket="b", revision=revision, nodes=nodes, partitions=assignments)


def waits(_: PartitionId) -> bool:
    return True


def waits_not(_: PartitionId) -> bool:
    return False


def test_each_partition_is_placed_where_the_map_says(router: PartitionRouter) -> None:
    assert router.route(PARTITIONS, (), waits, 0.0) == {0: ADDRESS, 1: None}
    assert router.has_unplaced


def test_a_refused_partition_rests_unless_there_is_a_newer_map(
    router: PartitionRouter, metadata: ClusterMetadata
) -> None:
    router.route(PARTITIONS, (), waits, 0.0)
    router.note_refused(PARTITIONS[0], REFUSAL, 5.0)
    assert router.next_retry_at(5.0) == 5.0 + FIRST_WAIT_S
    assert router.route(PARTITIONS, (), waits, 5.0)[PARTITIONS[0]] is None
    assert router.route(PARTITIONS, (), waits, 5.0 + FIRST_WAIT_S)[PARTITIONS[0]] == ADDRESS
    router.note_refused(PARTITIONS[0], REFUSAL, 6.0)
    metadata.update(map_of(2, Assignment(active="b"), Assignment()))
    router.note_map_changed()
    assert router.route(PARTITIONS, (), waits, 6.0)[PARTITIONS[0]] == ADDRESS.of_node("b:2")


def test_refusals_wait_longer_and_longer_until_the_partition_works(
    router: PartitionRouter,
) -> None:
    pauses = []
    for now in (0.0, 10.0, 20.0):
        router.note_refused(PARTITIONS[0], REFUSAL, now)
        pauses.append(router.next_retry_at(now) - now)
    assert pauses == pytest.approx([FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S])
    router.note_succeeded(PARTITIONS[0])
    router.note_refused(PARTITIONS[0], REFUSAL, 30.0)
    assert router.next_retry_at(30.0) - 30.0 == pytest.approx(FIRST_WAIT_S)


def test_a_partition_without_a_node_times_out_with_the_reason(router: PartitionRouter) -> None:
    router.route(PARTITIONS, (), waits, 0.0)
    assert router.timeout_error(waits, TIMEOUT_S - 0.1) is None
    error = router.timeout_error(waits, TIMEOUT_S)
    assert isinstance(error, BrokenError)
    assert "no node is active for partition 1" in str(error)
    assert error.__notes__ == ["gave up after 10 s"]


def test_a_partition_that_every_node_refuses_times_out_with_the_refusal(
    router: PartitionRouter,
) -> None:
    router.note_refused(PARTITIONS[0], REFUSAL, 0.0)
    assert router.timeout_error(waits, TIMEOUT_S) is REFUSAL


def test_the_time_without_a_node_counts_only_while_something_waits(
    router: PartitionRouter,
) -> None:
    router.route(PARTITIONS, (), waits_not, 0.0)
    assert router.timeout_error(waits_not, 100.0) is None
    router.route(PARTITIONS, (), waits, 100.0)
    assert router.timeout_error(waits, 100.0 + TIMEOUT_S - 0.1) is None
    assert router.timeout_error(waits, 100.0 + TIMEOUT_S) is not None


def test_partitions_without_a_node_are_named_with_the_reason(router: PartitionRouter) -> None:
    router.route(PARTITIONS, (), waits, 1.0)
    router.note_refused(PARTITIONS[0], REFUSAL, 2.0)
    assert router.unplaced_since(0.5) == ([], "")
    only_second, reason = router.unplaced_since(1.0)
    assert only_second == [PARTITIONS[1]]
    assert "partition 1" in reason
    assert router.unplaced_since(2.0) == (PARTITIONS, str(REFUSAL))
    router.note_succeeded(PARTITIONS[0])
    assert router.unplaced_since(2.0)[0] == [PARTITIONS[1]]
