"""Where the command `upr-indexer` begins: it says so when what it needs is not installed."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command."""
    try:
        from upr_server.indexer.cli import main as command
    except ModuleNotFoundError as error:
        sys.exit(f"upr-indexer needs {error.name}: pip install 'upr[indexer]'")
    command()
