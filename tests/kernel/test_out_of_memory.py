"""The native kernel when there is no memory: a process in which its requests for it fail."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final

import pytest

from tests.kernel.builds import BUILDS

COMPILER: Final = str(sysconfig.get_config_var("CC") or "cc").split()[0]
LIBRARY_SOURCE: Final = Path(__file__).with_name("failing_memory.c")

pytestmark = pytest.mark.skipif(
    "native" not in BUILDS
    or platform.libc_ver()[0] != "glibc"
    or not shutil.which(COMPILER)
    or "LD_PRELOAD" in os.environ,
    reason="needs the native kernel, a compiler, and glibc's memory without a sanitizer's",
)

# Writers and answers are at their limits, and the disk knows of them.
ANSWERS: Final = """
import ctypes
from upr_kernel._native import Answers

fail_after = ctypes.CDLL(None).fail_after
WRITERS = [bytes([number]) * 16 for number in range(4)]
PACKED = b"answer"


def remember_without_memory(writer, allowed):
    answers = Answers(2, 1000, 3, 7, 10, 5, 6)
    answers.track_unsaved()
    for step in range(6):
        answers.remember(WRITERS[step % 3], 1 + step, PACKED, 1 + step, 0)
    answers.take_unsaved(100, 100)
    before = [answers.newest(each) for each in WRITERS]
    fail_after(allowed)
    try:
        answers.remember(writer, 10, PACKED, 10, 0)
        is_remembered = True
    except MemoryError:
        is_remembered = False
    fail_after(-1)
    for each, newest in zip(WRITERS, before):
        if each == writer:
            assert answers.newest(each) == ((10, PACKED) if is_remembered else newest)
        elif newest is not None:
            assert answers.newest(each) in (newest, None)
    if not is_remembered:
        answers.check_invariants()
    # The next answers make good what was not done.
    answers.remember(writer, 11, PACKED, 11, 0)
    answers.remember(WRITERS[0], 12, PACKED, 11, 0)
    answers.check_invariants()
    return is_remembered


for writer in WRITERS:
    results = [remember_without_memory(writer, allowed) for allowed in range(12)]
    assert results == sorted(results), "with more memory it fails no more"
    print(results.count(False), results.count(True))
"""


def test_answers_to_publishers_are_remembered_or_not_at_all(tmp_path: Path) -> None:
    library = tmp_path / "failing_memory.so"
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-O1", str(LIBRARY_SOURCE), "-o", str(library), "-ldl"],
        check=True,
    )
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    finished = subprocess.run(
        [sys.executable, "-c", ANSWERS],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    for line in finished.stdout.splitlines():
        failed_count, remembered_count = map(int, line.split())
        assert failed_count > 0
        assert remembered_count > 0
