"""From a bucket through Spark into another: exactly once, whatever is killed at whatever time."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
from collections import Counter
from functools import partial
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession

from tests.kit.differences import differences
from tests.kit.effort import effort
from tests.spark.driver import JOB, Job, chain
from tests.spark.server import blocking_server
from tests.spark.test_kill import DRIVER_S, driver
from tests.spark.test_read import durable_client, until
from upr_protocol.chunk import Mutation
from upr_protocol.client import BlockingClient
from upr_protocol.ids import Operation

ROUNDS = effort(1, 100)
ROWS_A_ROUND = 400
COUNTERS = 10


def planned_batches(folder: Path) -> int:
    """How many batches have been planned; Spark removes the files of old ones."""
    files = (folder / "checkpoint" / "offsets").glob("[0-9]*")
    return max((int(file.name) + 1 for file in files), default=0)


def has_new_batch(folder: Path, before: int, process: subprocess.Popen[bytes]) -> bool:
    """Whether the driver has planned a batch; or has ended, which is an error."""
    return planned_batches(folder) > before or process.poll() is not None


@pytest.mark.timeout(240 + 60 * ROUNDS)
def test_each_row_counts_once_though_driver_and_server_are_killed(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(7)
    values: dict[bytes, bytes] = {}
    job = Job("chain", "", str(tmp_path), once=False, options={"maxOffsetsPerTrigger": "60"})
    with blocking_server() as server:
        job.url, job.target = server.create_bucket("b", 4), server.create_bucket("c", 4)
        for index in range(ROUNDS):
            rows = {
                b"key %d" % (index * ROWS_A_ROUND + row): b"%d" % draw.randrange(COUNTERS)
                for row in range(ROWS_A_ROUND)
            }
            values.update(rows)
            with durable_client(job.url) as client:
                client.apply(Mutation(Operation.SET, key, value) for key, value in rows.items())
            before = planned_batches(tmp_path)
            with driver(job) as process:
                has_begun = partial(has_new_batch, tmp_path, before, process)
                until(has_begun, "a new batch is planned", DRIVER_S)
                threading.Event().wait(draw.random() * 2)
                if draw.random() < 0.4:
                    server.kill()
                    server.start()
                    threading.Event().wait(draw.random())
                assert process.poll() is None, "the query ended by itself"
                os.killpg(process.pid, signal.SIGKILL)  # Python, JVM and all
                process.wait(DRIVER_S)
        job.once = True
        monkeypatch.setenv(JOB, msgspec.json.encode(job).decode())
        chain(spark)
        with BlockingClient(job.target) as client:
            items = {item.key: item.value for item in client.get_many(list(values)) if item}
            assert not differences(items, values)
            for value, count in Counter(values.values()).items():
                counter = client.get(b"rows-" + value)
                assert counter is not None
                assert int(counter.value) == count, f"counter {value!r}"
