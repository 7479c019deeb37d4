"""Where the figures come from: the machine, the programs, the commit."""

from __future__ import annotations

import os
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks.kit.errors import CannotMeasureError

ROOT: Final = Path(__file__).resolve().parents[2]

_MEASURED: Final = (
    "upr_kernel",
    "upr_protocol",
    "upr_server",
    "benchmarks/clients",
    "benchmarks/rows",
)


def machine_facts() -> dict[str, Any]:
    """What a reader needs to know of the machine, as far as the system tells."""
    return {
        "processor": _processor(),
        "second_level_cache": _second_level_cache(),
        "cores": len(os.sched_getaffinity(0)),
        "file_system": _first_line("stat", "--file-system", "--format=%T", tempfile.gettempdir()),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "redis": _first_line("redis-server", "--version").partition(" sha=")[0],
    }


def load_average() -> float:
    """Processes that wanted to run over the last minute: what else went on."""
    return os.getloadavg()[0]


def commit() -> str:
    """The commit that was measured, with `+changes` when what was measured is not all in it."""
    head = _first_line("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD") or "unknown"
    changed = _first_line("git", "-C", str(ROOT), "status", "--porcelain", "--", *_MEASURED)
    return f"{head}+changes" if changed else head


def check_disk() -> None:
    """Sees that what is written to a temporary folder is written to a disk.

    Raises:
        CannotMeasureError: It is kept in memory.
    """
    folder = tempfile.gettempdir()
    kind = _first_line("stat", "--file-system", "--format=%T", folder)
    if kind in ("tmpfs", "ramfs"):
        raise CannotMeasureError(f"{folder} is in memory: set TMPDIR to a folder on a disk")


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _second_level_cache() -> str:
    """The size of a core's second-level cache; empty if the system does not tell."""
    folder = Path("/sys/devices/system/cpu/cpu0/cache/index2")
    try:
        return (folder / "size").read_text().strip().replace("K", " KiB")
    except OSError:
        return ""


def _first_line(*command: str) -> str:
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout.partition("\n")[0].strip() if process.returncode == 0 else ""
