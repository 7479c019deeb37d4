"""What a stream tells of its progress, to Spark and to the server."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from tests.spark.model_driver_client import BYTES_A_ROW, ModelDriverClient
from tests.spark.stream_reader import offsets_of, ranges_of, reader_of, write_rows, written
from upr_protocol.errors import ServerError, Status
from upr_protocol.limits import LEASE_TIME_TO_LIVE_S_MAX
from upr_protocol.spark.consumer_position import (
    AGAIN_AFTER_REFUSAL_S,
    AGAIN_AFTER_S,
    ConsumerPosition,
)
from upr_protocol.spark.offset import StreamOffset


def test_the_progress_says_how_far_the_stream_is_behind() -> None:
    driver = written(2, 20)
    write_rows(driver, 0, 10)
    reader = reader_of(driver, maxOffsetsPerTrigger="10")
    start = reader.initialOffset()

    def metrics() -> dict[str, float]:
        document = reader.reportLatestOffset()
        assert document is not None
        assert offsets_of(document)[0].seq == 30
        metrics: dict[str, float] = document["metrics"]
        return metrics

    assert metrics() == {
        "minOffsetsBehindLatest": 20,
        "maxOffsetsBehindLatest": 30,
        "avgOffsetsBehindLatest": 25.0,
        "totalOffsetsBehindLatest": 50,
    }
    end = reader.latestOffset(start, ReadMaxRows(10))
    assert metrics() == {
        "minOffsetsBehindLatest": 16,
        "maxOffsetsBehindLatest": 24,
        "avgOffsetsBehindLatest": 20.0,
        "totalOffsetsBehindLatest": 40,
        "estimatedTotalBytesBehindLatest": 40 * BYTES_A_ROW,
    }
    reader = reader_of(driver)
    assert reader.latestOffset(end, ReadAllAvailable()) is not end
    assert metrics()["totalOffsetsBehindLatest"] == 0
    assert metrics()["secondsBehindLatest"] == 0
    assert metrics()["estimatedTotalBytesBehindLatest"] == 0


def test_a_named_stream_puts_its_position_when_batches_are_done() -> None:
    driver = written(2, 20)

    def put() -> list[tuple[str, dict[int, int]]]:
        return list(driver.positions.values())

    reader = reader_of(driver, consumerName="orders", maxOffsetsPerTrigger="20")
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadMaxRows(20))
    assert put() == [("orders", {0: 0, 1: 0})], "the batch was not done yet"
    for _ in range(3):
        start, end = end, reader.latestOffset(end, ReadMaxRows(20))
        reader.commit(start)
    assert put() == [("orders", {0: 20, 1: 20})]
    # Another process replaces what this one has put, also if that was put by the other lease.
    for _ in range(2):
        write_rows(driver, 0, 1)
        reader = reader_of(driver, consumerName="orders")
        end = reader.latestOffset(end, ReadAllAvailable())
        assert len(put()) == 1
    driver.write(1, 5)
    reader = reader_of(driver, consumerName="orders", stability="any")
    end = reader.latestOffset(end, ReadAllAvailable())
    end = reader.latestOffset(end, ReadAllAvailable())
    assert put() == [("orders", {0: 22, 1: 20})], "as far as it is on disk"


class RefusingDriver(ModelDriverClient):
    """A bucket whose server may refuse positions."""

    refuses = False
    puts = 0

    def put_position(self, lease_id: int, owner: str, seqs: Mapping[int, int]) -> None:
        self.puts += 1
        if self.refuses:
            raise ServerError(Status.LIMIT_REACHED, "there are too many leases")
        super().put_position(lease_id, owner, seqs)


def test_a_position_that_is_refused_does_not_end_the_stream(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = RefusingDriver(1)
    write_rows(driver, 0, 20)
    driver.refuses = True
    reader = reader_of(driver, consumerName="orders")
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    assert ranges_of(list(reader.partitions(start, end))) == [(0, 0, 20, None)]  # type: ignore[arg-type]
    for _ in range(3):
        assert reader.latestOffset(end, ReadAllAvailable()) is end
    assert driver.puts == 2, "where it is has changed once"
    (record,) = caplog.records
    assert "there are too many leases" in record.getMessage()


def test_a_position_that_does_not_change_is_put_again() -> None:
    driver = RefusingDriver(1)
    now = 0.0
    position = ConsumerPosition(driver, "orders", lambda: now)
    offset = StreamOffset("b", {})
    position.put_offset(offset)
    now = AGAIN_AFTER_S - 1
    position.put_offset(offset)
    assert driver.puts == 1
    now = AGAIN_AFTER_S
    position.put_offset(offset)
    assert driver.puts == 2
    assert len(driver.positions) == 1
    assert AGAIN_AFTER_S < LEASE_TIME_TO_LIVE_S_MAX
    driver.refuses = True
    now += AGAIN_AFTER_S
    position.put_offset(offset)
    driver.refuses = False
    now += AGAIN_AFTER_REFUSAL_S
    position.put_offset(offset)
    assert driver.puts == 4
    assert len(driver.positions) == 1
