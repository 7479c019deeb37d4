"""What work costs, in steps of Trio's tasks: a count that no load of the machine changes."""

from __future__ import annotations

from collections.abc import Iterator
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
