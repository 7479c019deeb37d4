"""`upr events`: which buckets change, as they do."""

from __future__ import annotations

import secrets
from base64 import b64encode
from typing import Any, Final

import attrs
import click
import msgspec
import trio

from upr_protocol.bucket_event import ALL_KINDS, ANY_DESIGN, BucketEvent, BucketFate, EventKind
from upr_protocol.cli.connection import identity, patience_option
from upr_protocol.cli.exits import say
from upr_protocol.cli.interrupt import run_interruptible
from upr_protocol.cli.numbers import number
from upr_protocol.cli.output import Output
from upr_protocol.cli.target import TargetCommand, server_argument
from upr_protocol.client import Address, EventFeed, LookAtEverything, follow_events
from upr_protocol.limits import HEALTH_TIMEOUT_S_MAX, HEALTH_TIMEOUT_S_MIN

_KINDS: Final = {kind.name.lower(): kind for kind in EventKind if kind.name}

_LOOK_S: Final = 0.5
"""A connection that is made again sooner than this is not worth a word."""

_encode: Final = msgspec.json.Encoder().encode


@click.command(cls=TargetCommand)
@server_argument
@click.option(
    "--kind",
    "kinds",
    type=click.Choice(list(_KINDS)),
    multiple=True,
    help="Only these; several times for several. `design` is of design documents.",
)
@click.option(
    "--name",
    "pattern",
    metavar="PATTERN",
    help="Only buckets with such a name; * and ? stand for others.  [default: the URL's, or all]",
)
@click.option(
    "--consumer",
    metavar="NAME",
    help="Come back under this name, and be told what was missed.  [default: a new one]",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=number(HEALTH_TIMEOUT_S_MIN, HEALTH_TIMEOUT_S_MAX),
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="For how long the server keeps what is missed.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@patience_option
def events(
    target: Address,
    kinds: tuple[str, ...],
    pattern: str | None,
    consumer: str | None,
    timeout_s: int,
    as_json: bool,
    patience: int,
) -> None:
    r"""Follow which buckets change, and not what changes in them.

    A bucket that was updated often since the line before stands in one line. A line `everything`
    comes first, and again whenever something may have been missed: any bucket may have changed.

    With --consumer the command can be killed at any moment: run again within --timeout, it tells
    what was missed meanwhile.

    \b
    Examples:
      upr events upr://127.0.0.1:12000
      upr events upr://127.0.0.1:12000 --kind created --kind deleted --name 'orders-*'
      upr events upr://127.0.0.1:12000 --consumer indexer --json
    """
    job = _Events(
        attrs.evolve(target, bucket=""),
        sum((_KINDS[kind] for kind in kinds), EventKind(0)) or ALL_KINDS,
        pattern or target.bucket or "*",
        consumer or f"upr-events-{secrets.token_hex(8)}",
        timeout_s,
        patience,
        as_json,
    )
    ended_by = run_interruptible(job.follow)
    if ended_by is not None:
        raise click.exceptions.Exit(ended_by)


@attrs.frozen
class _Events:
    """One run of `upr events`."""

    target: Address
    kinds: EventKind
    pattern: str
    consumer: str
    timeout_s: int
    patience_s: int
    as_json: bool
    _output: Output = attrs.field(factory=Output, init=False)

    async def follow(self) -> None:
        """Prints what there is to tell, for ever."""
        async with (
            follow_events(
                self.target,
                consumer=self.consumer,
                kinds=self.kinds,
                pattern=self.pattern,
                timeout_s=self.timeout_s,
                identity=identity("events"),
                patience_s=self.patience_s,
            ) as feed,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(self._output.watch)
            nursery.start_soon(self._tell_of_connection, feed)
            async for event in feed:
                await self._output.write(json_line(event) if self.as_json else text_line(event))

    async def _tell_of_connection(self, feed: EventFeed) -> None:
        was_connected = False
        while True:
            await trio.sleep(_LOOK_S)
            if was_connected and not feed.connected:
                say(
                    f"the connection is lost ({feed.last_failure}); trying again for up to "
                    f"{self.patience_s:,} s"
                )
            elif feed.connected and not was_connected and feed.last_failure:
                say("connected again")
            was_connected = feed.connected


def text_line(event: BucketEvent | LookAtEverything) -> bytes:
    """The line that tells a person of `event`, with its newline."""
    if isinstance(event, LookAtEverything):
        return b"everything may have changed\n"
    words = [event.bucket]
    if event.fate is not BucketFate.NONE:
        words.append(event.fate.name.lower())
    if event.updates:
        words.append("updated")
    words += [
        "_design/*" if design == ANY_DESIGN else design.decode(errors="replace")
        for design in event.designs
    ]
    return (" ".join(word.translate(_UNPRINTED) for word in words) + "\n").encode()


_UNPRINTED: Final = dict.fromkeys((*range(32), 127), "?")
"""Control characters in a key do not reach a terminal."""


def json_line(event: BucketEvent | LookAtEverything) -> bytes:
    """The line of JSON that tells of `event`, with its newline."""
    if isinstance(event, LookAtEverything):
        return b'{"event":"everything"}\n'
    fields: dict[str, Any] = {
        "event": "bucket",
        "bucket": event.bucket,
        "incarnation": f"{event.incarnation:016x}",
        "created": event.fate is BucketFate.CREATED,
        "deleted": event.fate is BucketFate.DELETED,
        "updates": event.updates,
        "designs": [_text(design) for design in event.designs if design != ANY_DESIGN],
        "any_design": ANY_DESIGN in event.designs,
    }
    return _encode(fields) + b"\n"


def _text(key: bytes) -> str | dict[str, str]:
    try:
        return key.decode()
    except UnicodeDecodeError:
        return {"base64": b64encode(key).decode()}
