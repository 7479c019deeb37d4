"""What a driver asks of a real server, without Spark."""

from __future__ import annotations

from collections.abc import Callable

from tests.spark.bucket import change, put
from upr_protocol.client import BlockingClient
from upr_protocol.spark.driver_client import BucketDriverClient
from upr_protocol.spark.read_options import ReadOptions


def test_a_position_replaces_that_of_another_process(new_bucket: Callable[..., str]) -> None:
    url = new_bucket(2)
    change(url, put(range(20)))
    options = ReadOptions.parse({"url": url}, streaming=True)
    driver = BucketDriverClient(options)
    ends: dict[int, int] = {
        row.partition: row.persisted_seq for row in driver.wait_until_persisted().values()
    }
    driver.close()
    for seqs, numbers_behind in ((dict.fromkeys(ends, 0), 20), (ends, 0)):
        # It is not connected yet, and cannot end the lease that is there.
        driver = BucketDriverClient(options)
        driver.put_position(7, "orders", seqs)
        driver.close()
        with BlockingClient(url) as client:
            (consumer,) = client.stats(client.address.bucket)["leases"]["consumers"]
        assert consumer["numbers_behind"] == numbers_behind
