"""Real indexer processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.kit.process import ROOT, environment, status_of

UPR_INDEXER: Final = (sys.executable, "-c", "from upr_server.indexer.command import main; main()")
DEADLINE_S: Final = 60


class IndexerProcess:
    """A running `upr-indexer`.

    Attributes:
        process: The process.
        url: `http://HOST:PORT`.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        line = process.stdout.readline()
        prefix, _, url = line.rstrip("\n").rpartition(" ")
        assert prefix == "listening on", line
        self.process = process
        self.url = url

    @property
    def anonymous_bytes(self) -> int:
        """Memory in use now, without mapped files."""
        return status_of(self.process.pid, "RssAnon")

    def kill(self) -> None:
        """Ends it as a crash would."""
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def stop(self) -> int:
        """Asks it to end; gives its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)


def workers_of(indexer: IndexerProcess) -> list[int]:
    """The processes of an indexer's workers, in no order."""
    threads = Path(f"/proc/{indexer.process.pid}/task").iterdir()
    # Each thread has its own children.
    return [int(child) for path in threads for child in (path / "children").read_text().split()]


@contextmanager
def indexer_process(
    url: str, data_dir: Path, *options: str, workers: int | None = 1
) -> Iterator[IndexerProcess]:
    """An indexer that runs for as long as the context; without `workers` the options say how many
    processes it has."""
    in_workers = () if workers is None else ("--workers", str(workers))
    process = subprocess.Popen(
        [
            *(*UPR_INDEXER, url, "--listen", "127.0.0.1:0", "--data-dir", str(data_dir)),
            *("--log-level", "warning", *in_workers, *options),
        ],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=environment(),
        text=True,
    )
    with process:
        try:
            yield IndexerProcess(process)
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(DEADLINE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
