"""Mutants are tried in a copy of the tree, each in a child process."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs
import click
import hypothesis
import numpy as np
import pytest
import trio.testing
from hypothesis import Phase

from tests.mutation.covered_lines import CoveredLines, TestCost
from tests.mutation.mutants import Mutant
from tests.mutation.selection import Selection, limit_time, tests_of

PRELOADED: Final = (hypothesis, np, pytest, trio.testing)
"""What takes long to import, and is the same for all mutants. A child need not import it again."""

MEMORY_LIMIT_BYTES: Final = 3 << 30
"""How much memory the tests may take for one mutant: some append for ever."""

ALL_TESTS_S: Final = 900.0
"""How long the slow and the wider tests may take of the processor for one mutant."""

_NANOSECONDS: Final = 1_000_000_000

OPTIONS: Final = ["-x", "-q", "-n0", "--assert=plain", "--timeout=0", "-p", "no:cacheprovider"]


@attrs.frozen
class Trials:
    """A copy of the tree, in which lines are broken one at a time."""

    tree: Path

    def costs(
        self, tests: Sequence[str], modules: Collection[str], slow: Sequence[str] = ()
    ) -> dict[str, TestCost]:
        """What each test takes and runs with nothing broken; `slow` ones are left out.

        Raises:
            click.ClickException: A test fails.
        """
        result = self.tree / "costs.pickle"

        def measure() -> int:
            plugin = CoveredLines(self.tree, modules)
            status = self._run([*tests, *(f"--deselect={test}" for test in slow)], plugin)
            # This process has imported the class again, so its objects would not be understood.
            values = {
                name: attrs.astuple(cost, recurse=False) for name, cost in plugin.costs.items()
            }
            result.write_bytes(pickle.dumps(values))
            return status

        if not _succeeds(measure):
            raise click.ClickException(f"{' '.join(tests)} fail before anything is broken")
        return {name: TestCost(*cost) for name, cost in pickle.loads(result.read_bytes()).items()}

    def is_found(self, module: str, mutant: Mutant, costs: Mapping[str, TestCost]) -> bool:
        """Whether a test that runs a line fails, or takes far too long, while the line is broken.

        Args:
            module: The path of the module in the tree.
            mutant: The broken module.
            costs: What each test takes and runs. Others are not tried.
        """
        test_names = tests_of((module, mutant.line), costs)

        def run() -> int:
            limit_time(processor_s=30, elapsed_s=120)
            files = {test.split("::")[0] for test in test_names}
            return self._run(sorted(files), Selection(test_names, costs))

        return bool(test_names) and self._is_noticed(module, mutant, run)

    def is_found_by_all(self, module: str, mutant: Mutant, tests: Sequence[str]) -> bool:
        """Whether one of all these tests fails while a line of the module is broken."""

        def run() -> int:
            limit_time(processor_s=ALL_TESTS_S, elapsed_s=6 * ALL_TESTS_S)
            return self._run(tests)

        return self._is_noticed(module, mutant, run)

    def _is_noticed(self, module: str, mutant: Mutant, run: Callable[[], int]) -> bool:
        path = self.tree / module
        original, times = path.read_text(), path.stat()

        def run_limited() -> int:
            # What is compiled from a broken module must not be taken for the module's.
            sys.dont_write_bytecode = True
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
            return run()

        path.write_text(mutant.source)
        # Python takes a module for unchanged if its length and the second of its time are.
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 10 * _NANOSECONDS))
        try:
            return not _succeeds(run_limited)
        finally:
            path.write_text(original)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def _run(self, tests: Sequence[str], *plugins: object) -> int:
        """Runs tests of the copy in this process, a child that is there for them alone."""
        os.chdir(self.tree)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        for name in list(sys.modules):
            if name.split(".")[0] in ("tests", "upr_protocol"):
                del sys.modules[name]
        own = Path(__file__).resolve().parents[2]
        sys.path[:] = [str(self.tree), *(entry for entry in sys.path if Path(entry or ".") != own)]
        # The same examples for each mutant; the first that fails is enough.
        hypothesis.settings.register_profile(
            "mutation",
            deadline=None,
            derandomize=True,
            database=None,
            phases=(Phase.explicit, Phase.generate),
            report_multiple_bugs=False,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        return int(pytest.main([*OPTIONS, "--hypothesis-profile=mutation", *tests], plugins))


def _succeeds(run: Callable[[], int]) -> bool:
    """Whether `run` returns 0 in a child process. What the child started is ended with it."""
    process_id = os.fork()
    if not process_id:
        status = 1
        try:
            os.setpgid(0, 0)
            status = run()
        finally:
            os._exit(status)
    _, wait_status = os.waitpid(process_id, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process_id, signal.SIGKILL)
    return os.waitstatus_to_exitcode(wait_status) == 0
