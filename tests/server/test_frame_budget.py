"""The memory budget for frames that have not come completely."""

from __future__ import annotations

from typing import Final

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.server.connected_peer import make_server
from upr_server.net.frame_budget import (
    FRAME_BYTES_PER_S_MIN,
    FRAME_TIMEOUT_S,
    SHORT_BYTES_PER_S_MIN,
    STEP_BYTES,
    FrameBudget,
    UnfinishedFrame,
)

FIRST_ADDRESS: Final = "192.0.2.1"
SECOND_ADDRESS: Final = "192.0.2.2"
MIB: Final = 1024 * 1024


class _Frames:
    """A budget, and unfinished frames of connections.

    Attributes:
        budget: The budget.
        dropped: Why each frame was dropped, by its name.
        next_drop: Set when a frame has been dropped.
    """

    def __init__(self, limit: int) -> None:
        self.budget = FrameBudget(limit)
        self.dropped: dict[str, str] = {}
        self.next_drop = trio.Event()

    def begin(
        self, name: str, nbytes: int, now: float = 0.0, address: str = FIRST_ADDRESS
    ) -> UnfinishedFrame:

        def drop(reason: str) -> None:
            self.dropped[name] = reason
            self.next_drop.set()

        frame = UnfinishedFrame(self.budget, address, drop)
        frame.set_held_bytes(nbytes, now, is_new=True)
        return frame

    def sweep(self, now: float) -> None:
        for _ in self.budget.sweep(now):
            self.budget.check_invariants()

    def progress(self, frame: UnfinishedFrame, count: int, now: float) -> None:
        frame.note_read(count, now)
        frame.set_held_bytes(frame.nbytes + count, now, is_new=False)


async def test_the_addresses_of_an_ipv6_network_have_one_share() -> None:
    """One network has more addresses than a server has connections."""
    connections = make_server().connections
    peers = (
        "[2001:db8::1]:9",
        "[2001:db8::2]:9",
        "[2001:db8:0:1::1]:9",
        f"{FIRST_ADDRESS}:9",
        f"{FIRST_ADDRESS}:10",
    )
    first, same, third, of_ipv4, same_of_ipv4 = (
        connections.new_connection(trio.testing.memory_stream_pair()[0], peer)._frame.address
        for peer in peers
    )
    assert first == same
    assert of_ipv4 == same_of_ipv4
    assert len({first, third, of_ipv4}) == 3


def test_many_late_frames_are_dropped_in_several_steps() -> None:
    frames = _Frames(100 * MIB)
    for number in range(8):
        frames.begin(f"{number}", MIB)
    finished = frames.begin("finished", MIB)
    steps = frames.budget.sweep(FRAME_TIMEOUT_S + 1)
    next(steps)
    assert len(frames.dropped) == STEP_BYTES // MIB
    finished.release()
    assert list(steps) == [None]
    assert frames.dropped.keys() == {f"{number}" for number in range(8)}
    assert frames.budget.used_bytes == 0


def test_the_budget_is_the_sum_of_the_bytes_of_unfinished_frames() -> None:
    frames = _Frames(100)
    first = frames.begin("first", 60)
    second = frames.begin("second", 20)
    frames.progress(first, 10, 1.0)
    assert frames.budget.used_bytes == 90
    first.set_held_bytes(5, 2.0, is_new=True)
    assert frames.budget.used_bytes == 25
    second.release()
    second.release()
    assert frames.budget.used_bytes == 5


def test_a_frame_that_stops_is_dropped_after_the_timeout_however_short_it_is() -> None:
    frames = _Frames(100)
    frames.begin("header", 8)
    frames.sweep(FRAME_TIMEOUT_S)
    assert not frames.dropped
    frames.sweep(FRAME_TIMEOUT_S + 0.1)
    assert frames.dropped.keys() == {"header"}
    assert "8 bytes" in frames.dropped["header"]
    assert (frames.budget.used_bytes, frames.budget.dropped_count) == (0, 1)


def test_a_frame_below_the_slowest_rate_is_dropped() -> None:
    frames = _Frames(100)
    trickle = frames.begin("trickle", 1)
    for second in range(5, 35, 5):
        frames.sweep(second)
        frames.progress(trickle, 1, second)
    frames.sweep(35)
    assert frames.dropped.keys() == {"trickle"}


def test_a_frame_that_keeps_the_slowest_rate_is_never_dropped() -> None:
    frames = _Frames(1 << 30)
    slow = frames.begin("slow", 1)
    for second in range(1, 1000):
        frames.progress(slow, FRAME_BYTES_PER_S_MIN, second)
        frames.sweep(second)
    assert not frames.dropped


