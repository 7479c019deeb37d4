"""What several commands take: the URL that comes first, options, and the types of their values."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import wraps
from typing import Any, Final

import click

from upr_protocol.cli.security_options import SecurityCommand, security_of
from upr_protocol.client import Address, AddressError
from upr_protocol.ids import DURABILITIES, REPLICATED_DURABILITIES, Durability
from upr_protocol.partition_numbers import parse_partition_numbers
from upr_protocol.timestamps import parse_timestamp, to_nanoseconds

# The URL.

SCHEMES: Final = ("upr://", "uprs://")
URL_VARIABLE: Final = "UPR_URL"

URL_ADVICE: Final = "a server's URL begins with upr:// or uprs://"
"""For what may have been meant as one."""


class TargetCommand(SecurityCommand):
    """A command whose first argument, `target`, may be left out where `UPR_URL` is set; with the
    options of encrypted connections and of the log-in."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Inserts the URL from the environment when the command line has none."""
        # A parser that knows only the options returns every argument, in order.
        options = [param for param in self.params if isinstance(param, click.Option)]
        parser = click.Command(None, params=list(options)).make_parser(ctx)
        _, positional, _ = parser.parse_args(list(args))
        asks_for_help = not set(args).isdisjoint(ctx.help_option_names)
        if not asks_for_help and not (positional and positional[0].startswith(SCHEMES)):
            url = os.environ.get(URL_VARIABLE)
            if not url:
                ctx.fail(
                    "the first argument must be the server's URL, as in "
                    f"upr://127.0.0.1:12000/flights; or set {URL_VARIABLE} to it"
                )
            self._check_first(ctx, positional)
            args = [url, *args]
        return super().parse_args(ctx, args)

    def _check_first(self, ctx: click.Context, positional: list[str]) -> None:
        """Refuses a URL of another scheme that is one argument too many beside `UPR_URL`. Otherwise
        it may be a key."""
        counts = [param.nargs for param in self.params if isinstance(param, click.Argument)]
        is_one_too_many = min(counts) > 0 and len(positional) >= sum(counts)
        if is_one_too_many and "://" in positional[0]:
            # It is not shown: it may have a password.
            ctx.fail(f"the first argument is not the URL of a server: {URL_ADVICE}")


def _server(ctx: click.Context, _param: click.Parameter, url: str) -> Address:
    try:
        return Address.parse(url, security_of(ctx))
    except AddressError as error:
        raise click.BadParameter(str(error)) from error


def _bucket(ctx: click.Context, param: click.Parameter, url: str) -> Address:
    try:
        return _server(ctx, param, url).with_bucket()
    except AddressError as error:
        raise click.BadParameter(str(error)) from error


server_argument: Final = click.argument("target", metavar="URL", callback=_server)
"""Declares the argument `target` of a `TargetCommand`; its URL may name a bucket."""

bucket_argument: Final = click.argument("target", metavar="URL", callback=_bucket)
"""Declares the argument `target` of a `TargetCommand`; its URL must name a bucket."""


# Numbers and sizes.


def number_type(low: int, high: int) -> Callable[[str], int]:
    """The type of a whole number from `low` to `high`, both included."""

    # click.IntRange would add its range to the help text, which names it where it matters.
    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise click.BadParameter(f"{text!r} is not a whole number") from None
        if not low <= value <= high:
            raise click.BadParameter(f"{value} is not from {low} to {high}")
        return value

    return convert


U32: Final = number_type(0, 2**32 - 1)
U64: Final = number_type(0, 2**64 - 1)

_SIZES_END: Final = 2**63
"""Sizes are below this: a server stores them in 64 bits."""

_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(?:i?B)?", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """The bytes that `text` means: `4096`, `512M`, `1.5GiB`; the units are powers of 1,024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(
            f"{text!r} is not a size; write a number of bytes, or a unit as in 512M or 2G"
        )
    size = float(match[1]) * _UNITS[match[2].upper()]
    if size >= _SIZES_END:
        raise click.BadParameter(f"{text!r} is too large; a size is below {_SIZES_END:,} bytes")
    return int(size)


# Texts.


def utf8_text(text: str) -> str:
    """The type of a text that the server gets as it is."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise click.BadParameter(f"{text!r} is not UTF-8; write it in UTF-8") from None
    return text


# Times.

_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_AGE: Final = re.compile(r"(\d{1,9})([smhd])", re.ASCII)


def parse_past_time(text: str) -> datetime:
    """The moment that `text` means: `2026-01-31T12:00:00Z`, or so long ago: `30s`, `10m`, `2h`,
    `7d`."""
    age = _AGE.fullmatch(text.strip())
    try:
        if age is None:
            return parse_timestamp(text.strip())
        time = datetime.now(UTC) - timedelta(seconds=int(age[1]) * _SECONDS[age[2]])
        to_nanoseconds(time)
        return time
    except (OverflowError, ValueError):
        raise click.BadParameter(
            f"{text!r} is not a time from 1970 to 2554; write it as in 2026-01-31T12:00:00Z, or so "
            "long ago as in 30s, 10m, 2h or 7d"
        ) from None


# Partitions.


def partition_numbers(text: str | tuple[int, ...]) -> tuple[int, ...]:
    """The type of partitions in a text like `0-3,7`."""
    if isinstance(text, tuple):  # a default
        return text
    try:
        return parse_partition_numbers(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


# Options that several commands have.

json_option: Final = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object per line."
)

retry_timeout_option: Final = click.option(
    "--retry-timeout",
    type=number_type(0, 10**9),
    default=300,
    show_default=True,
    metavar="SECONDS",
    help="How long to keep trying to reconnect after the connection is lost.",
)


def _level(_ctx: click.Context, _param: click.Parameter, name: str) -> Durability:
    return DURABILITIES[name]


def durability_options(command: Any) -> Any:
    """Declares the options `--durability` and `--copies`. `copies` is 0 for the levels that do not
    replicate."""

    @wraps(command)
    def with_copies(*args: Any, durability: Durability, copies: int | None, **options: Any) -> Any:
        if durability.is_replicated:
            copies = copies or 1
        elif copies is not None:
            raise click.UsageError(f"--copies goes with --durability {REPLICATED_DURABILITIES}")
        return command(*args, durability=durability, copies=copies or 0, **options)

    for option in (
        click.option(
            "--copies",
            type=click.IntRange(1, 255),
            metavar="N",
            help="How many replicas must have the change; only for the replicated levels. "
            "[default: 1]",
        ),
        click.option(
            "--durability",
            type=click.Choice(list(DURABILITIES)),
            default="memory",
            show_default=True,
            callback=_level,
            help="What must hold before the server accepts a change. A server refuses a level that "
            "it does not offer.",
        ),
    ):
        with_copies = option(with_copies)
    return with_copies
