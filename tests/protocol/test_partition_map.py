"""The partition map: what it says, what it may not say, and how one follows another."""

from __future__ import annotations

import re
from itertools import permutations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upr_protocol.address import Address
from upr_protocol.ids import HistoryId, PartitionId, PartitionState, SeqNo
from upr_protocol.limits import BUCKET_NAME_BYTES_MAX, NODES_MAX, PARTITIONS_MAX
from upr_protocol.partition_map import (
    STEP_PARTITIONS,
    Assignment,
    HistoryPoint,
    PartitionMap,
    PartitionMapError,
    newest_map,
)
from upr_protocol.security import UNPROTECTED

NODES = {name: f"host-{name}:12000" for name in "abcd"}
ACTIVE, REPLICA = PartitionState.ACTIVE, PartitionState.REPLICA
PENDING, DEAD = PartitionState.PENDING, PartitionState.DEAD


def map_of(
    *partitions: Assignment,
    revision: int = 1,
    nodes: dict[str, str] = NODES,
    command: str = "",
) -> PartitionMap:
    return PartitionMap(
        bucket="b", revision=revision, nodes=nodes, partitions=partitions, command=command
    )


@st.composite
def assignments(draw: st.DrawFn) -> Assignment:
    """Assignment that may be: every replica follows one that was there before it."""
    names = draw(st.lists(st.sampled_from(sorted(NODES)), unique=True))
    has_first = draw(st.booleans())
    first = names.pop(0) if names and has_first else ""
    hands_over = bool(first) and draw(st.booleans())
    sources = [""]
    replicas = {}
    for name in names:
        replicas[name] = draw(st.sampled_from(sources))
        sources.append(name)
    keeps = st.none() | st.builds(
        HistoryPoint,
        st.integers(1, 2**64 - 1).map(HistoryId),
        st.integers(0, 2**64 - 1).map(SeqNo),
    )
    return Assignment(
        active="" if hands_over else first,
        replicas=replicas,
        handing_over=first if hands_over else "",
        continues_from=draw(keeps),
    )


MAPS = st.builds(
    lambda revision, partitions, command: map_of(*partitions, revision=revision, command=command),
    st.integers(1, 2**53 - 1),
    st.lists(assignments(), min_size=1, max_size=8),
    st.sampled_from(["", "0", "0123456789abcdef", "a" * 100]),
)


@given(MAPS)
def test_decoding_reverses_encoding(partition_map: PartitionMap) -> None:
    document = partition_map.encode()
    assert PartitionMap.decode(document) == partition_map
    assert PartitionMap.decode(document.encode()) == partition_map
    assert PartitionMap.decode(document).encode() == document


def test_numbers_of_64_bits_are_text_in_the_document() -> None:
    point = HistoryPoint(HistoryId(2**64 - 1), SeqNo(2**53 + 1))
    partition_map = map_of(Assignment(active="a", continues_from=point, promotion_point=point))
    document = partition_map.encode()
    text = '{"history_id":"18446744073709551615","seq":"9007199254740993"}'
    assert f'"keeps":{text}' in document
    assert f'"floor":{text}' in document
    # Maps that nodes keep on disk may have them as numbers.
    assert PartitionMap.decode(re.sub(r'"(\d+)"', r"\1", document)) == partition_map


@given(MAPS)
def test_a_node_has_one_state_in_each_partition(partition_map: PartitionMap) -> None:
    for partition_id, assignment in enumerate(partition_map.partitions):
        partition = PartitionId(partition_id)
        for name in NODES:
            state = assignment.state_of(name)
            assert (state is ACTIVE) == (name == assignment.active)
            assert (state is PENDING) == (name == assignment.handing_over)
            assert (state is REPLICA) == (name in assignment.replicas)
            assert (state is DEAD) == (name not in assignment.holders())
        assert partition_map.active_of(partition) == NODES.get(assignment.active, "")
        assert partition_map.replicas_of(partition) == [NODES[name] for name in assignment.replicas]


@given(MAPS)
def test_sources_lead_to_the_active_node(partition_map: PartitionMap) -> None:
    for assignment in partition_map.partitions:
        head = assignment.active or assignment.handing_over
        assert assignment.source_of(head) == ""
        for name in assignment.replicas:
            nodes_passed = []
            while name:
                assert name not in nodes_passed
                nodes_passed.append(name)
                name = assignment.source_of(name)
            assert nodes_passed[-1] == head or not head


def test_replicas_follow_a_named_node_or_the_active_one() -> None:
    assignment = Assignment(active="a", replicas={"b": "", "c": "b"})
    assert [assignment.source_of(name) for name in "abcd"] == ["", "a", "b", ""]
    assert assignment.holders() == ["a", "b", "c"]
    assignment = Assignment(handing_over="a", replicas={"b": "", "c": "a"})
    assert [assignment.source_of(name) for name in "abc"] == ["", "a", "a"]
    assert [assignment.state_of(name) for name in "abcd"] == [PENDING, REPLICA, REPLICA, DEAD]
    assignment = Assignment(replicas={"b": "", "c": "b"})
    assert [assignment.source_of(name) for name in "bc"] == ["", "b"]
    assert [assignment.state_of(name) for name in "ab"] == [DEAD, REPLICA]


