"""The start of the store's processes."""

from __future__ import annotations

import sys

from tests.kit.process import run


async def test_a_worker_does_not_import_what_only_the_server_needs() -> None:
    """A starting server waits for two workers, so their imports must be few."""
    line = "import sys, upr_server.storage.worker; print(*{'trio', 'structlog'} & set(sys.modules))"
    result = await run((sys.executable, "-c", line))
    assert (result.code, result.out, result.err) == (0, "\n", "")
