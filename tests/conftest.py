"""What all tests share."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says more about the machine and what else runs on it than about us.
settings.register_profile("upr", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("upr")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell has what it runs in the background ignore Ctrl-C, and so would what tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)

SLOW: Final = ("system", "spark")
"""Folders in which one file takes minutes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Has what is slow begin first: a file is run by one process, and at the end the other would
    have nothing to do."""
    here = Path(__file__).parent
    items.sort(key=lambda item: item.path.relative_to(here).parts[0] not in SLOW)
