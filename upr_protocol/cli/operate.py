"""What the operator's commands share: how they run, and how they name partitions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import click

from upr_protocol.cli.connection import identity
from upr_protocol.cli.exits import say
from upr_protocol.cli.interrupt import run_interruptible
from upr_protocol.client import Address
from upr_protocol.client.operator import Operator
from upr_protocol.limits import PARTITIONS_MAX


def operate(target: Address, work: Callable[[Operator], Awaitable[object]]) -> None:
    """Runs `work`, which says on standard error what it has done; Ctrl-C ends it between any two
    steps."""
    name = identity(click.get_current_context().command_path.replace(" ", "-").removeprefix("upr-"))
    operator = Operator(target, name, tell=lambda sentence: click.echo(sentence, err=True))

    async def run() -> None:
        await work(operator)

    ended_by = run_interruptible(run)
    if ended_by is not None:
        say("interrupted: see how things stand with `upr partitions`, or repeat the command")
        raise click.exceptions.Exit(ended_by)


def _numbers(text: str | tuple[int, ...]) -> tuple[int, ...]:
    """`3`, `0-15`, or several of them with commas."""
    if isinstance(text, tuple):  # a default
        return text
    found: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        try:
            first, last = int(low), int(high if dash else low)
        except ValueError:
            raise click.BadParameter(f"{part!r} is no partition: as in 5, 0-15 or 1,3") from None
        if not 0 <= first <= last < PARTITIONS_MAX:
            raise click.BadParameter(f"{part!r} is not from 0 to {PARTITIONS_MAX - 1}, rising")
        found += range(first, last + 1)
    return tuple(found)


PARTITIONS: Final = _numbers
"""The type of a parameter that names partitions."""


def partitions_option(command: Any) -> Any:
    """Declares the option `--partitions`."""
    return click.option(
        "--partitions",
        type=PARTITIONS,
        default=(),
        metavar="NUMBERS",
        help="Only these, as in 0-15 or 1,3. [default: all]",
    )(command)


def chosen_partitions_arguments(command: Any) -> Any:
    """Declares the arguments PARTITION… and the option `--all-of`."""
    argument = click.argument("partitions", metavar="[PARTITION]...", nargs=-1, type=PARTITIONS)
    option = click.option(
        "--all-of", metavar="NODE", default="", help="All partitions that NODE is active for."
    )
    return argument(option(command))


def chosen(partitions: tuple[tuple[int, ...], ...], all_of: str) -> list[int]:
    """The partitions named, of which there must be some, or all of a node.

    Raises:
        click.UsageError: Neither, or both.
    """
    found = [number for numbers in partitions for number in numbers]
    if bool(found) is bool(all_of):
        raise click.UsageError(
            "name the partitions, as in 5 or 0-15; or all that a node is active for, with --all-of"
        )
    return found
