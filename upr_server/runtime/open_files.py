"""How many files this process may have open; connections are such."""

from __future__ import annotations

import resource
from contextlib import suppress


def raise_file_limit() -> None:
    """Raises the limit of open files as far as the system lets this process, and processes that it
    starts. Often it is 1,024, for the sake of programs that call `select`."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems allow less than they say: then it stays as it is.
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def file_limit() -> int:
    """How many files this process may have open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 62 if limit == resource.RLIM_INFINITY else limit
