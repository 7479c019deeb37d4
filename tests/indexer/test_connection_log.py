"""The log tells when the server is gone, and when it is back."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog
import trio
from trio.testing import MockClock

from tests.indexer.kit import a_server, an_indexer
from tests.kit.process import eventually
from upr_server.app import Server
from upr_server.indexer import connection_log
from upr_server.indexer.connection_log import POLL_S, log_connection
from upr_server.storage.simulated import SimulatedStore

LOST = "the connection to the server is lost; retrying"
BACK = "connected to the server again"


async def test_each_change_is_logged_once(autojump_clock: MockClock) -> None:
    del autojump_clock
    reasons: list[str | None] = [None]
    with structlog.testing.capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(log_connection, lambda: reasons[-1])
            await trio.sleep(POLL_S / 2)
            for reason in (None, "", "", "refused", "timed out", None, "refused", "", "", "cut"):
                reasons.append(reason)
                await trio.sleep(POLL_S)
            nursery.cancel_scope.cancel()
    assert [(line["event"], line.get("error")) for line in logs] == [
        (LOST, "refused"),
        (BACK, None),
        (LOST, "cut"),
    ]


async def test_an_indexer_logs_that_its_server_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its consumer connects again for ever, and says nothing."""
    monkeypatch.setattr(connection_log, "POLL_S", 0.01)
    store = SimulatedStore()

    async def serve(port: int, stop: trio.Event, *, task_status: trio.TaskStatus[Server]) -> None:
        async with a_server(store, port=port) as server:
            task_status.started(server)
            await stop.wait()

    with structlog.testing.capture_logs() as logs:

        def events() -> list[str]:
            return [line["event"] for line in logs if line["event"] in (LOST, BACK)]

        async with trio.open_nursery() as nursery:
            stop = trio.Event()
            server: Server = await nursery.start(serve, 0, stop)
            async with an_indexer(server.url("b"), tmp_path) as indexer:
                (part,) = indexer.slices
                await eventually(lambda: part.stream.is_connected, "it is connected")
                stop.set()
                await eventually(lambda: events() == [LOST], "the loss is logged")
                stop = trio.Event()
                await nursery.start(serve, server.port, stop)
                await eventually(lambda: events() == [LOST, BACK], "the return is logged")
            stop.set()
