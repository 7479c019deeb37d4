"""Which copy has everything, against a naive model; and the maps that are made."""

from __future__ import annotations

import itertools

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.effort import effort
from upr_protocol.client.operator.plan import (
    RUN_REVISIONS,
    Copy,
    fenced,
    fences_needed,
    first_revision,
    furthest,
    handed_over,
    holders_of,
    led_by,
    master_of,
    partitions_text,
    ranges_text,
    revised,
    witnesses_of,
)
from upr_protocol.failover import FailoverLog, Position, RollBack, Start, decide_start
from upr_protocol.ids import HistoryId, PartitionId, SeqNo
from upr_protocol.partition_map import Assignment, HistoryPoint, PartitionMap, PartitionMapError


def copy(name: str, high: int, *pairs: tuple[int, int]) -> Copy:
    return Copy(name, FailoverLog.of(pairs), SeqNo(high))


def nodes(copies: list[Copy]) -> list[str]:
    return [one.node for one in copies]


def test_which_is_furthest() -> None:
    old, older = copy("old", 95, (1, 0)), copy("older", 80, (1, 0))
    new = copy("new", 90, (2, 90), (1, 0))
    assert nodes(furthest([older, old])) == ["old"]
    assert nodes(furthest([old, new])) == ["new"]
    assert nodes(furthest([new, attrs.evolve(new, node="too"), old])) == ["new", "too"]
    assert nodes(furthest([copy("empty", 0), old])) == ["old"]
    assert nodes(furthest([copy("empty", 0), copy("too", 0)])) == ["empty", "too"]
    assert furthest([]) == []
    # It has the newer log, and not yet any of the newer history.
    behind = copy("behind", 50, (2, 90), (1, 0))
    assert nodes(furthest([behind, old])) == ["old"]
    assert nodes(furthest([behind, older, new])) == ["new"]
    # Two went different ways.
    assert furthest([new, copy("other", 99, (3, 80), (1, 0))]) == []


def test_who_is_being_filled_anew_has_given_up_what_it_acknowledged() -> None:
    """Found by the simulation: at 27 `b` began a history; `c` went back to nothing, and follows."""
    before = FailoverLog.of([(1, 0)])
    floor = Copy("b", before, SeqNo(27)).place
    assert floor == HistoryPoint(HistoryId(1), SeqNo(27))
    for high, is_whole in ((0, False), (26, False), (27, True), (40, True)):
        assert Copy("c", before, SeqNo(high)).reaches(floor) is is_whole
    since = before.branch(HistoryId(2), SeqNo(27))
    for high, is_whole in ((0, False), (26, False), (27, True), (40, True)):
        assert Copy("c", since, SeqNo(high)).reaches(floor) is is_whole
    # Who has left that history below has not all of it, however far it is now.
    elsewhere = before.branch(HistoryId(3), SeqNo(20))
    assert not Copy("c", elsewhere, SeqNo(40)).reaches(floor)
    assert not Copy("c", FailoverLog.of([(4, 0)]), SeqNo(40)).reaches(floor)
    assert Copy("c", FailoverLog(), SeqNo(0)).reaches(None)
    assert Copy("c", FailoverLog(), SeqNo(0)).reaches(Copy("b", before, SeqNo(0)).place)


