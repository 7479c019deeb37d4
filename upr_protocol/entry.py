"""Where a command begins, before what it needs is imported.

Importing takes some tenths of a second. Ctrl-C in that time, or a system that has no memory or
descriptors left, ends a command with an exit code and at most one sentence, like later on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final, NoReturn

EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130


def upr() -> NoReturn:
    """Runs the command `upr`."""
    run_command("upr", _load)


def _load() -> Callable[[], Any]:
    from upr_protocol.cli import main

    return main


def run_command(program: str, load: Callable[[], Callable[[], Any]]) -> NoReturn:
    """Imports a command and runs it; ends the process.

    Args:
        program: Its name, for the sentence.
        load: Imports it.
    """
    try:
        command = load()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except ModuleNotFoundError:
        raise
    except (ImportError, OSError, MemoryError) as error:
        # The loader of shared libraries gives ImportError where memory cannot be mapped.
        reason = str(error) or "out of memory"
        sys.stderr.write(f"{program}: cannot start: {reason}; look at `ulimit -a`\n")
        sys.exit(EXIT_FAILED)
    try:
        sys.exit(command())
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
