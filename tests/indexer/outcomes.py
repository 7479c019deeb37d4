"""What an indexer tells its clients, over HTTP and as the command prints it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog
import trio
from click.testing import CliRunner, Result

from upr_protocol.cli import main
from upr_protocol.client import IndexClient
from upr_protocol.security import UNPROTECTED, Security


async def status_of(url: str, security: Security = UNPROTECTED) -> dict[str, Any]:
    """What the indexer tells a client."""

    def ask() -> dict[str, Any]:
        with IndexClient(url, security) as client:
            return client.status()

    return await trio.to_thread.run_sync(ask)


async def upr_index(*arguments: str) -> Result:
    """What `upr index` prints."""

    def invoke(arguments: Sequence[str]) -> Result:
        return CliRunner().invoke(main, ["index", *arguments])

    # What the indexer and its server log meanwhile would be printed to the same standard output.
    with structlog.testing.capture_logs():
        return await trio.to_thread.run_sync(invoke, arguments)
