"""Runs the command `upr` in this process, for tests that need no process of its own."""

from __future__ import annotations

from functools import partial

import trio
from click.testing import CliRunner

from tests.kit.process import Finished
from upr_protocol.cli import main


async def upr(*arguments: str, stdin: bytes = b"") -> Finished:
    """Runs `upr` in a thread, because it runs an event loop of its own. In a new process the
    imports would take longer than most commands. Commands that handle signals, like `tail`, cannot
    run in a thread."""
    invoke = partial(CliRunner().invoke, main, arguments, input=stdin, prog_name="upr")
    result = await trio.to_thread.run_sync(invoke)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Finished(result.exit_code, result.stdout, result.stderr)
