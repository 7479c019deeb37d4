"""`upr tail`: what changes, as it changes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final, Literal

import attrs
import click
import trio

from upr_protocol.cli.connection import identity, patience_option
from upr_protocol.cli.exits import RefusedError, say
from upr_protocol.cli.interrupt import run_interruptible
from upr_protocol.cli.lines import event_lines
from upr_protocol.cli.numbers import number
from upr_protocol.cli.output import Output
from upr_protocol.cli.progress import Progress
from upr_protocol.cli.summary import Summary
from upr_protocol.cli.target import TargetCommand, bucket_argument
from upr_protocol.client import (
    Address,
    BarrierReached,
    Consumer,
    LocalCopy,
    RolledBack,
    StreamEnded,
    Undone,
    consume,
    keep_local_copy,
)
from upr_protocol.limits import PARTITIONS_MAX

CAUGHT_UP: Final = b"caught-up"
"""The cookie of the barrier by which `--until caught-up` knows."""

_SUMMARY_S: Final = 1.0

_LOOK_S: Final = 0.5
"""A connection that is made again sooner than this is not worth a word."""


@click.command(cls=TargetCommand)
@bucket_argument
@click.option(
    "--from",
    "start",
    type=click.Choice(["beginning", "now"]),
    default="beginning",
    show_default=True,
    help="Where to start: with everything the server has, or with what changes from now on.",
)
@click.option(
    "--resume",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Keep in FILE how far you are, and go on from there the next time.",
)
@click.option(
    "--state",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep a local copy of the bucket in DIR, and go on from there the next time.",
)
@click.option(
    "--until",
    type=click.Choice(["caught-up"]),
    help="End once everything is here that was stored when the command began.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "summary"]),
    default="jsonl",
    show_default=True,
    help="A line of JSON for each event, or a line of figures every second.",
)
@click.option(
    "--partition",
    "partitions",
    type=number(0, PARTITIONS_MAX - 1),
    multiple=True,
    metavar="NUMBER",
    help="Only this partition; several times for several.",
)
@patience_option
def tail(
    target: Address,
    start: Literal["beginning", "now"],
    resume: Path | None,
    directory: Path | None,
    until: str | None,
    form: str,
    partitions: Sequence[int],
    patience: int,
) -> None:
    r"""Follow the changes of a bucket.

    Changes come in snapshots: between a `snapshot_start` and its `snapshot_end` a copy is on its
    way; at the end it is what the server had at that sequence number. A key that changed several
    times meanwhile comes once. A `rollback` says that a partition restarts: drop what you have of
    it.

    With --resume the command can be killed at any moment: run again, it goes on where it was. Lines
    may come twice then; none is ever missing.

    With --state the command keeps a local copy of the bucket in DIR, an SQLite database
    (map.sqlite), and prints the changes that it applied. Killed at any moment, it goes on from its
    last commit. If the server has lost changes that the copy has, just those are undone: a line
    `undone` lists the keys and what they hold now.

    \b
    Examples:
      upr tail upr://127.0.0.1:12000/planes
      upr tail upr://127.0.0.1:12000/planes --until caught-up --format summary
      upr tail upr://127.0.0.1:12000/planes --resume planes.state >> planes.jsonl
      upr tail upr://127.0.0.1:12000/planes --state planes.copy --format summary
    """
    if resume is not None and not resume.absolute().parent.is_dir():
        raise click.UsageError(f"{resume} cannot be written: its folder does not exist")
    if directory is not None and (resume is not None or start != "beginning"):
        raise click.UsageError("--state keeps where it is by itself: leave out --resume and --from")
    job = _Tail(
        target,
        start,
        resume,
        directory,
        partitions,
        patience,
        until_caught_up=until is not None,
        as_lines=form == "jsonl",
    )
    job.run()


@attrs.define
class _Tail:
    """One run of `upr tail`."""

    target: Address
    start: Literal["beginning", "now"]
    resume: Path | None
    directory: Path | None
    partitions: Sequence[int]
    patience_s: int
    until_caught_up: bool = attrs.field(kw_only=True)
    as_lines: bool = attrs.field(kw_only=True)
    summary: Summary = attrs.field(factory=lambda: Summary(time.monotonic), init=False)
    _output: Output = attrs.field(factory=Output, init=False)
    _deleted: bool = attrs.field(default=False, init=False)

    def run(self) -> None:
        """Follows the changes until the end that was asked for, or Ctrl-C."""
        progress = Progress(self.summary.line, _SUMMARY_S)
        try:
            ended_by = run_interruptible(self._follow, progress)
        finally:
            progress.clear()
            if not self.as_lines:
                click.echo(self.summary.total())
        if ended_by is not None:
            raise click.exceptions.Exit(ended_by)
        if self._deleted:
            raise RefusedError(f"the bucket {self.target.bucket!r} was deleted")

    async def _follow(self, progress: Progress) -> None:
        async with self._source() as consumer, trio.open_nursery() as nursery:
            if self.as_lines:
                if self.resume is not None:
                    self._output.end_line()
                nursery.start_soon(self._output.watch)
            else:
                nursery.start_soon(progress.run)
            nursery.start_soon(self._tell_of_connection, consumer, progress)
            if self.until_caught_up:
                consumer.send_barrier(CAUGHT_UP)
            await self._tell(consumer)
            nursery.cancel_scope.cancel()

    def _source(self) -> AbstractAsyncContextManager[Consumer | LocalCopy]:
        if self.directory is not None:
            return keep_local_copy(
                self.target,
                self.directory,
                identity=identity("tail"),
                partitions=self.partitions or None,
                patience_s=self.patience_s,
            )
        return consume(
            self.target,
            identity=identity("tail"),
            start=self.start,
            resume=self.resume,
            partitions=self.partitions or None,
            patience_s=self.patience_s,
        )

    async def _tell_of_connection(self, consumer: Consumer | LocalCopy, progress: Progress) -> None:
        was_connected = True
        while True:
            await trio.sleep(_LOOK_S)
            statistics = consumer.statistics()
            is_connected = statistics.connected
            if is_connected != was_connected:
                progress.clear()
                lost = (
                    f"the connection is lost ({statistics.last_failure}); trying again for up to "
                    f"{self.patience_s:,} s"
                )
                say("connected again" if is_connected else lost)
            was_connected = is_connected

    async def _tell(self, consumer: Consumer | LocalCopy) -> None:
        # To ask for the next event is to say that this one is dealt with, and only then may the
        # resume file hold it: so everything of it has been written by then.
        async for event in consumer:
            self.summary.add(event)
            if self.as_lines:
                await self._output.write(event_lines(event))
            elif isinstance(event, RolledBack | Undone):
                say(f"partition {event.partition} restarts from {event.to}: {event.reason}")
            if isinstance(event, BarrierReached):
                await consumer.save()
                return
            if isinstance(event, StreamEnded):
                self._deleted = True
