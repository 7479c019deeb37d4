"""The store's processes, as they start."""

from __future__ import annotations

import sys

from tests.kit.process import run


async def test_it_starts_without_what_it_has_no_use_for() -> None:
    """A server waits for two of them when it starts."""
    line = "import sys, upr_server.storage.worker; print(*{'trio', 'structlog'} & set(sys.modules))"
    done = await run((sys.executable, "-c", line))
    assert (done.code, done.out, done.err) == (0, "\n", "")
