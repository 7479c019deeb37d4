"""`upr tail`: follows the changes of a bucket."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from pathlib import Path
from typing import Final, Literal

import attrs
import click
import trio

from upr_protocol.cli.connection import command_identity, report_connection, run_until_signal
from upr_protocol.cli.errors import RefusedError, say
from upr_protocol.cli.event_lines import EventCounts, event_lines
from upr_protocol.cli.output import Output, ProgressDisplay, print_line
from upr_protocol.cli.parameters import (
    TargetCommand,
    bucket_argument,
    number_type,
    parse_past_time,
    retry_timeout_option,
)
from upr_protocol.client import (
    Address,
    BarrierReached,
    Consumer,
    ConsumerStatistics,
    LocalCopyFollower,
    ResumeState,
    RolledBack,
    StreamEnded,
    Undone,
    connect,
    consume,
    keep_local_copy,
)
from upr_protocol.client.operator import partitions_text
from upr_protocol.limits import PARTITIONS_MAX

CAUGHT_UP: Final = b"caught-up"
"""The cookie of the barrier that ends `--until caught-up`."""

_SUMMARY_S: Final = 1.0


@click.command(cls=TargetCommand)
@bucket_argument
@click.option(
    "--from",
    "start",
    type=click.Choice(["beginning", "now"]),
    default="beginning",
    show_default=True,
    help="Where to start: with everything that the server has, or with changes from now on.",
)
@click.option(
    "--since",
    type=parse_past_time,
    metavar="TIME",
    help="Start with the changes since TIME: a date and time as in 2026-01-31T12:00:00Z, or so "
    "long ago, as in 30s, 10m, 2h or 7d.",
)
@click.option(
    "--resume",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Save the position in FILE, and resume from there the next time.",
)
@click.option(
    "--state",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep a local copy of the bucket in DIR, and resume from there the next time.",
)
@click.option(
    "--until",
    type=click.Choice(["caught-up"]),
    help="Stop once everything has arrived that was stored when the command began.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "summary"]),
    default="jsonl",
    show_default=True,
    help="A JSON line per event, or a summary line every second.",
)
@click.option(
    "--partition",
    "partitions",
    type=number_type(0, PARTITIONS_MAX - 1),
    multiple=True,
    metavar="NUMBER",
    help="Follow only this partition. Repeat it for several.  [default: all]",
)
@click.option(
    "--prefix",
    metavar="TEXT",
    default="",
    help="Follow only the keys that begin with this. The server leaves the others out.  [default: "
    "all]",
)
@retry_timeout_option
def tail(
    target: Address,
    start: Literal["beginning", "now"],
    since: datetime | None,
    resume: Path | None,
    directory: Path | None,
    until: str | None,
    form: str,
    partitions: Sequence[int],
    prefix: str,
    retry_timeout: int,
) -> None:
    r"""Follow the changes of a bucket.

    Changes arrive in snapshots. Between a `snapshot_start` and its `snapshot_end` your copy of a
    partition is incomplete; at the end it equals the server's at that sequence number. A key that
    changed several times in between arrives once. A `rollback` means that a partition starts again:
    drop what you have of it.

    With --since each change counts that is still the newest of its key, or that the server has not
    yet compacted. The time of a change is that of the server's clock when the change got its
    number.

    With --resume the command can be killed at any moment, and resumes from its position when it is
    run again. It may then repeat lines, but never omits one. Give the same --prefix again: another
    one is refused, because FILE says nothing of the changes that were left out.

    With --state the command keeps a local copy of the bucket in DIR, an SQLite database
    (map.sqlite), and prints the changes that it applied. Killed at any moment, it resumes from its
    last commit. If the server has lost changes that the copy has, the command undoes just those,
    and prints a line `undone` with the keys and their values now.

    \b
    Examples:
      upr tail upr://127.0.0.1:12000/planes
      upr tail upr://127.0.0.1:12000/planes --until caught-up --format summary
      upr tail upr://127.0.0.1:12000/planes --since 10m
      upr tail upr://127.0.0.1:12000/planes --prefix N619
      upr tail upr://127.0.0.1:12000/planes --resume planes.state >> planes.jsonl
      upr tail upr://127.0.0.1:12000/planes --state planes.copy --format summary
    """
    if resume is not None and not resume.absolute().parent.is_dir():
        raise click.UsageError(
            f"{resume} cannot be written: its directory does not exist; make it, or name another "
            "file"
        )
    if directory is not None and (resume is not None or start != "beginning"):
        raise click.UsageError("--state saves its own position; leave out --resume and --from")
    if directory is not None and prefix:
        raise click.UsageError("--state copies all keys; leave out --prefix")
    if since is not None and (resume or directory or start != "beginning"):
        raise click.UsageError(
            "--since says where to start; leave out --from, --resume and --state"
        )
    job = _Tail(
        target,
        start,
        since,
        resume,
        directory,
        partitions,
        os.fsencode(prefix),
        retry_timeout,
        until_caught_up=until is not None,
        as_lines=form == "jsonl",
    )
    job.run()


_UNPLACED_POLL_S: Final = 1.0
"""How often it looks whether a partition has no node."""


@attrs.define
class _Tail:
    """One run of `upr tail`."""

    target: Address
    start: Literal["beginning", "now"]
    since: datetime | None
    resume: Path | None
    directory: Path | None
    partitions: Sequence[int]
    key_prefix: bytes
    retry_timeout_s: int
    until_caught_up: bool = attrs.field(kw_only=True)
    as_lines: bool = attrs.field(kw_only=True)
    summary: EventCounts = attrs.field(factory=lambda: EventCounts(time.monotonic), init=False)
    _output: Output = attrs.field(factory=Output, init=False)
    _is_deleted: bool = attrs.field(default=False, init=False)

    def run(self) -> None:
        """Follows the changes until caught up, if that was asked for, or until Ctrl-C."""
        progress = ProgressDisplay(self.summary.line, _SUMMARY_S)
        try:
            run_until_signal(self._follow, progress)
        finally:
            progress.clear()
            if not self.as_lines:
                print_line(self.summary.total())
        if self._is_deleted:
            raise RefusedError(f"the bucket {self.target.bucket!r} was deleted")

    async def _follow(self, progress: ProgressDisplay) -> None:
        resume = self.resume if self.since is None else await self._state_at(self.since)
        async with self._source(resume) as consumer, trio.open_nursery() as nursery:
            if self.as_lines:
                if self.resume is not None:
                    self._output.end_line()
                nursery.start_soon(self._output.wait_until_closed)
            else:
                nursery.start_soon(progress.run)
            nursery.start_soon(self._report_connection, consumer, progress)
            nursery.start_soon(report_unplaced, consumer.statistics, self.retry_timeout_s, progress)
            if self.until_caught_up:
                consumer.send_barrier(CAUGHT_UP)
            await self._print_events(consumer)
            nursery.cancel_scope.cancel()

    async def _state_at(self, time: datetime) -> ResumeState:
        async with connect(self.target, identity=command_identity("tail")) as client:
            return await client.resume_state_at_time(time, self.partitions)

    def _source(
        self, resume: Path | ResumeState | None
    ) -> AbstractAsyncContextManager[Consumer | LocalCopyFollower]:
        if self.directory is not None:
            return keep_local_copy(
                self.target,
                self.directory,
                identity=command_identity("tail"),
                partitions=self.partitions or None,
                retry_timeout_s=self.retry_timeout_s,
            )
        return consume(
            self.target,
            identity=command_identity("tail"),
            start=self.start,
            resume=resume,
            partitions=self.partitions or None,
            key_prefix=self.key_prefix,
            retry_timeout_s=self.retry_timeout_s,
        )

    async def _report_connection(
        self, consumer: Consumer | LocalCopyFollower, progress: ProgressDisplay
    ) -> None:
        def status() -> tuple[bool, str]:
            statistics = consumer.statistics()
            return statistics.is_connected, statistics.last_failure

        await report_connection(
            status, self.retry_timeout_s, was_connected=True, before=progress.clear
        )

    async def _print_events(self, consumer: Consumer | LocalCopyFollower) -> None:
        # Asking for the next event acknowledges this one, which the resume file may then include.
        # So all of its lines are written before that.
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
                self._is_deleted = True


async def report_unplaced(
    statistics: Callable[[], ConsumerStatistics], retry_timeout_s: int, progress: ProgressDisplay
) -> None:
    """Says on standard error what a consumer waits for, once each time that no node has served a
    partition for some seconds. Runs until cancelled."""
    had_unplaced = False
    while True:
        await trio.sleep(_UNPLACED_POLL_S)
        figures = statistics()
        if figures.unplaced_partitions and not had_unplaced:
            progress.clear()
            reason = figures.unplaced_reason or "no node tells a newer partition map"
            say(
                f"waiting for a node that serves {partitions_text(figures.unplaced_partitions)} "
                f"({reason}); trying for up to {retry_timeout_s:,} s"
            )
        had_unplaced = bool(figures.unplaced_partitions)
