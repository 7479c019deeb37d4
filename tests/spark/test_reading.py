"""What a task of a read does when its bucket changes, without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import attrs
import pytest
import trio
from pyspark.sql import types
from pyspark.sql.types import StructField

from tests.kit.fake_server import FakeConnection, FakeServer, put_keys
from tests.kit.threaded import TrioThread, trio_thread
from upr_protocol.errors import Status
from upr_protocol.ids import HistoryId, SeqNo
from upr_protocol.spark import value_sample
from upr_protocol.spark.batch_reader import plan
from upr_protocol.spark.driver_client import BucketDriverClient
from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.offset import PartitionOffset, StreamOffset
from upr_protocol.spark.read_options import ReadOptions
from upr_protocol.spark.read_tasks import PartitionRange, ReadTask, ranges_between
from upr_protocol.spark.reading import read_task
from upr_protocol.spark.schema import READ_COLUMNS
from upr_protocol.wire import Go

COLUMNS = types.StructType([types.StructField("key", types.BinaryType())])


async def listen() -> list[trio.SocketListener]:
    return await trio.open_tcp_listeners(0, host="127.0.0.1")


@contextmanager
def served_keys(count: int) -> Iterator[tuple[FakeServer, TrioThread, ReadOptions]]:
    """A server with so many keys in one partition, and the thread in which it runs."""
    with trio_thread() as thread:
        server = FakeServer(1)
        thread.call(lambda: put_keys(server, count))
        (listener,) = thread.run(listen)
        port = listener.socket.getsockname()[1]
        thread.call(
            lambda: thread.nursery.start_soon(trio.serve_listeners, server.serve, [listener])
        )
        yield server, thread, ReadOptions.parse({"url": f"upr://127.0.0.1:{port}/b"})


def test_a_task_whose_bucket_is_deleted_fails_and_does_not_lack_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def delete_bucket(connection: FakeConnection, _: Go) -> None:
        connection.end_streams(Status.BUCKET_DELETED)

    monkeypatch.setattr(FakeConnection, "_on_go", delete_bucket, raising=False)
    with served_keys(20) as (server, _, options):
        partition = server.partitions[0]
        bounds = (SeqNo(0), partition.high, SeqNo(0), partition.high)
        task = ReadTask((PartitionRange(partition.id, partition.log, *bounds),), 0)
        with pytest.raises(PipelineError, match="deleted while it was read") as failed:
            list(read_task(task, options, COLUMNS))
        assert failed.value.code == "UPR_NO_BUCKET"


@pytest.mark.parametrize("is_under_way", [False, True])
def test_a_task_whose_rows_a_crash_undoes_fails_and_does_not_wait(
    monkeypatch: pytest.MonkeyPatch, *, is_under_way: bool
) -> None:
    """The partition has yet to reach the planned end, and will reach it with other rows."""
    with served_keys(20) as (server, thread, options):
        partition = server.partitions[0]
        bounds = (SeqNo(0), partition.high, SeqNo(0), partition.high)
        task = ReadTask((PartitionRange(partition.id, partition.log, *bounds),), 0)

        def crash(connection: FakeConnection, _: Go) -> None:
            if partition.high == 20:
                partition.fail_over(99, 15)
                connection.scope.cancel()

        if is_under_way:
            monkeypatch.setattr(FakeConnection, "_on_go", crash, raising=False)
        else:
            thread.call(lambda: partition.fail_over(99, 15))
        sentence = "partition 0 of b has to go back from 20 to 15"
        with pytest.raises(PipelineError, match=sentence) as failed:
            list(read_task(task, options, COLUMNS))
        assert failed.value.code == "UPR_ROLLBACK"


def test_a_sample_is_taken_though_a_crash_undoes_the_newest_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with served_keys(20) as (server, thread, options):
        partition = server.partitions[0]

        class FailingDriver(BucketDriverClient):
            def close(self) -> None:
                super().close()
                thread.call(lambda: partition.fail_over(99, 15))

        monkeypatch.setattr(value_sample, "BucketDriverClient", FailingDriver)
        assert len(list(value_sample.sample([options]))) == 15


def test_the_values_of_a_sample_are_not_held_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be longer than memory."""
    numbers: list[int] = []

    def newest_values(_options: ReadOptions, count: int) -> Iterator[bytes]:
        for number in range(count):
            numbers.append(number)
            yield b"%d" % number

    monkeypatch.setattr(value_sample, "_newest_values", newest_values)
    options = ReadOptions.parse({"url": "upr://h/b", "inferSample": "10", "valueSchema": "infer"})
    values = value_sample.sample([options, options])
    assert (next(values), numbers) == (b"0", [0])
    assert len(list(values)) == 9


def test_a_batch_read_again_after_a_crash_has_the_same_histories() -> None:
    """Otherwise a sink would take its rows for others: partition, history and number identify a
    row."""
    columns = types.StructType([StructField("history_id", *READ_COLUMNS["history_id"])])
    with served_keys(20) as (server, thread, options):
        partition = server.partitions[0]
        high, history_id = partition.high, partition.log.current
        offset = PartitionOffset(partition.log, high, SeqNo(0), high)
        thread.call(lambda: partition.fail_over(99, high))
        # Nothing promises that rows are the same which no lease pins.
        for lease_id, history_id_of_rows in ((7, history_id), (0, HistoryId(99))):
            end = StreamOffset("b", {partition.id: offset}, lease_id)
            task = ReadTask(tuple(ranges_between(StreamOffset("b", {}), end)), lease_id)
            rows = [row for batch in read_task(task, options, columns) for row in batch.to_pylist()]
            assert rows == [{"history_id": f"{history_id_of_rows:016x}"}] * 20


def test_a_read_that_nothing_pins_has_keys_that_change_meanwhile() -> None:
    """Their older rows are gone from memory, and the newer ones come after the planned end."""
    columns = types.StructType(
        [StructField(name, *READ_COLUMNS[name]) for name in ("key", "seq", "snapshot_end")]
    )
    with served_keys(5) as (server, thread, options):
        options = attrs.evolve(options, durable=False)
        driver = BucketDriverClient(options)
        (task,) = plan(options, driver, 0, ExitStack())
        driver.close()
        thread.call(lambda: put_keys(server, 2))
        rows = [row for batch in read_task(task, options, columns) for row in batch.to_pylist()]
        assert [(row["key"], row["seq"]) for row in rows] == [
            (b"key-%d" % number, seq) for number, seq in ((2, 3), (3, 4), (4, 5), (0, 6), (1, 7))
        ]
        assert {row["snapshot_end"] for row in rows} == {7}
