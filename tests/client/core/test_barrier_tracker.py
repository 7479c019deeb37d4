"""When a barrier returns: once it has passed the stream of each partition that is still read."""

from __future__ import annotations

import pytest

from upr_protocol.client.core.barrier_tracker import BarrierTracker
from upr_protocol.client.core.events import BarrierReached
from upr_protocol.errors import LocalProtocolError, Status
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.limits import COOKIE_BYTES_MAX, OPEN_BARRIERS_MAX

P0, P1 = PartitionId(0), PartitionId(1)
COOKIE = b"a barrier"


@pytest.fixture
def tracker() -> BarrierTracker:
    tracker = BarrierTracker()
    tracker.open_barrier(COOKIE)
    return tracker


def test_a_barrier_returns_with_the_ends_of_all_streams_that_it_has_passed(
    tracker: BarrierTracker,
) -> None:
    assert tracker.cookies_to_send({P0, P1}) == [COOKIE]
    tracker.add_passed(COOKIE, [P0], {P0: SeqNo(5)})
    assert tracker.close_completed({P0, P1}) == []
    assert tracker.cookies_to_send({P0}) == []
    assert tracker.cookies_to_send({P0, P1}) == [COOKIE]
    # The second partition is at another node.
    tracker.add_passed(COOKIE, [P1], {P1: SeqNo(7)})
    assert tracker.close_completed({P0, P1}) == [
        BarrierReached(COOKIE, {P0: SeqNo(5), P1: SeqNo(7)})
    ]
    assert len(tracker) == 0


def test_a_barrier_does_not_wait_for_a_stream_that_has_ended(tracker: BarrierTracker) -> None:
    tracker.add_passed(COOKIE, [P1], {P1: SeqNo(7)})
    assert tracker.close_completed({P1}) == [BarrierReached(COOKIE, {P1: SeqNo(7)})]


def test_a_barrier_passes_a_partition_again_that_has_rolled_back(tracker: BarrierTracker) -> None:
    """What came before the barrier is given up, and has to come again before it returns."""
    tracker.add_passed(COOKIE, [P0, P1], {P0: SeqNo(5), P1: SeqNo(7)})
    tracker.forget_passed(P0)
    assert tracker.close_completed({P0, P1}) == []
    assert tracker.cookies_to_send({P0}) == [COOKIE]
    assert tracker.cookies_to_send({P1}) == []
    # It passes the partition before any snapshot has come again.
    tracker.add_passed(COOKIE, [P0], {})
    assert tracker.close_completed({P0, P1}) == [BarrierReached(COOKIE, {P1: SeqNo(7)})]


@pytest.mark.parametrize("cookie", [b"", bytes(COOKIE_BYTES_MAX + 1)])
def test_a_cookie_that_no_server_takes_is_refused(tracker: BarrierTracker, cookie: bytes) -> None:
    with pytest.raises(LocalProtocolError, match="a barrier's cookie"):
        tracker.open_barrier(cookie)
    tracker.open_barrier(bytes(COOKIE_BYTES_MAX))


def test_a_cookie_is_free_again_once_its_barrier_has_returned(tracker: BarrierTracker) -> None:
    with pytest.raises(LocalProtocolError) as caught:
        tracker.open_barrier(COOKIE)
    assert caught.value.status is Status.COOKIE_IN_USE
    tracker.close_completed(set())
    tracker.open_barrier(COOKIE)


def test_no_more_barriers_are_open_than_a_server_takes(tracker: BarrierTracker) -> None:
    for number in range(1, OPEN_BARRIERS_MAX):
        tracker.open_barrier(b"%d" % number)
    with pytest.raises(LocalProtocolError) as caught:
        tracker.open_barrier(b"one more")
    assert caught.value.status is Status.TOO_MANY
    assert len(tracker) == OPEN_BARRIERS_MAX
