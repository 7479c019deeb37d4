"""What all tests share."""

from __future__ import annotations

import gc
import os
import signal
import zlib
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import trio
from hypothesis import HealthCheck, settings

from tests.kit import patience, refusals
from tests.kit.certificates import Certificates
from tests.kit.effort import effort
from tests.kit.longest_step import runs_again_if_long
from tests.kit.scheduler import seeded_scheduler
from upr_server.net.request_context import RequestContext

# What a comparison outside of test files compared is told, too.
for _package in ("engine", "events", "indexer", "spark", "storage", "kit.group", "kit.mirror"):
    pytest.register_assert_rewrite(f"tests.{_package}")

# How long an example takes says more about the machine and what else runs on it than about us.
settings.register_profile(
    "upr",
    deadline=None,
    max_examples=effort(40, 400),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("upr")

# Servers and commands are started a thousand times: they are not to compile what they import each
# time. What is imported here is compiled as pytest has it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell has what it runs in the background ignore Ctrl-C, and so would what tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)

setattr(trio.to_thread, "run_sync", patience.run_sync)  # noqa: B010  for the type checker
setattr(RequestContext, "refuse", refusals.refuse)  # noqa: B010

CLOCKS: Final = {"autojump_clock", "mock_clock"}
"""Fixtures that are a test's clock."""

SLOW: Final = ("system", "spark")
"""Folders in which one file takes minutes."""


def _run_on_clock(
    item: pytest.Function, main: Callable[[], Awaitable[None]], **options: Any
) -> None:
    """Runs a test in the time of a mock clock that only a fixture of it, or a mark, asks for.
    pytest-trio looks for one among the test's own arguments: such a test slept for real."""
    clocks = {clock for clock in item.funcargs.values() if isinstance(clock, trio.abc.Clock)}
    (clock,) = clocks
    trio.run(main, **{**options, "clock": clock})


@pytest.hookimpl(tryfirst=True)  # the processes of pytest-xdist look at the groups in theirs
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Says what is run by one process, one test after the other: a file, or all that shares a
    session of Spark, which takes half a minute to start. What is slow begins first, or the other
    processes would have nothing to do at the end."""
    here = Path(__file__).parent
    for item in items:
        path = item.path.relative_to(here)
        shares_spark = "spark" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("spark" if shares_spark else str(path)))
        if isinstance(item, pytest.Function) and CLOCKS & set(item.fixturenames):
            item.add_marker(pytest.mark.trio(run=partial(_run_on_clock, item)), append=False)
        # pytest-trio marks each test of its own, which counts more than the mark of a module.
        if runs_again_if_long.mark in item.iter_markers("trio"):
            item.add_marker(runs_again_if_long, append=False)

    def place(item: pytest.Item) -> int:
        if "spark" in getattr(item, "fixturenames", ()):
            return 0
        return 1 if item.path.relative_to(here).parts[0] in SLOW else 2

    items.sort(key=place)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates of several kinds."""
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(autouse=True)
def _scheduler(request: pytest.FixtureRequest) -> Iterator[None]:
    """Has Trio schedule a test's tasks in the same order in each run, so that no test fails by
    chance. `UPR_SCHEDULER_SEED` draws other orders."""
    seed = int(os.environ.get("UPR_SCHEDULER_SEED", "0"))
    with seeded_scheduler(zlib.crc32(request.node.nodeid.encode()) + seed):
        yield


@pytest.fixture(autouse=True)
def _collector() -> Iterator[None]:
    """Has Python's collector work after a test as before it: a daemon that a test runs in this
    process excludes objects from collection, and others rely on what it collects."""
    thresholds, callbacks = gc.get_threshold(), list(gc.callbacks)
    yield
    if (thresholds, callbacks) != (gc.get_threshold(), gc.callbacks):
        gc.set_threshold(*thresholds)
        gc.callbacks[:] = callbacks
        gc.unfreeze()
