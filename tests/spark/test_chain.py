"""From a bucket through Spark into another, and into a Delta table: exactly once, whatever is
killed at whatever time."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from tests.kit.differences import differences
from tests.kit.effort import effort
from tests.spark.bucket import contents, contents_of_rows
from tests.spark.driver import JOB, Job, chain
from tests.spark.driver_process import DRIVER_S, driver, log_of
from tests.spark.durable_keys import durable_client
from tests.spark.server import blocking_server
from tests.spark.waiting import until
from upr_protocol.chunk import Mutation
from upr_protocol.client import BlockingClient
from upr_protocol.ids import Operation

ROUNDS = effort(1, 100)
ROUNDS_A_DRIVER = 4
"""Rounds before the driver is killed, too: most of what a round costs is to start one."""

ROWS_A_ROUND = 400
COUNTERS = 10
KEYS_OF_TABLE = 300


def planned_batches(folder: Path) -> tuple[int, int]:
    """How many batches each query has planned; Spark removes the files of old ones."""

    def planned(checkpoint: str) -> int:
        files = (folder / checkpoint / "offsets").glob("[0-9]*")
        return max((int(file.name) + 1 for file in files), default=0)

    return planned("checkpoint"), planned("table-checkpoint")


def have_new_batches(
    folder: Path, before: tuple[int, int], process: subprocess.Popen[bytes]
) -> bool:
    """Whether the driver has planned a batch of each query; or has ended, which is an error."""
    planned = planned_batches(folder)
    return all(map(int.__gt__, planned, before)) or process.poll() is not None


def changes_of(draw: random.Random) -> list[Mutation]:
    """Changes of the bucket that the table follows: most overwrite keys, some delete them."""
    keys = [b"key %d" % key for key in draw.sample(range(KEYS_OF_TABLE), 200)]
    return [
        *(Mutation(Operation.SET, key, b"%d" % draw.randrange(1000)) for key in keys[:150]),
        *(Mutation(Operation.DELETE, key) for key in keys[150:]),
    ]


def kill_a_worker(driver_pid: int, draw: random.Random) -> None:
    """Kills one of the processes in which a driver's tasks run, if there is one just now."""
    workers = [
        pid
        for pid in descendants_of(driver_pid)
        # Those that a driver asks for offsets, which a query does not outlive, are of another.
        if b"pyspark.worker" in command_of(pid).split(b"\0") and is_forked_worker(pid)
    ]
    if workers:
        with suppress(ProcessLookupError):
            os.kill(draw.choice(workers), signal.SIGKILL)


def is_forked_worker(pid: int) -> bool:
    """Whether it was forked by the process that forks workers, and is not that one itself."""
    return command_of(parent_of(pid)) == command_of(pid)


def command_of(pid: int) -> bytes:
    """The words of a process's command; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def parent_of(pid: int) -> int:
    """Its parent; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def descendants_of(pid: int) -> list[int]:
    """The processes that it has started, and those that these have."""
    parents = {int(path.name): parent_of(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    descendants = [pid]
    for known in descendants:
        descendants += [child for child, parent in parents.items() if parent == known]
    return sorted(descendants[1:])


@pytest.mark.timeout(240 + 120 * ROUNDS)
def test_each_row_counts_once_though_driver_workers_and_server_are_killed(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(7)
    values: dict[bytes, bytes] = {}
    job = Job("chain", "", str(tmp_path), master="local[2,4]", once=False, dies="reading")
    job.options = {"maxOffsetsPerTrigger": "60"}
    with blocking_server() as server:
        job.url, job.target = server.create_bucket("b", 4), server.create_bucket("c", 4)
        job.of_table = server.create_bucket("d", 4)

        def write(index: int) -> None:
            rows = {
                b"key %d" % (index * ROWS_A_ROUND + row): b"%d" % draw.randrange(COUNTERS)
                for row in range(ROWS_A_ROUND)
            }
            values.update(rows)
            with durable_client(job.url) as client:
                client.apply(Mutation(Operation.SET, key, value) for key, value in rows.items())
            with durable_client(job.of_table) as client:
                client.apply(changes_of(draw))

        for first in range(0, ROUNDS, ROUNDS_A_DRIVER):
            before = planned_batches(tmp_path)
            write(first)
            with driver(job) as process:
                for index in range(first, min(first + ROUNDS_A_DRIVER, ROUNDS)):
                    if index > first:
                        before = planned_batches(tmp_path)
                        write(index)
                    have_begun = partial(have_new_batches, tmp_path, before, process)
                    until(have_begun, "new batches are planned", DRIVER_S)
                    if not index:
                        # In every run, and not only if the driver happens to live for long enough.
                        until((tmp_path / "a worker died").exists, "a worker died", DRIVER_S)
                    threading.Event().wait(draw.random() * 2)
                    if draw.random() < 0.4:
                        server.kill()
                        server.start()
                        threading.Event().wait(draw.random())
                    elif index > first:
                        kill_a_worker(process.pid, draw)
                    assert process.poll() is None, (
                        f"a query ended by itself: {log_of(job).read_text()[-4000:]}"
                    )
                os.killpg(process.pid, signal.SIGKILL)  # Python, JVM and all
                process.wait(DRIVER_S)
        job.once, job.dies = True, ""
        monkeypatch.setenv(JOB, msgspec.json.encode(job).decode())
        chain(spark)
        with BlockingClient(job.target) as client:
            items = {item.key: item.value for item in client.get_many(list(values)) if item}
            assert not differences(items, values)
            for value, count in Counter(values.values()).items():
                counter = client.get(b"rows-" + value)
                assert counter is not None
                assert int(counter.value) == count, f"counter {value!r}"
        table = DeltaTable(str(tmp_path / "table")).to_pyarrow_table()
        assert not differences(contents_of_rows(table.to_pylist()), contents(job.of_table))
