"""A server process, and `upr` run in this process or as one of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from typing import IO, Any

import pytest
from click.testing import CliRunner, Result

from tests.cli.processes import Line, Server, Upr, start_server
from upr_protocol.cli import main

Run = Callable[..., Result]
Start = Callable[..., Upr]
Tail = Callable[..., list[Line]]

_names = count(1)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A server for all tests of the session; each test has a bucket of its own."""
    with start_server() as started:
        yield started


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `upr` in this process: `run("get", url, "key", input=..., code=...)`."""
    monkeypatch.delenv("UPR_URL", raising=False)

    def run(*args: str, input: bytes | str | IO[bytes] | None = None, code: int = 0) -> Result:  # noqa: A002
        result = CliRunner().invoke(main, args, input=input, prog_name="upr")
        assert result.exit_code == code, (result.exit_code, result.stdout, result.stderr)
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result

    return run


@pytest.fixture
def tail(run: Run, capfdbinary: pytest.CaptureFixture[bytes]) -> Tail:
    """The lines of `upr tail` until it has caught up. It runs in this process, and writes them to
    its descriptor of standard output."""

    def tail(bucket: str, *args: str) -> list[Line]:
        capfdbinary.readouterr()
        result = run("tail", bucket, "--until", "caught-up", *args)
        assert result.stderr == ""
        out, err = capfdbinary.readouterr()
        assert err == b""
        return [json.loads(line) for line in out.splitlines()]

    return tail


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts `upr` as a process that is killed at the end of the test: `start("tail", url)`."""
    with ExitStack() as stack:

        def start(*args: str, **options: Any) -> Upr:
            process = Upr(*args, **options)
            stack.callback(process.end)
            return process

        yield start


@pytest.fixture
def bucket(server: Server, run: Run) -> str:
    """The URL of a new bucket with eight partitions."""
    url = f"{server.url}bucket-{next(_names)}"
    run("bucket", "create", url, "--partitions", "8")
    return url
