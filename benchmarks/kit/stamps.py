"""The time at which a chunk was due, in its values: latency counts from there."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.kit.work import VALUE_BYTES
from upr_protocol.chunk import Chunk

Times = NDArray[np.int64]
"""Nanoseconds of the monotonic clock, which all processes share."""


def stamped(chunk: Chunk, due_ns: int) -> Chunk:
    """A copy of `chunk` whose values all begin with the time.

    All of them, as deduplication may leave any of them and no other.
    """
    copy = Chunk(bytearray(chunk.encode()))
    _column(copy)[:] = due_ns
    return copy


def stamps(chunk: Chunk) -> Times:
    """The times in a chunk that was received, one for each run of values of one published chunk."""
    times = _column(chunk)
    is_first = np.ones(len(times), dtype=np.bool_)
    np.not_equal(times[1:], times[:-1], out=is_first[1:])
    return times[is_first]


def _column(chunk: Chunk) -> Times:
    """The first 8 bytes of each value, where they lie."""
    values: Any = chunk.value_bytes
    return np.ndarray((chunk.count,), np.int64, values, strides=(VALUE_BYTES,))
