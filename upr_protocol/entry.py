"""Where the command `upr` begins, before what it needs is imported."""

from __future__ import annotations

from upr_protocol.start import TYPE_CHECKING, run_command

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn


def upr() -> NoReturn:
    """Runs the command `upr`."""
    run_command("upr", _load)


def _load() -> Callable[[], Any]:
    from upr_protocol.cli import main

    return main
