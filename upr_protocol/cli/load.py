"""`upr load`: stores the rows of a file as items."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Final

import attrs
import click
import trio

from upr_protocol.chunk import Chunk, chunk_of_plain_sets
from upr_protocol.cli.connection import command_identity, report_connection, run_until_signal
from upr_protocol.cli.errors import REFUSED, FailedError, say
from upr_protocol.cli.load_report import LoadReport
from upr_protocol.cli.output import ProgressDisplay, print_line, rate_text, size_text
from upr_protocol.cli.parameters import (
    TargetCommand,
    bucket_argument,
    durability_options,
    retry_timeout_option,
)
from upr_protocol.cli.row_reader import read_in_thread
from upr_protocol.cli.rows import FORMATS, BadRow, FileError, KeyMaker, Row, Rows, read_rows
from upr_protocol.client import Address, Failure, Publisher, publisher
from upr_protocol.errors import ServerError, Status
from upr_protocol.hashing import partition_of
from upr_protocol.ids import Durability, PartitionId
from upr_protocol.limits import VALUE_BYTES_MAX

_FATAL_STATUSES: Final = frozenset(
    {
        Status.UNSUPPORTED,
        Status.TOO_FEW_REPLICAS,
        Status.NO_BUCKET,
        Status.BUCKET_DELETED,
        Status.BAD_ARGUMENT,
        Status.NOT_ALLOWED,
    }
)
"""Statuses that the server would give to every other batch, too; or, where a user may change some
keys only, to a batch that happens to have another key."""

_SLOW_ROWS: Final = 500
"""Fewer rows than this at once mean a slow source, whose batches are sent before they are full."""

BATCH_ITEMS_MAX: Final = 1_000
LOAD_BATCH_BYTES: Final = 256 * 1024
"""A batch is full at either; larger ones are not faster."""


@click.command(cls=TargetCommand)
@bucket_argument
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.option(
    "--key",
    "columns",
    multiple=True,
    required=True,
    metavar="COLUMN",
    help="The column that holds the key. Repeat it for a key of several columns.",
)
@click.option(
    "--separator",
    default=":",
    show_default=True,
    help="The text between the columns of a key. Choose one that none of them contains.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(sorted(set(FORMATS.values()))),
    help="The format of FILE, if its name does not tell.",
)
@click.option(
    "--null",
    multiple=True,
    metavar="TEXT",
    help="A text that stands for a missing value, as NA does in many CSV files. It becomes null.",
)
@click.option(
    "--skip-bad-rows",
    is_flag=True,
    help="Skip and count rows that cannot be read, instead of stopping with exit code 1.",
)
@durability_options
@retry_timeout_option
@click.option("--quiet", is_flag=True, help="Do not show progress.")
def load(
    target: Address,
    file: str,
    columns: Sequence[str],
    separator: str,
    form: str | None,
    null: Sequence[str],
    skip_bad_rows: bool,
    durability: Durability,
    copies: int,
    retry_timeout: int,
    quiet: bool,
) -> None:
    r"""Store the rows of a file, each under its key.

    The column that --key names holds the key; the value is the row as JSON. FILE is CSV, JSON
    Lines or, where pyarrow is installed, Parquet; `-` is standard input, which needs --format. CSV
    values are stored as text. If several rows have the same key, the last one is kept. Rows without
    a key are skipped and counted.

    Loading a file twice is safe: it stores the same items again.

    \b
    Examples:
      upr load upr://127.0.0.1:12000/planes planes.csv --key tailnum
      upr load upr://127.0.0.1:12000/flights flights.csv --null NA \
          --key carrier --key flight --separator /
      my-export | upr load upr://127.0.0.1:12000/people - --format jsonl --key id
    """
    form = form or _format_of(file)
    with _open_source(file, form) as source:
        header, rows = _read(source, form, null)
        _check_columns(header, columns)
        job = _Load(
            target,
            KeyMaker(columns, separator),
            skip_bad_rows=skip_bad_rows,
            durability=durability,
            copies=copies,
            retry_timeout_s=retry_timeout,
            unit="row" if form == "parquet" else "line",
        )
        job.run(rows, show_progress=not quiet)


def _format_of(file: str) -> str:
    if file == "-":
        raise click.UsageError("standard input needs --format, as it has no file name")
    form = FORMATS.get(Path(file).suffix.lower())
    if form is None:
        suffixes = ", ".join(FORMATS)
        raise click.UsageError(
            f"{file} does not end with {suffixes}; name its format with --format"
        )
    return form


def _open_source(file: str, form: str) -> AbstractContextManager[IO[bytes]]:
    if file != "-":
        try:
            return Path(file).open("rb")
        except OSError as error:
            raise click.UsageError(f"{file} cannot be read: {error.strerror}") from error
    if form == "parquet":
        raise click.UsageError("Parquet is read from its end; save it to a file first")
    try:
        os.read(sys.stdin.fileno(), 0)
    except OSError as error:
        raise click.UsageError(f"standard input cannot be read: {error.strerror}") from error
    # A thread may still be reading it when the command ends, and closing it would then block. So it
    # is not closed, and it is not `sys.stdin`, which Python closes on exit.
    return nullcontext(open(sys.stdin.fileno(), "rb", closefd=False))


def _read(source: IO[bytes], form: str, null: Sequence[str]) -> tuple[list[str], Rows]:
    try:
        return read_rows(source, form, null)
    except FileError as error:
        raise click.UsageError(str(error)) from error


def _check_columns(header: Sequence[str], columns: Sequence[str]) -> None:
    for column in columns:
        if header and column not in header:
            raise click.UsageError(
                f"there is no column {column!r}; the columns are {', '.join(header)}"
            )


class LoadBatches:
    """The batches being filled, at most one per partition.

    A publisher batches as well, but it takes any operation one by one. These are only stores
    without conditions, whose chunk is made of two lists: twice as fast.

    Args:
        partition_count: The number of partitions of the bucket.
    """

    def __init__(self, partition_count: int) -> None:
        self._partition_count = partition_count
        self._keys: dict[PartitionId, list[bytes]] = {}
        self._values: dict[PartitionId, list[bytes]] = {}
        self._nbytes: dict[PartitionId, int] = {}

    def add(self, key: bytes, value: bytes) -> tuple[PartitionId, Chunk] | None:
        """Adds an item; returns its partition's batch if that is now full. O(1) otherwise."""
        partition = partition_of(key, self._partition_count)
        keys = self._keys.get(partition)
        if keys is None:
            self._keys[partition], self._values[partition] = [key], [value]
            nbytes = len(key) + len(value)
        else:
            keys.append(key)
            self._values[partition].append(value)
            nbytes = self._nbytes[partition] + len(key) + len(value)
            if len(keys) >= BATCH_ITEMS_MAX:
                return self._take(partition)
        self._nbytes[partition] = nbytes
        return self._take(partition) if nbytes >= LOAD_BATCH_BYTES else None

    def take_all(self) -> list[tuple[PartitionId, Chunk]]:
        """Removes and returns every batch. O(items)."""
        return [self._take(partition) for partition in list(self._keys)]

    def _take(self, partition: PartitionId) -> tuple[PartitionId, Chunk]:
        self._nbytes.pop(partition, None)
        return partition, chunk_of_plain_sets(
            self._keys.pop(partition), self._values.pop(partition)
        )


