"""What a task of a read does when its bucket changes, without Spark."""

from __future__ import annotations

import pytest
import trio
from pyspark.sql import types

from tests.kit.fake_server import FakeConnection, FakeServer, put_keys
from tests.kit.threaded import trio_thread
from upr_protocol.errors import Status
from upr_protocol.ids import SeqNo
from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.read_options import ReadOptions
from upr_protocol.spark.read_tasks import PartitionRange, ReadTask
from upr_protocol.spark.reading import read_task
from upr_protocol.wire import Go

COLUMNS = types.StructType([types.StructField("key", types.BinaryType())])


async def listen() -> list[trio.SocketListener]:
    return await trio.open_tcp_listeners(0, host="127.0.0.1")


def test_a_task_whose_bucket_is_deleted_fails_and_does_not_lack_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def delete_bucket(connection: FakeConnection, _: Go) -> None:
        connection.end_streams(Status.BUCKET_DELETED)

    monkeypatch.setattr(FakeConnection, "_on_go", delete_bucket, raising=False)
    with trio_thread() as thread:
        server = FakeServer(1)
        thread.call(lambda: put_keys(server, 20))
        (listener,) = thread.run(listen)
        port = listener.socket.getsockname()[1]
        thread.call(
            lambda: thread.nursery.start_soon(trio.serve_listeners, server.serve, [listener])
        )
        partition = server.partitions[0]
        bounds = (SeqNo(0), partition.high, SeqNo(0), partition.high)
        task = ReadTask((PartitionRange(partition.id, partition.log, *bounds),), 0)
        options = ReadOptions.parse({"url": f"upr://127.0.0.1:{port}/b"})
        with pytest.raises(PipelineError, match="deleted while it was read") as failed:
            list(read_task(task, options, COLUMNS))
        assert failed.value.code == "UPR_NO_BUCKET"
