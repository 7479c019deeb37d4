"""The data source and a recipe over Spark Connect, with a client in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.effort import THOROUGH
from tests.kit.process import ROOT
from tests.spark.bucket import contents
from tests.spark.class_archive import JAVA_OPTIONS

CLIENT_S = 200.0


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("class_archive")
@pytest.mark.parametrize("what", ["all" if THOROUGH else "sample"])
def test_a_client_of_spark_connect_reads_writes_and_streams(
    new_bucket: Callable[..., str], tmp_path: Path, what: str
) -> None:
    """The sample writes, reads, and runs one recipe."""
    url, target = new_bucket(4), new_bucket(4)
    here = {
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_REMOTE": "local[2]",
        "SPARK_SUBMIT_OPTS": JAVA_OPTIONS,
    }
    client = subprocess.run(
        [sys.executable, "-m", "tests.spark.connected", url, target, str(tmp_path), what],
        env={**os.environ, **here},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=CLIENT_S,
        check=False,
    )
    assert client.returncode == 0, client.stderr[-4000:]
    result = json.loads(client.stdout.splitlines()[-1])
    assert "[UPR_OPTION] there is no option partition" in result.pop("refusal")
    assert "pass app_id (--app-id)" in result.pop("nameless query")
    assert result.pop("table") == 100
    assert result.pop("written") == 100
    if what == "all":
        assert result == {"latest": 100, "snapshot": 100}
        expected = {b"key %d" % number: b"%d" % number for number in range(100)}
        assert {key: item.value for key, item in contents(target).items()} == expected