def test_bytes_above_the_slowest_rate_give_no_time_for_a_pause() -> None:
    frames = _Frames(1 << 30)
    burst = frames.begin("burst", 1)
    frames.progress(burst, 30_000_000, 0.1)
    frames.sweep(FRAME_TIMEOUT_S + 0.2)
    assert frames.dropped.keys() == {"burst"}


def test_time_in_which_the_server_does_not_read_does_not_count() -> None:
    frames = _Frames(100)
    unread = frames.begin("unread", 8)
    unread.note_read(8, 1.0)
    frames.sweep(1000.0)
    unread.set_held_bytes(16, 1000.0, is_new=False)
    frames.sweep(1000.0 + FRAME_TIMEOUT_S - 1.1)
    assert not frames.dropped


def test_time_in_which_a_read_waits_for_its_turn_does_not_count() -> None:
    frames = _Frames(100)
    waiting_frame = frames.begin("waiting", 8)
    waiting_frame.stop_waiting(1.0)
    frames.sweep(1000.0)
    assert not frames.dropped
    assert waiting_frame.lag_s(1000.0) == 1.0
    waiting_frame.note_read(8, 1000.0)
    assert waiting_frame.lag_s(1000.0) < 1.0


def test_the_next_frame_begins_without_the_lag_of_the_last_one() -> None:
    frames = _Frames(100)
    frame = frames.begin("frame", 8)
    frame.note_read(8, 29.0)
    frame.set_held_bytes(8, 29.0, is_new=True)
    frames.sweep(50.0)
    assert not frames.dropped


def test_while_memory_is_short_the_frames_with_the_most_lag_are_dropped() -> None:
    frames = _Frames(100)
    frames.begin("stopped first", 40, 0.0)
    frames.begin("stopped later", 40, 1.0)
    busy = frames.begin("busy", 10, 2.0)
    frames.sweep(3.0)
    assert not frames.dropped
    frames.progress(busy, 20, 3.0)
    assert frames.budget.is_short
    frames.sweep(3.0)
    assert frames.dropped.keys() == {"stopped first"}


