"""Failures that end the server."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing

from upr_protocol.client import connect
from upr_protocol.concurrency import first_failure
from upr_server.app import running_server
from upr_server.config import ServerConfig
from upr_server.runtime.faults import IS_LOGGED
from upr_server.storage.simulated import SimulatedStore

CONFIG = ServerConfig(listen="127.0.0.1:0")

Line = MutableMapping[str, Any]


def critical_lines(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line["log_level"] == "critical"]


async def test_a_fault_is_logged_once_before_the_server_has_ended(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def run_into_fault() -> None:
        async with running_server(CONFIG, SimulatedStore()) as server:
            server.upkeep.count_memory(lambda: iter([1 // 0]))
            with trio.CancelScope(shield=True):
                await trio.sleep(10)
            early_lines.extend(critical_lines(lines))
            await trio.sleep_forever()

    early_lines: list[Line] = []
    with structlog.testing.capture_logs() as lines, pytest.raises(ExceptionGroup) as caught:
        await run_into_fault()
    fault = first_failure(caught.value)
    assert isinstance(fault, ZeroDivisionError)
    assert fault.__notes__ == [IS_LOGGED]
    assert [line["exc_info"] for line in early_lines] == [fault]
    assert critical_lines(lines) == early_lines


async def test_a_disk_that_fails_is_logged_in_a_sentence() -> None:
    async def run_into_failure() -> None:
        store = SimulatedStore()
        async with running_server(CONFIG, store):
            store.fail("the disk is gone")
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked()
            early_lines.extend(critical_lines(lines))
            await trio.sleep_forever()

    early_lines: list[Line] = []
    with structlog.testing.capture_logs() as lines, pytest.raises(ExceptionGroup):
        await run_into_failure()
    assert early_lines == critical_lines(lines)
    assert early_lines == [
        {"event": "the server has to stop", "error": "the disk is gone", "log_level": "critical"}
    ]


async def test_a_fault_before_a_connection_is_served_ends_only_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_arguments: object) -> None:
        raise ZeroDivisionError

    async with running_server(CONFIG, SimulatedStore()) as server:
        with monkeypatch.context() as patch, structlog.testing.capture_logs() as lines:
            patch.setattr(server.connections, "new_connection", fail)
            stream = await trio.open_tcp_stream("127.0.0.1", server.port)
            assert await stream.receive_some() == b""
            await stream.aclose()
        assert [line["event"] for line in lines] == ["connection failed"]
        async with connect(server.url()) as client:
            assert await client.list_buckets() == []
