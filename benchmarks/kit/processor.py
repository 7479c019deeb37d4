"""Processor time and memory of other processes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

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


def anonymous_bytes(pid: int) -> int:
    """What of it is its own: neither files nor what it shares."""
    status = Path(f"/proc/{pid}/status").read_text()
    (kib,) = (line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(kib) * 1024


def children_of(pid: int) -> dict[int, list[str]]:
    """The processes that `pid` has started, and their arguments."""
    commands = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid:
                commands[int(path.name)] = (path / "cmdline").read_text().split("\0")
        except OSError:
            # It has ended meanwhile.
            pass
    return commands


def tree_s(pid: int) -> float:
    """The processor time of `pid` and of all that it started, also of what has ended since and was
    waited for; in steps of 10 ms."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    own_s = sum(map(int, fields[11:15])) / _TICKS
    return own_s + sum(map(tree_s, children_of(pid)))


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


_adopted_s: Final[list[float]] = []


def adopt(seconds: float) -> None:
    """Counts processor time as this process's own that the system will not: that of processes whose
    parent was killed before it could wait for them."""
    _adopted_s.append(seconds)


class Disturbance:
    """How much of the machine others used meanwhile: what a figure is worth."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._busy_s = _busy_s()
        self._own_s = _own_s()

    def share(self) -> float:
        """Others' share of all processors' time since it was made, 0 to 1.

        The children of this process count as others until they have ended.
        """
        elapsed_s = (time.monotonic() - self._begun) * (os.cpu_count() or 1)
        others_s = _busy_s() - self._busy_s - (_own_s() - self._own_s)
        return max(0.0, others_s / elapsed_s)


def _busy_s() -> float:
    """What all processors have worked since the machine started; waiting for disks is none."""
    fields = Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
    user, nice, system, _idle, _waiting, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / _TICKS


def _own_s() -> float:
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return own + sum(_adopted_s)


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

    def total(self) -> float:
        """Seconds of processor time since the process was started."""
        return processor_s(self._pid)
