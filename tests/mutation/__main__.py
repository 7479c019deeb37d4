"""A mutation run: `python -m tests.mutation [--sample N] [--seed N] [MODULE ...]`.

Each mutant is tried in a copy of the tree, with the tests that concern its module, until one of
them fails. If none fails, the mutant survives: it is printed, and a person judges it. Other tools
try every change of every line. This one breaks each line once, because the question is which lines
no test holds. It forks for each mutant, so pytest is imported once.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Final

import attrs
import click
import hypothesis
import numpy as np
import pytest
import trio.testing

from tests.mutation.mutants import Mutant, mutants_of

PRELOADED: Final = (hypothesis, np, pytest, trio.testing)
"""What takes long to import, and is the same for all mutants."""

ROOT: Final = Path(__file__).resolve().parents[2]

TESTS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("upr_protocol/failover.py", ("tests/protocol/test_failover.py",)),
    ("upr_protocol/session", ("tests/protocol/session",)),
    ("upr_server/engine", ("tests/engine",)),
    ("upr_server/events", ("tests/events",)),
    ("upr_server/indexer", ("tests/indexer",)),
    (
        "upr_server/storage/online/flusher.py",
        ("tests/server/test_durability.py", "tests/server/test_bucket_disk.py"),
    ),
)
"""Modules, and the tests that concern them."""

TIME_LIMIT_S: Final = 120
"""How long the tests may take for one mutant; one that hangs them is found."""


@attrs.frozen
class Candidate:
    """A mutant, its module, and the tests that it is tried with."""

    module: str
    mutant: Mutant
    tests: Sequence[str]

    def __str__(self) -> str:
        mutant = self.mutant
        return f"{self.module}:{mutant.line}: {_short(mutant.before)}  ->  {_short(mutant.after)}"


def _short(code: str) -> str:
    return " ".join(code.split())[:80]


def candidates(modules: Sequence[str], random: Random) -> list[Candidate]:
    """One for each line that can be broken, of the modules under these paths; of all if none."""
    return [
        Candidate(name, mutant, tests)
        for path, tests in TESTS
        for name in _modules_under(path)
        if not modules or any(name.startswith(module) for module in modules)
        for mutant in mutants_of((ROOT / name).read_text(), random)
    ]


def _modules_under(path: str) -> list[str]:
    paths = [ROOT / path] if path.endswith(".py") else sorted((ROOT / path).rglob("*.py"))
    return [str(module.relative_to(ROOT)) for module in paths]


def is_killed(tree: Path, tests: Sequence[str]) -> bool:
    """Whether a test fails in `tree`. It runs in a child process, which has pytest imported."""
    process_id = os.fork()
    if not process_id:
        os.setpgid(0, 0)
        os._exit(_run_tests(tree, tests))
    deadline = time.monotonic() + TIME_LIMIT_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process_id, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) != 0
        signal.sigtimedwait([signal.SIGCHLD], 0.5)
    os.killpg(process_id, signal.SIGKILL)
    os.waitpid(process_id, 0)
    return True


def _run_tests(tree: Path, tests: Sequence[str]) -> int:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    os.chdir(tree)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "upr_protocol")]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(entry for entry in sys.path if Path(entry or ".") != ROOT)]
    sys.dont_write_bytecode = True
    return int(pytest.main(["-x", "-q", "-n0", "--assert=plain", "-p", "no:cacheprovider", *tests]))


@click.command()
@click.argument("modules", nargs=-1)
@click.option("--sample", type=int, default=0, help="Try so many lines, drawn at random.")
@click.option("--seed", type=int, default=0, help="Chooses the lines and how each is broken.")
def main(modules: Sequence[str], sample: int, seed: int) -> None:
    """Breaks one line at a time, and lists those that no test fails for."""
    random = Random(seed)
    chosen = candidates(modules, random)
    if sample:
        chosen = sorted(random.sample(chosen, min(sample, len(chosen))), key=chosen.index)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        subprocess.run(["git", "checkout-index", "-a", f"--prefix={tree}/"], cwd=ROOT, check=True)
        for library in (ROOT / "upr_kernel").glob("_native*.so"):
            shutil.copy(library, tree / "upr_kernel")
        for tests in {candidate.tests for candidate in chosen}:
            if is_killed(tree, tests):
                raise click.ClickException(f"{' '.join(tests)} fail before anything is broken")
        survivors = 0
        for number, candidate in enumerate(chosen, 1):
            path = tree / candidate.module
            original = path.read_text()
            path.write_text(candidate.mutant.source)
            try:
                if not is_killed(tree, candidate.tests):
                    survivors += 1
                    click.echo(str(candidate))
            finally:
                path.write_text(original)
            if number % 20 == 0 or number == len(chosen):
                click.echo(
                    f"{number} of {len(chosen)} lines broken, {survivors} survived", err=True
                )


if __name__ == "__main__":
    main()
