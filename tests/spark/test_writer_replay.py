"""Tasks that send again what the server may have forgotten, without Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Thread

import pyarrow as pa
import pytest
import trio
from pyspark.sql import types

from tests.kit.proxy import Proxy, proxy_to
from tests.kit.threaded import TrioThread, trio_thread
from tests.spark.interrupted import mutations
from tests.spark.server import blocking_server
from upr_protocol.client import Address, BlockingClient, BlockingConsumer, ChunkReceived
from upr_protocol.client.operator import (
    Operator,
    ReplicaLag,
    add_replicas,
    fail_over,
    wait_caught_up,
)
from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.publication import WriteCounts, attempt_of, job_of_write, writer_id
from upr_protocol.spark.write_options import BATCH_BYTES_MIN, WriteOptions
from upr_protocol.spark.writer import WriteTask

NewBucket = Callable[..., str]

BATCHES = 100
ROWS = 2 * BATCHES
"""Of some 31 KiB: two a batch."""

SCHEMA = types.StructType(
    [
        types.StructField("key", types.StringType()),
        types.StructField("value", types.StringType()),
    ]
)
WRITER = writer_id(b"job", 7)


def rows(count: int, value: str = "v") -> Iterator[pa.RecordBatch]:
    for first in range(0, count, 20):
        keys = [f"key-{index}" for index in range(first, min(first + 20, count))]
        yield pa.record_batch({"key": keys, "value": [value * 31_000] * len(keys)})


def run(url: str, attempt: int, count: int = ROWS, value: str = "v", **more: str) -> WriteCounts:
    all_options = {"url": url, "batchBytes": str(BATCH_BYTES_MIN), **more}
    options = WriteOptions.parse(all_options, SCHEMA, overwrite=False)
    return WriteTask(options, WRITER, attempt).write(rows(count, value))


def test_a_run_too_old_to_recognise_is_passed_over(new_bucket: NewBucket) -> None:
    url = new_bucket(1)
    first = run(url, 1)
    assert (first.rows, first.failed) == (ROWS, 0)
    assert run(url, 2) == first
    assert run(url, 3, ROWS + 2).rows == ROWS + 2
    assert mutations(url) == ROWS + 2


def test_a_run_too_old_to_recognise_must_fit_the_recognised_ones(new_bucket: NewBucket) -> None:
    url = new_bucket(1)
    run(url, 1)
    with pytest.raises(PipelineError, match=r"UPR_REPLAY_DIFFERS.*differs from"):
        run(url, 2, value="w")
    with pytest.raises(PipelineError, match=r"UPR_REPLAY_DIFFERS.*fewer rows"):
        run(url, 3, 10)
    assert mutations(url) == ROWS


def test_a_run_too_old_to_recognise_may_have_failed(new_bucket: NewBucket) -> None:
    url = new_bucket(1)
    run(url, 1, operation="insert")
    with pytest.raises(PipelineError, match=r"UPR_REPLAY_TOO_OLD.*upsert or delete"):
        run(url, 2, operation="insert")
    assert mutations(url) == ROWS


def test_upserts_that_run_again_in_other_tasks_are_refused(new_bucket: NewBucket) -> None:
    """The server knows a task by its number, and cannot tell other tasks from other rows."""
    url = new_bucket(1)
    options = WriteOptions.parse({"url": url}, SCHEMA, overwrite=False)

    def write(task: int, attempt: int, keys: range) -> None:
        batch = pa.record_batch({"key": [f"key-{key}" for key in keys], "value": ["v"] * len(keys)})
        writer = writer_id(b"layout", task)
        WriteTask(options, writer, attempt).write_or_prepare(iter([batch]), "layout")

    write(0, 1, range(50))
    write(1, 1, range(50, 100))
    with pytest.raises(PipelineError, match="UPR_REPLAY_DIFFERS"):
        write(0, 2, range(100))
    write(0, 3, range(50))
    write(1, 3, range(50, 100))
    with BlockingClient(url) as client:
        assert [row.high_seq for row in client.seqnos()] == [100]


def test_an_attempt_that_was_overtaken(new_bucket: NewBucket) -> None:
    url = new_bucket(1)
    run(url, attempt_of(1_700_000_000, 9))
    run(url, attempt_of(1_700_000_001, 1))
    with pytest.raises(PipelineError, match=r"UPR_SUPERSEDED.*stop"):
        run(url, attempt_of(1_700_000_000, 10))
    assert mutations(url) == ROWS


def test_what_is_left_of_a_write_inside_foreach_batch_is_refused_if_the_write_has_a_name(
    new_bucket: NewBucket,
) -> None:
    """A batch runs again while a task of its first run is left on an executor that has lost its
    driver. Without a name, the server cannot tell that task from one of a later write."""
    url = new_bucket(1)
    options = WriteOptions.parse({"url": url}, SCHEMA, overwrite=False)

    def write(job: str, attempt: int, value: str) -> None:
        batch = pa.record_batch({"key": ["key"], "value": [value]})
        WriteTask(options, writer_id(job.encode(), 0), attempt).write(iter([batch]))

    def value() -> bytes:
        with BlockingClient(url) as client:
            item = client.get("key")
        assert item is not None
        return item.value

    write(job_of_write("orders/1"), 2, "batch 1")
    write(job_of_write("orders/2"), 3, "batch 2")
    with pytest.raises(PipelineError, match="UPR_SUPERSEDED"):
        write(job_of_write("orders/1"), 1, "batch 1")
    assert value() == b"batch 2"
    write("drawn for the first run", 1, "batch 1")
    assert value() == b"batch 1"


def test_the_writer_id_of_a_task() -> None:
    ids = {writer_id(job, task) for job in (b"a", b"b") for task in (0, 1)}
    assert len(ids) == 4
    assert {len(writer) for writer in ids} == {16}
    assert writer_id(b"a", 0) == writer_id(b"a", 0)
    assert attempt_of(5, 1) < attempt_of(5, 2) < attempt_of(6, 0) < 1 << 64


# A connection that is lost.

COUNTERS = 40_000
LARGEST = 2**64 - 1
"""A counter that takes as much of an answer as any."""
IN_DOUBT = 16_000
"""As many rows as are in flight of a write of counters."""


def proxy_in(thread: TrioThread, port: int) -> Proxy:
    """A proxy to a server, which lives as long as the thread."""

    async def serve(*, task_status: trio.TaskStatus[Proxy]) -> None:
        async with proxy_to("127.0.0.1", port) as proxy:
            task_status.started(proxy)
            await trio.sleep_forever()

    async def start() -> Proxy:
        started: Proxy = await thread.nursery.start(serve)
        return started

    return thread.run(start)


def counters(url: str) -> dict[bytes, bytes]:
    with BlockingConsumer(url, end="now") as consumer:
        return {
            row.key: row.value
            for event in consumer
            if isinstance(event, ChunkReceived)
            for row in event.chunk
        }


def test_counters_whose_answers_are_lost_with_the_server() -> None:
    with blocking_server() as server, trio_thread() as thread:
        url = server.create_bucket("b", 1)
        proxy = proxy_in(thread, server.port)
        # Enough for the credit and an answer or two.
        proxy.budget_bytes = 32 * 1024

        def some() -> Iterator[pa.RecordBatch]:
            yield pa.record_batch(
                {
                    "op": ["increment"] * COUNTERS,
                    "key": [f"key-{index}" for index in range(COUNTERS)],
                    "value": [str(LARGEST)] * COUNTERS,
                }
            )

        def restart() -> None:
            while mutations(url) < IN_DOUBT:
                pass
            server.stop()
            proxy.budget_bytes = None
            server.start()

        schema = types.StructType([types.StructField("op", types.StringType()), *SCHEMA.fields])
        all_options = {"url": proxy.url("b"), "operation": "apply", "batchBytes": str(512 * 1024)}
        options = WriteOptions.parse(all_options, schema, overwrite=False)
        restarter = Thread(target=restart)
        restarter.start()
        try:
            assert WriteTask(options, WRITER, 1).write(some()).rows == COUNTERS
        finally:
            restarter.join(60)
        assert mutations(url) == COUNTERS
        largest = str(LARGEST).encode()
        assert counters(url) == {b"key-%d" % index: largest for index in range(COUNTERS)}


def test_rows_that_are_on_replicas_survive_a_failover() -> None:
    """The task is sent again to whoever is active then, and has one effect."""
    with blocking_server("--node", "a") as active, blocking_server("--node", "b") as replica:
        url = active.create_bucket("b", 1)
        with pytest.raises(PipelineError, match="too few replicas: add replicas"):
            run(url, 1, durability="replicated")
        trio.run(replicate, url, f"127.0.0.1:{replica.port}")
        both_urls = url.replace("/b", f",127.0.0.1:{replica.port}/b")
        result = run(both_urls, 2, durability="replicated-and-persisted", copies="1")
        assert result.rows == ROWS
        active.kill()
        trio.run(fail_over_from_a, replica.url("b"))
        assert run(both_urls, 3).rows == ROWS
        assert mutations(both_urls) == ROWS


async def replicate(url: str, address: str) -> None:
    operator = Operator(Address.parse(url))
    new_partitions = await add_replicas(operator, "b", address)
    await wait_caught_up(operator, "b", new_partitions, ReplicaLag())


async def fail_over_from_a(url: str) -> None:
    await fail_over(Operator(Address.parse(url)), all_of="a")