def _size_of(row: Row | BadRow) -> int:
    return len(row.json) if isinstance(row, Row) else 0


@attrs.define
class _Load:
    """One run of `upr load`."""

    target: Address
    keys: KeyMaker
    skip_bad_rows: bool = attrs.field(kw_only=True)
    durability: Durability = attrs.field(kw_only=True)
    copies: int = attrs.field(kw_only=True)
    retry_timeout_s: int = attrs.field(kw_only=True)
    unit: str = attrs.field(kw_only=True)
    report: LoadReport = attrs.field(factory=LoadReport, init=False)
    started_at: float = attrs.field(factory=time.monotonic, init=False)
    _is_finished: bool = attrs.field(default=False, init=False)
    _fatal_failure: Failure | None = attrs.field(default=None, init=False)

    def run(self, rows: Rows, *, show_progress: bool) -> None:
        """Loads the rows, and says what happened to them."""
        progress = ProgressDisplay(self._progress)
        try:
            run_until_signal(self._load, rows, progress if show_progress else None)
        finally:
            progress.clear()
            for sentence in self.report.problems(self.unit):
                say(sentence)
            if self._is_finished or self.report.rows:
                print_line(self._total())
        if self.report.refused_counts:
            raise click.exceptions.Exit(REFUSED)
        if self.report.rows and not self.report.rows_sent:
            raise FailedError("no row could be loaded: see the messages above, and check --key")

    async def _load(self, rows: Rows, progress: ProgressDisplay | None) -> None:
        publishing = publisher(
            self.target,
            identity=command_identity("load"),
            durability=self.durability,
            copies=self.copies,
            on_failure=self._note_refusal,
            retry_timeout_s=self.retry_timeout_s,
        )
        async with (
            publishing as sink,
            trio.open_nursery() as nursery,
            read_in_thread(rows, _size_of) as source,
        ):
            nursery.start_soon(self._report_connection, sink, progress)
            if progress is not None:
                nursery.start_soon(progress.run)
            batches = LoadBatches(sink.partition_count)
            async for rows_read in source:
                is_first = not self.report.rows_sent
                await self._send(sink, batches, rows_read)
                if is_first or len(rows_read) < _SLOW_ROWS:
                    await self._flush(sink, batches)
                if is_first:
                    # What the server refuses of these rows, it refuses of all: hear it before the
                    # rest of a large file is on its way.
                    await sink.flush()
                self._check_fatal_failure()
            await self._flush(sink, batches)
            await sink.flush()
            self._check_fatal_failure()
            self._is_finished = True
            nursery.cancel_scope.cancel()

    async def _report_connection(self, sink: Publisher, progress: ProgressDisplay | None) -> None:
        def status() -> tuple[bool, str]:
            statistics = sink.statistics()
            return statistics.is_connected, statistics.last_failure

        before = (lambda: None) if progress is None else progress.clear
        await report_connection(status, self.retry_timeout_s, was_connected=True, before=before)

    async def _send(self, sink: Publisher, batches: LoadBatches, rows: list[Row | BadRow]) -> None:
        report = self.report
        for row in rows:
            report.rows += 1
            item = row if isinstance(row, BadRow) else self._item(row)
            if item is None:
                report.keyless.add(str(row.line))
            elif isinstance(item, BadRow):
                if not self.skip_bad_rows:
                    await self._flush(sink, batches)
                    await sink.flush()
                    raise self._stop(item)
                report.bad.add(f"{item.line} ({item.reason})")
            else:
                key, value = item
                report.rows_sent += 1
                report.nbytes += len(key) + len(value)
                full_batch = batches.add(key, value)
                if full_batch is not None:
                    self._check_fatal_failure()
                    await sink.publish(*full_batch)

    def _item(self, row: Row) -> tuple[bytes, bytes] | BadRow | None:
        """The row's key and value; None if it has no key."""
        value = row.json
        if len(value) > VALUE_BYTES_MAX:
            return BadRow(row.line, f"it has {size_text(len(value))}; the limit is 20 MiB")
        try:
            key = self.keys.key(row.fields)
        except ValueError as error:
            return BadRow(row.line, str(error))
        return None if key is None else (key, value)

    async def _flush(self, sink: Publisher, batches: LoadBatches) -> None:
        for partition, chunk in batches.take_all():
            await sink.publish(partition, chunk)

    def _stop(self, row: BadRow) -> FileError:
        return FileError(
            f"{self.unit} {row.line}: {row.reason}; correct it and load the file again, or skip "
            "such rows with --skip-bad-rows"
        )

    def _note_refusal(self, failure: Failure) -> None:
        self.report.add_refused(failure)
        if failure.status in _FATAL_STATUSES and self._fatal_failure is None:
            self._fatal_failure = failure

    def _check_fatal_failure(self) -> None:
        if self._fatal_failure is not None:
            raise ServerError(self._fatal_failure.status, self._fatal_failure.sentence)

    def _progress(self) -> str:
        report = self.report
        rate = rate_text(report.rows, time.monotonic() - self.started_at)
        return f"{report.rows:,} rows, {size_text(report.nbytes)}, {rate}"

    def _total(self) -> str:
        report = self.report
        seconds = time.monotonic() - self.started_at
        if not self._is_finished:
            return f"stopped after {report.rows:,} rows; rows already loaded stay"
        return (
            f"loaded {report.loaded:,} of {report.rows:,} rows, {size_text(report.nbytes)}, in "
            f"{seconds:.1f} s ({rate_text(report.rows, seconds)})"
        )
