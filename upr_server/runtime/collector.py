"""When Python's collector of reference cycles looks at which objects."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Final

RARE_OBJECTS: Final = 50_000
"""How many objects more must be made than freed before the youngest generation is collected. By
default it is 700, which is the work of one batch."""

RARE_ROUNDS: Final = 20
"""Collections of one generation before one of the next older."""

YOUNG_OBJECTS: Final = 10_000
"""How many objects more must be made than freed before Python's collector looks at them: 1 to 2 ms
of the loop."""


def keeps_ended_frames() -> bool:
    """Whether this Python keeps the frame of an ended generator together with the frame that ran it
    last.

    An exception that a context manager made of a generator has swallowed is in a reference cycle
    then, with all that the frames of its traceback hold: a connection that was cancelled, for
    instance. CPython 3.12 does so, and early releases of 3.13 and 3.14
    (https://github.com/python/cpython/issues/100964).
    """

    def frames() -> Iterator[FrameType | None]:
        yield inspect.currentframe()

    (frame,) = frames()
    return frame is not None and frame.f_back is not None


def collect_rarely() -> None:
    """Excludes the objects that exist now from collection, and collects the others more rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(RARE_OBJECTS, RARE_ROUNDS, RARE_ROUNDS)


def collect_only_young() -> None:
    """Has Python's collector look at each object once, when it is young.

    A collection of all objects holds the loop for 0.3 s where 200 clients have 1,000 streams each,
    and for 1 s where 40 buckets have 1,024 partitions. So what lives long must be in no reference
    cycle when its time is over, and reference counts free it at once: connections, buckets, and
    what they hold. Cycles of a moment, as exceptions make them, are found while they are young.
    Where ended frames are kept (`keeps_ended_frames`), that would lose memory.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    gc.callbacks.append(_exclude_survivors)


def _exclude_survivors(phase: str, _info: object) -> None:
    if phase == "stop":
        gc.freeze()


class YoungObjects:
    """Has Python's collector look at young objects in time.

    It begins a collection when `YOUNG_OBJECTS` more objects were made than freed. Where as many old
    ones are freed as new ones are made, as 1,000 connections leave and others come, that is late:
    the new ones become many, and one collection takes 10 ms and more. So whoever makes many objects
    that live for some time says so.

    Args:
        collect: Has the collector look at the young objects.
    """

    def __init__(self, collect: Callable[[], object] | None = None) -> None:
        self._collect = partial(gc.collect, 0) if collect is None else collect
        self._is_started = False
        self._made_count = 0

    def start(self) -> None:
        """Counts from now on, in this process, whose collector is set up already. Before that
        nothing is collected here. It collects at once what was made until now."""
        self._is_started = True
        gc.callbacks.append(self._note_collection)
        self.collect()

    def stop(self) -> None:
        """Stops counting collections."""
        self._is_started = False
        gc.callbacks.remove(self._note_collection)

    def _note_collection(self, phase: str, _info: object) -> None:
        if phase == "stop":
            self._made_count = 0

    def note_made(self, objects: int) -> None:
        """About so many objects were made. O(1), mostly."""
        self._made_count += objects
        if self._made_count >= YOUNG_OBJECTS:
            self.collect()

    def collect(self) -> None:
        """Has the collector look at the young objects now, if `start` was called."""
        if self._is_started:
            self._made_count = 0
            self._collect()
