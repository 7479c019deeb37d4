"""The options of the log-in: where the user and the password come from, and what is refused."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest
import trio

from tests.cli.conftest import Run, Start
from tests.cli.processes import DEADLINE_S
from tests.kit.process import ROOT, UPR, environment
from tests.kit.threaded import trio_thread
from tests.server.users import server_with_users
from upr_protocol.client import Address, BlockingClient, Credentials, Security
from upr_protocol.errors import CredentialsError


@pytest.fixture(scope="module")
def secured() -> Iterator[str]:
    """The URL of a bucket of a server that has the users alice and bob; bob has a password."""

    async def serve(*, task_status: trio.TaskStatus[str]) -> None:
        async with server_with_users() as server:
            task_status.started(server.url("b"))
            await trio.sleep_forever()

    with trio_thread() as thread:

        async def started() -> str:
            url: str = await thread.nursery.start(serve)
            return url

        yield thread.run(started)


@pytest.fixture(autouse=True)
def _no_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UPR_USER", "UPR_PASSWORD", "UPR_PASSWORD_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text("pencil\nwhat follows does not matter\n")
    path.chmod(0o600)
    return path


def test_the_password_comes_from_a_file_or_the_environment(
    secured: str, run: Run, password_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_bob = ("--user", "bob", "--password-file", str(password_file))
    run("set", secured, "k", "v", *of_bob)
    assert run("get", secured, "k", "--raw", *of_bob).stdout == "v"
    monkeypatch.setenv("UPR_USER", "bob")
    monkeypatch.setenv("UPR_PASSWORD", "pencil")
    assert run("get", secured, "k", "--raw").stdout == "v"
    # The file is the more particular of the two.
    monkeypatch.setenv("UPR_PASSWORD", "wrong")
    monkeypatch.setenv("UPR_PASSWORD_FILE", str(password_file))
    assert run("get", secured, "k", "--raw").stdout == "v"


def test_a_password_file_that_is_a_pipe(secured: str, start: Start, tmp_path: Path) -> None:
    """As in `--password-file <(command)`, or in a container that hands it over so. Only the first
    line is read: the value comes behind it."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o644)
    of_bob = ("--user", "bob", "--password-file")
    setter = start("set", secured, "k", "-", *of_bob, "/dev/stdin", stdin=subprocess.PIPE)
    setter.feed(b"pencil\nv")
    setter.finished()
    getter = start("get", secured, "k", "--raw", *of_bob, str(fifo))
    with fifo.open("wb", buffering=0) as pipe:
        pipe.write(b"pencil\n")
        assert getter.finished() == (b"v", b"")


@pytest.mark.parametrize(
    ("options", "password", "code", "sentence"),
    [
        ([], "", 3, "upr: the server wants its clients to log in: name a user with --user"),
        (["--user", "bob"], "pen", 3, "upr: the user's name or the password is wrong: check"),
        (["--user", "eve"], "pen", 3, "upr: the user's name or the password is wrong: check"),
        (["--user", "b\x07b"], "pen", 2, "upr: the user's name has a control character"),
        (["--password-file", "f"], "", 2, "--password-file needs a user"),
        (["--user", "bob", "--password-file", "/nowhere"], "", 2, "/nowhere, cannot be read"),
    ],
)
def test_wrong_credentials_are_refused(
    secured: str,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    password: str,
    code: int,
    sentence: str,
) -> None:
    monkeypatch.setenv("UPR_PASSWORD", password)
    refusal = run("get", secured, "k", *options, code=code)
    assert sentence in refusal.stderr
    assert "Traceback" not in refusal.stderr


def test_a_command_that_asks_all_nodes_says_that_it_is_refused(secured: str, run: Run) -> None:
    refusal = run("partitions", secured, code=3)
    assert "the server wants its clients to log in: name a user" in refusal.stderr
    assert "check that the server is running" not in refusal.stderr


def test_a_load_that_is_not_allowed_ends_before_its_source_does(
    secured: str, run: Run, start: Start, password_file: Path
) -> None:
    of_bob = ("--user", "bob", "--password-file", str(password_file))
    run("user", "add", secured, "reader", "--new-password-file", str(password_file), *of_bob)
    run("user", "grant", secured, "reader", "read", "b", *of_bob)
    of_reader = ("--user", "reader", "--password-file", str(password_file))
    args = ("load", secured, "-", "--format", "jsonl", "--key", "id", *of_reader)
    loader = start(*args, stdin=subprocess.PIPE)
    loader.feed(b'{"id": 1}\n')
    assert loader.wait(DEADLINE_S) == 3  # though its standard input is open
    out, err = loader.finished(code=3)
    assert out == b"stopped after 1 rows; rows already loaded stay\n"
    assert b"upr: user reader may not do this: Mutate needs the right write" in err


