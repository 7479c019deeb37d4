"""`upr events`: follows which buckets change."""

from __future__ import annotations

import secrets
from base64 import b64encode
from typing import Any, Final

import attrs
import click
import msgspec
import trio

from upr_protocol.bucket_event import ALL_KINDS, ANY_DESIGN, BucketEvent, BucketFate, EventKind
from upr_protocol.cli.connection import command_identity, report_connection, run_until_signal
from upr_protocol.cli.escaping import printable, printable_json
from upr_protocol.cli.output import Output
from upr_protocol.cli.parameters import (
    TargetCommand,
    json_option,
    number_type,
    retry_timeout_option,
    server_argument,
    utf8_text,
)
from upr_protocol.client import Address, EventFeed, LookAtEverything, follow_events
from upr_protocol.limits import HEALTH_TIMEOUT_S_MAX, HEALTH_TIMEOUT_S_MIN

_KINDS: Final = {kind.name.lower(): kind for kind in EventKind if kind.name}

_encode: Final = msgspec.json.Encoder().encode


@click.command(cls=TargetCommand)
@server_argument
@click.option(
    "--kind",
    "kinds",
    type=click.Choice(list(_KINDS)),
    multiple=True,
    help="Only events of this kind. Repeat it for several. `design` stands for design documents.",
)
@click.option(
    "--name",
    "pattern",
    type=utf8_text,
    metavar="PATTERN",
    help="Only buckets with a matching name; * and ? are wildcards.  [default: the URL's, or all]",
)
@click.option(
    "--consumer",
    type=utf8_text,
    metavar="NAME",
    help="The consumer's name; one that returns gets the events it missed.  [default: a new one]",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=number_type(HEALTH_TIMEOUT_S_MIN, HEALTH_TIMEOUT_S_MAX),
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="How long the server keeps events for a consumer that is away.",
)
@json_option
@retry_timeout_option
def events(
    target: Address,
    kinds: tuple[str, ...],
    pattern: str | None,
    consumer: str | None,
    timeout_s: int,
    as_json: bool,
    retry_timeout: int,
) -> None:
    r"""Follow which buckets change, without the changes themselves.

    Several updates of a bucket since the previous line become one line. A line `everything` means
    that any bucket may have changed: it comes first, and whenever events may have been missed.

    With --consumer the command can be killed at any moment. Run again within --timeout, it prints
    what happened in the meantime.

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
        retry_timeout,
        as_json,
    )
    run_until_signal(job.follow)


@attrs.frozen
class _Events:
    """One run of `upr events`."""

    target: Address
    kinds: EventKind
    pattern: str
    consumer: str
    timeout_s: int
    retry_timeout_s: int
    as_json: bool
    _output: Output = attrs.field(factory=Output, init=False)

    async def follow(self) -> None:
        """Prints events until cancelled."""
        async with (
            follow_events(
                self.target,
                consumer=self.consumer,
                kinds=self.kinds,
                pattern=self.pattern,
                timeout_s=self.timeout_s,
                identity=command_identity("events"),
                retry_timeout_s=self.retry_timeout_s,
            ) as feed,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(self._output.wait_until_closed)
            nursery.start_soon(self._report_connection, feed)
            async for event in feed:
                await self._output.write(json_line(event) if self.as_json else text_line(event))

    async def _report_connection(self, feed: EventFeed) -> None:
        await report_connection(
            lambda: (feed.is_connected, feed.last_failure),
            self.retry_timeout_s,
            was_connected=False,
        )


def text_line(event: BucketEvent | LookAtEverything) -> bytes:
    """The line for `event` for people, with its newline."""
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
    return f"{printable(' '.join(words))}\n".encode()


def json_line(event: BucketEvent | LookAtEverything) -> bytes:
    """The JSON line for `event`, with its newline."""
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
    return printable_json(_encode(fields)) + b"\n"


def _text(key: bytes) -> str | dict[str, str]:
    try:
        return key.decode()
    except UnicodeDecodeError:
        return {"base64": b64encode(key).decode()}
