"""`upr` and `upr-server` as processes."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, Final

import attrs

from tests.kit.process import ROOT, UPR, UPR_SERVER, environment

DEADLINE_S: Final = 60

Line = dict[str, Any]
"""A line of `upr tail`."""


@attrs.frozen
class Server:
    """A server process.

    Attributes:
        url: `upr://HOST:PORT/`; append a bucket's name.
        process: The process.
    """

    url: str
    process: subprocess.Popen[str]

    def stop(self, signal_number: int = signal.SIGTERM) -> None:
        """Sends a signal, and waits until the process has ended."""
        self.process.send_signal(signal_number)
        self.process.wait(DEADLINE_S)


@contextmanager
def start_server(address: str = "127.0.0.1:0", *options: str) -> Iterator[Server]:
    """A server that runs for as long as the context. Its data directory is removed afterwards,
    unless `options` name another one."""
    # The storage processes of a killed server may still be writing.
    folder = tempfile.TemporaryDirectory(prefix="upr-server-", ignore_cleanup_errors=True)
    with folder as data:
        process = subprocess.Popen(
            [
                *(*UPR_SERVER, "serve", "--listen", address, "--log-level", "warning"),
                *("--data-dir", data, *options),
            ],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=environment(),
            text=True,
        )
        with process:
            yield from _serving(process)


def _serving(process: subprocess.Popen[str]) -> Iterator[Server]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("listening on "), line
    server = Server(f"upr://{line.split()[-1]}/", process)
    try:
        yield server
    finally:
        process.kill()


class Upr(subprocess.Popen[bytes]):
    """`upr` as a process."""

    def __init__(
        self,
        *args: str,
        stdin: int | IO[Any] = subprocess.DEVNULL,
        stdout: int | IO[Any] = subprocess.PIPE,
    ) -> None:
        super().__init__(
            [*UPR, *args],
            bufsize=0,  # data that `event` reads ahead would be missing in `finished`
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env=environment(PYTHONWARNINGS="error"),
        )

    def event(self, name: str) -> Line:
        """The next line of `upr tail` with this event."""
        assert self.stdout is not None
        for line in self.stdout:
            event: Line = json.loads(line)
            if event["event"] == name:
                return event
        raise AssertionError(f"the output ended without an event {name!r}")

    def feed(self, data: bytes) -> None:
        """Writes to the standard input."""
        assert self.stdin is not None
        self.stdin.write(data)
        self.stdin.flush()

    def leave(self) -> None:
        """Closes the reading end of the standard output."""
        assert self.stdout is not None
        self.stdout.close()
        self.stdout = None

    def finished(self, *, code: int = 0, data: bytes | None = None) -> tuple[bytes, bytes]:
        """Waits until it ends with `code`. Returns standard output and standard error."""
        out, err = self.communicate(data, timeout=DEADLINE_S)
        assert self.returncode == code, (self.returncode, out, err)
        return out, err

    def stopped(self, signal_number: int = signal.SIGTERM) -> tuple[bytes, bytes]:
        """Sends a signal, and returns what the process printed."""
        self.send_signal(signal_number)
        return self.finished(code=128 + signal_number)

    def end(self) -> None:
        """Kills the process."""
        self.kill()
        with self:
            pass
