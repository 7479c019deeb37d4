"""What a client knows of its cluster, and where it sends requests by it."""

from __future__ import annotations

import pytest

from upr_protocol.address import Address
from upr_protocol.client.core.metadata import ClusterMetadata, partition_map_of
from upr_protocol.errors import RemoteProtocolError
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.partition_map import Assignment, PartitionMap
from upr_protocol.wire import MapReply

ADDRESS = Address.parse("upr://a:1,b:2/flights")
P0, P1 = PartitionId(0), PartitionId(1)


def map_with(revision: int, *assignments: Assignment, bucket: str = "flights") -> PartitionMap:
    nodes = {"a": "a:1", "b": "b:2", "c": "c:3"}
    return PartitionMap(bucket=bucket, revision=revision, nodes=nodes, partitions=assignments)


TWO = map_with(
    3, Assignment(active="a", replicas={"b": "", "c": ""}), Assignment(replicas={"c": ""})
)


def node(name: str) -> Address:
    return ADDRESS.of_node(TWO.nodes[name])


def test_before_any_map_the_users_address_holds_every_partition_in_every_state() -> None:
    metadata = ClusterMetadata(ADDRESS)
    assert metadata.is_single_node
    assert not metadata.is_stale
    for state in PartitionState:
        assert metadata.holders(PartitionId(77), state) == [ADDRESS]
        assert not metadata.explain_no_holder(PartitionId(77), state)


def test_between_a_revision_and_its_map_no_node_holds_anything() -> None:
    metadata = ClusterMetadata(ADDRESS)
    metadata.note_revision(3)
    assert metadata.is_stale
    assert not metadata.is_single_node
    assert metadata.holders(P0, PartitionState.ACTIVE) == []
    assert metadata.known_nodes() == ADDRESS.each_node()


def test_holders_follow_the_map() -> None:
    metadata = ClusterMetadata(ADDRESS)
    assert metadata.update(TWO)
    assert not metadata.is_stale
    assert metadata.holders(P0, PartitionState.ACTIVE) == [node("a")]
    assert metadata.holders(P0, PartitionState.REPLICA) == [node("b"), node("c")]
    assert metadata.holders(P1, PartitionState.ACTIVE) == []
    assert metadata.holders(PartitionId(2), PartitionState.ACTIVE) == []
    assert "no node is active for partition 1" in metadata.explain_no_holder(
        P1, PartitionState.ACTIVE
    )
    assert metadata.known_nodes() == [*ADDRESS.each_node(), node("c")]


def test_an_older_map_changes_nothing_and_a_newer_revision_makes_it_stale() -> None:
    metadata = ClusterMetadata(ADDRESS)
    metadata.update(TWO)
    assert not metadata.update(map_with(2, Assignment(active="b"), Assignment(active="b")))
    assert metadata.revision == 3
    metadata.note_revision(4)
    assert metadata.is_stale
    assert metadata.holders(P0, PartitionState.ACTIVE) == [node("a")]


THREE_NODES = [ADDRESS.of_node(f"{name}:{port}") for name, port in (("a", 1), ("b", 2), ("c", 3))]
CREATED_AGAIN = map_with(2, Assignment(active="b"), Assignment(active="c"))
OTHER = map_with(3, Assignment(active="b"), Assignment(active="c"))


def learn(metadata: ClusterMetadata, node: Address, answer: PartitionMap | None) -> bool:
    """A node answers at once."""
    return metadata.learn(node, answer, metadata.newest_revision)


@pytest.mark.parametrize("last_answer", [CREATED_AGAIN, OTHER, None])
def test_a_map_that_no_node_has_any_more_gives_way_to_an_older_one(
    last_answer: PartitionMap | None,
) -> None:
    metadata = ClusterMetadata(ADDRESS)
    metadata.update(TWO)
    answers = [CREATED_AGAIN, CREATED_AGAIN, last_answer]
    changes = [
        learn(metadata, node, answer) for node, answer in zip(THREE_NODES, answers, strict=True)
    ]
    assert changes == [False, False, True]
    assert metadata.map == (last_answer or CREATED_AGAIN)
    assert metadata.newest_revision == metadata.revision
    # The bucket's next map counts as usual.
    assert learn(metadata, THREE_NODES[0], map_with(4, Assignment(), Assignment()))


