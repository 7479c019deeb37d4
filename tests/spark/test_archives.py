"""An environment that Spark unpacks on each machine: executors run its code, and streams do."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.process import ROOT
from tests.spark.bucket import change, put
from tests.spark.conftest import SPARK_OPTIONS

SUBMIT = Path(sys.executable).with_name("spark-submit")
SUBMIT_S = 200.0

PYTHON = f"""#!/bin/sh
environment=$(cd "$(dirname "$0")/.." && pwd)
PYTHONPATH="$environment/lib:$PYTHONPATH" exec {sys.executable} "$@"
"""
"""The environment's interpreter. It runs the code of its own `lib`, and takes from the environment
of these tests what an installation of this package would have brought."""


def packed_environment(folder: Path) -> Path:
    """An archive as `venv-pack` makes it, with `bin/python`."""
    python = folder / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    archive = folder / "environment.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as packed:
        packed.add(python, "bin/python")
        for package in ("upr_protocol", "upr_kernel"):
            packed.add(ROOT / package, f"lib/{package}")
    return archive


@pytest.mark.timeout(240)
def test_executors_and_streams_run_the_code_of_a_packed_environment(
    new_bucket: Callable[..., str], tmp_path: Path
) -> None:
    url = new_bucket(4)
    change(url, put(range(50)))
    archive = packed_environment(tmp_path)
    # The driver runs where the archive was unpacked by hand.
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "environment", filter="data")
    options = {**SPARK_OPTIONS, "spark.executorEnv.PYTHONPATH": ""}
    words = [word for name, value in options.items() for word in ("--conf", f"{name}={value}")]
    submitted = subprocess.run(
        [
            *(str(SUBMIT), "--master", "local-cluster[1,1,1024]"),
            *("--archives", f"{archive}#environment", *words),
            *(str(ROOT / "tests" / "spark" / "archived_job.py"), url, str(tmp_path / "streamed")),
        ],
        cwd=tmp_path,
        env={
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "PYSPARK_PYTHON": "./environment/bin/python",
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_WORKER_DIR": str(tmp_path / "work"),
        },
        capture_output=True,
        text=True,
        timeout=SUBMIT_S,
        check=False,
    )
    assert submitted.returncode == 0, submitted.stderr[-4000:]
    of_driver, of_executor, count = (tmp_path / "streamed" / "result").read_text().splitlines()
    inside = Path("environment", "lib", "upr_protocol", "__init__.py")
    assert Path(of_driver) == tmp_path / inside
    assert of_executor.endswith(f"/{inside}")
    assert of_executor != of_driver, "the executor has unpacked its own"
    assert count == "50"