def test_while_memory_is_short_a_frame_must_come_at_a_higher_rate() -> None:
    """The rate of the first frame would be enough while memory is not short."""
    frames = _Frames(4 * MIB)
    trickle = frames.begin("trickle", 2, 0.0)
    good = frames.begin("good", 4 * MIB, 0.0)
    for step in range(1, 7):
        frames.progress(trickle, FRAME_BYTES_PER_S_MIN // 10 + 1, step * 0.1)
        frames.progress(good, SHORT_BYTES_PER_S_MIN // 10 + 1, step * 0.1)
        frames.sweep(step * 0.1)
        assert not frames.dropped or step == 6
    assert frames.dropped.keys() == {"trickle"}
    assert frames.budget.is_short


def test_far_above_the_limit_the_frame_that_exceeds_its_share_most_is_dropped() -> None:
    frames = _Frames(100)
    frames.begin("small", 20, address=FIRST_ADDRESS)
    frames.begin("large", 80, address=FIRST_ADDRESS)
    frames.begin("alone", 60, address=SECOND_ADDRESS)
    frames.sweep(0.0)
    assert frames.dropped.keys() == {"large"}
    assert "short of memory" in frames.dropped["large"]


def test_addresses_share_equally_and_then_their_connections() -> None:
    frames = _Frames(120)
    many = [frames.begin(f"{index}", 1, address=FIRST_ADDRESS) for index in range(6)]
    alone = frames.begin("alone", 1, address=SECOND_ADDRESS)
    assert [frames.budget.share(frame) for frame in many] == [10] * 6
    assert frames.budget.share(alone) == 60


async def test_connections_above_their_share_wait_and_the_first_continues(
    nursery: trio.Nursery,
) -> None:
    frames = _Frames(100)
    first = frames.begin("first", 70)
    second = frames.begin("second", 60)
    small = frames.begin("small", 10)
    continued: list[str] = []

    async def wait(name: str, frame: UnfinishedFrame) -> None:
        await frame.wait_for_turn()
        continued.append(name)

    for name, frame in (("first", first), ("second", second), ("small", small)):
        nursery.start_soon(wait, name, frame)
    await trio.testing.wait_all_tasks_blocked()
    assert sorted(continued) == ["first", "small"]
    first.set_held_bytes(0, 1.0, is_new=True)
    await trio.testing.wait_all_tasks_blocked()
    assert continued[2:] == ["second"]


async def test_time_in_which_a_frame_waits_for_memory_does_not_count(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    frames = _Frames(100)
    first = frames.begin("first", 70, trio.current_time())
    second = frames.begin("second", 60, trio.current_time())
    nursery.start_soon(second.wait_for_turn)
    await trio.sleep(100)
    assert second.lag_s(trio.current_time()) == 0.0
    first.release()
    await trio.sleep(1)
    assert second.lag_s(trio.current_time()) == 1.0


async def test_a_frame_that_waits_does_not_wake_whenever_another_grows(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds may wait, and each read makes one grow."""
    frames, share_count = _Frames(100), 0
    first = frames.begin("first", 70)
    second = frames.begin("second", 60)
    share = frames.budget.share

    def counted_share(frame: UnfinishedFrame) -> int:
        nonlocal share_count
        share_count += 1
        return share(frame)

    monkeypatch.setattr(frames.budget, "share", counted_share)
    nursery.start_soon(second.wait_for_turn)
    await trio.testing.wait_all_tasks_blocked()
    for now in range(5):
        frames.progress(first, 1, now)
        await trio.testing.wait_all_tasks_blocked()
    assert share_count == 1
    first.release()
    await trio.testing.wait_all_tasks_blocked()
    assert not nursery.child_tasks


async def test_a_frame_that_is_dropped_stops_waiting(nursery: trio.Nursery) -> None:
    frames = _Frames(100)
    frames.begin("first", 200)
    second = frames.begin("second", 90)
    nursery.start_soon(second.wait_for_turn)
    await trio.testing.wait_all_tasks_blocked()
    second.release()
    await trio.testing.wait_all_tasks_blocked()
    assert not nursery.child_tasks


async def test_a_frame_whose_wait_is_cancelled_keeps_its_bytes(nursery: trio.Nursery) -> None:
    frames = _Frames(100)
    frames.begin("first", 70)
    second = frames.begin("second", 60)
    with pytest.raises(trio.TooSlowError), trio.fail_after(0):
        await second.wait_for_turn()
    assert frames.budget.used_bytes == 130
    second.release()
    assert frames.budget.used_bytes == 70


async def test_the_budget_is_checked_more_often_while_memory_is_short(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    frames = _Frames(100)
    nursery.start_soon(frames.budget.run)
    frames.begin("stopped", 60, trio.current_time())
    await trio.sleep(1)
    assert not frames.dropped
    frames.begin("another", 60, trio.current_time())
    await trio.sleep(0.2)
    assert frames.dropped.keys() == {"stopped"}
    await trio.sleep(FRAME_TIMEOUT_S + 10)
    assert frames.dropped.keys() == {"stopped", "another"}


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 80), st.booleans()), max_size=40))
def test_the_counts_agree_with_sums_over_all_frames(steps: list[tuple[int, int, bool]]) -> None:
    frames = _Frames(100)
    by_number = [
        frames.begin(f"{n}", 0, address=(FIRST_ADDRESS, SECOND_ADDRESS)[n % 2]) for n in range(5)
    ]
    for now, (frame, nbytes, is_new) in enumerate(steps):
        by_number[frame].note_read(1, now)
        by_number[frame].set_held_bytes(nbytes, now, is_new=is_new)
        frames.budget.check_invariants()
        frames.sweep(now)
        frames.budget.check_invariants()
        assert frames.budget.used_bytes <= 125


async def test_no_frame_is_read_while_others_are_dropped_in_steps(
    autojump_clock: MockClock,
) -> None:
    """Otherwise more could come in each turn than is dropped in it."""
    frames = _Frames(100 * MIB)
    # So many that the test has its turn before all of them are dropped.
    late_count = 10 * STEP_BYTES // MIB
    for number in range(late_count):
        frames.begin(f"{number}", MIB)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(frames.budget.run)
        await trio.sleep(FRAME_TIMEOUT_S + 1)
        assert not frames.budget.holds_up_frames
        good = frames.begin("good", MIB, trio.current_time())
        with trio.fail_after(0):
            await good.wait_for_turn()
        await frames.next_drop.wait()
        assert 0 < len(frames.dropped) < late_count
        assert frames.budget.holds_up_frames
        await good.wait_for_turn()
        assert len(frames.dropped) == late_count
        assert not frames.budget.holds_up_frames
        nursery.cancel_scope.cancel()