@pytest.mark.parametrize("holder", range(3))
def test_a_map_that_one_node_has_stays(holder: int) -> None:
    metadata = ClusterMetadata(ADDRESS)
    metadata.update(TWO)
    for _ in range(2):
        for index, node in enumerate(THREE_NODES):
            assert not learn(metadata, node, TWO if index == holder else CREATED_AGAIN)
    assert metadata.map == TWO


def test_answers_from_before_a_revision_do_not_count_against_it() -> None:
    metadata = ClusterMetadata(ADDRESS)
    metadata.update(TWO)
    for node in THREE_NODES[:2]:
        learn(metadata, node, CREATED_AGAIN)
    newer_map = map_with(4, Assignment(active="a"), Assignment(active="c"))
    assert learn(metadata, THREE_NODES[2], newer_map)
    assert not learn(metadata, THREE_NODES[2], CREATED_AGAIN)
    assert metadata.map == newer_map
    metadata.forget_answers()
    for node in THREE_NODES[:2]:
        assert not learn(metadata, node, CREATED_AGAIN)
    assert learn(metadata, THREE_NODES[2], CREATED_AGAIN)


def test_an_answer_that_a_newer_one_has_overtaken_does_not_count() -> None:
    """A node that is busy is asked on another connection, too. Its older map would lead back to a
    node that was failed over."""
    metadata = ClusterMetadata(ADDRESS)
    metadata.update(CREATED_AGAIN)
    asked_revision = metadata.newest_revision
    assert learn(metadata, THREE_NODES[2], TWO)
    assert not metadata.learn(THREE_NODES[2], CREATED_AGAIN, asked_revision)
    for node in THREE_NODES[:2]:
        assert not learn(metadata, node, CREATED_AGAIN)
    assert metadata.map == TWO


def test_a_bucket_that_no_node_has_keeps_its_map() -> None:
    metadata = ClusterMetadata(ADDRESS)
    metadata.update(TWO)
    for node in THREE_NODES:
        assert not learn(metadata, node, None)
    assert metadata.map == TWO


def test_a_revision_that_no_node_has_any_more_is_not_waited_for() -> None:
    metadata = ClusterMetadata(ADDRESS)
    metadata.note_revision(9)
    assert learn(metadata, THREE_NODES[0], TWO)
    assert metadata.is_stale
    for node in THREE_NODES[1:]:
        learn(metadata, node, TWO)
    assert metadata.map == TWO
    assert not metadata.is_stale


def test_the_map_of_another_bucket_is_an_error() -> None:
    with pytest.raises(RemoteProtocolError, match=r"'flights'.*'other'"):
        partition_map_of(
            MapReply(1, map_with(1, Assignment(active="a"), bucket="other").encode(), "a"),
            "flights",
        )


def test_without_following_maps_everything_stays_with_the_users_address() -> None:
    metadata = ClusterMetadata(ADDRESS, follow_map=False)
    metadata.note_revision(3)
    assert not metadata.update(TWO)
    assert metadata.is_single_node
    assert metadata.holders(P1, PartitionState.ACTIVE) == [ADDRESS]


def test_the_current_node_stays_unless_it_is_down_and_another_is_not() -> None:
    metadata = ClusterMetadata(ADDRESS)
    metadata.update(TWO)

    def choose(*down: str, current: str = "") -> Address | None:
        return metadata.choose_holder(
            P0,
            PartitionState.REPLICA,
            down={node(name) for name in down},
            current=node(current) if current else None,
        )

    assert choose() == node("b")
    assert choose(current="c") == node("c")
    assert choose("c", current="c") == node("b")
    assert choose("b") == node("c")
    assert choose("b", "c") == node("b")
    assert metadata.choose_holder(P1, PartitionState.ACTIVE, down=()) is None


def test_a_reply_brings_a_map_or_none_or_an_error() -> None:
    assert partition_map_of(MapReply(3, TWO.encode(), "a"), "flights") == TWO
    assert partition_map_of(MapReply(0, "", "a"), "flights") is None
    with pytest.raises(RemoteProtocolError):
        partition_map_of(MapReply(3, "{}", "a"), "flights")
