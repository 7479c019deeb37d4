"""Processor time and memory of other processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def processor_s(pid: int) -> float:
    """The processor time that all threads of `pid` have used, to the nanosecond.

    Linux gives every process a clock of its own (`clock_getcpuclockid`); /proc counts in 10 ms.
    """
    return time.clock_gettime((~pid << 3) | 2)


def system_s(pid: int) -> float:
    """How much of it was spent in the kernel, in steps of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[12]) / _TICKS


def resident_bytes(pid: int) -> int:
    """What `pid` holds in memory now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES


class ProcessorClock:
    """The processor time of one process since the last look.

    Args:
        pid: The process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._total_s = processor_s(pid)

    def lap(self) -> float:
        """Seconds of processor time since it was made, or since the last lap."""
        before, self._total_s = self._total_s, processor_s(self._pid)
        return self._total_s - before
