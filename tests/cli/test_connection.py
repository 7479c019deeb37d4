"""What a command says of its connection."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from upr_protocol.cli.connection import report_connection
from upr_protocol.cli.errors import CONNECTION_ADVICE


async def reported(
    statuses: list[tuple[bool, str]], capsys: pytest.CaptureFixture[str], *, was_connected: bool
) -> list[str]:
    """What is said of a connection that has these statuses, a second each."""
    began_at = trio.current_time()

    def status() -> tuple[bool, str]:
        return statuses[min(int(trio.current_time() - began_at), len(statuses) - 1)]

    with trio.move_on_after(len(statuses)):
        await report_connection(status, 300, was_connected=was_connected)
    return capsys.readouterr().err.splitlines()


async def test_a_lost_connection_is_told_of_once_and_its_return(
    autojump_clock: MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    statuses = [(True, ""), (False, "cut"), (False, "refused"), (True, "refused"), (True, "")]
    assert await reported(statuses, capsys, was_connected=True) == [
        "upr: the connection is lost (cut); trying again for up to 300 s",
        "upr: connected again",
    ]


async def test_a_connection_that_cannot_be_made_is_told_of_before_the_time_is_over(
    autojump_clock: MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    statuses = [(False, ""), (False, "refused"), (False, "refused"), (True, "refused")]
    assert await reported(statuses, capsys, was_connected=False) == [
        "upr: there is no connection (refused); trying again for up to 300 s; " + CONNECTION_ADVICE,
        "upr: connected",
    ]


async def test_a_first_attempt_that_fails_is_not_told_of_once_there_is_a_connection(
    autojump_clock: MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await reported([(True, "refused")] * 2, capsys, was_connected=False) == []
