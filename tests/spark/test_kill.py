"""Drivers, executors and servers that die: nothing is lost, nothing is done twice, and a batch that
is read again is what it was."""

from __future__ import annotations

import random
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from tests.kit.differences import differences
from tests.kit.effort import THOROUGH, thorough
from tests.spark.driver import JOB, Job, stream
from tests.spark.driver_process import DRIVER_S, driver, log_of
from tests.spark.durable_keys import durable_client, keys_of, overwrite
from tests.spark.server import blocking_server
from tests.spark.waiting import until
from upr_protocol.chunk import Mutation
from upr_protocol.client import BlockingClient
from upr_protocol.ids import Operation

PARTITIONS = 1024
"""With this many partitions, each is compacted though little of it is garbage."""
KEYS = keys_of(5, PARTITIONS, 10) + keys_of(700, PARTITIONS, 10)


def run(job: Job) -> int:
    """Has a driver do a job; gives its exit code."""
    with driver(job) as process:
        exit_code = process.wait(DRIVER_S)
        if exit_code not in (0, -signal.SIGKILL):
            raise AssertionError(log_of(job).read_text()[-4000:])
        return exit_code


def finish(job: Job, spark: SparkSession, patch: pytest.MonkeyPatch) -> None:
    """Has the driver in this process do a job; it does not die."""
    job.once, job.dies = True, ""
    patch.setenv(JOB, msgspec.json.encode(job).decode())
    stream(spark)


def fail(job: Job, spark: SparkSession, patch: pytest.MonkeyPatch) -> None:
    """Has the driver in this process do a job, whose query ends where it would die."""
    failing = msgspec.structs.replace(job, raises=True)
    patch.setenv(JOB, msgspec.json.encode(failing).decode())
    with pytest.raises(StreamingQueryException, match="SinkError"):
        stream(spark)


def batches_of(folder: Path) -> dict[int, list[Any]]:
    """Each batch's rows; they are the same each time that it was done."""
    batches = {}
    for batch in sorted((folder / "batches").iterdir(), key=lambda path: int(path.name)):
        times = [msgspec.json.decode(run.read_bytes()) for run in batch.iterdir()]
        assert all(run == times[0] for run in times), f"batch {batch.name} was not the same"
        batches[int(batch.name)] = times[0]
    return batches


def check(batches: dict[int, list[Any]], client: BlockingClient, *, from_start: bool) -> None:
    """Nothing twice, in order, and in the end what the server has."""
    reached: Counter[int] = Counter()
    contents: dict[bytes, bytes] = {}
    for rows in batches.values():
        before = dict(reached)
        for partition, _, seq, key, value, deleted in rows:
            assert seq > before.get(partition, 0), "a number in two batches"
            reached[partition] = max(reached[partition], seq)
            assert not deleted
            contents[bytes.fromhex(key)] = bytes.fromhex(value)
    server_items = {key.encode(): client.get(key) for key in KEYS}
    assert not differences(
        contents, {key: item.value for key, item in server_items.items() if item}
    )
    for row in client.seqnos():
        assert reached[row.partition] == row.high_seq
    if from_start:
        assert min(seq for rows in batches.values() for _, _, seq, *_ in rows) == 1


def write(client: BlockingClient, value: str) -> None:
    client.apply(Mutation(Operation.SET, key.encode(), value.encode()) for key in KEYS)


