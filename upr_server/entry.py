"""Where the command `upr-server` begins, before what it needs is imported."""

from __future__ import annotations

from upr_protocol.start import TYPE_CHECKING, run_command

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn


def upr_server() -> NoReturn:
    """Runs the command `upr-server`."""
    run_command("upr-server", _load)


def _load() -> Callable[[], Any]:
    from upr_server.cli import main

    return main


if __name__ == "__main__":
    upr_server()
