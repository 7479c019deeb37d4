"""The option `timeoutSeconds`: how long a task waits for a server that is away, or silent."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread, Timer

import pyarrow as pa
import pytest
from pyspark.sql import types

from tests.spark.durable_keys import durable_client
from tests.spark.server import blocking_server
from upr_protocol.client import BlockingClient
from upr_protocol.failover import FailoverEntry, FailoverLog
from upr_protocol.ids import HistoryId, PartitionId, SeqNo
from upr_protocol.session import ServerSession
from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.options import idle_interval_s
from upr_protocol.spark.publication import writer_id
from upr_protocol.spark.read_options import ReadOptions
from upr_protocol.spark.read_tasks import PartitionRange, ReadTask
from upr_protocol.spark.reading import read_task
from upr_protocol.spark.write_options import WriteOptions
from upr_protocol.spark.writer import WriteTask

PAIR = types.StructType(
    [types.StructField(name, types.StringType()) for name in ("key", "value")],
)

COLUMNS = types.StructType([types.StructField("key", types.BinaryType())])


def write(options: dict[str, str]) -> None:
    WriteTask(WriteOptions.parse(options, PAIR, overwrite=False), writer_id(b"job", 0), 1).write(
        iter(())
    )


def read(options: dict[str, str], history_id: int = 1) -> list[pa.RecordBatch]:
    log = FailoverLog((FailoverEntry(HistoryId(history_id), SeqNo(0)),))
    range_ = PartitionRange(PartitionId(0), log, SeqNo(0), SeqNo(1), SeqNo(0), SeqNo(1))
    return list(read_task(ReadTask((range_,), 0), ReadOptions.parse(options), COLUMNS))


@contextmanager
def http_server() -> Iterator[tuple[str, list[int]]]:
    """A server that accepts one connection and answers over HTTP. Gives the URL of a bucket, and a
    list that gets the idle interval of the client's `Hello`."""
    intervals_s: list[int] = []

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            session = ServerSession("test", now=0)
            while session.hello is None:
                session.receive(connection.recv(4096), 0)
                list(session.messages())
            intervals_s.append(session.hello.idle_interval_s)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = Thread(target=answer, args=(listener,), daemon=True)
        thread.start()
        yield f"upr://127.0.0.1:{listener.getsockname()[1]}/b", intervals_s
        thread.join()


@pytest.mark.parametrize("work", [write, read])
def test_a_task_tells_its_idle_interval_and_refuses_a_server_of_another_protocol(
    work: Callable[[dict[str, str]], object],
) -> None:
    with (
        http_server() as (url, intervals_s),
        pytest.raises(PipelineError, match=r"UPR_SERVER.*not a UPR frame"),
    ):
        work({"url": url, "timeoutSeconds": "120"})
    assert intervals_s == [60]


@pytest.mark.parametrize(
    ("timeout_s", "interval_s"), [(1, 30), (61, 30), (120, 60), (600, 300), (604_800, 300)]
)
def test_the_idle_interval_is_half_the_timeout_between_30_s_and_300_s(
    timeout_s: int, interval_s: int
) -> None:
    assert idle_interval_s(timeout_s) == interval_s


def test_tasks_that_begin_while_the_server_restarts_wait_for_it() -> None:
    """The driver has reached the server before, and sends tasks."""
    with blocking_server() as server:
        url = server.create_bucket("b", 1)
        with durable_client(url) as client:
            client.set("before", "1")
            (info,) = client.partitions()

        def restart() -> Timer:
            server.kill()
            timer = Timer(0.5, server.start)
            timer.start()
            return timer

        timer = restart()
        (batch,) = read({"url": url}, info.log.current)
        timer.join()
        assert batch.column("key").to_pylist() == [b"before"]
        timer = restart()
        rows = pa.RecordBatch.from_pydict({"key": ["after"], "value": ["2"]})
        options = WriteOptions.parse({"url": url}, PAIR, overwrite=False)
        assert WriteTask(options, writer_id(b"job", 0), 1).write(iter([rows])).rows == 1
        timer.join()
        with BlockingClient(url) as client:
            item = client.get("after")
        assert item is not None
        assert item.value == b"2"
