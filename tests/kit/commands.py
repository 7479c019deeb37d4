"""The command `upr` in this process, for tests in which a process of its own would show nothing."""

from __future__ import annotations

from functools import partial

import trio
from click.testing import CliRunner

from tests.kit.process import Finished
from upr_protocol.cli import main


async def upr(*arguments: str, stdin: bytes = b"") -> Finished:
    """Runs `upr` in a thread, as it runs a loop of its own. To import what it needs in a process
    takes longer than most commands do. Commands that listen for signals, as `tail` does, cannot run
    in a thread."""
    invoke = partial(CliRunner().invoke, main, arguments, input=stdin, prog_name="upr")
    result = await trio.to_thread.run_sync(invoke)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Finished(result.exit_code, result.stdout, result.stderr)
