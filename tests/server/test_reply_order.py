"""The order of replies: of two that share a partition, the first is sent first."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise

import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from tests.server.recorded_replies import Reply, new_order
from upr_server.net.replies import STEP_REPLIES, STEP_ROWS, ReplySteps

_PARTITIONS = st.frozensets(st.integers(0, 4), min_size=1).map(sorted)


@given(st.lists(_PARTITIONS, max_size=12), st.randoms(use_true_random=False))
def test_replies_leave_in_order_a_partition_and_as_soon_as_that_allows(
    requests: list[list[int]], chance: random.Random
) -> None:
    order, sent_opaques = new_order(ReplySteps()), list[int]()
    replies = [Reply(n, partitions, sent_opaques) for n, partitions in enumerate(requests)]
    for reply in replies:
        order.add(reply)
    completed = set[int]()
    for index in chance.sample(range(len(replies)), len(replies)):
        order.complete(replies[index])
        completed.add(index)
        assert set(sent_opaques) == _sendable(requests, completed)
    assert sorted(sent_opaques) == list(range(len(replies)))
    assert not order.newest
    by_partition = defaultdict[int, list[int]](list)
    for index in sent_opaques:
        for partition in requests[index]:
            by_partition[partition].append(index)
    assert all(numbers == sorted(numbers) for numbers in by_partition.values())


def _sendable(requests: list[list[int]], completed: set[int]) -> set[int]:
    """Those that are complete, and behind no reply that is not sent."""
    sendable, blocked = set[int](), set[int]()
    for index, partitions in enumerate(requests):
        if index in completed and blocked.isdisjoint(partitions):
            sendable.add(index)
        else:
            blocked.update(partitions)
    return sendable


def test_a_thousand_replies_may_wait_for_one() -> None:
    order, sent_opaques = new_order(ReplySteps()), list[int]()
    replies = [Reply(n, [0], sent_opaques) for n in range(1000)]
    for reply in replies:
        order.add(reply)
    for reply in reversed(replies):
        order.complete(reply)
    assert sent_opaques == list(range(1000))


async def test_replies_that_waited_for_one_are_sent_some_in_each_turn(
    nursery: trio.Nursery,
) -> None:
    steps = ReplySteps()
    nursery.start_soon(steps.run)
    await trio.testing.wait_all_tasks_blocked()
    order, sent_opaques = new_order(steps), list[int]()
    count = 3 * STEP_REPLIES + 1
    replies = [Reply(n, [0], sent_opaques) for n in range(count)]
    for reply in replies[:-1]:
        order.add(reply)
    for reply in replies[-2::-1]:
        order.complete(reply)
    assert len(sent_opaques) == STEP_REPLIES
    # One that comes meanwhile is sent behind them.
    order.add(replies[-1])
    order.complete(replies[-1])
    sent_counts = [len(sent_opaques)]
    while sent_counts[-1] < count:
        await trio.lowlevel.checkpoint()
        sent_counts.append(len(sent_opaques))
    # Between two looks it may have had two turns.
    assert max(later - earlier for earlier, later in pairwise(sent_counts)) <= 2 * STEP_REPLIES
    assert sent_opaques == list(range(count))
    assert not order.newest


async def test_nothing_is_sent_once_the_connection_is_over(nursery: trio.Nursery) -> None:
    steps = ReplySteps()
    nursery.start_soon(steps.run)
    await trio.testing.wait_all_tasks_blocked()
    order, sent_opaques = new_order(steps), list[int]()
    replies = [Reply(n, [n // (2 * STEP_REPLIES)], sent_opaques) for n in range(3 * STEP_REPLIES)]
    for reply in replies:
        order.add(reply)
    for reply in replies[2 * STEP_REPLIES - 1 :: -1]:
        order.complete(reply)
    order.close()
    for reply in replies[2 * STEP_REPLIES :]:
        order.complete(reply)
    await trio.testing.wait_all_tasks_blocked()
    assert len(sent_opaques) == STEP_REPLIES
    assert not order.newest


async def test_large_replies_of_many_connections_are_sent_some_in_each_turn(
    nursery: trio.Nursery,
) -> None:
    steps = ReplySteps()
    nursery.start_soon(steps.run)
    await trio.testing.wait_all_tasks_blocked()
    sent_opaques = list[int]()
    orders = [new_order(steps) for _ in range(9)]
    for opaque, order in enumerate(orders):
        order.complete(Reply(opaque, [0], sent_opaques, STEP_ROWS // 2))
    assert sent_opaques == [0, 1]
    # A small one of another connection waits for a turn, too: rows are left then.
    new_order(steps).complete(Reply(9, [0], sent_opaques))
    sent_counts = [len(sent_opaques)]
    while sent_counts[-1] < 10:
        await trio.lowlevel.checkpoint()
        sent_counts.append(len(sent_opaques))
    # Between two looks there may have been two turns.
    assert max(later - earlier for earlier, later in pairwise(sent_counts)) <= 4
    assert sent_opaques == list(range(10))
