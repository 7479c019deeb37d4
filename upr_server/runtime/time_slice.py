"""How long Linux lets a thread have a processor before others that are ready have their turn.

From Linux 6.12 on, a thread may ask for a time slice of its own. It has the same share of the
processors with any. With a shorter one it has its turns sooner: when it wakes, it comes before
threads that have longer ones, and need not wait until the next tick of the clock, which may be
several milliseconds away for each thread that is before it.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from struct import Struct
from typing import Final

SHORT_SLICE_S: Final = 0.0005
"""For a thread that others wait for, and that has little to do each time."""

LONG_SLICE_S: Final = 0.02
"""For a thread that works for long, and for nobody in particular."""

_ATTRIBUTES: Final = Struct("=IIQiIQQQ")
"""The kernel's `sched_attr`: its size, policy, flags, niceness, priority, and three times in
nanoseconds, of which the first is the slice."""

_SET_ATTRIBUTES: Final = {"x86_64": 314, "aarch64": 274, "riscv64": 274}
"""The number of the system call `sched_setattr`, which the C library may lack. That of
`sched_getattr` is the next."""

_SET: Final = 0
_GET: Final = 1
"""Which of the two calls, as a distance from the first."""


def set_time_slice(slice_s: float, *, is_batch: bool = False) -> None:
    """Asks for a time slice for the calling thread. Threads and processes that it starts later have
    the same one. Elsewhere than on Linux, on an older kernel, or where a sandbox forbids it,
    nothing happens.

    Args:
        slice_s: The slice, from 0.0001 to 0.1 s; 0 for the system's own.
        is_batch: Whether the thread lets others finish their turns when it wakes (`SCHED_BATCH`).
    """
    call = _kernel_call()
    if call is None:
        return
    policy = os.SCHED_BATCH if is_batch else os.SCHED_OTHER
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _ATTRIBUTES.pack(
        _ATTRIBUTES.size, policy, 0, niceness, 0, round(slice_s * 1e9), 0, 0
    )
    call(_SET, attributes, 0)


@cache
def _kernel_call() -> Callable[..., int] | None:
    """Sets (`_SET`) or gets (`_GET`) the attributes of the calling thread; None where that cannot
    be."""
    number = _SET_ATTRIBUTES.get(platform.machine())
    if platform.system() != "Linux" or number is None:
        return None
    library = ctypes.CDLL(None)
    return lambda which, *arguments: int(library.syscall(number + which, 0, *arguments))


@contextmanager
def in_background() -> Iterator[None]:
    """Has the calling thread work in long time slices, without interrupting others, for as long as
    the context. Afterwards it has the slice and the policy that it had before."""
    call = _kernel_call()
    attributes = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if call is None or call(_GET, attributes, _ATTRIBUTES.size, 0) != 0:
        yield
        return
    set_time_slice(LONG_SLICE_S, is_batch=True)
    try:
        yield
    finally:
        call(_SET, attributes, 0)
