"""Connections whose peers have gone are ended some in each turn of the loop."""

from __future__ import annotations

from collections import Counter

import trio
import trio.testing

from upr_server.net.connection_ends import ENDS_MAX, ConnectionEnds
from upr_server.runtime import TurnTimer

COUNT = 3 * ENDS_MAX + 1


async def test_thousands_that_leave_together_are_ended_some_in_each_turn() -> None:
    timer, ends = TurnTimer(), ConnectionEnds()
    timer.start()
    turns: dict[int, int] = {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ends.run)

        async def converse(number: int) -> None:
            with trio.CancelScope() as scope:
                await trio.lowlevel.checkpoint()
                ends.end(scope)
                await trio.sleep_forever()
            turns[number] = timer.turn_count

        async with trio.open_nursery() as connections:
            for number in range(COUNT):
                connections.start_soon(converse, number)
        nursery.cancel_scope.cancel()
    assert sorted(turns) == list(range(COUNT))
    assert max(Counter(turns.values()).values()) == ENDS_MAX


async def test_all_are_ended_at_once_where_it_does_not_run() -> None:
    ends = ConnectionEnds()
    before, waiting, after = ([trio.CancelScope() for _ in range(COUNT)] for _ in range(3))
    for scope in before:
        ends.end(scope)
    assert all(scope.cancel_called for scope in before)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ends.run)
        await trio.testing.wait_all_tasks_blocked()
        for scope in waiting:
            ends.end(scope)
        assert not any(scope.cancel_called for scope in waiting)
        nursery.cancel_scope.cancel()
    assert all(scope.cancel_called for scope in waiting)
    for scope in after:
        ends.end(scope)
    assert all(scope.cancel_called for scope in after)
