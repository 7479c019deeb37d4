"""A batch of a stream that runs again in other tasks: other cores, another `maxPartitionBytes`,
adaptive execution."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.kit.process import ROOT, environment
from tests.spark.counting import ONE_TASK, TWO_TASKS, count, put_increments
from tests.spark.test_writer import contents
from upr_protocol.client import BlockingClient

NewBucket = Callable[..., str]


def run_and_die(url: str, folder: Path, how: str) -> None:
    """Has a driver of its own write the batch in two tasks, and die."""
    process = subprocess.run(
        [
            sys.executable,
            "-c",
            "from tests.spark.counting import main; main()",
            url,
            str(folder),
            how,
        ],
        cwd=ROOT,
        env=environment(PYSPARK_PYTHON=sys.executable, PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=200,
        start_new_session=True,
    )
    assert process.returncode == -signal.SIGKILL, process.stdout[-4000:]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ["hanging", "committed"])
def test_a_batch_that_runs_again_in_one_task_counts_once(
    spark: SparkSession, new_bucket: NewBucket, tmp_path: Path, how: str
) -> None:
    url = new_bucket()
    for name in ("first", "second"):
        put_increments(tmp_path, name, [f"counter-{number % 10}" for number in range(5000)])
    run_and_die(url, tmp_path, how)
    count(spark, url, tmp_path, "upr", ONE_TASK)
    assert contents(url) == {b"counter-%d" % number: b"1000" for number in range(10)}
    put_increments(tmp_path, "third", ["counter-0"])
    count(spark, url, tmp_path, "upr", TWO_TASKS)
    with BlockingClient(url) as client:
        item = client.get("counter-0")
        assert item is not None
        assert item.value == b"1001"
