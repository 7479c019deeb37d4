"""A process that is forked from that of the tests."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_forked_process(function: Callable[[], object]) -> None:
    """Calls a function that must raise nothing."""
    child = os.fork()
    if not child:  # it must not come back to pytest
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
