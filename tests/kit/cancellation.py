"""Cancelling a piece of work at every step that it makes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio
import trio.testing


class _CancelAfter(trio.abc.Instrument):
    """Cancels a scope once so many steps of any task were made."""

    def __init__(self, scope: trio.CancelScope, steps: int) -> None:
        self._scope = scope
        self._steps = steps

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._steps -= 1
        if self._steps < 0:
            self._scope.cancel()


async def cancelled_at_each_step(
    work: Callable[[], Awaitable[None]], look: Callable[[], None]
) -> int:
    """Does `work` again and again, cancelled after one more step each time, until it gets through.

    Args:
        work: What is cancelled.
        look: Called each time once all has come to rest: sees whether anything was left behind.

    Returns:
        How often it was cancelled.
    """
    steps = 0
    while True:
        with trio.CancelScope() as scope:
            instrument = _CancelAfter(scope, steps)
            trio.lowlevel.add_instrument(instrument)
            await work()
        trio.lowlevel.remove_instrument(instrument)
        await trio.testing.wait_all_tasks_blocked()
        look()
        if not scope.cancelled_caught:
            return steps
        steps += 1
