"""Which copy has everything, against a naive model; and the planned maps."""

from __future__ import annotations

import itertools

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.effort import effort
from upr_protocol.client.operator.plan import (
    COMMAND_REVISIONS,
    FAILOVER_REVISIONS,
    FAILOVER_STEP,
    PartitionCopy,
    acknowledging_replicas,
    active_assignment,
    fenced_assignment,
    fences_needed,
    first_failover_revision,
    first_revision,
    handover_assignment,
    last_active_of,
    most_complete,
    own_failover_revision,
    partitions_text,
    ranges_text,
)
from upr_protocol.failover import FailoverLog, Position, RollBack, Start, decide_start
from upr_protocol.ids import HistoryId, PartitionId, SeqNo
from upr_protocol.partition_map import Assignment, HistoryPoint, PartitionMap, PartitionMapError


def copy(name: str, high_seq: int, *log: tuple[int, int]) -> PartitionCopy:
    return PartitionCopy(name, FailoverLog.of_pairs(log), SeqNo(high_seq))


def names(copies: list[PartitionCopy]) -> list[str]:
    return [copy.node for copy in copies]


def test_the_most_complete_copy_has_what_any_has() -> None:
    old_copy, older = copy("old", 95, (1, 0)), copy("older", 80, (1, 0))
    new_copy = copy("new", 90, (2, 90), (1, 0))
    assert names(most_complete([older, old_copy])) == ["old"]
    assert names(most_complete([old_copy, new_copy])) == ["new"]
    assert names(most_complete([new_copy, attrs.evolve(new_copy, node="equal"), old_copy])) == [
        "new",
        "equal",
    ]
    assert names(most_complete([copy("empty", 0), old_copy])) == ["old"]
    assert names(most_complete([copy("empty", 0), copy("equal", 0)])) == ["empty", "equal"]
    assert most_complete([]) == []
    # It has the newer log, but nothing yet of the newer history.
    behind = copy("behind", 50, (2, 90), (1, 0))
    assert names(most_complete([behind, old_copy])) == ["old"]
    assert names(most_complete([behind, older, new_copy])) == ["new"]
    # Two histories that diverged.
    assert most_complete([new_copy, copy("other", 99, (3, 80), (1, 0))]) == []


def test_a_replica_that_is_refilled_lacks_what_it_once_acknowledged() -> None:
    """Found by the simulation: `b` began a history at 27; `c`, a replica, rolled back to 0."""
    before = FailoverLog.of_pairs([(1, 0)])
    floor = PartitionCopy("b", before, SeqNo(27)).point
    assert floor == HistoryPoint(HistoryId(1), SeqNo(27))
    for high_seq, has_everything in ((0, False), (26, False), (27, True), (40, True)):
        assert PartitionCopy("c", before, SeqNo(high_seq)).contains(floor) is has_everything
    since = before.with_branch(HistoryId(2), SeqNo(27))
    for high_seq, has_everything in ((0, False), (26, False), (27, True), (40, True)):
        assert PartitionCopy("c", since, SeqNo(high_seq)).contains(floor) is has_everything
    # A copy that left this history below the floor lacks part of it, however far it is now.
    elsewhere = before.with_branch(HistoryId(3), SeqNo(20))
    assert not PartitionCopy("c", elsewhere, SeqNo(40)).contains(floor)
    assert not PartitionCopy("c", FailoverLog.of_pairs([(4, 0)]), SeqNo(40)).contains(floor)
    beginning = PartitionCopy("b", before, SeqNo(0)).point
    for point in (None, beginning):
        assert PartitionCopy("c", FailoverLog(), SeqNo(0)).contains(point)


