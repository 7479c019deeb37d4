"""The partition cycle and its barriers, against a server that really loops over all partitions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.calls import calls_of
from tests.protocol.session.kit import Pair, chunk, end, start, stream, stream_reply, taken
from upr_protocol.ids import PartitionId
from upr_protocol.session import EndOfCycle, PartitionCycle, SessionState
from upr_protocol.session.barrier_queue import BarrierQueue
from upr_protocol.wire import Barrier, BarrierReply, CycleEnd, Go, PartitionStart

PARTITIONS: Final = 5

SLOTS: Final = PARTITIONS + 1
"""What the loop looks at: partition numbers go further than those that are streamed."""

Event = tuple[str, object]


class Loop:
    """Seed 002, word for word: it looks at one partition after the other, whether or not there is
    anything, counts its cycles, and checks the barriers after each partition that it streamed or
    skipped.

    Attributes:
        told: What it said, in order.
    """

    def __init__(self) -> None:
        self.told: list[Event] = []
        self.cycles = 0
        self.partition = 0
        self.current: int | None = None
        self.mutated: set[int] = set()
        self.barriers: deque[tuple[int, int, str]] = deque()
        self._sent = False

    def mutate(self, partition: int) -> None:
        self.mutated.add(partition)

    def barrier(self, cookie: str) -> None:
        self.barriers.append((self.cycles, self.partition, cookie))

    def go_on(self) -> None:
        """Loops up to the next partition that has mutations, or until there is nothing to do."""
        while True:
            if not self.mutated and not self._sent and self.cycles > 0:
                while self.barriers:
                    self.told.append(("barrier", self.barriers.popleft()[2]))
                return
            if self.partition == SLOTS:
                self.partition = 0
                self.cycles += 1
                if self._sent or self.cycles == 1:
                    self.told.append(("completed", self.cycles))
                self._sent = False
            elif self.partition in self.mutated:
                self.mutated.remove(self.partition)
                self.current = self.partition
                self.told.append(("turn", self.partition))
                return
            else:
                self._leave_partition()

    def begin(self) -> None:
        self._sent = True

    def finish(self) -> None:
        self.current = None
        self._leave_partition()

    def _leave_partition(self) -> None:
        left_partition = self.partition
        self.partition += 1
        while self.barriers:
            cycle, partition, cookie = self.barriers[0]
            if (self.cycles, left_partition) < (cycle + 1, partition):
                break
            self.barriers.popleft()
            self.told.append(("barrier", cookie))


class Quick:
    """The cycle and the queue, driven as the server session drives them."""

    def __init__(self) -> None:
        self.told: list[Event] = []
        self.cycle = PartitionCycle()
        self.queue = BarrierQueue()

    @property
    def current(self) -> int | None:
        return self.cycle.current

    def mutate(self, partition: int) -> None:
        self.cycle.mark_ready(PartitionId(partition))

    def barrier(self, cookie: str) -> None:
        self.queue.add_barrier(cookie.encode(), self.cycle.barrier_position)

    def go_on(self) -> None:
        while True:
            turn = self.cycle.next_turn()
            if turn is None:
                self._tell(self.queue.take_all())
                return
            self._tell(self.queue.take_due(self.cycle.passed_position))
            if not isinstance(turn, EndOfCycle):
                self.told.append(("turn", turn))
                return
            self.told.append(("completed", turn.cycle))

    def begin(self) -> None:
        self.cycle.begin_snapshot()

    def finish(self) -> None:
        self.cycle.finish_turn()
        self._tell(self.queue.take_due(self.cycle.passed_position))

    def _tell(self, cookies: list[bytes]) -> None:
        self.told += [("barrier", cookie.decode()) for cookie in cookies]


# What happens: a number is a mutation of that partition.
DOINGS: Final = st.lists(
    st.one_of(
        st.integers(0, PARTITIONS - 1),
        st.sampled_from(["barrier", "go on", "send", "pass"]),
    ),
    max_size=60,
)


def _do(doing: int | str, loop: Loop | Quick, cookie: str = "") -> None:
    """Does what can be done: a turn that somebody has is sent or passed; otherwise both go on."""
    if isinstance(doing, int):
        loop.mutate(doing)
    elif doing == "barrier":
        loop.barrier(cookie)
    elif doing == "go on":
        if loop.current is None:
            loop.go_on()
    elif loop.current is not None:
        if doing == "send":
            loop.begin()
        loop.finish()


@settings(max_examples=600, deadline=None)
@given(DOINGS)
def test_the_cycle_takes_the_same_turns_as_a_naive_loop(doings: list[int | str]) -> None:
    loop, quick = Loop(), Quick()
    for index, doing in enumerate([*doings, *["send", "go on"] * 2 * PARTITIONS]):
        _do(doing, loop, f"barrier {index}")
        _do(doing, quick, f"barrier {index}")
        quick.cycle.check_invariants()
        assert quick.current == loop.current
    assert quick.told == loop.told
    assert not quick.queue
    assert quick.cycle.completed == loop.cycles


@settings(max_examples=600, deadline=None)
@given(DOINGS)
def test_a_barrier_comes_back_once_in_order_and_after_all_that_was_before_it(
    doings: list[int | str],
) -> None:
    """Stated without cycles and positions: mutations are numbered; a turn takes along those of its
    partition; a barrier that comes back finds every older one streamed."""
    quick = Quick()
    waiting_items: dict[int, list[int]] = {partition: [] for partition in range(PARTITIONS)}
    taken_along: list[int] = []
    unstreamed: set[int] = set()
    cookies_sent: list[str] = []
    before: dict[str, set[int]] = {}
    back: list[str] = []
    doings = [*doings, *["go on", "send"] * (2 * PARTITIONS + len(doings)), "go on"]
    for index, doing in enumerate(doings):
        told_before = len(quick.told)
        if isinstance(doing, int):
            quick.mutate(doing)
            waiting_items[doing].append(index)
            unstreamed.add(index)
        elif doing == "barrier":
            cookie = f"barrier {index}"
            quick.barrier(cookie)
            cookies_sent.append(cookie)
            before[cookie] = set(unstreamed)
        elif quick.current is None:
            if doing == "go on":
                quick.go_on()
                if quick.current is not None:
                    taken_along, waiting_items[quick.current] = waiting_items[quick.current], []
        elif doing in ("send", "pass"):
            unstreamed.difference_update(taken_along)
            quick.begin()
            quick.finish()
        for step, cookie_back in quick.told[told_before:]:
            if step == "barrier":
                back.append(str(cookie_back))
                assert not before[str(cookie_back)] & unstreamed
        if doing == "go on" and quick.current is None:
            assert back == cookies_sent  # nothing left to stream
    assert back == cookies_sent


def test_a_barrier_waits_for_the_partition_it_arrived_at_and_no_longer() -> None:
    """Arriving in cycle c at partition p, it is due at (c + 1, p), however busy the rest is."""
    for arrival in range(PARTITIONS):
        quick = Quick()
        for partition in range(PARTITIONS):
            quick.mutate(partition)
        turns = 0
        while True:
            quick.go_on()
            assert quick.current is not None
            quick.mutate(quick.current)
            if turns == arrival:
                quick.barrier("here")
            quick.begin()
            quick.finish()
            if ("barrier", "here") in quick.told:
                break
            turns += 1
        assert turns == arrival + PARTITIONS


def test_with_nothing_left_to_stream_a_barrier_comes_back_at_once() -> None:
    quick = Quick()
    quick.go_on()
    quick.barrier("a")
    quick.barrier("b")
    quick.go_on()
    assert quick.told == [("completed", 1), ("barrier", "a"), ("barrier", "b")]


def test_a_partition_that_leaves_gives_up_its_turn() -> None:
    cycle = PartitionCycle()
    for partition in (1, 2, 3):
        cycle.mark_ready(PartitionId(partition))
    assert cycle.next_turn() == 1
    cycle.mark_ready(PartitionId(1))
    cycle.remove(PartitionId(2))
    cycle.remove(PartitionId(1))
    assert cycle.current is None
    assert cycle.barrier_position == (0, 2)
    assert cycle.next_turn() == 3
    cycle.remove(PartitionId(2))
    assert cycle.current == 3


def test_each_turn_is_finished_before_the_next() -> None:
    cycle = PartitionCycle()
    with pytest.raises(AssertionError):
        cycle.finish_turn()
    with pytest.raises(AssertionError):
        cycle.begin_snapshot()
    cycle.mark_ready(PartitionId(1))
    cycle.next_turn()
    with pytest.raises(AssertionError):
        cycle.next_turn()


def test_a_cycle_in_which_nothing_was_sent_is_not_announced() -> None:
    quick = Quick()
    doings: list[int | str] = ["go on", 3, "go on", "pass", "go on", 1, "go on", "send", "go on"]
    for doing in doings:
        _do(doing, quick)
    assert quick.told == [("completed", 1), ("turn", 3), ("turn", 1), ("completed", 3)]


# In a whole session.


def test_the_session_cycles_over_the_partitions_that_are_ready() -> None:
    pair = Pair.in_state(SessionState.OPEN)
    messages: list[Any] = []
    for partition in (7, 2, 5):
        pair.accept(partition, 100 + partition)
        pair.server.mark_ready(PartitionId(partition))
    pair.client.send(Go())
    pair.client.send(Barrier(b"first"))
    pair.to_server()
    standing = dict.fromkeys((2, 5, 7), 0)
    rounds = 0
    while (turn := pair.server.next_partition()) is not None:
        opaque = pair.server.opaque_of(turn)
        start_seq = standing[turn]
        pair.server.send(start(turn, opaque, start_seq, start_seq + 1))
        pair.server.send(chunk(turn, opaque, start_seq, start_seq + 1))
        pair.server.send(end(turn, opaque, start_seq + 1))
        pair.server.end_turn()
        standing[turn] += 1
        if turn == 5 and rounds < 1:
            rounds += 1
            pair.server.mark_ready(PartitionId(2))
            pair.client_sends(Barrier(b"second"))
    for message in pair.to_client():
        if isinstance(message, CycleEnd):
            messages.append(message.cycle)
        elif isinstance(message, BarrierReply):
            messages.append((message.cookie, message.ends))
        elif isinstance(message, PartitionStart):
            messages.append(f"partition {message.partition}")
    assert messages == [
        "partition 2",
        "partition 5",
        "partition 7",
        1,
        # It arrived before partition 0 was looked at, and that was looked at again.
        (b"first", ((7, 1), (2, 1), (5, 1))),
        "partition 2",
        # It arrived behind partition 5, and that was skipped.
        (b"second", ((7, 1), (2, 2), (5, 1))),
        2,
    ]


def _busy_pair(registered: int, ready: int) -> Pair:
    pair = Pair.in_state(SessionState.STREAMING)
    for partition in range(registered):
        pair.client_sends(stream(partition, partition + 1))
        pair.server_sends(stream_reply(partition, partition + 1))
    for partition in range(ready):
        pair.server.mark_ready(PartitionId(partition))
    return pair


def _some_turns(pair: Pair) -> Callable[[], None]:
    def run() -> None:
        for turn_count in range(3):
            partition = pair.server.next_partition()
            assert partition is not None
            opaque = pair.server.opaque_of(partition)
            pair.server.send(start(partition, opaque, 0, 1))
            pair.server.send(chunk(partition, opaque, 0, 1))
            pair.server.send(end(partition, opaque, 1))
            pair.server.end_turn()
            if turn_count == 0:
                pair.server.mark_ready(partition)

    return run


def test_a_turn_costs_the_same_however_many_partitions_are_registered() -> None:
    few, many = _busy_pair(3, 3), _busy_pair(1000, 3)
    assert calls_of(_some_turns(few)) == calls_of(_some_turns(many))
    idle_few, idle_many = _busy_pair(3, 0), _busy_pair(1000, 0)
    cost = calls_of(idle_few.server.next_partition)
    assert cost == calls_of(idle_many.server.next_partition) < 40


def test_a_turn_costs_little_more_however_many_partitions_are_ready() -> None:
    few, many = _busy_pair(3, 3), _busy_pair(1000, 1000)
    assert calls_of(_some_turns(many)) <= calls_of(_some_turns(few)) + 60


def test_no_partition_has_a_turn_before_the_client_sends_go() -> None:
    pair = Pair.in_state(SessionState.OPEN)
    pair.accept(3, 9)
    pair.server.mark_ready(PartitionId(3))
    assert pair.server.next_partition() is None
    pair.client_sends(Go())
    assert pair.server.next_partition() == 3
    assert taken(pair.server) == b""


def test_the_first_cycle_is_announced_even_if_it_was_empty() -> None:
    pair = Pair.in_state(SessionState.OPEN)
    pair.client_sends(Go())
    assert pair.server.next_partition() is None
    assert pair.to_client() == [CycleEnd(1)]
    assert pair.server.next_partition() is None
    assert pair.to_client() == []
