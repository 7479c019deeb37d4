"""The order of replies: of two that share a partition, the first is sent first."""

from __future__ import annotations

import random
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from upr_protocol.ids import PartitionId
from upr_server.net.replies import OrderedReply, ReplyOrder


class _Reply(OrderedReply):
    def __init__(self, opaque: int, partitions: list[int], sent_opaques: list[int]) -> None:
        super().__init__(list(map(PartitionId, partitions)))
        self._number = opaque
        self._sent = sent_opaques

    def send(self) -> None:
        self._sent.append(self._number)


_PARTITIONS = st.frozensets(st.integers(0, 4), min_size=1).map(sorted)


@given(st.lists(_PARTITIONS, max_size=12), st.randoms(use_true_random=False))
def test_replies_leave_in_order_a_partition_and_as_soon_as_that_allows(
    requests: list[list[int]], chance: random.Random
) -> None:
    order, sent_opaques = ReplyOrder(), list[int]()
    replies = [_Reply(n, partitions, sent_opaques) for n, partitions in enumerate(requests)]
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
    order, sent_opaques = ReplyOrder(), list[int]()
    replies = [_Reply(n, [0], sent_opaques) for n in range(1000)]
    for reply in replies:
        order.add(reply)
    for reply in reversed(replies):
        order.complete(reply)
    assert sent_opaques == list(range(1000))