class Node:
    """A naive copy: a list of changes, each of which has a number of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.log = FailoverLog()
        self.changes: list[int] = []

    @property
    def high_seq(self) -> SeqNo:
        return SeqNo(len(self.changes))

    def connect(self, active: Node, data: st.DataObject) -> bool:
        """Follows `active`: rolls back as far as that says or further, and takes over its log."""
        decision = decide_start(
            active.log, active.high_seq, SeqNo(0), Position(self.log, self.high_seq, self.high_seq)
        )
        if isinstance(decision, RollBack):
            end = SeqNo(data.draw(st.sampled_from([0, int(decision.ceiling)]), "back to"))
            del self.changes[end:]
            self.log = self.log.up_to(end)
            return self.connect(active, data)
        if not isinstance(decision, Start):
            return False
        self.log = active.log
        assert self.changes == active.changes[: len(self.changes)]
        return True


@given(st.data())
@settings(max_examples=effort(100, 6000))
def test_a_failover_keeps_what_was_acknowledged(data: st.DataObject) -> None:
    """Random writes, replicas that connect and lag at random, and several failovers."""
    size = data.draw(st.integers(2, 4), "nodes")
    nodes = [Node(f"n{index}") for index in range(size)]
    needed = data.draw(st.integers(1, size - 1), "acknowledged")
    assignment = Assignment(active="n0", replicas={node.name: "" for node in nodes[1:]})
    node_of = {node.name: node for node in nodes}
    node_of["n0"].log = FailoverLog.of_pairs([(1, 0)])
    history, change = 1, 0
    acknowledged: list[int] = []
    for _ in range(data.draw(st.integers(1, 5), "failovers")):
        active = node_of[assignment.active]
        connected: dict[str, Node] = {}
        for _ in range(data.draw(st.integers(0, 6), "steps")):
            action = data.draw(st.sampled_from(["write", "connect", "take", "acknowledge"]))
            if action == "write":
                for _ in range(data.draw(st.integers(1, 3))):
                    change += 1
                    active.changes.append(change)
            elif action == "connect":
                name = data.draw(st.sampled_from(sorted(assignment.replicas)))
                if node_of[name].connect(active, data):
                    connected[name] = node_of[name]
            elif action == "take" and connected:
                node = connected[data.draw(st.sampled_from(sorted(connected)))]
                node.changes = active.changes[: node.high_seq + data.draw(st.integers(0, 4))]
            elif action == "acknowledge":
                # At least `needed` replicas report it, in the active's history.
                ends = sorted((node.high_seq for node in connected.values()), reverse=True)
                if len(ends) >= needed:
                    acknowledged = max(acknowledged, active.changes[: ends[needed - 1]], key=len)
        fenced_names = data.draw(
            st.lists(
                st.sampled_from(acknowledging_replicas(assignment)),
                min_size=fences_needed(assignment, needed),
                unique=True,
            ),
            "fenced",
        )
        fenced = fenced_assignment(assignment)
        assert acknowledging_replicas(fenced) == acknowledging_replicas(assignment)
        copies = [
            PartitionCopy(name, node_of[name].log, node_of[name].high_seq) for name in fenced_names
        ]
        best = [copy for copy in most_complete(copies) if copy.contains(assignment.promotion_point)]
        for candidate in best:
            changes = node_of[candidate.node].changes
            assert changes[: len(acknowledged)] == acknowledged, candidate.node
        if not best:
            break
        active_node = data.draw(st.sampled_from(best))
        promoted = node_of[active_node.node]
        history += 1
        promoted.log = promoted.log.with_branch(HistoryId(history), promoted.high_seq)
        assignment = active_assignment(fenced, promoted.name, promotion_point=active_node.point)
        assert sorted(assignment.holders()) == sorted(node_of)


@given(st.data())
@settings(max_examples=effort(80, 4000))
def test_a_copy_continues_past_a_point_if_it_has_all_before_it_and_more(
    data: st.DataObject,
) -> None:
    """Each node copies a prefix of another, and may write more: at the end of the other's history,
    or in a new one."""
    nodes = [Node("n0")]
    nodes[0].log = FailoverLog.of_pairs([(1, 0)])
    ends, change = {1: 0}, 0
    for index in range(1, data.draw(st.integers(2, 8), "nodes")):
        source = data.draw(st.sampled_from(nodes))
        node = Node(f"n{index}")
        node.changes = source.changes[: data.draw(st.integers(0, len(source.changes)), "has")]
        node.log = source.log.up_to(node.high_seq)
        if data.draw(st.booleans(), "in a new history"):
            node.log = node.log.with_branch(HistoryId(index + 1), node.high_seq)
            ends[index + 1] = node.high_seq
        if ends[node.log.current] == node.high_seq:
            for _ in range(data.draw(st.integers(0, 3), "writes")):
                change += 1
                node.changes.append(change)
            ends[node.log.current] = node.high_seq
        nodes.append(node)
    for first, second in itertools.product(nodes, nodes):
        point = PartitionCopy(first.name, first.log, first.high_seq).point
        shares = any(entry.history_id == first.log.current for entry in second.log)
        has_more = (
            first.high_seq < second.high_seq and second.changes[: first.high_seq] == first.changes
        )
        copy = PartitionCopy(second.name, second.log, second.high_seq)
        assert copy.continues_past(point) is (shares and has_more)


@st.composite
def assignments(draw: st.DrawFn) -> Assignment:
    names = draw(st.permutations("abcde"))
    count = draw(st.integers(1, 5))
    replicas = {
        name: draw(st.sampled_from(["", *names[: index + 1]]))
        for index, name in enumerate(names[1:count])
    }
    active = Assignment(active=names[0], replicas=replicas)
    return draw(st.sampled_from([active, handover_assignment(active), fenced_assignment(active)]))


@pytest.mark.parametrize("size", range(1, 9))
def test_of_two_failovers_that_reach_different_nodes_one_can_acknowledge(size: int) -> None:
    """Each has fenced enough replicas. A node follows one of the two new actives only, and each of
    these needs as many others as publishers wait for."""
    assignment = Assignment("a", {f"r{number}": "" for number in range(size)})
    for acknowledged in range(1, size + 1):
        both_can_fence = 2 * fences_needed(assignment, acknowledged) <= size
        both_can_acknowledge = 2 * (1 + acknowledged) <= len(assignment.holders())
        assert not (both_can_fence and both_can_acknowledge)


NODES = dict.fromkeys("abcde", "h:1")


@given(assignments(), st.data())
def test_every_planned_map_is_valid(before: Assignment, data: st.DataObject) -> None:
    base = PartitionMap(bucket="b", revision=5, nodes=NODES, partitions=(before,))
    base.check()
    to = data.draw(st.sampled_from(before.holders()))
    fenced, handover = fenced_assignment(before), handover_assignment(before)
    promoted = active_assignment(before, to)
    for planned in (fenced, handover, promoted):
        revised = base.with_assignments({PartitionId(0): planned})
        assert PartitionMap.decode(revised.encode()) == revised
        assert sorted(planned.holders()) == sorted(before.holders())
    assert fenced_assignment(fenced) == fenced
    assert last_active_of(fenced) == last_active_of(handover) == last_active_of(before)
    # No replica accepts anything more from the last active, or from a node that is not fenced.
    assert all(fenced.source_of(name) == "" for name in acknowledging_replicas(before))
    assert last_active_of(before) not in fenced.replicas.values()
    assert set(promoted.replicas) == set(before.holders()) - {to}


def test_a_command_takes_its_revisions_from_a_block_of_its_own() -> None:
    assert [first_revision(newest) for newest in (0, 1, 15, 16, 17)] == [16, 16, 16, 32, 32]
    assert COMMAND_REVISIONS == 16


def test_a_failover_outranks_other_commands() -> None:
    """Also those that have reached only nodes which it does not reach."""
    step, block = FAILOVER_STEP, FAILOVER_REVISIONS
    revisions = [first_failover_revision(newest) for newest in (0, block - 1, block, block + 17)]
    assert revisions == [block, block, 2 * block, 2 * block]
    own_revisions = {own_failover_revision(block, str(number)) for number in range(5000)}
    assert own_revisions == set(range(block + step, 2 * block - step, step))
    # Other commands have a whole step before the next failover.
    assert first_failover_revision(max(own_revisions) + step) == 2 * block


def test_partitions_are_written_as_ranges() -> None:
    assert ranges_text([7, 0, 1, 2, 3]) == "0-3, 7"
    assert partitions_text([5]) == "partition 5"
    assert partitions_text([5, 6]) == "partitions 5-6"


def test_only_replicas_that_follow_the_active_directly_acknowledge() -> None:
    assignment = Assignment("a", {"b": "", "c": "b", "d": "a"})
    assert acknowledging_replicas(assignment) == ["b", "d"]
    assert [fences_needed(assignment, n) for n in (1, 2, 3, 4)] == [2, 1, 0, 0]


def test_a_lost_active_is_a_replica_of_a_partition_without_an_active() -> None:
    assignment = Assignment(replicas={"a": "", "b": ""}, lost_active="a")
    base = PartitionMap(bucket="b", revision=5, nodes=NODES, partitions=(assignment,))
    base.check()
    for wrong in (
        Assignment(active="b", replicas={"a": ""}, lost_active="a"),
        Assignment(handing_over="b", replicas={"a": ""}, lost_active="a"),
        Assignment(replicas={"b": ""}, lost_active="a"),
    ):
        with pytest.raises(PartitionMapError, match="a node can be lost only as a replica"):
            base.with_assignments({PartitionId(0): wrong})


def test_every_later_map_remembers_when_a_failover_chose_the_active() -> None:
    fenced = fenced_assignment(Assignment("a", {"b": "", "c": ""}))
    assignment = active_assignment(fenced, "b", failover_revision=33)
    assert (assignment.active, assignment.failover_revision) == ("b", 33)
    for later in (
        fenced_assignment(assignment),
        handover_assignment(assignment),
        active_assignment(assignment, "c"),
    ):
        assert later.failover_revision == 33
