"""What work costs, in steps of Trio's tasks: a count that no load of the machine changes."""

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
    """Counts as long as the context lasts."""
    counter = StepCounter()
    trio.lowlevel.add_instrument(counter)
    try:
        yield counter
    finally:
        trio.lowlevel.remove_instrument(counter)


class LargestStep(trio.abc.Instrument):
    """Notes by how much one step of any task has raised a number at most."""

    def __init__(self, number: Callable[[], int]) -> None:
        self.added_count = 0
        self._number = number
        self._count = number()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        count_before, self._count = self._count, self._number()
        self.added_count = max(self.added_count, self._count - count_before)
