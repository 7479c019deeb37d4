from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import click
import pytest

from tests.cli.conftest import Run, Start
from tests.cli.processes import Server
from tests.kit.process import ROOT, environment
from upr_protocol.cli import main


def commands(group: click.Group, *names: str) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*names, name)
        if isinstance(command, click.Group):
            yield from commands(command, *names, name)


@pytest.mark.parametrize("names", [(), *commands(main)], ids=" ".join)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_every_command_has_help(run: Run, names: tuple[str, ...], option: str) -> None:
    output = run(*names, option).stdout
    assert output.startswith("Usage: " + " ".join(("upr", *names)))
    assert "..." not in output.partition("Commands:")[2]  # each summary fits its line


def test_help_names_the_exit_codes(run: Run) -> None:
    output = run("--help").stdout
    for code in (0, 1, 2, 3, 4, 130):
        assert f"\n    {code:<4} " in output


def test_the_version_is_printed_with_the_commands_name(run: Run) -> None:
    assert run("--version").stdout.startswith("upr, version ")


def test_it_runs_as_a_module() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "upr_protocol.cli", "--help"],
        capture_output=True,
        cwd=ROOT,
        env=environment(),
        check=True,
    )
    assert result.stdout.startswith(b"Usage: upr ")


# The URL.


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["get", "k"], "the first argument must be the server's URL"),
        (["stats"], "the first argument must be the server's URL"),
        (["get", "127.0.0.1/b", "k"], "the first argument must be the server's URL"),
        (["get", "upr://127.0.0.1", "k"], "the bucket is missing"),
        (["get", "upr:///b", "k"], "the host is missing"),
        (["get", "upr://h:99999/b", "k"], "not a valid address"),
        (["get", "upr://h/b/c", "k"], "a bucket's name has no slash"),
        (["get", "upr://h/b?x=1", "k"], "it has only a host, a port and a bucket"),
    ],
)
def test_a_bad_url_is_a_usage_error(run: Run, args: list[str], sentence: str) -> None:
    assert sentence in run(*args, code=2).stderr


def test_the_url_may_come_from_the_environment(
    bucket: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPR_URL", bucket)
    run("set", "k", "upr://is.a/value")
    assert run("get", "k", "--raw").stdout == "upr://is.a/value"
    assert run("get", "--raw", "k").stdout == "upr://is.a/value"
    assert run("increment", "--by", "3", "n").stdout == "3\n"
    run("partitions")


def test_a_url_on_the_command_line_overrides_the_environment(
    bucket: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPR_URL", "upr://127.0.0.1:1/nowhere")
    run("set", bucket, "k", "v")
    monkeypatch.setenv("UPR_URL", "nonsense")
    run("get", bucket, "k")
    assert "not a valid address" in run("get", "k", code=2).stderr


def test_a_url_of_another_scheme_may_be_a_key_and_is_explained(
    bucket: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPR_URL", bucket)
    advice = "a server's URL begins with upr:// or uprs://"
    run("set", "http://a.page/", "x")
    assert run("get", "http://a.page/").stdout == "x\n"
    result = run("get", "http://127.0.0.1/b", "k", code=1)
    assert result.stderr == f"upr: http://127.0.0.1/b: no such key; {advice}\nupr: k: no such key\n"
    for args in (
        ("set", "http://me:secret@127.0.0.1/b", "k", "v"),
        ("stats", "http://me:secret@127.0.0.1/b"),
        ("load", "http://me:secret@127.0.0.1/b", "f.csv", "--key", "k"),
    ):
        result = run(*args, code=2)
        assert f"the first argument is not the URL of a server: {advice}" in result.stderr
        assert "secret" not in result.stderr


def test_unknown_commands_and_options_are_usage_errors(server: Server, run: Run) -> None:
    run("fetch", code=2)
    run("stats", server.url, "--loud", code=2)
    run("stats", server.url, "extra", code=2)


# No server there.


@contextmanager
def other_program(reply: bytes) -> Iterator[int]:
    """The port of a program that answers a connection with `reply`, and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(64)
                peer.sendall(reply)
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(4096):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.mark.parametrize(
    "args", [["get", "k"], ["tail"], ["stats"], ["bucket", "list"]], ids=" ".join
)
def test_an_unreachable_server_is_a_lost_connection(start: Start, args: list[str]) -> None:
    group = ["bucket"] if args[0] == "bucket" else []
    name, *arguments = args[len(group) :]
    out, err = start(*group, name, f"upr://127.0.0.1:{free_port()}/b", *arguments).finished(code=4)
    assert out == b""
    assert err.startswith(b"upr: cannot connect to upr://127.0.0.1:")
    assert b": Connection refused; check that the server is running" in err
    assert err.count(b"\n") == 1


@pytest.mark.parametrize("reply", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 100, b""])
@pytest.mark.parametrize("args", [["get", "k"], ["tail"]], ids=" ".join)
def test_another_program_at_the_address_is_a_lost_connection(
    start: Start, args: list[str], reply: bytes
) -> None:
    with other_program(reply) as port:
        name, *arguments = args
        _, err = start(name, f"upr://127.0.0.1:{port}/b", *arguments).finished(code=4)
    assert err.startswith(b"upr: ")
    assert err.count(b"\n") == 1


@pytest.mark.parametrize("args", [["get", "k"], ["tail"]], ids=" ".join)
def test_ctrl_c_ends_a_command_that_waits_for_an_answer(start: Start, args: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        name, *arguments = args
        process = start(name, f"upr://127.0.0.1:{listener.getsockname()[1]}/b", *arguments)
        peer, _ = listener.accept()
        with peer:
            peer.recv(1)
            assert process.stopped(signal.SIGINT) == (b"", b"")
