"""`upr load`: a file's rows become items."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Final

import attrs
import click
import trio

from upr_protocol.cli.batches import Batches
from upr_protocol.cli.connection import identity, patience_option
from upr_protocol.cli.durability import durability_option
from upr_protocol.cli.exits import REFUSED, FailedError, say
from upr_protocol.cli.interrupt import run_interruptible
from upr_protocol.cli.keys import KeyMaker
from upr_protocol.cli.progress import Progress, rate_text
from upr_protocol.cli.pump import pumped
from upr_protocol.cli.rows import FORMATS, BadRow, FileError, Row, Rows, read_rows
from upr_protocol.cli.sizes import size_text
from upr_protocol.cli.tally import Tally
from upr_protocol.cli.target import TargetCommand, bucket_argument
from upr_protocol.client import Address, Failure, Publisher, publisher
from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import Durability
from upr_protocol.limits import VALUE_BYTES_MAX

_OF_NO_USE: Final = frozenset(
    {
        Status.UNSUPPORTED,
        Status.TOO_FEW_REPLICAS,
        Status.NO_BUCKET,
        Status.BUCKET_DELETED,
        Status.BAD_ARGUMENT,
    }
)
"""What the server says of one batch and would say of all."""

_FEW: Final = 500
"""Rows at a time that tell of a slow source: then nobody waits for a batch to become full."""


@click.command(cls=TargetCommand)
@bucket_argument
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.option(
    "--key",
    "columns",
    multiple=True,
    required=True,
    metavar="COLUMN",
    help="The column that holds the key; several times, for a key made of several columns.",
)
@click.option(
    "--separator",
    default=":",
    show_default=True,
    help="What stands between the columns of a key. Choose one that occurs in none of them.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(sorted(set(FORMATS.values()))),
    help="What the file is, where its name does not tell.",
)
@click.option(
    "--null",
    multiple=True,
    metavar="TEXT",
    help="A text that stands for a missing value, as NA does in many CSV files; it becomes null.",
)
@click.option(
    "--skip-bad-rows", is_flag=True, help="Count rows that cannot be read, instead of stopping."
)
@durability_option
@patience_option
@click.option("--quiet", is_flag=True, help="Show no progress.")
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
    patience: int,
    quiet: bool,
) -> None:
    r"""Store the rows of a file, each under its key.

    The key is in the column that --key names; the value is the row as JSON. FILE is CSV, JSON
    Lines, or (where pyarrow is installed) Parquet; `-` is standard input, which needs --format. The
    values of CSV are texts. Of rows with the same key the last one stays. Rows without a key are
    left out and counted.

    Loading a file twice does no harm: it stores the same again.

    \b
    Examples:
      upr load upr://127.0.0.1:12000/planes planes.csv --key tailnum
      upr load upr://127.0.0.1:12000/flights flights.csv --null NA \
          --key carrier --key flight --separator /
      my-export | upr load upr://127.0.0.1:12000/people - --format jsonl --key id
    """
    form = form or _format_of(file)
    with _opened(file, form) as source:
        header, rows = _read(source, form, null)
        _check_columns(header, columns)
        job = _Load(
            target,
            KeyMaker(columns, separator),
            skip_bad_rows=skip_bad_rows,
            durability=durability,
            copies=copies,
            patience_s=patience,
            unit="row" if form == "parquet" else "line",
        )
        job.run(rows, show_progress=not quiet)


def _format_of(file: str) -> str:
    if file == "-":
        raise click.UsageError("standard input has no name to tell its format by: say --format")
    form = FORMATS.get(Path(file).suffix.lower())
    if form is None:
        known = ", ".join(FORMATS)
        raise click.UsageError(f"{file} does not end with {known}: say --format")
    return form


def _opened(file: str, form: str) -> AbstractContextManager[IO[bytes]]:
    if file != "-":
        try:
            return Path(file).open("rb")
        except OSError as error:
            raise click.UsageError(f"{file} cannot be read: {error.strerror}") from error
    if form == "parquet":
        raise click.UsageError("Parquet is read from its end: save it to a file first")
    # A thread may still wait for it when the command ends, and whoever closed it then would wait as
    # well; so it is neither closed nor `sys.stdin` itself, which Python closes.
    return nullcontext(open(sys.stdin.fileno(), "rb", closefd=False))


def _read(source: IO[bytes], form: str, null: Sequence[str]) -> tuple[list[str], Rows]:
    try:
        return read_rows(source, form, null)
    except FileError as error:
        raise click.UsageError(str(error)) from error


def _check_columns(header: Sequence[str], columns: Sequence[str]) -> None:
    for column in columns:
        if header and column not in header:
            there_are = ", ".join(header)
            raise click.UsageError(f"there is no column {column!r}; there are {there_are}")


@attrs.define
class _Load:
    """One run of `upr load`."""

    target: Address
    keys: KeyMaker
    skip_bad_rows: bool = attrs.field(kw_only=True)
    durability: Durability = attrs.field(kw_only=True)
    copies: int = attrs.field(kw_only=True)
    patience_s: int = attrs.field(kw_only=True)
    unit: str = attrs.field(kw_only=True)
    tally: Tally = attrs.field(factory=Tally, init=False)
    started_at: float = attrs.field(factory=time.monotonic, init=False)
    _finished: bool = attrs.field(default=False, init=False)
    _no_use: Status | None = attrs.field(default=None, init=False)

    def run(self, rows: Rows, *, show_progress: bool) -> None:
        """Loads the rows, and says what became of them."""
        progress = Progress(self._progress)
        try:
            ended_by = run_interruptible(self._load, rows, progress if show_progress else None)
        finally:
            progress.clear()
            for sentence in self.tally.troubles(self.unit):
                say(sentence)
            click.echo(self._total())
        if ended_by is not None:
            raise click.exceptions.Exit(ended_by)
        if self.tally.failures:
            raise click.exceptions.Exit(REFUSED)
        if self.tally.rows and not self.tally.sent:
            raise FailedError("not one row could be loaded; see above, and look at --key")

    async def _load(self, rows: Rows, progress: Progress | None) -> None:
        sink_of = publisher(
            self.target,
            identity=identity("load"),
            durability=self.durability,
            copies=self.copies,
            on_failure=self._refused,
            patience_s=self.patience_s,
        )
        async with sink_of as sink, trio.open_nursery() as nursery, pumped(rows) as batches:
            if progress is not None:
                nursery.start_soon(progress.run)
            waiting = Batches(sink.partition_count)
            async for batch in batches:
                await self._send(sink, waiting, batch)
                if len(batch) < _FEW:
                    await self._flush(sink, waiting)
            await self._flush(sink, waiting)
            await sink.flush()
            self._check_use()
            self._finished = True
            nursery.cancel_scope.cancel()

    async def _send(self, sink: Publisher, waiting: Batches, batch: list[Row | BadRow]) -> None:
        tally = self.tally
        for row in batch:
            tally.rows += 1
            item = row if isinstance(row, BadRow) else self._item(row)
            if item is None:
                tally.keyless.add(str(row.line))
            elif isinstance(item, BadRow):
                if not self.skip_bad_rows:
                    await self._flush(sink, waiting)
                    await sink.flush()
                    raise self._stop(item)
                tally.bad.add(f"{item.line} ({item.reason})")
            else:
                key, value = item
                tally.sent += 1
                tally.nbytes += len(key) + len(value)
                full = waiting.add(key, value)
                if full is not None:
                    self._check_use()
                    await sink.publish(*full)

    def _item(self, row: Row) -> tuple[bytes, bytes] | BadRow | None:
        """The row's key and value; None when it has no key."""
        value = row.json
        if len(value) > VALUE_BYTES_MAX:
            return BadRow(row.line, f"it has {size_text(len(value))}; at most 20 MiB")
        try:
            key = self.keys.key(row.fields)
        except ValueError as error:
            return BadRow(row.line, str(error))
        return None if key is None else (key, value)

    async def _flush(self, sink: Publisher, waiting: Batches) -> None:
        for partition, chunk in waiting.all():
            await sink.publish(partition, chunk)

    def _stop(self, row: BadRow) -> FileError:
        return FileError(
            f"{self.unit} {row.line}: {row.reason}; correct it and load the file again, or leave "
            "such rows out with --skip-bad-rows"
        )

    def _refused(self, failure: Failure) -> None:
        self.tally.refused(failure)
        if failure.status in _OF_NO_USE:
            self._no_use = failure.status

    def _check_use(self) -> None:
        if self._no_use is not None:
            raise ServerError(self._no_use)

    def _progress(self) -> str:
        tally = self.tally
        rate = rate_text(tally.rows, time.monotonic() - self.started_at)
        return f"{tally.rows:,} rows, {size_text(tally.nbytes)}, {rate}"

    def _total(self) -> str:
        tally = self.tally
        seconds = time.monotonic() - self.started_at
        if not self._finished:
            return f"stopped after {tally.rows:,} rows; what was loaded stays"
        return (
            f"loaded {tally.loaded:,} of {tally.rows:,} rows, {size_text(tally.nbytes)}, in "
            f"{seconds:.1f} s ({rate_text(tally.rows, seconds)})"
        )
