"""What must hold before a change counts as accepted."""

from __future__ import annotations

from typing import Any, Final

import click

from upr_protocol.ids import Durability

_LEVELS: Final = {level.name.lower().replace("_", "-"): level for level in Durability}


def _level(_ctx: click.Context, _param: click.Parameter, name: str) -> Durability:
    return _LEVELS[name]


def durability_option(command: Any) -> Any:
    """Declares the option `--durability`."""
    return click.option(
        "--durability",
        type=click.Choice(list(_LEVELS)),
        default="memory",
        show_default=True,
        callback=_level,
        help="What must hold before a change counts as accepted. A server refuses what it does not "
        "offer.",
    )(command)
