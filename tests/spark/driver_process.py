"""Spark's driver as a process that can be killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tests.kit.process import ROOT, environment
from tests.spark.driver import Job

DRIVER_S = 300.0
"""One with executors starts five JVMs and a dozen Pythons, on two cores or on one."""


@contextmanager
def driver(job: Job) -> Iterator[subprocess.Popen[bytes]]:
    """A driver that does a job; what is left of it in the end is killed. What it says goes into a
    file: a pipe that nobody reads would stop it, and each worker that dies is a page."""
    with log_of(job).open("wb") as log:
        process = subprocess.Popen(
            (
                sys.executable,
                "-c",
                "from tests.spark.driver import main; main()",
                msgspec.json.encode(job),
            ),
            cwd=ROOT,
            env=environment(PYSPARK_PYTHON=sys.executable, PYTHONPATH=str(ROOT)),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def log_of(job: Job) -> Path:
    """Where a driver's output goes."""
    return Path(job.folder, "driver.log")
