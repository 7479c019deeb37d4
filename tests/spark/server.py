"""A real server process for tests that block: it may be killed, and begin again where it was."""

from __future__ import annotations

import json
import select
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kit.ports import free_port
from tests.kit.process import ROOT, START_TIMEOUT_S, STOP_TIMEOUT_S, UPR_SERVER, environment
from upr_protocol.client import BlockingClient


class BlockingServer:
    """`upr-server serve` on a port and in a folder of its own, which it keeps when it is started
    again.

    Args:
        folder: Where its data and its log lie.
        *options: More for its command line.

    Attributes:
        port: Where it listens, on 127.0.0.1.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    def url(self, bucket: str = "") -> str:
        """`upr://127.0.0.1:PORT/bucket`."""
        return f"upr://127.0.0.1:{self.port}/{bucket}"

    @property
    def data_dir(self) -> Path:
        """Where its data lies."""
        return self._folder / "data"

    def create_bucket(self, name: str, partitions: int = 8, quota_bytes: int = 0) -> str:
        """Makes a bucket; gives its URL."""
        with BlockingClient(self.url()) as client:
            client.create_bucket(name, partitions, quota_bytes)
        return self.url(name)

    def start(self) -> None:
        """Starts it, and waits until it listens."""
        assert self._process is None, "it runs"
        with (self._folder / "log").open("ab") as log:
            self._process = process = subprocess.Popen(
                (
                    *(*UPR_SERVER, "serve", "--listen", f"127.0.0.1:{self.port}"),
                    *("--log-format", "json", "--data-dir", str(self.data_dir)),
                    *self._options,
                ),
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env=environment(),
            )
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
        line = process.stdout.readline() if ready else b""
        if not line.startswith(b"listening on "):
            self.kill()
            raise AssertionError(f"the server did not start:\n{self.log_tail}")

    def kill(self) -> None:
        """Ends it as a crash would; nothing when it does not run."""
        if self._process is not None:
            self._process.kill()
            self._reap()

    def stop(self) -> None:
        """Asks it to end, and waits until it has."""
        assert self._process is not None, "it does not run"
        self._process.terminate()
        code = self._reap()
        assert code == 0, f"the server ended with code {code}"

    def _reap(self) -> int:
        process, self._process = self._process, None
        assert process is not None
        assert process.stdout is not None
        with process.stdout:
            return process.wait(STOP_TIMEOUT_S)

    @property
    def log_tail(self) -> str:
        """The end of what it wrote to standard error."""
        return (self._folder / "log").read_text()[-4000:]

    @property
    def faults(self) -> list[str]:
        """The log's lines that speak of a fault of the server's own."""
        lines = (self._folder / "log").read_text().splitlines()
        events = [line for line in lines if not line.startswith("upr-server: ")]
        return [line for line in events if json.loads(line)["level"] in ("error", "critical")]


@contextmanager
def blocking_server(*options: str) -> Iterator[BlockingServer]:
    """A server that runs for as long as the context, unless it is stopped before; its log may not
    speak of a fault."""
    # Its processes for the disk may be at their last work when it was killed.
    temporary = tempfile.TemporaryDirectory(prefix="upr-server-", ignore_cleanup_errors=True)
    with temporary as folder:
        server = BlockingServer(Path(folder), *options)
        try:
            server.start()
            yield server
            if server._process is not None:
                server.stop()
            assert not server.faults
        except BaseException as error:
            error.add_note(f"The server's log ends:\n{server.log_tail}")
            raise
        finally:
            server.kill()