@pytest.mark.parametrize(
    "nonsense",
    ["{}," * 5000, '{"replicas":{' + '"a":"",' * 40_000 + "}}"],
    ids=["many partitions", "many replicas"],
)
def test_a_document_of_more_than_a_map_can_have_is_not_parsed(nonsense: str) -> None:
    """It is no JSON, either, and nobody notices."""
    with pytest.raises(PartitionMapError, match="more than 1024 partitions, 256 nodes, or 16"):
        PartitionMap.decode('{"bucket":"b","revision":1,"nodes":{},"partitions":[' + nonsense)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"bucket": ""}, "is not a bucket's name"),
        ({"bucket": "ä" * (BUCKET_NAME_BYTES_MAX // 2 + 1)}, "is not a bucket's name"),
        ({"revision": 0}, r"a revision is 1 to \d+, not 0"),
        ({"revision": -1}, r"a revision is 1 to \d+, not -1"),
        ({"revision": 1 << 53}, "a revision is 1 to 9007199254740991"),
        ({"nodes": {}}, "1 to 256 nodes, not 0"),
        ({"nodes": {f"n{n}": "h:1" for n in range(NODES_MAX + 1)}}, "not 257"),
        ({"partitions": ()}, "1 to 1024 partitions, not 0"),
        ({"partitions": (Assignment(),) * (PARTITIONS_MAX + 1)}, "not 1025"),
        ({"nodes": {"": "h:1"}}, "is not a node's name"),
        ({"nodes": {"a b": "h:1"}}, "is not a node's name"),
        ({"nodes": {"x" * 101: "h:1"}}, "is not a node's name"),
        ({"nodes": {"a": "h"}}, "not HOST:PORT"),
        ({"nodes": {"a": ":1"}}, "not HOST:PORT"),
        ({"command": "a b"}, "'a b' is not a command's name"),
        ({"command": "a" * 101}, "is not a command's name"),
        ({"nodes": {"a": "h:"}}, "not HOST:PORT"),
        ({"nodes": {"a": "h:0"}}, "not HOST:PORT"),
        ({"nodes": {"a": "h:65536"}}, "not HOST:PORT"),
        ({"nodes": {"a": "h:\u0661"}}, "not HOST:PORT"),
        ({"nodes": {"a": "h:-1"}}, "not HOST:PORT"),
        ({"nodes": {"a": "h" * 256 + ":1"}}, "not HOST:PORT"),
        *(
            ({"nodes": {"a": f"{host}:1"}}, "not HOST:PORT")
            for host in ("::1", "[::1", "::1]", "[h]", "[::1%a/b]", "http://h", "h/", "u@h", "h h")
        ),
        *(
            ({"nodes": {"a": f"{host}:1"}}, "not HOST:PORT")
            for host in ("\u2100", "\uff3b::1\uff3d")
        ),
        # More digits than Python makes a number of.
        ({"nodes": {"a": "h:" + "9" * 5000}}, "not HOST:PORT"),
        ({"partitions": (Assignment(active="x"),)}, "partition 0: the map has no node 'x'"),
        (
            {"partitions": (Assignment(), Assignment(handing_over="x"))},
            "partition 1: the map has no node",
        ),
        ({"partitions": (Assignment(replicas={"x": ""}),)}, "the map has no node 'x'"),
        ({"partitions": (Assignment(replicas={"a": "x"}),)}, "the map has no node 'x'"),
        (
            {"partitions": (Assignment(active="a", handing_over="b"),)},
            "while another hands over",
        ),
        (
            {"partitions": (Assignment(replicas={f"n{n}": "" for n in range(17)}),)},
            "at most 16 replicas, not 17",
        ),
        ({"partitions": (Assignment(active="a", replicas={"a": ""}),)}, "its own replica"),
        ({"partitions": (Assignment(handing_over="a", replicas={"a": ""}),)}, "its own replica"),
        (
            {"partitions": (Assignment(active="a", replicas={"b": "b"}),)},
            "in a circle",
        ),
        (
            {"partitions": (Assignment(active="a", replicas={"b": "c", "c": "b"}),)},
            "in a circle",
        ),
        (
            {"partitions": (Assignment(active="a", replicas={"d": "b", "b": "c", "c": "b"}),)},
            "in a circle",
        ),
        (
            {"partitions": (Assignment(active="a", replicas={"b": "c"}),)},
            "c does not hold the partition",
        ),
        ({"partitions": (Assignment(replicas={"b": "c"}),)}, "c does not hold the partition"),
    ],
)
def test_a_map_that_contradicts_itself_is_refused(changed: dict[str, object], why: str) -> None:
    partition_map = msgspec.structs.replace(map_of(Assignment(active="a")), **changed)
    with pytest.raises(PartitionMapError, match=why):
        partition_map.check()
    with pytest.raises(PartitionMapError, match=why):
        PartitionMap.decode(partition_map.encode())


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        "\ud800",
        '{"bucket":"b"}',
        '{"bucket":"b","revision":"1","nodes":{"a":"h:1"},"partitions":[{}]}',
        '{"bucket":"b","revision":1,"nodes":{"a":"h:1"},"partitions":[{}],"more":1}',
        '{"bucket":"b","revision":1,"nodes":{"a":"h:1"},"partitions":[{"more":1}]}',
        '{"bucket":"b","revision":1,"nodes":{"a":"h:1"},"partitions":[{"keeps":{"seq":1}}]}',
    ],
)
def test_a_document_that_is_not_a_map_is_refused(document: str | bytes) -> None:
    with pytest.raises(PartitionMapError, match="not a partition map"):
        PartitionMap.decode(document)


