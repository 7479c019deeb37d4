"""What must hold before a change counts as accepted."""

from __future__ import annotations

from functools import wraps
from typing import Any, Final

import click

from upr_protocol.ids import Durability

_LEVELS: Final = {level.name.lower().replace("_", "-"): level for level in Durability}
_REPLICATED: Final = (Durability.REPLICATED, Durability.REPLICATED_AND_PERSISTED)


def _level(_ctx: click.Context, _param: click.Parameter, name: str) -> Durability:
    return _LEVELS[name]


def durability_option(command: Any) -> Any:
    """Declares the options `--durability` and `--copies`; `copies` is 0 for the levels that know
    none."""

    @wraps(command)
    def with_copies(*args: Any, durability: Durability, copies: int | None, **others: Any) -> Any:
        if durability in _REPLICATED:
            wanted = copies or 1
        elif copies is None:
            wanted = 0
        else:
            levels = " or ".join(n for n, level in _LEVELS.items() if level in _REPLICATED)
            raise click.UsageError(f"--copies goes with --durability {levels}")
        return command(*args, durability=durability, copies=wanted, **others)

    for option in (
        click.option(
            "--copies",
            type=click.IntRange(1, 255),
            metavar="N",
            help="For the replicated levels: how many replicas must have the change. [default: 1]",
        ),
        click.option(
            "--durability",
            type=click.Choice(list(_LEVELS)),
            default="memory",
            show_default=True,
            callback=_level,
            help="What must hold before a change counts as accepted. A server refuses what it does "
            "not offer.",
        ),
    ):
        with_copies = option(with_copies)
    return with_copies
