"""Cancelling a piece of work at every step that it makes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Final

import attrs
import trio
import trio.testing

from tests.kit.async_names import name_of
from tests.kit.effort import effort

STEPS_MAX: Final = 1_000_000
"""Work with more steps than this does not end."""

REST_S: Final = 60.0
"""What was cancelled may take so long to be gone: it says goodbye, and waits for answers."""


@attrs.frozen
class Cancellations:
    """What was tried.

    Attributes:
        times: How often the work was cancelled.
        inside: In what it was cancelled: `module.Class.function` of all that was waited for.
    """

    times: int
    inside: frozenset[str]

    def check_inside(self, *functions: Callable[..., object]) -> None:
        """It was cancelled while it was in each of these."""
        missing_names = {name_of(function) for function in functions} - self.inside
        assert not missing_names, f"it was never cancelled in {sorted(missing_names)}"


class _CancelAfter(trio.abc.Instrument):
    """Cancels a scope once so many steps of any task were made.

    Attributes:
        inside: What `task` and the tasks below it waited for then.
    """

    def __init__(self, scope: trio.CancelScope, steps: int) -> None:
        self.inside: set[str] = set()
        self._scope = scope
        self._task = trio.lowlevel.current_task()
        self._nurseries = set(self._task.child_nurseries)
        self._steps = steps

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._steps -= 1
        if self._steps < 0 and not self._scope.cancel_called:
            self.inside.update(_waited_for(self._task, self._nurseries))
            self._scope.cancel()


def _waited_for(task: trio.lowlevel.Task, without: set[trio.Nursery]) -> Iterator[str]:
    for frame, _ in task.iter_await_frames():
        yield f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}"
    for nursery in task.child_nurseries:
        if nursery not in without:
            for child in nursery.child_tasks:
                yield from _waited_for(child, set())


async def cancelled_at_each_step(
    work: Callable[[], Awaitable[object]],
    look: Callable[[], None] | None = None,
    *,
    then: Callable[[], Awaitable[object]] | None = None,
    undo: Callable[[], Awaitable[object]] | None = None,
    every: int = 1,
    reaching: Iterable[Callable[..., object]] = (),
) -> Cancellations:
    """Does `work` again and again, cancelled after one more step each time, until it gets through.

    Each time no task of it may be left when all has come to rest. Work that was in a thread then,
    or shielded, may end as if nothing had happened.

    Args:
        work: What is cancelled.
        look: Called each time once all has come to rest: sees whether anything was left behind.
        then: Done each time behind that, and not cancelled: sees that all still works.
        undo: Done each time before anything is looked at: takes back what `work`, or `then`, may
            have done that has tasks of its own.
        every: So many steps more each time, for work of many steps. A sample takes thrice as many.
        reaching: What must be cancelled inside. With `every` above 1 a pass may step over some of
            these; then another pass begins one step later, until all were met.
    """
    needed_names = {name_of(function) for function in reaching}
    if every > 1 and needed_names:
        every *= effort(3, 1)
    times = 0
    inside: set[str] = set()
    for first in range(every):
        times += await _one_pass(work, look, then, undo, range(first, STEPS_MAX, every), inside)
        if needed_names <= inside:
            break
    return Cancellations(times, frozenset(inside))


async def _one_pass(
    work: Callable[[], Awaitable[object]],
    look: Callable[[], None] | None,
    then: Callable[[], Awaitable[object]] | None,
    undo: Callable[[], Awaitable[object]] | None,
    cancelled_after: range,
    inside: set[str],
) -> int:
    """Cancels `work` after each of these numbers of steps, until it gets through.

    Returns:
        How often it was cancelled.
    """
    await trio.testing.wait_all_tasks_blocked()
    tasks = _tasks()
    for times, steps in enumerate(cancelled_after):
        with trio.CancelScope() as scope:
            instrument = _CancelAfter(scope, steps)
            trio.lowlevel.add_instrument(instrument)
            try:
                await work()
            finally:
                trio.lowlevel.remove_instrument(instrument)
        await _come_to_rest(tasks, undo)
        if look is not None:
            look()
        if then is not None:
            await then()
            await _come_to_rest(tasks, undo)
        if not scope.cancel_called:
            return times
        inside |= instrument.inside
    raise AssertionError(f"the work takes more than {STEPS_MAX} steps")


async def _come_to_rest(tasks: int, undo: Callable[[], Awaitable[object]] | None) -> None:
    await trio.testing.wait_all_tasks_blocked()
    if undo is not None:
        await undo()
        await trio.testing.wait_all_tasks_blocked()
    with trio.move_on_after(REST_S):
        await trio.lowlevel.checkpoint()
        while _tasks() > tasks:  # noqa: ASYNC110  tasks tell nobody that they are gone
            await trio.sleep(0.1)
    leftover_tasks = _tasks() - tasks
    assert leftover_tasks <= 0, f"{leftover_tasks} tasks are left"


def _tasks() -> int:
    return trio.lowlevel.current_statistics().tasks_living
