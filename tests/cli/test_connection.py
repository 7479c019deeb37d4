"""What a command says of its connection."""

from __future__ import annotations

import socket
import threading

import pytest
import trio
from trio.testing import MockClock

from tests.cli.conftest import Run
from upr_protocol.cli import connection
from upr_protocol.cli.connection import report_connection, report_waiting
from upr_protocol.cli.errors import CONNECTION_ADVICE, say
from upr_protocol.client import Address


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


async def test_a_command_that_waits_says_why(
    autojump_clock: MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    await report_waiting(Address.parse("upr://a:1/b"), lambda: "node c is away")
    sentence = "upr: no answer from upr://a:1/b yet (node c is away); still waiting\n"
    assert capsys.readouterr().err == sentence


def test_a_command_whose_server_says_nothing_says_that_it_waits(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_told = threading.Event()

    def say_noted(sentence: str) -> None:
        say(sentence)
        has_told.set()

    def break_connection() -> None:
        stream, _ = listener.accept()
        with stream:
            # Something to read is there, and is left unread: that breaks the connection.
            stream.recv(1, socket.MSG_PEEK)
            has_told.wait(60)

    monkeypatch.setattr(connection, "SILENT_S", 0.01)
    monkeypatch.setattr(connection, "say", say_noted)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"upr://127.0.0.1:{listener.getsockname()[1]}/b"
        thread = threading.Thread(target=break_connection)
        thread.start()
        told_first, told_last = run("get", url, "k", code=4).stderr.splitlines()
        thread.join()
    assert told_first == f"upr: no answer from {url} yet; still waiting"
    assert "the connection was lost" in told_last
