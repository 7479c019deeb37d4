"""A history that parts from a stream's, in each phase of a batch: after a crash, an older copy of
the data is put in place, and begins a new history at its end."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from tests.kit.effort import effort
from tests.spark.bucket import contents, contents_of_rows
from tests.spark.durable_keys import durable_client
from tests.spark.server import BlockingServer, blocking_server
from upr_protocol.chunk import Mutation
from upr_protocol.ids import Operation
from upr_protocol.spark.recipes import LatestState

PARTITIONS = 4


class RestorableServer:
    """A server whose data goes back, a stream of it, and a table that the stream keeps."""

    def __init__(self, spark: SparkSession, server: BlockingServer, folder: Path) -> None:
        self._spark = spark
        self._server = server
        self._folder = folder
        self.url = server.create_bucket("b", PARTITIONS)
        self.table = str(folder / "table")
        self.batches = 0

    def write(self, numbers: range, value: str) -> None:
        with durable_client(self.url) as client:
            client.apply(
                Mutation(Operation.SET, b"key %d" % key_number, value.encode())
                for key_number in numbers
            )

    def go_back(self, *, between: Callable[[], None]) -> None:
        """Does something that the server then never had; after that it writes something else."""
        data, copy = self._server.data_dir, self._folder / "copy"
        self._server.kill()
        shutil.copytree(data, copy)
        self._server.start()
        between()
        self._server.kill()
        shutil.rmtree(data)
        copy.rename(data)
        self._server.start()
        self.write(range(60, 90), "in another history")

    def delete(self, numbers: range) -> None:
        with durable_client(self.url) as client:
            client.apply(
                Mutation(Operation.DELETE, b"key %d" % key_number) for key_number in numbers
            )

    def run(self, sink: Callable[[DataFrame, int], None], on_rollback: str) -> None:
        """Has a query catch up, in batches of 40."""
        reader = self._spark.readStream.format("upr").option("url", self.url)
        reader = reader.option("maxOffsetsPerTrigger", "40").option("onRollback", on_rollback)
        writer = reader.load().writeStream.foreachBatch(sink)
        writer = writer.option("checkpointLocation", str(self._folder / "checkpoint"))
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()

    def check(self) -> None:
        """The table is what the server has."""
        rows = DeltaTable(self.table).to_pyarrow_table().to_pylist()
        assert contents_of_rows(rows) == contents(self.url)


@pytest.fixture
def restorable(spark: SparkSession, tmp_path: Path) -> Iterator[RestorableServer]:
    with blocking_server() as server:
        yield RestorableServer(spark, server, tmp_path)


class PowerCutError(Exception):
    """What the sink does not survive."""


@pytest.mark.parametrize(
    ("phase", "on_rollback"),
    effort(
        [("in the sink", "rewind")],
        [("between batches", "rewind"), ("planned", "marker"), ("in the sink", "rewind")],
    ),
)
def test_a_history_that_parts(restorable: RestorableServer, phase: str, on_rollback: str) -> None:
    """The query fails and says why; with markers it goes on, and its table is the server's."""
    latest_state = LatestState(restorable.table)
    went_to: list[int] = []

    def keep(frame: DataFrame, batch: int) -> None:
        latest_state(frame, batch)
        went_to.extend(row.seq for row in frame.where("op = 'rollback'").collect())

    def dies(frame: DataFrame, batch: int) -> None:
        if batch:
            if phase == "in the sink":
                keep(frame, batch)
            raise PowerCutError
        keep(frame, batch)

    def between() -> None:
        restorable.delete(range(5))
        restorable.write(range(20, 80), "never had")
        if phase == "between batches":
            restorable.run(keep, on_rollback)
        else:
            with pytest.raises(StreamingQueryException, match="PowerCutError"):
                restorable.run(dies, on_rollback)

    restorable.write(range(40), "value")
    restorable.run(keep, on_rollback)
    restorable.go_back(between=between)
    with pytest.raises(StreamingQueryException, match=r"\[UPR_ROLLBACK\] partition") as failed:
        restorable.run(keep, "fail")
    assert "onRollback=marker" in str(failed.value)
    assert not went_to
    restorable.run(keep, on_rollback)
    restorable.check()
    assert went_to
    assert all((seq > 0) == (on_rollback == "rewind") for seq in went_to)
    restorable.write(range(85, 95), "later")
    restorable.run(keep, on_rollback)
    restorable.check()