def test_commands_to_an_indexer_log_in_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--user" in run("index", "list", "--help").stdout
    monkeypatch.setenv("UPR_USER", "bob")
    monkeypatch.setenv("UPR_PASSWORD", "pencil")
    # The password would go in the clear; and then it fails because nobody is there.
    refusal = run("index", "list", "--indexer", "http://indexer.example:1", code=2)
    assert "would read the password" in refusal.stderr
    refusal = run("index", "list", "--indexer", "http://127.0.0.1:1", code=4)
    assert "does not answer" in refusal.stderr


def test_a_password_in_a_url_is_not_shown(run: Run) -> None:
    refusal = run("get", "upr://bob:pencil@127.0.0.1:1/b", "k", code=2)
    assert "users and passwords do not belong into URLs" in refusal.stderr
    assert "pencil" not in refusal.stderr


_IN_TERMINAL: Final = """
import fcntl, os, sys, termios
fcntl.ioctl(2, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""Runs Python in a session whose terminal is that of standard error."""


@contextmanager
def in_terminal(*args: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`upr` with a terminal, whose other side is a descriptor; its standard input is a file."""
    own_end, peer_end = pty.openpty()
    command = [sys.executable, "-c", _IN_TERMINAL, "-m", "upr_protocol.cli", *args]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=peer_end,
        cwd=ROOT,
        env=environment(),
        start_new_session=True,
    )
    os.close(peer_end)
    try:
        with process:
            yield process, own_end
    finally:
        process.kill()
        os.close(own_end)


def shown_until(terminal: int, text: bytes) -> bytes:
    output = b""
    while text not in output:
        output += os.read(terminal, 1024)
    return output


def rest_of(terminal: int) -> bytes:
    """What it still prints when the program has ended."""
    output = b""
    with suppress(OSError):  # the terminal's other side is gone
        while data := os.read(terminal, 1024):
            output += data
    return output


def test_the_password_is_asked_for_on_the_terminal(secured: str) -> None:
    with in_terminal("set", secured, "typed", "v", "--user", "bob") as (process, terminal):
        shown_until(terminal, b"Password of bob: ")
        os.write(terminal, b"pencil\n")
        assert b"pencil" not in rest_of(terminal)
        assert process.wait(60) == 0


def test_ctrl_c_at_the_prompt_ends_the_command(secured: str) -> None:
    with in_terminal("get", secured, "typed", "--user", "bob") as (process, terminal):
        shown_until(terminal, b"Password of bob: ")
        os.write(terminal, b"\x03")
        assert b"Traceback" not in rest_of(terminal)
        assert process.wait(60) == 130


def test_without_a_terminal_nothing_is_asked(secured: str) -> None:
    process_result = subprocess.run(
        [*UPR, "get", secured, "k", "--user", "bob"],
        capture_output=True,
        check=False,
        cwd=ROOT,
        env=environment(),
        start_new_session=True,
    )
    assert process_result.returncode == 2
    assert b"the password of bob is missing, and there is no terminal" in process_result.stderr


def test_a_password_that_others_can_read_is_refused(
    secured: str, run: Run, password_file: Path
) -> None:
    password_file.chmod(0o644)
    of_bob = ("--user", "bob", "--password-file", str(password_file))
    refusal = run("get", secured, "k", *of_bob, code=2)
    assert f"others can use the password in {password_file}: take that right" in refusal.stderr


def test_a_file_is_read_at_each_connection(secured: str, password_file: Path) -> None:
    credentials = Credentials("bob", password_file=str(password_file))
    address = Address.parse(secured, Security(credentials=credentials))
    with BlockingClient(address) as client:
        client.set("k", "v")
    for content, sentence in ((b"\npencil", "is empty"), (b"\xff\n", "not UTF-8")):
        password_file.write_bytes(content)
        with pytest.raises(CredentialsError, match=sentence), BlockingClient(address):
            pass
    password_file.write_bytes(b"pencil\r\n")
    with BlockingClient(address) as client:
        assert client.get("k") is not None
