"""Runs a function in a forked process."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_forked_process(function: Callable[[], object]) -> None:
    """Calls a function, which must not raise, in a forked process."""
    child = os.fork()
    if not child:  # the forked process must not return to pytest
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
