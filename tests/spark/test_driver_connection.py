"""How a driver waits for a server that is away."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from upr_protocol.client import Address, BlockingClient
from upr_protocol.errors import BrokenError, ServerError, Status
from upr_protocol.spark import driver_connection
from upr_protocol.spark.driver_connection import DriverConnection
from upr_protocol.spark.errors import PipelineError

ADDRESS = Address.parse("upr://127.0.0.1:1/b")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long a driver has waited, each time; no time passes."""
    waits: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(waits), sleep=waits.append)
    monkeypatch.setattr(driver_connection, "time", clock)
    return waits


def broken(client: BlockingClient) -> None:
    del client
    raise BrokenError("connection refused")


def test_the_log_says_once_that_a_server_is_waited_for(
    waits: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    connection = DriverConnection(ADDRESS, 600)
    with pytest.raises(PipelineError) as caught:
        connection.ask(broken)
    assert 600 <= sum(waits) < 610
    assert str(caught.value) == (
        "[UPR_UNREACHABLE] upr://127.0.0.1:1/b: connection refused; waited 600 s for the server "
        "(timeoutSeconds). Start it, or correct the option url, and run this again"
    )
    (record,) = caplog.records
    assert record.getMessage() == "connection refused; trying again for 600 s (timeoutSeconds)"


def test_a_connection_that_is_lost_for_a_moment_is_not_worth_a_line(
    waits: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    def asks(client: BlockingClient) -> str:
        if len(waits) < 3:
            broken(client)
        return "an answer"

    assert DriverConnection(ADDRESS, 600).ask(asks) == "an answer"
    assert len(waits) == 3
    assert not caplog.records


@pytest.mark.parametrize("status", [Status.TIMED_OUT, Status.HISTORY_CHANGED])
def test_a_server_that_refuses_for_too_long_is_not_called_unreachable(
    waits: list[float], status: Status
) -> None:
    """Its disk may be full, or its nodes fail over again and again."""

    def refused(_client: BlockingClient) -> None:
        raise ServerError(status, "not on disk after 30 s")

    with pytest.raises(PipelineError) as caught:
        DriverConnection(ADDRESS, 600).ask(refused)
    assert 600 <= sum(waits) < 610
    assert caught.value.code == "UPR_SERVER"
    assert "not on disk after 30 s" in str(caught.value)
    assert "Start it" not in str(caught.value)
