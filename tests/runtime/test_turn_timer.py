"""The longest turn of a loop is measured, and the longest step of a task."""

from __future__ import annotations

import trio
import trio.testing

from upr_server.runtime import TurnTimer


class Work:
    """A clock that goes on only while somebody works."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    async def do(self, *steps_s: float) -> None:
        for step_s in steps_s:
            self.now += step_s
            await trio.lowlevel.checkpoint()


async def worked(*tasks: tuple[float, ...]) -> TurnTimer:
    """Tasks that begin at once, and do their steps."""
    work = Work()
    timer = TurnTimer(work.clock, work.clock)
    timer.start()
    async with trio.open_nursery() as nursery:
        for index, steps_s in enumerate(tasks):
            nursery.start_soon(work.do, *steps_s, name=f"task {index}")
    await trio.testing.wait_all_tasks_blocked()
    trio.lowlevel.remove_instrument(timer)
    return timer


async def test_the_longest_step_is_that_of_the_most_work() -> None:
    timer = await worked((1.0, 0.25, 2.0), (0.5, 3.0, 0.5))
    assert timer.longest_step_s == 3.0
    assert timer.longest_step_task == "task 1"


async def test_a_turn_is_a_step_of_each_task() -> None:
    timer = await worked((1.0, 2.0), (1.0, 2.0), (1.0, 2.0))
    assert timer.longest_turn_s == 6.0
    assert timer.longest_step_s == 2.0


async def test_short_steps_are_counted_in_their_turn() -> None:
    timer = await worked(*[(0.0001,)] * 100)
    assert 0.009 < timer.longest_turn_s <= 0.0101
    assert timer.longest_step_s < 0.001
