"""Processes that a row starts: this server, Redis, and clients of either."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from benchmarks.kit.errors import CannotMeasureError
from benchmarks.kit.machine import ROOT
from benchmarks.kit.processor import ProcessorClock, adopt, children_of, is_running
from benchmarks.kit.target import target
from upr_protocol.client import Address

STOP_TIMEOUT_S: Final = 20.0
ANSWER_TIMEOUT_S: Final = 600.0

HOST: Final = "127.0.0.1"


class Process:
    """A child process that ends with its context.

    Args:
        command: What to run, from the repository's root.
        piped: Whether its standard input and output are ours.
    """

    def __init__(self, command: list[str], *, piped: bool = False) -> None:
        pipe = subprocess.PIPE if piped else subprocess.DEVNULL
        self._name = command[-1] if len(command) < 3 else " ".join(command[1:4])
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed in __exit__
        self.child = subprocess.Popen(
            command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=self._log, text=True
        )
        self.clock = ProcessorClock(self.child.pid)

    @property
    def pid(self) -> int:
        """Its process ID."""
        return self.child.pid

    def line(self) -> str:
        """The next line it writes.

        Raises:
            CannotMeasureError: It ended instead; what it logged is in the message.
        """
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if not line:
            raise CannotMeasureError(f"{self._name} ended: {self.log()}")
        return line.strip()

    def log(self) -> str:
        """The end of what it wrote to standard error."""
        self._log.flush()
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-3000:].strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        child = self.child
        child.terminate()
        try:
            child.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()
        self._log.close()


class UprServer(Process):
    """This server, on a free port, with one bucket.

    Args:
        partitions: The bucket's.
        quota_bytes: The bucket's; by default far from what any row uses.
        data_dir: Where it keeps its data, left there afterwards; by default a folder of its own.
        node: What partition maps call it.
        events: Whether it has its event bus.
        is_encrypted: Whether it has a certificate.

    Attributes:
        port: Where it listens.
        certificate: The file with its certificate, which is its own authority; empty for none.
        data_dir: Where its data is.
        writer: The process that writes its disk.
        reader: The process that reads it.
        clocks: The processor time of the three, by their names in `ROLES`.
    """

    BUCKET: Final = "bench"
    ROLES: Final = ("server", "writer", "reader")

    def __init__(
        self,
        *,
        partitions: int,
        quota_bytes: int = 16 << 30,
        data_dir: Path | None = None,
        node: str = "",
        events: bool = True,
        is_encrypted: bool = False,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.data_dir = Path(self._folder.name) / "data" if data_dir is None else data_dir
        self.certificate = make_certificate(self._folder.name) if is_encrypted else ""
        config = Path(self._folder.name) / "server.toml"
        config.write_text(
            f'listen = "{HOST}:0"\nnode = "{node}"\nlog_level = "warning"\n'
            f'tls_certificate = "{self.certificate}"\n'
            f'data_dir = "{self.data_dir}"\nevents = {str(events).lower()}\n'
            f'[[buckets]]\nname = "{self.BUCKET}"\n'
            f"partitions = {partitions}\nquota_bytes = {quota_bytes}\n"
        )
        command = "import sys; from upr_server.cli import main; sys.exit(main())"
        super().__init__(
            [sys.executable, "-c", command, "serve", "--config", str(config)], piped=True
        )
        with ExitStack() as undo:
            undo.push(self)
            self.port = int(self.line().rpartition(":")[2])
            children = children_of(self.pid)
            self.writer, self.reader = (
                next(pid for pid, arguments in children.items() if role in arguments)
                for role in self.ROLES[1:]
            )
            self.clocks = {
                role: ProcessorClock(pid)
                for role, pid in zip(self.ROLES, (self.pid, self.writer, self.reader), strict=True)
            }
            undo.pop_all()

    @property
    def url(self) -> str:
        """Where its bucket is."""
        scheme = "uprs" if self.certificate else "upr"
        return f"{scheme}://{HOST}:{self.port}/{self.BUCKET}"

    @property
    def address(self) -> Address:
        """The same, with the certificate that counts."""
        return target(self.url, self.certificate)

    def lap(self) -> dict[str, float]:
        """The processor time of its processes since the last lap, seconds."""
        return {role: clock.lap() for role, clock in self.clocks.items()}

    def total(self) -> dict[str, float]:
        """The processor time of its processes since they were started, seconds."""
        return {role: clock.total() for role, clock in self.clocks.items()}

    def kill(self) -> None:
        """Kills it, as `kill -9` does, and waits until the processes of its disk are gone too."""
        processor_s = self.total()
        self.child.kill()
        self.child.wait()
        adopt(processor_s["writer"] + processor_s["reader"])
        wait_until(lambda: not any(map(is_running, (self.writer, self.reader))), timeout_s=60)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._folder.cleanup()


class RedisServer(Process):
    """Redis on a free port.

    Args:
        is_durable: Whether every change is on disk before it is acknowledged; by default nothing
            is written to disk.
    """

    def __init__(self, *, is_durable: bool = False) -> None:
        self.port = free_port()
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        # Nothing is rewritten meanwhile: with that Redis would have more to do.
        disk = (
            ("yes", "--appendfsync", "always", "--auto-aof-rewrite-percentage", "0")
            if is_durable
            else ("no",)
        )
        super().__init__(
            [
                program("redis-server"),
                *("--port", str(self.port), "--bind", HOST, "--dir", self._folder.name),
                *("--save", "", "--loglevel", "warning", "--appendonly", *disk),
                *("--client-query-buffer-limit", "1gb"),
            ]
        )
        with ExitStack() as undo:
            undo.push(self)
            self._wait()
            undo.pop_all()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._folder.cleanup()

    def _wait(self) -> None:
        for _ in range(200):
            if self.child.poll() is not None:
                raise CannotMeasureError(f"redis-server ended: {self.log()}")
            try:
                with socket.create_connection((HOST, self.port)):
                    return
            except OSError:
                pause_s(0.05)
        raise CannotMeasureError("redis-server did not listen within 10 seconds")

    def flush(self) -> None:
        """Drops everything, before the call returns."""
        with socket.create_connection((HOST, self.port)) as connection:
            connection.sendall(b"FLUSHALL SYNC\r\n")
            if connection.recv(100) != b"+OK\r\n":
                raise CannotMeasureError("redis-server refused FLUSHALL")


class Worker(Process):
    """A client in a process of its own: `python -m benchmarks.worker ROLE`.

    Told what to do in lines of JSON, it answers each with one line of JSON.

    Args:
        role: Its name in `benchmarks.worker`.
        arguments: What the role is given to begin with; its first answer says that it is ready.
    """

    def __init__(self, role: str, **arguments: Any) -> None:
        super().__init__([sys.executable, "-m", "benchmarks.worker", role], piped=True)
        self.tell(arguments)

    def tell(self, command: dict[str, Any]) -> None:
        """Gives a command; its answer is to be fetched with `answer`."""
        assert self.child.stdin is not None
        try:
            self.child.stdin.write(json.dumps(command) + "\n")
            self.child.stdin.flush()
        except OSError as error:
            raise CannotMeasureError(f"{self._name} ended: {self.log()}") from error

    def answer(self) -> dict[str, Any]:
        """The answer to the oldest command that has none yet. Waits for it."""
        answer: dict[str, Any] = json.loads(self.line())
        return answer

    def ask(self, **command: Any) -> dict[str, Any]:
        """Gives a command and waits for its answer."""
        self.tell(command)
        return self.answer()


def program(name: str) -> str:
    """Where the program is.

    Raises:
        CannotMeasureError: It is not installed; the message says how.
    """
    path = shutil.which(name)
    if path is None:
        package = "openssl" if name == "openssl" else "redis"
        debian = "redis-server" if package == "redis" else package
        raise CannotMeasureError(
            f"{name} is missing: install it with `apt-get install {debian}` (Debian, Ubuntu), "
            f"`dnf install {package}` (Fedora) or `brew install {package}` (macOS)"
        )
    return path


def make_certificate(folder: str) -> str:
    """A file in `folder` with a certificate for this machine, and its key."""
    path = Path(folder) / "server.pem"
    subprocess.run(
        [
            *(program("openssl"), "req", "-x509", "-newkey", "ec", "-nodes", "-days", "1"),
            *("-pkeyopt", "ec_paramgen_curve:P-256", "-subj", "/CN=bench"),
            *("-addext", f"subjectAltName=IP:{HOST}", "-keyout", path, "-out", f"{path}.cert"),
        ],
        check=True,
        capture_output=True,
    )
    with path.open("a") as file:
        file.write(Path(f"{path}.cert").read_text())
    path.chmod(0o600)
    return str(path)


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def pause_s(seconds: float) -> None:
    """Lets time pass, where there is nothing to wait for."""
    subprocess.run(["sleep", str(seconds)], check=True)


def wait_until(condition: Callable[[], bool], *, timeout_s: float) -> None:
    """Looks every now and then whether `condition` has come true.

    Raises:
        CannotMeasureError: It has not.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise CannotMeasureError(f"waited {timeout_s:.0f} s in vain")
        pause_s(0.1)
