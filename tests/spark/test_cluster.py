"""Recipes on a cluster of two workers, in an environment that Spark unpacks on each machine:
executors run its code, and streams do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tests.kit.effort import THOROUGH
from tests.kit.process import ROOT
from tests.spark.bucket import change, contents, contents_of_rows, put
from tests.spark.conftest import SPARK_OPTIONS
from upr_protocol.spark import commands

NewBucket = Callable[..., str]
MASTER = "local-cluster[2,1,1024]"
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


def submit(
    *arguments: str, cwd: Path, options: Mapping[str, str], python: str
) -> subprocess.CompletedProcess[str]:
    """Runs a script by `spark-submit`, on two workers."""
    words = [word for name, value in options.items() for word in ("--conf", f"{name}={value}")]
    return subprocess.run(
        [str(SUBMIT), "--master", MASTER, *words, *arguments],
        cwd=cwd,
        env={
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "PYSPARK_PYTHON": python,
            # The session that other tests share sets it.
            "PYSPARK_DRIVER_PYTHON": python,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_WORKER_DIR": str(cwd / "work"),
        },
        capture_output=True,
        text=True,
        timeout=SUBMIT_S,
        check=False,
    )


def logged(folder: Path) -> dict[str, str]:
    """Options with which Spark writes down what happens."""
    folder.mkdir()
    return {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": folder.as_uri(),
    }


def executors_of(log: Path) -> set[str]:
    """The executors that had tasks."""
    lines = [line for path in log.rglob("events_*") for line in path.read_text().splitlines()]
    ends = [event for event in map(json.loads, lines) if event["Event"] == "SparkListenerTaskEnd"]
    return {event["Task Info"]["Executor ID"] for event in ends}


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("class_archive")
def test_executors_and_streams_run_the_code_of_a_packed_environment(
    new_bucket: NewBucket, tmp_path: Path
) -> None:
    url, target = new_bucket(), new_bucket()
    change(url, put(range(200)))
    archive = packed_environment(tmp_path)
    # The driver runs where the archive was unpacked by hand.
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "environment", filter="data")
    log = tmp_path / "log"
    submitted = submit(
        *("--archives", f"{archive}#environment"),
        *(str(ROOT / "tests" / "spark" / "cluster_job.py"), url, target, str(tmp_path)),
        cwd=tmp_path,
        options={**SPARK_OPTIONS, **logged(log), "spark.executorEnv.PYTHONPATH": ""},
        python="./environment/bin/python",
    )
    assert submitted.returncode == 1, submitted.stderr[-4000:]
    # Spark puts warnings of its own libraries there, too.
    assert submitted.stdout.splitlines()[-1].startswith("2 rows written, 1 failed")
    assert {key: item.value for key, item in contents(target).items()} == {
        b"N1": b'{"tailnum":"N1","seats":"10"}',
        b"N2": b'{"tailnum":"N2","seats":"20"}',
    }
    table_rows = DeltaTable(tmp_path / "table").to_pyarrow_table().to_pylist()
    assert contents_of_rows(table_rows) == contents(url)
    assert executors_of(log) == {"0", "1"}, "each worker's executor had tasks"
    of_driver, *of_executors = (tmp_path / "result").read_text().splitlines()
    inside = Path("environment", "lib", "upr_protocol", "__init__.py")
    assert Path(of_driver) == tmp_path / inside
    assert of_executors
    for code in of_executors:
        assert code.endswith(f"/{inside}")
        assert code != of_driver, "each executor has unpacked its own"


@pytest.mark.skipif(not THOROUGH, reason="each takes half a minute; the one above stands for them")
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("class_archive")
def test_a_cluster_of_two_workers_runs_the_files_of_the_recipes(
    new_bucket: NewBucket, tmp_path: Path
) -> None:
    url, target = new_bucket(), new_bucket()
    change(url, put(range(200)))
    table = tmp_path / "table"
    words_of = {
        "latest_state.py": (
            *(url, str(table), "--checkpoint", str(tmp_path / "checkpoint"), "--once"),
            *("--option", "minPartitions=4"),
        ),
        "backup.py": (url, str(tmp_path / "backup")),
        "restore.py": (str(tmp_path / "backup"), target),
        "snapshot.py": (url, str(tmp_path / "snapshot")),
    }
    for name, words in words_of.items():
        script = str(Path(commands.__path__[0], name))
        submitted = submit(
            *(script, *words), cwd=tmp_path, options=SPARK_OPTIONS, python=sys.executable
        )
        assert submitted.returncode == 0, submitted.stderr[-4000:]
    table_rows = DeltaTable(table).to_pyarrow_table().to_pylist()
    assert contents_of_rows(table_rows) == contents(url)
    assert contents(target) == contents(url)
