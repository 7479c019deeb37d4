"""Items that are looked up, and a bucket that loses some: without Spark, against a model."""

from __future__ import annotations

import pytest

from tests.spark.model_driver_client import ModelDriverClient
from upr_protocol.client import Address
from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.recipes.lookup_history import LookupHistory


def history_of(driver: ModelDriverClient) -> LookupHistory:
    return LookupHistory(Address.parse("upr://localhost/b"), lambda: driver)


def test_what_a_crash_undid_during_a_lookup_is_looked_up_again() -> None:
    driver = ModelDriverClient(2)
    driver.write(1, key=1)
    driver.flush(1)
    history = history_of(driver)
    history.begin_lookup()
    driver.write(1, key=2)
    driver.fail_over(1, 1)
    assert not history.finish_lookup(), "key 2 may have been read, and is gone"
    history.begin_lookup()
    driver.write(1, key=3)
    assert history.finish_lookup()
    history.begin_lookup()
    # It was noted where the lookup ended: what it read is not lost without notice.
    driver.fail_over(1, 1)
    with pytest.raises(PipelineError, match=r"UPR_ROLLBACK.*partition 1 has lost"):
        history.begin_lookup()


def test_a_failover_without_loss_between_lookups_does_no_harm() -> None:
    driver = ModelDriverClient(1)
    driver.write(0, key=1)
    history = history_of(driver)
    history.begin_lookup()
    assert history.finish_lookup()
    driver.fail_over(0, 1)
    history.begin_lookup()
    assert history.finish_lookup()
