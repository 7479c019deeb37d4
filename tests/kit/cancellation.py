"""Cancels a piece of work at each of its steps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
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
    """Where the work was cancelled.

    Attributes:
        times: How often the work was cancelled.
        inside: The functions in which it was cancelled, as `module.Class.function`.
    """

    times: int
    inside: frozenset[str]

    def check_inside(self, *functions: Callable[..., object]) -> None:
        """Checks that it was cancelled inside each of these functions."""
        missing_names = {name_of(function) for function in functions} - self.inside
        assert not missing_names, f"it was never cancelled in {sorted(missing_names)}"


class _Canceller(trio.abc.Instrument):
    """Cancels a scope before a step of any task.

    Attributes:
        inside: The functions in which `task` and its child tasks waited at that moment.
    """

    def __init__(self, scope: trio.CancelScope) -> None:
        self.inside: frozenset[str] = frozenset()
        self._scope = scope
        self._task = trio.lowlevel.current_task()
        self._nurseries = set(self._task.child_nurseries)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if not self._scope.cancel_called and self._is_due():
            self.inside = self._waited_for()
            self._scope.cancel()

    def _is_due(self) -> bool:
        raise NotImplementedError

    def _waited_for(self) -> frozenset[str]:
        return frozenset(_waited_for(self._task, self._nurseries))


class _CancelAfter(_Canceller):
    """Cancels after so many steps."""

    def __init__(self, scope: trio.CancelScope, steps: int) -> None:
        super().__init__(scope)
        self._steps = steps

    def _is_due(self) -> bool:
        self._steps -= 1
        return self._steps < 0


class _CancelInside(_Canceller):
    """Cancels as soon as one of these functions waits."""

    def __init__(self, scope: trio.CancelScope, names: frozenset[str]) -> None:
        super().__init__(scope)
        self._names = names

    def _is_due(self) -> bool:
        return not self._names.isdisjoint(self._waited_for())


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
        every: How many steps more each time, for work of many steps. A sample takes ten times as
            many.
        reaching: What must be cancelled inside. With `every` above 1 that may step over some of
            these: then it is done once more for each, and cancelled as soon as that waits.
    """
    needed_names = frozenset(map(name_of, reaching))
    if every > 1 and needed_names:
        every *= effort(10, 1)
    await trio.testing.wait_all_tasks_blocked()
    tasks = _tasks()

    async def inside_of(new_canceller: Callable[[trio.CancelScope], _Canceller]) -> frozenset[str]:
        """What it was cancelled in; empty if it got through."""
        with trio.CancelScope() as scope:
            canceller = new_canceller(scope)
            trio.lowlevel.add_instrument(canceller)
            try:
                await work()
            finally:
                trio.lowlevel.remove_instrument(canceller)
        await _come_to_rest(tasks, undo)
        if look is not None:
            look()
        if then is not None:
            await then()
            await _come_to_rest(tasks, undo)
        return canceller.inside

    times = 0
    inside: set[str] = set()
    for steps in range(0, STEPS_MAX, every):
        if not (new_inside := await inside_of(partial(_CancelAfter, steps=steps))):
            break
        times += 1
        inside |= new_inside
    else:
        raise AssertionError(f"the work takes more than {STEPS_MAX} steps")
    while missing_names := needed_names - inside:
        if not (new_inside := await inside_of(partial(_CancelInside, names=missing_names))):
            break
        times += 1
        inside |= new_inside
    return Cancellations(times, frozenset(inside))


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
