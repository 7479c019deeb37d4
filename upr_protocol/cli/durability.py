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
    def with_copies(*args: Any, durability: Durability, copies: int, **others: Any) -> Any:
        wanted = copies if durability in _REPLICATED else 0
        return command(*args, durability=durability, copies=wanted, **others)

    for option in (
        click.option(
            "--copies",
            type=click.IntRange(1, 255),
            default=1,
            show_default=True,
            metavar="N",
            help="For the replicated levels: how many replicas must have the change.",
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
