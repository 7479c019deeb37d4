"""Reading a data directory that may be damaged, in processes that may die of it.

A truncated file kills its reader with SIGBUS, and a flipped bit in LMDB's pages may kill it with
SIGSEGV. So each bucket is read by a process of its own, which reports what it finds through a pipe.
If the process dies, that is a finding, and another goes on with the next stage.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from upr_server.storage.errors import DataDirectoryError, StorageError
from upr_server.storage.offline.bucket_files import open_map
from upr_server.storage.offline.check import BucketCheck
from upr_server.storage.offline.dump import BucketDump, DumpOptions, OutputError
from upr_server.storage.offline.findings import INDEX_ADVICE, LOG_ADVICE, Finding, Problem, Stage

Task = Literal["check", "dump"]

_MAIN: Final = (
    "import sys; from upr_server.storage.offline.inspection import main; main(sys.argv[1:])"
)
_CAUSES: Final = {
    signal.SIGBUS: "the file is damaged or truncated",
    signal.SIGSEGV: "the file is damaged",
    signal.SIGABRT: "the file is damaged",
}

EVERYTHING: Final = DumpOptions()


class OutputClosedError(Exception):
    """The reader of the output has closed it."""


def bucket_names(path: Path) -> list[str]:
    """The buckets of a data directory, sorted. Folders that a crash left half made are left out.

    Raises:
        DataDirectoryError: It cannot be read.
    """
    try:
        names = [folder.name for folder in (path / "buckets").iterdir()]
    except OSError as error:
        raise DataDirectoryError(f"{path} cannot be read: {error.strerror}") from error
    return sorted(name for name in names if not name.startswith("."))


def inspect(
    path: Path, names: Iterable[str], task: Task, options: DumpOptions = EVERYTHING
) -> Iterator[Finding]:
    """Checks or dumps buckets, one after the other.

    Args:
        path: The data directory; no server may use it meanwhile.
        names: The buckets.
        task: What to do; a dump goes to standard output.
        options: What to dump.

    Raises:
        OutputClosedError: The reader of the dump has closed it.
    """
    for name in names:
        first_stage: int | None = 0
        while first_stage is not None:
            first_stage = yield from _run(path, name, task, options, first_stage)


def _run(
    path: Path, name: str, task: Task, options: DumpOptions, first_stage: int
) -> Generator[Finding, None, int | None]:
    """Runs one process. Returns the stage to go on with if it died, otherwise None."""
    reading, writing = os.pipe()
    arguments = [str(writing), str(path), name, task, str(first_stage)]
    # Without -P, modules in the working directory would be imported.
    command = [sys.executable, "-P", "-c", _MAIN, *arguments]
    command.append(msgspec.json.encode(options).decode())
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(writing,))
    finally:
        os.close(writing)
    stage = Stage(-1, "its files")
    with open(reading, "rb") as pipe:
        try:
            for line in pipe:
                if not line.endswith(b"\n"):
                    break
                finding = msgspec.json.decode(line, type=Finding)
                if isinstance(finding, Stage):
                    stage = finding
                yield finding
            code = process.wait()
        finally:
            process.kill()
            process.wait()
    if not code:
        return None
    if code == -signal.SIGPIPE:
        raise OutputClosedError
    if code == -signal.SIGINT:
        raise KeyboardInterrupt
    yield _death(path / "buckets" / name, name, stage, code)
    return None if stage.number < first_stage else stage.number + 1


def _death(folder: Path, name: str, stage: Stage, code: int) -> Problem:
    reason = _CAUSES.get(signal.Signals(-code)) if code < 0 else None
    if reason is None:
        reason = f"the process that read it ended with code {code}"
    sizes = ", ".join(
        f"{part}/data.mdb has {_size(folder / part / 'data.mdb')}" for part in ("log", "index")
    )
    advice = INDEX_ADVICE if stage.is_index else LOG_ADVICE
    text = f"{stage.text} cannot be read to the end: {reason} ({sizes})"
    return Problem(name, stage.partition, text, advice)


def _size(path: Path) -> str:
    try:
        return f"{path.stat().st_size:,} bytes"
    except OSError as error:
        return error.strerror or "no size"


# The process.


def main(arguments: Sequence[str]) -> None:
    """Inspects one bucket, and writes its findings to the pipe, one JSON line each."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    descriptor, path, name, task, first_stage, options = arguments
    with open(int(descriptor), "wb", buffering=0) as pipe:
        folder = Path(path) / "buckets" / name
        dump_options = msgspec.json.decode(options, type=DumpOptions)
        findings = _findings(folder, name, task, int(first_stage), dump_options)
        pipe.writelines(msgspec.json.encode(finding) + b"\n" for finding in findings)


def _findings(
    folder: Path, name: str, task: str, first_stage: int, options: DumpOptions
) -> Iterator[Finding]:
    advice = LOG_ADVICE
    try:
        log = open_map(folder / "log")
        if task == "dump":
            yield from BucketDump(name, log, options).run(first_stage)
        else:
            advice = f"{INDEX_ADVICE}; then check again"
            yield from BucketCheck(name, log, open_map(folder / "index")).run(first_stage)
    except OutputError as error:
        yield Problem(name, None, str(error), "make room there, and dump again")
    except (StorageError, OSError) as error:
        yield Problem(name, None, str(error), advice)
