"""What the tasks of a client or server wait with, beyond what Trio has."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self, TypeVar

import trio

E = TypeVar("E", bound=BaseException)
T = TypeVar("T")


class Notifier:
    """Wakes all tasks that wait, every time that something changed.

    A `trio.Event` is set once and stays set; this one can be waited for again. Between looking at
    what changes and `wait` there must be no checkpoint, or a change in between is missed. Where
    there is one, take `next_event` first, then look, and wait for that event.
    """

    __slots__ = ("_event",)

    def __init__(self) -> None:
        # Made when somebody waits: most notifications come while nobody does, and cost nothing.
        self._event: trio.Event | None = None

    def notify(self) -> None:
        """Wakes the tasks that wait now. Nothing is kept for one that waits later."""
        if self._event is not None:
            self._event.set()
            self._event = None

    def next_event(self) -> trio.Event:
        """The event that the next `notify` sets."""
        if self._event is None:
            self._event = trio.Event()
        return self._event

    async def wait(self) -> None:
        """Waits for the next `notify`."""
        await self.next_event().wait()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits until `condition` is true. Evaluates it at once, and after every `notify`; does not
        pass a checkpoint when it is true at once."""
        while not condition():
            await self.wait()


class _Holder:
    """Keeps an exception back until it is raised again."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        self.error = error
        return True


@asynccontextmanager
async def background_nursery() -> AsyncIterator[trio.Nursery]:
    """A nursery whose tasks are cancelled when the body ends.

    An exception of the body comes out as it is. A plain nursery would wrap it into a group, and
    then `except ServerError` around `async with connect(...)` would not catch what it names.
    """
    holder = _Holder()
    try:
        async with trio.open_nursery() as nursery:
            with holder:
                yield nursery
            nursery.cancel_scope.cancel()
        if holder.error is not None:
            raise holder.error
    finally:
        # Or it would refer to itself through its traceback's frame: also one that is not raised
        # again, because the nursery raised a cancellation.
        holder.error = None


def first_failure(error: BaseException) -> BaseException:
    """The first exception that an exception group holds, however deep, or the exception itself.

    When several tasks failed at once, the message names the first failure.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def without_traceback(error: E) -> E:
    """A copy of an exception, for an object that keeps it when it ends, or for one of several that
    raise it.

    An exception that was raised refers to the frames that it passed, and those often to the object
    that keeps it: a reference cycle, which only the garbage collector would free. Each time that it
    is raised it refers to more of them.
    """
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    return copy


async def run_steps(steps: Generator[None, None, T]) -> T:
    """What `steps` return in the end. Others have their turn between the steps. Cancelled, the rest
    of them is not done."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        await trio.lowlevel.checkpoint()
