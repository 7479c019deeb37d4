"""What all tests share."""

from __future__ import annotations

import gc
import os
import signal
import zlib
from collections.abc import Awaitable, Callable, Iterator
from functools import cache, partial
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any, Final

import pytest
import trio
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from tests.kit import patience, refusals
from tests.kit.certificates import Certificates
from tests.kit.effort import effort
from tests.kit.longest_step import runs_again_if_long
from tests.kit.scheduler import seeded_scheduler
from tests.kit.steady_clock import SteadyClock
from upr_server.net.request_context import RequestContext

# What a comparison outside of test files compared is told, too.
for _package in ("engine", "events", "indexer", "spark", "storage", "kit.group", "kit.mirror"):
    pytest.register_assert_rewrite(f"tests.{_package}")

# How long an example takes says more about the machine and what else runs on it than about us.
settings.register_profile(
    "upr",
    deadline=None,
    max_examples=effort(30, 400),
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

HERE: Final = Path(__file__).parent

SLOW: Final = ("system", "spark", "simulation", "indexer")
"""Folders in which one file takes a minute. Their files begin in this order."""

SPARK: Final = "spark"
"""The group of the files that share a session of Spark."""


@cache
def _group(path: Path) -> str:
    """What is run by one process, one test after the other: a file, or all files that share a
    session of Spark, which takes long to start, and longer to become fast."""
    return SPARK if "spark: SparkSession" in path.read_text() else str(path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Has pytest-xdist give each process a group at a time. Its own `--dist loadgroup` knows no
    groups with pytest 9.2: it writes them where pytest does not look any more."""
    scheduling = LoadFileScheduling(config, log)
    scheduling._split_scope = lambda test: _group(config.rootpath / test.partition("::")[0])
    return scheduling


def _run_on_clock(
    item: pytest.Function, main: Callable[[], Awaitable[None]], **options: Any
) -> None:
    """Runs a test in the time of a mock clock that only a fixture of it, or a mark, asks for.
    pytest-trio looks for one among the test's own arguments: such a test slept for real."""
    clocks = {clock for clock in item.funcargs.values() if isinstance(clock, trio.abc.Clock)}
    (clock,) = clocks
    trio.run(main, **{**options, "clock": clock})


def _run_on_steady_clock(main: Callable[[], Awaitable[None]], **options: Any) -> None:
    """Runs a test that asks for no mock clock."""
    trio.run(main, **{**options, "clock": SteadyClock()})


def _is_async(item: pytest.Function) -> bool:
    hypothesis_test = getattr(item.obj, "hypothesis", None)
    return iscoroutinefunction(hypothesis_test.inner_test if hypothesis_test else item.obj)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives each test its clock. Puts what is slow first, or the other processes would have nothing
    to do at the end."""
    for item in items:
        if isinstance(item, pytest.Function) and CLOCKS & set(item.fixturenames):
            item.add_marker(pytest.mark.trio(run=partial(_run_on_clock, item)), append=False)
        elif isinstance(item, pytest.Function) and _is_async(item):
            item.add_marker(pytest.mark.trio(run=_run_on_steady_clock), append=False)
        # pytest-trio marks each test of its own, which counts more than the mark of a module.
        if runs_again_if_long.mark in item.iter_markers("trio"):
            item.add_marker(runs_again_if_long, append=False)

    def place(item: pytest.Item) -> int:
        if _group(item.path) == SPARK:
            return 0
        folder = item.path.relative_to(HERE).parts[0]
        return 1 + SLOW.index(folder) if folder in SLOW else 1 + len(SLOW)

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end. Python's collector is not to look at it
    again each time: that took a second, where a test has it collect."""
    gc.collect()
    gc.freeze()


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
