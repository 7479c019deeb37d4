"""The longest turn of a loop is measured."""

from __future__ import annotations

import trio
import trio.testing

from upr_server.runtime import TurnTimer


async def test_the_longest_turn_is_that_of_the_most_work() -> None:
    now = 0.0
    timer = TurnTimer(lambda: now)
    trio.lowlevel.add_instrument(timer)
    for work_s in (1.0, 0.25, 3.0, 2.0):
        await trio.testing.wait_all_tasks_blocked()
        now += work_s
    await trio.testing.wait_all_tasks_blocked()
    trio.lowlevel.remove_instrument(timer)
    assert timer.longest_s == 3.0
