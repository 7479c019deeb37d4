"""Which node keeps which slices."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from upr_server.indexer.pure.node_map import REPLICAS_MAX, NodeMap


@st.composite
def node_maps(draw: st.DrawFn) -> NodeMap:
    count = draw(st.integers(2, 9))
    return NodeMap(
        tuple(f"http://n{place}:1" for place in range(count)),
        draw(st.integers(count, 64)),
        draw(st.integers(0, min(REPLICAS_MAX, count - 1))),
    )


@given(node_maps())
def test_each_slice_is_at_as_many_nodes_as_asked(node_map: NodeMap) -> None:
    for index in range(node_map.slices):
        holders = node_map.holders(index)
        assert len(set(holders)) == len(holders) == 1 + node_map.replicas
        assert set(holders) <= set(range(len(node_map.nodes)))
    slices_of_nodes = [set(node_map.kept_by(place)) for place in range(len(node_map.nodes))]
    for index in range(node_map.slices):
        assert {place for place, own in enumerate(slices_of_nodes) if index in own} == set(
            node_map.holders(index)
        )


@given(node_maps())
def test_the_work_is_spread(node_map: NodeMap) -> None:
    places = range(len(node_map.nodes))
    first = Counter(node_map.holders(index)[0] for index in range(node_map.slices))
    assert max(first[place] for place in places) - min(first[place] for place in places) <= 1
    slice_counts = [len(list(node_map.kept_by(place))) for place in places]
    assert min(slice_counts) >= 1
    assert max(slice_counts) - min(slice_counts) <= 1 + node_map.replicas


@given(node_maps())
def test_the_work_of_a_lost_node_goes_to_all_others(node_map: NodeMap) -> None:
    """As far as there are rows enough."""
    count = len(node_map.nodes)
    if not node_map.replicas:
        return
    for lost_place in range(count):
        heirs = {
            node_map.holders(index)[1]
            for index in range(node_map.slices)
            if node_map.holders(index)[0] == lost_place
        }
        rows = sum(node_map.holders(index)[0] == lost_place for index in range(node_map.slices))
        assert len(heirs) == min(rows, count - 1)


def test_a_map_by_hand() -> None:
    node_map = NodeMap(("http://a:1", "http://b:1", "http://c:1"), 6, 1)
    holders = [node_map.holders(index) for index in range(6)]
    assert holders == [(0, 1), (1, 2), (2, 0), (0, 2), (1, 0), (2, 1)]
    assert list(node_map.kept_by(0)) == [0, 2, 3, 4]


@given(node_maps(), node_maps())
def test_a_fingerprint_is_of_all_of_it(left: NodeMap, right: NodeMap) -> None:
    assert (left.fingerprint("b") == right.fingerprint("b")) == (left == right)
    assert left.fingerprint("b") != left.fingerprint("c")
