"""Real server processes, and the commands, as the tests start them."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from tests.kit.effort import VARIABLE

ROOT: Final = Path(__file__).resolve().parents[2]
UPR_SERVER: Final = (sys.executable, "-m", "upr_server.entry")
UPR: Final = (sys.executable, "-m", "upr_protocol.cli")

AS_INSTALLED: Final = Path(__file__).parent / "as_installed"
"""Comes first on the path of processes. In it there is no package rich: users who install us have
none, and structlog would import it at each of a thousand starts."""

START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 60.0
"""A slow machine with other work to do is no failure; a hang is."""

CRASH_S: Final = 3.0
"""How long a server that has failed may take to say why and to have an exit code. It closes its
connections first, and on a busy machine the rest takes a while."""

POLL_S: Final = 0.005


class TimeoutReachedError(AssertionError):
    """What was waited for did not come."""


async def eventually(
    condition: Callable[[], bool], description: str, timeout_s: float = STOP_TIMEOUT_S
) -> None:
    """Waits until `condition` is true, of something that can only be asked and does not tell."""
    deadline = trio.current_time() + timeout_s
    while not condition():
        if trio.current_time() > deadline:
            raise TimeoutReachedError(f"{timeout_s:.0f} s are over, and not yet: {description}")
        await trio.sleep(POLL_S)


def environment(**changes: str) -> dict[str, str]:
    """The environment of a process: this one's without any settings for us, and `changes`."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name == VARIABLE or not name.startswith("UPR_")
    }
    # Of a crash in C the log has the place.
    path = {
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(AS_INSTALLED), os.environ.get("PYTHONPATH")))
        )
    }
    return {**variables, **path, "PYTHONFAULTHANDLER": "1", **changes}