def test_a_chain_of_replicas_in_any_order() -> None:
    nodes = {f"n{index}": "h:1" for index in range(5)}
    chain = {f"n{index}": f"n{index - 1}" for index in range(1, 5)}
    for names in permutations(chain):
        replicas = {name: chain[name] for name in names}
        map_of(Assignment(active="n0", replicas=replicas), nodes=nodes).check()
        # Its other end is nobody, or itself.
        with pytest.raises(PartitionMapError, match="in a circle"):
            map_of(Assignment(active="n0", replicas={**replicas, "n1": "n3"}), nodes=nodes).check()
        del replicas["n1"]
        with pytest.raises(PartitionMapError, match="n1 does not hold the partition"):
            map_of(Assignment(active="n0", replicas=replicas), nodes=nodes).check()


def test_the_largest_map_is_valid() -> None:
    nodes = {f"node-{index}": f"10.0.0.{index}:12000" for index in range(NODES_MAX)}
    assignment = Assignment(active="node-0", replicas={"node-1": "", "node-2": "node-1"})
    largest = map_of(*(assignment,) * PARTITIONS_MAX, nodes=nodes)
    document = largest.encode()
    assert PartitionMap.decode(document) == largest
    assert len(document) < 1024 * 1024


def test_a_map_is_read_and_written_in_steps() -> None:
    partition_map = map_of(*(Assignment(active="a"),) * (3 * STEP_PARTITIONS))
    document = partition_map.encode()
    assert len(list(partition_map.encode_in_steps())) == 3
    # Each partition's text is read, and then checked; and the node's address is.
    assert len(list(PartitionMap.decode_in_steps(document))) == 3 + len(partition_map.nodes) + 3


def test_an_address_may_be_ipv6() -> None:
    for host in ("[::1]", "[fe80::1%eth0]"):
        map_of(Assignment(active="a"), nodes={"a": f"{host}:12000"}).check()


@given(st.text("ab1.:[]@/?#%\\ \t\0,-_é\u2100\uff0e\uff3b\uff1a\u200b", max_size=6))
def test_a_node_makes_an_address_of_each_one_that_a_map_may_have(host: str) -> None:
    try:
        map_of(Assignment(active="a"), nodes={"a": f"{host}:12000"}).check()
    except PartitionMapError:
        return
    address = Address.of_bucket(f"{host}:12000", "b", UNPROTECTED)
    assert (address.host, address.port) == (host.strip("[]").lower(), 12000)


def test_other_assignments_make_the_next_map() -> None:
    before = map_of(Assignment(active="a"), Assignment(active="b"), revision=7)
    other_assignment = Assignment(active="c", continues_from=HistoryPoint(HistoryId(5), SeqNo(3)))
    after = before.with_assignments({PartitionId(1): other_assignment})
    assert after == map_of(Assignment(active="a"), other_assignment, revision=8)
    assert before.partitions[1] == Assignment(active="b")
    with pytest.raises(PartitionMapError, match="the map has no node"):
        before.with_assignments({PartitionId(0): Assignment(active="x")})


def test_a_bucket_on_one_node_is_a_map_of_one_node() -> None:
    partition_map = PartitionMap.of_one_node("b", 3, "a", "h:1")
    partition_map.check()
    assert (partition_map.revision, partition_map.nodes) == (1, {"a": "h:1"})
    assert [partition_map.active_of(PartitionId(partition)) for partition in range(3)] == [
        "h:1"
    ] * 3
    assert PartitionMap.of_one_node("b", 3, "a", "h:1", revision=0).revision == 0


def test_the_newest_map_has_the_highest_revision() -> None:
    maps = [map_of(Assignment(), revision=revision) for revision in (2, 9, 4)]
    assert newest_map(maps) is maps[1]
    assert newest_map(iter(maps)) is maps[1]
    assert newest_map([]) is None


@pytest.mark.parametrize("opening", ["[", '{"nodes":'])
def test_a_document_nested_too_deep_is_not_a_map(opening: str) -> None:
    with pytest.raises(PartitionMapError, match="not a partition map"):
        PartitionMap.decode(opening * 200_000)
