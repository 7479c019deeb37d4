"""Measures work in steps of Trio's tasks: this count does not depend on the load of the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio


class StepCounter(trio.abc.Instrument):
    """Counts the steps of all tasks."""

    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        del task
        self.count += 1


@contextmanager
def counted_steps() -> Iterator[StepCounter]:
    """Counts steps while the context lasts."""
    counter = StepCounter()
    trio.lowlevel.add_instrument(counter)
    try:
        yield counter
    finally:
        trio.lowlevel.remove_instrument(counter)


class LargestStep(trio.abc.Instrument):
    """Records the largest increase of a number within one step of any task."""

    def __init__(self, number: Callable[[], int]) -> None:
        self.added_count = 0
        self._number = number
        self._count = number()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        count_before, self._count = self._count, self._number()
        self.added_count = max(self.added_count, self._count - count_before)
