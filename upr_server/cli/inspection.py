"""The commands `check` and `dump`, which read a data directory."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from upr_server.cli.output import EXIT_BROKEN_PIPE, EXIT_FAILED, EXIT_INTERRUPTED, print_text, say
from upr_server.cli.parameters import with_data_dir
from upr_server.storage.directory import lock_for_reading
from upr_server.storage.errors import DataDirectoryError
from upr_server.storage.offline.dump import DumpOptions
from upr_server.storage.offline.findings import Problem, Progress, Stage
from upr_server.storage.offline.inspection import OutputClosedError, Task, bucket_names, inspect

_PROGRESS_S = 0.2
"""How often the counts are shown on a terminal."""

_CHECK_EXITS = """\b
Exit codes:
  0    no problems
  1    problems, one per line on standard output, or the output cannot be written
  2    wrong usage: check the command line
  130  interrupted by Ctrl-C
"""

_DUMP_EXITS = """\b
Exit codes:
  0    everything was printed
  1    damaged records were left out, or the output cannot be written
  2    wrong usage: check the command line
  130  interrupted by Ctrl-C
"""


@click.command("check", epilog=_CHECK_EXITS)
@with_data_dir
def check_command(data_dir: Path) -> None:
    """Check a data directory for damage.

    The command reads every record, chunk and index entry, and compares them with their checksums
    and with each other. It changes nothing. Stop the server that uses the directory first.
    """
    inspected = _inspect(data_dir, None, "check", DumpOptions())
    for problem in inspected.problems:
        print_text(str(problem))
    if inspected.problems:
        say(f"{data_dir} has {len(inspected.problems)} problems")
        sys.exit(EXIT_FAILED)
    print_text(f"{data_dir} has no problems: {inspected.summary()}")


@click.command("dump", epilog=_DUMP_EXITS)
@with_data_dir
@click.option("--bucket", help="Print only this bucket.  [default: all]")
@click.option(
    "--partition", type=click.IntRange(0), help="Print only this partition.  [default: all]"
)
@click.option("--keys-only", is_flag=True, help="Leave out the values.")
@click.option(
    "--history", is_flag=True, help="Print every mutation that is still stored, oldest first."
)
def dump_command(
    data_dir: Path, bucket: str | None, partition: int | None, keys_only: bool, history: bool
) -> None:
    """Print the contents of a data directory, one JSON object per line.

    By default that is the newest mutation of each key, deletions too, by partition, and in each
    partition by sequence number. Keys and values are text where they are UTF-8; otherwise they are
    base64, and a second field (key_encoding, value_encoding) says so. Damaged records are left out,
    and reported on standard error. The command changes nothing. Stop the server that uses the
    directory first.
    """
    options = DumpOptions(partition, keys_only, history)
    inspected = _inspect(data_dir, bucket, "dump", options)
    for problem in inspected.problems:
        say(str(problem))
    if inspected.problems:
        sys.exit(EXIT_FAILED)
    if partition is not None and not inspected.stages:
        place = "" if bucket is None else f" of bucket {bucket!r}"
        raise click.UsageError(f"{data_dir} has no partition {partition}{place}")


class _Inspected:
    """What an inspection found so far."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.buckets = self.stages = self.chunks = self.chunk_bytes = self.records = 0
        self._shown_at = time.monotonic()
        self._on_terminal = sys.stderr.isatty()

    def summary(self) -> str:
        """How much was inspected, in a line."""
        return (
            f"{self.buckets:,} buckets, {self.chunks:,} chunks of {self.chunk_bytes:,} bytes, "
            f"{self.records:,} records"
        )

    def take(self, checked: Progress) -> None:
        """Counts, and shows the counts on a terminal."""
        self.chunks += checked.chunks
        self.chunk_bytes += checked.chunk_bytes
        self.records += checked.records
        if self._on_terminal and time.monotonic() - self._shown_at > _PROGRESS_S:
            self._shown_at = time.monotonic()
            click.echo(f"\r{self.summary()}", nl=False, err=True)

    def clear(self) -> None:
        """Leaves the terminal's line empty."""
        if self._on_terminal:
            click.echo("\r\x1b[K", nl=False, err=True)


def _inspect(data_dir: Path, bucket: str | None, task: Task, options: DumpOptions) -> _Inspected:
    inspected = _Inspected()
    try:
        with lock_for_reading(data_dir):
            names = bucket_names(data_dir)
            if bucket is not None and bucket not in names:
                text = ", ".join(names) or "none"
                raise click.UsageError(f"{data_dir} has no bucket {bucket!r}; it has {text}")
            names = names if bucket is None else [bucket]
            inspected.buckets = len(names)
            for finding in inspect(data_dir, names, task, options):
                if isinstance(finding, Problem):
                    inspected.problems.append(finding)
                elif isinstance(finding, Stage):
                    inspected.stages += 1
                else:
                    inspected.take(finding)
        inspected.clear()
    except DataDirectoryError as error:
        say(str(error))
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except OutputClosedError:
        sys.exit(EXIT_BROKEN_PIPE)
    return inspected