class ServerProcess:
    """A running `upr-server serve`.

    Attributes:
        process: The process.
        host: Where it listens.
        port: Where it listens.
    """

    def __init__(self, process: trio.Process, first_line: str, log_path: Path) -> None:
        prefix, _, address = first_line.rstrip("\n").rpartition(" ")
        assert prefix == "listening on", first_line
        host, _, port = address.rpartition(":")
        self.process = process
        self.host = host.strip("[]")
        self.port = int(port)
        self._log_path = log_path

    def url(self, bucket: str = "") -> str:
        """`upr://HOST:PORT/bucket`."""
        return f"upr://{self.host}:{self.port}/{bucket}"

    # Its log.

    @property
    def log_text(self) -> str:
        """What it wrote to standard error."""
        return self._log_path.read_text()

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """The log's events, or those with this name."""
        # Of a line that is being written, the file may have a part.
        lines = self.log_text.rpartition("\n")[0].splitlines()
        events = [json.loads(line) for line in lines if not line.startswith("upr-server: ")]
        return [event for event in events if name in ("", event["event"])]

    async def logged(self, name: str, count: int = 1) -> list[dict[str, Any]]:
        """The log's events with this name, once there are so many at least. A server that runs
        writes its log in a thread: what has just happened may not be there yet."""
        await eventually(lambda: len(self.events(name)) >= count, f"{name!r} is in the log")
        return self.events(name)

    @property
    def faults(self) -> list[dict[str, Any]]:
        """The log's events that report a fault of the server's own. A lack of descriptors is not
        such a fault."""
        return [
            event
            for event in self.events()
            if event["level"] in ("error", "critical") and "EMFILE" not in event["event"]
        ]

    # What it takes.

    @property
    def resident_bytes(self) -> int:
        """Memory in use now."""
        return self._status("VmRSS")

    @property
    def peak_bytes(self) -> int:
        """The most memory that was in use since it started, or since `forget_peak`."""
        return self._status("VmHWM")

    def forget_peak(self) -> None:
        """Has `peak_bytes` begin anew."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def _status(self, field: str) -> int:
        return status_of(self.process.pid, field)

    @property
    def anonymous_bytes(self) -> int:
        """Memory in use now by it and its processes for the disk, without mapped files."""
        return self.own_anonymous_bytes + self.storage_anonymous_bytes

    @property
    def own_anonymous_bytes(self) -> int:
        """The part of `anonymous_bytes` that is the server's own."""
        return status_of(self.process.pid, "RssAnon")

    @property
    def storage_anonymous_bytes(self) -> int:
        """The part of `anonymous_bytes` that its processes for the disk have."""
        return sum(status_of(pid, "RssAnon") for pid in children_of(self.process.pid))

    @property
    def shared_bytes(self) -> int:
        """Memory in use now that it shares with its processes for the disk; each counts it."""
        pids = (self.process.pid, *children_of(self.process.pid))
        return sum(status_of(pid, "RssShmem") for pid in pids)

    @property
    def descriptors(self) -> int:
        """How many descriptors it has open."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    # The end.

    def kill(self) -> None:
        """Ends it as a crash would."""
        self.process.kill()

    async def wait(self) -> int:
        """Waits until it has ended; gives its exit code."""
        with trio.move_on_after(STOP_TIMEOUT_S):
            return await self.process.wait()
        raise TimeoutReachedError(f"the server did not stop within {STOP_TIMEOUT_S:.0f} s")

    async def stop(self, signal_number: signal.Signals = signal.SIGTERM) -> int:
        """Asks it to end and waits until it has; gives its exit code."""
        self.process.send_signal(signal_number)
        return await self.wait()


@asynccontextmanager
async def server_process(
    *options: str,
    listen: str = "127.0.0.1:0",
    data_dir: Path | None = None,
    descriptors_max: int | None = None,
    variables: Mapping[str, str] | None = None,
    program: Sequence[str] = UPR_SERVER,
    cwd: Path = ROOT,
    errors: Collection[str] = (),
) -> AsyncIterator[ServerProcess]:
    """A server that runs for as long as the context.

    On the way out it is stopped with SIGTERM, unless it has ended already, and must then end with
    code 0. In no case may its log speak of a fault.

    Args:
        *options: More for its command line.
        listen: Where it listens.
        data_dir: Its data directory; None for one that goes with it.
        descriptors_max: How many descriptors it may have; None for as many as this process.
        variables: More for its environment.
        program: What is started.
        cwd: In which folder.
        errors: Events of the log that would speak of a fault, and are what the test is about.
    """
    # Its processes for the disk may be at their last work when it was killed.
    temporary = tempfile.TemporaryDirectory(prefix="upr-server-", ignore_cleanup_errors=True)
    with temporary as folder:
        data = data_dir or Path(folder, "data")
        options = ("--log-format", "json", "--data-dir", str(data), *options)
        command = (*program, "serve", "--listen", listen, *options)
        if descriptors_max is not None:
            command = ("sh", "-c", 'ulimit -n "$0" && exec "$@"', str(descriptors_max), *command)
        log_path = Path(folder, "log")
        with log_path.open("wb") as log:  # noqa: ASYNC230  it is a moment's work
            process = await trio.lowlevel.open_process(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=cwd,
                env=environment(**(variables or {})),
            )
        try:
            server = ServerProcess(process, await _first_line(process, log_path), log_path)
            yield server
            if process.returncode is None:
                code = await server.stop()
                assert code == 0, f"the server ended with code {code}"
            assert not [fault for fault in server.faults if fault["event"] not in errors]
        except BaseException as error:
            # One that has crashed may not have been waited for yet.
            with trio.move_on_after(CRASH_S, shield=True):
                await process.wait()
            error.add_note(
                f"The server's exit code: {process.returncode}; its log ends:\n{_tail(log_path)}"
            )
            raise
        finally:
            with trio.move_on_after(STOP_TIMEOUT_S, shield=True):
                await _end(process)


def children_of(pid: int) -> list[int]:
    """The processes that a process started, in whichever of its threads."""
    with suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return []


def status_of(pid: int, field: str) -> int:
    """A field of a process's status that counts memory, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def _tail(log_path: Path) -> str:
    return log_path.read_text()[-4000:]


async def _end(process: trio.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
    if process.stdout is not None:
        await trio.aclose_forcefully(process.stdout)


async def _first_line(process: trio.Process, log_path: Path) -> str:
    assert process.stdout is not None
    received = bytearray()
    with trio.move_on_after(START_TIMEOUT_S):
        while True:
            data = await process.stdout.receive_some()
            if not data:
                raise AssertionError(f"the server did not start:\n{_tail(log_path)}")
            received += data
            if b"\n" in data:
                return received.partition(b"\n")[0].decode()
    raise TimeoutReachedError(f"the server said nothing within {START_TIMEOUT_S:.0f} s")


@attrs.frozen
class Finished:
    """What a command left.

    Attributes:
        code: Its exit code.
        out: Its standard output.
        err: Its standard error.
    """

    code: int
    out: str
    err: str


async def run(
    command: Sequence[str],
    *,
    variables: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    cwd: Path = ROOT,
) -> Finished:
    """Runs a command to its end."""
    with trio.move_on_after(STOP_TIMEOUT_S):
        finished = await trio.run_process(
            command,
            stdin=stdin,
            capture_stdout=True,
            capture_stderr=True,
            check=False,
            cwd=cwd,
            env=environment(**(variables or {})),
        )
        return Finished(finished.returncode, finished.stdout.decode(), finished.stderr.decode())
    raise TimeoutReachedError(f"{' '.join(command)} did not end within {STOP_TIMEOUT_S:.0f} s")


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process gets no more descriptors meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free_descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(free_descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free_descriptor, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def many_descriptors() -> Iterator[int]:
    """Lets this process and those it starts have as many descriptors as the system allows it; gives
    their number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