@thorough
@pytest.mark.timeout(240)
def test_a_driver_that_dies_reads_its_batch_again(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between plan and read, and when its sink has written but Spark does not know. Every key is
    overwritten meanwhile, and all that nobody holds is compacted."""
    with blocking_server() as server:
        url = server.create_bucket("b", PARTITIONS)
        with durable_client(url) as client:
            for index in range(4):
                write(client, f"value {index}")
            job = Job("stream", url, str(tmp_path), options={"maxOffsetsPerTrigger": "25"})
            for job.dies, job.in_batch in (("planned", 1), ("written", 2)):
                # To the server both are the same, and a driver takes long to start.
                if THOROUGH:
                    assert run(job) == -signal.SIGKILL
                else:
                    fail(job, spark, monkeypatch)
                overwrite(client, KEYS, 1)
            finish(job, spark, monkeypatch)
            batches = batches_of(tmp_path)
            check(batches, client, from_start=True)
            times = {batch: len(list((tmp_path / "batches" / batch).iterdir())) for batch in "0123"}
            assert times == {"0": 1, "1": 1, "2": 2, "3": 1}
            values = Counter(row[4] for rows in batches.values() for row in rows)
            for index in range(4):
                assert values[f"value {index}".encode().hex()] == len(KEYS), "every version"


@thorough
@pytest.mark.timeout(240)
def test_a_driver_that_dies_in_its_first_batch_begins_where_it_began(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with blocking_server() as server:
        url = server.create_bucket("b", PARTITIONS)
        with durable_client(url) as client:
            write(client, "before")
            job = Job("stream", url, str(tmp_path), options={"startingOffsets": "latest"})
            job.once, job.dies = False, "planned"
            with driver(job) as process:
                until((tmp_path / "began").exists, "the query begins")
                write(client, "first")
                assert process.wait(DRIVER_S) == -signal.SIGKILL
            write(client, "second")
            finish(job, spark, monkeypatch)
            batches = batches_of(tmp_path)
            check(batches, client, from_start=False)
            values = [bytes.fromhex(row[4]) for rows in batches.values() for row in rows]
            assert Counter(values) == {b"first": len(KEYS), b"second": len(KEYS)}


@thorough
@pytest.mark.timeout(360)
@pytest.mark.usefixtures("class_archive")
def test_executors_that_die_while_they_read_and_write(tmp_path: Path) -> None:
    draw = random.Random(3)
    with blocking_server() as server:
        url, target = server.create_bucket("b", 4), server.create_bucket("c", 4)
        items_written = {b"key %d" % index: draw.randbytes(200) for index in range(20_000)}
        with durable_client(url) as client:
            client.apply(
                Mutation(Operation.SET, key, value) for key, value in items_written.items()
            )
        job = Job("copy", url, str(tmp_path), target, master="local-cluster[1,1,1024]")
        job.options = {"minPartitions": "2"}
        assert run(job) == 0
        killed = {marker.name for marker in tmp_path.glob("killed *")}
        assert killed == {"killed while it reads", "killed while it writes"}
        with BlockingClient(target) as client:
            items = client.get_many(list(items_written))
            assert not differences({item.key: item.value for item in items if item}, items_written)
            assert sum(row.high_seq for row in client.seqnos()) == len(items_written), "each once"


@pytest.mark.timeout(240)
def test_a_server_that_dies_in_each_phase_of_a_batch(spark: SparkSession, tmp_path: Path) -> None:
    """Before it is read, while it is read, and while the sink has it; each time there is a new
    history, and the stream goes on."""
    with blocking_server() as server:
        url = server.create_bucket("b", 4)
        draw = random.Random(4)
        items_written = {b"key %d" % index: draw.randbytes(1000) for index in range(20_000)}
        with durable_client(url) as client:
            client.apply(
                Mutation(Operation.SET, key, value) for key, value in items_written.items()
            )
        items_read: dict[bytes, bytes] = {}
        numbers: list[tuple[int, int]] = []

        def restart() -> threading.Timer:
            server.kill()
            timer = threading.Timer(1.0, server.start)
            timer.start()
            return timer

        def sink(frame: DataFrame, batch: int) -> None:
            timers = [restart()] if batch == 0 else []
            for row in frame.select("partition", "seq", "key", "value").toLocalIterator():
                if batch == 1 and not timers:
                    timers.append(restart())
                items_read[bytes(row.key)] = bytes(row.value)
                numbers.append((row.partition, row.seq))
            if batch == 2:
                timers.append(restart())
            for timer in timers:
                timer.join()

        reader = spark.readStream.format("upr").option("url", url)
        reader = reader.option("maxOffsetsPerTrigger", "5000")
        writer = reader.load().writeStream.foreachBatch(sink)
        writer = writer.option("checkpointLocation", str(tmp_path))
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(120)
        assert not differences(items_read, items_written)
        assert len(numbers) == len(set(numbers)) == len(items_written)
        with BlockingClient(url) as client:
            assert all(len(info.log) == 4 for info in client.partitions())