class Node:
    """A naive copy: what it has is a list, in which a change is named by who gave it when."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.log = FailoverLog()
        self.changes: list[int] = []

    @property
    def high(self) -> SeqNo:
        return SeqNo(len(self.changes))

    def connect(self, master: Node, data: st.DataObject) -> bool:
        """Follows: goes back as it is told, or further, as its snapshots end, and keeps the log."""
        decision = decide_start(
            master.log, master.high, SeqNo(0), Position(self.log, self.high, self.high)
        )
        if isinstance(decision, RollBack):
            end = SeqNo(data.draw(st.sampled_from([0, int(decision.ceiling)]), "back to"))
            del self.changes[end:]
            self.log = self.log.until(end)
            return self.connect(master, data)
        if not isinstance(decision, Start):
            return False
        self.log = master.log
        assert self.changes == master.changes[: len(self.changes)]
        return True


@given(st.data())
@settings(max_examples=effort(300, 6000))
def test_what_was_acknowledged_is_kept(data: st.DataObject) -> None:
    """Random writes, replicas that connect and lag as they like, and one failover after another."""
    size = data.draw(st.integers(2, 4), "nodes")
    everyone = [Node(f"n{number}") for number in range(size)]
    needed = data.draw(st.integers(1, size - 1), "acknowledged")
    assignment = Assignment(active="n0", replicas={node.name: "" for node in everyone[1:]})
    of = {node.name: node for node in everyone}
    of["n0"].log = FailoverLog.of([(1, 0)])
    history, change = 1, 0
    acknowledged: list[int] = []
    for _ in range(data.draw(st.integers(1, 5), "failovers")):
        master = of[assignment.active]
        connected: dict[str, Node] = {}
        for _ in range(data.draw(st.integers(0, 6), "steps")):
            action = data.draw(st.sampled_from(["write", "connect", "take", "acknowledge"]))
            if action == "write":
                for _ in range(data.draw(st.integers(1, 3))):
                    change += 1
                    master.changes.append(change)
            elif action == "connect":
                name = data.draw(st.sampled_from(sorted(assignment.replicas)))
                if of[name].connect(master, data):
                    connected[name] = of[name]
            elif action == "take" and connected:
                node = connected[data.draw(st.sampled_from(sorted(connected)))]
                node.changes = master.changes[: node.high + data.draw(st.integers(0, 4))]
            elif action == "acknowledge":
                # So many replicas report it, in the history of the master.
                ends = sorted((node.high for node in connected.values()), reverse=True)
                if len(ends) >= needed:
                    acknowledged = max(acknowledged, master.changes[: ends[needed - 1]], key=len)
        there = data.draw(
            st.lists(
                st.sampled_from(witnesses_of(assignment)),
                min_size=fences_needed(assignment, needed),
                unique=True,
            ),
            "fenced",
        )
        fence = fenced(assignment)
        assert witnesses_of(fence) == witnesses_of(assignment)
        copies = [Copy(name, of[name].log, of[name].high) for name in there]
        best = [one for one in furthest(copies) if one.reaches(assignment.floor)]
        for one in best:
            kept = of[one.node].changes
            assert kept[: len(acknowledged)] == acknowledged, (one.node, kept, acknowledged)
        if not best:
            break
        copied = data.draw(st.sampled_from(best))
        chosen = of[copied.node]
        history += 1
        chosen.log = chosen.log.branch(HistoryId(history), chosen.high)
        assignment = led_by(fence, chosen.name, floor=copied.place)
        assert sorted(holders_of(assignment)) == sorted(of)


@given(st.data())
@settings(max_examples=effort(200, 4000))
def test_who_goes_on_from_a_place_has_everything_up_to_it_and_more(data: st.DataObject) -> None:
    """Each node copies the front of another, and may write on: at the end of that one's history, or
    in a new one."""
    nodes = [Node("n0")]
    nodes[0].log = FailoverLog.of([(1, 0)])
    ends, change = {1: 0}, 0
    for number in range(1, data.draw(st.integers(2, 8), "nodes")):
        source = data.draw(st.sampled_from(nodes))
        node = Node(f"n{number}")
        node.changes = source.changes[: data.draw(st.integers(0, len(source.changes)), "has")]
        node.log = source.log.until(node.high)
        if data.draw(st.booleans(), "in a new history"):
            node.log = node.log.branch(HistoryId(number + 1), node.high)
            ends[number + 1] = node.high
        if ends[node.log.current] == node.high:
            for _ in range(data.draw(st.integers(0, 3), "writes")):
                change += 1
                node.changes.append(change)
            ends[node.log.current] = node.high
        nodes.append(node)
    for one, other in itertools.product(nodes, nodes):
        there = Copy(one.name, one.log, one.high).place
        knows = any(entry.history_id == one.log.current for entry in other.log)
        has_more = one.high < other.high and other.changes[: one.high] == one.changes
        found = Copy(other.name, other.log, other.high).goes_on_from(there)
        assert found is (knows and has_more)


@st.composite
def owned(draw: st.DrawFn) -> Assignment:
    names = draw(st.permutations("abcde"))
    count = draw(st.integers(1, 5))
    replicas = {
        name: draw(st.sampled_from(["", *names[: at + 1]]))
        for at, name in enumerate(names[1:count])
    }
    one = Assignment(active=names[0], replicas=replicas)
    return draw(st.sampled_from([one, handed_over(one), fenced(one)]))


NODES = dict.fromkeys("abcde", "h:1")


@given(owned(), st.data())
def test_every_map_that_is_made_can_be(assignment: Assignment, data: st.DataObject) -> None:
    base = PartitionMap(bucket="b", revision=5, nodes=NODES, partitions=(assignment,))
    base.check()
    to = data.draw(st.sampled_from(holders_of(assignment)))
    for changed in (fenced(assignment), handed_over(assignment), led_by(assignment, to)):
        found = revised(base, 6, {PartitionId(0): changed})
        assert PartitionMap.decode(found.encode()) == found
        assert sorted(holders_of(changed)) == sorted(holders_of(assignment))
    assert fenced(fenced(assignment)) == fenced(assignment)
    assert (
        master_of(fenced(assignment)) == master_of(handed_over(assignment)) == master_of(assignment)
    )
    old = master_of(assignment)
    stopped = fenced(assignment)
    # Nobody takes anything any more from the one that was active, or from who is not fenced.
    assert all(stopped.source_of(name) == "" for name in witnesses_of(assignment))
    assert old not in stopped.replicas.values()
    assert set(led_by(assignment, to).replicas) == set(holders_of(assignment)) - {to}


def test_revisions_and_sentences() -> None:
    assert [first_revision(one) for one in (0, 1, 15, 16, 17)] == [16, 16, 16, 32, 32]
    assert RUN_REVISIONS == 16
    assert ranges_text([7, 0, 1, 2, 3]) == "0-3, 7"
    assert partitions_text([5]) == "partition 5"
    assert partitions_text([5, 6]) == "partitions 5-6"
    assignment = Assignment("a", {"b": "", "c": "b", "d": "a"})
    assert witnesses_of(assignment) == ["b", "d"]
    assert [fences_needed(assignment, n) for n in (1, 2, 3, 4)] == [2, 1, 0, 0]


def test_who_was_lost() -> None:
    lost = Assignment(replicas={"a": "", "b": ""}, lost="a")
    base = PartitionMap(bucket="b", revision=5, nodes=NODES, partitions=(lost,))
    base.check()
    for wrong in (
        Assignment(active="b", replicas={"a": ""}, lost="a"),
        Assignment(handing_over="b", replicas={"a": ""}, lost="a"),
        Assignment(replicas={"b": ""}, lost="a"),
    ):
        with pytest.raises(PartitionMapError, match="who was lost is a replica"):
            revised(base, 6, {PartitionId(0): wrong})


def test_who_was_chosen_is_remembered_by_every_map_that_follows() -> None:
    assignment = led_by(fenced(Assignment("a", {"b": "", "c": ""})), "b", chosen=33)
    assert (assignment.active, assignment.chosen) == ("b", 33)
    assert (
        fenced(assignment).chosen
        == handed_over(assignment).chosen
        == led_by(assignment, "c").chosen
        == 33
    )
