"""Where the command `upr-indexer` begins: it says so when what it needs is not installed."""

from __future__ import annotations

import sys

from upr_protocol.start import TYPE_CHECKING, run_command

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn


def main() -> NoReturn:
    """Runs the command."""
    run_command("upr-indexer", _load)


def _load() -> Callable[[], Any]:
    try:
        from upr_server.indexer.cli import main as command
    except ModuleNotFoundError as error:
        sys.exit(f"upr-indexer needs {error.name}: pip install 'upr-server[indexer]'")
    return command
