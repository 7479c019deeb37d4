"""A mutation run: `python -m tests.mutation [--sample N] [--seed N] [MODULE ...]`.

Each mutant is tried in a copy of the tree, with the tests that run the broken line, until one of
them fails. If none fails, the mutant survives: it is printed, and a person judges it. Other tools
try every change of every line. This one breaks each line once, because the question is which lines
no test holds. It forks for each mutant, so pytest is imported once.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Final

import attrs
import click

from tests.mutation.mutants import Mutant, mutants_of
from tests.mutation.trials import Trials

ROOT: Final = Path(__file__).resolve().parents[2]

TESTS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("upr_protocol/failover.py", ("tests/protocol/test_failover.py",)),
    ("upr_protocol/scram.py", ("tests/protocol/test_scram.py",)),
    ("upr_server/net/log_in.py", ("tests/server/test_log_in.py",)),
    ("upr_protocol/session", ("tests/protocol/session",)),
    ("upr_server/engine", ("tests/engine",)),
    ("upr_server/events", ("tests/events",)),
    ("upr_server/indexer", ("tests/indexer",)),
    (
        "upr_server/storage/online/flusher.py",
        (
            "tests/server/test_flusher.py",
            "tests/server/test_durability.py",
            "tests/server/test_bucket_disk.py",
        ),
    ),
)
"""Modules, and the tests that concern them."""


@attrs.frozen
class Candidate:
    """A mutant, its module, and the tests that concern it."""

    module: str
    mutant: Mutant
    tests: tuple[str, ...]

    def __str__(self) -> str:
        mutant = self.mutant
        return f"{self.module}:{mutant.line}: {_short(mutant.before)}  ->  {_short(mutant.after)}"


def _short(code: str) -> str:
    return " ".join(code.split())[:80]


def candidates(modules: Sequence[str], seed: int) -> list[Candidate]:
    """One for each line that can be broken, of the modules under these paths; of all if none."""
    return [
        Candidate(name, mutant, tests)
        for path, tests in TESTS
        for name in _modules_under(path)
        if not modules or any(name.startswith(module) for module in modules)
        for mutant in mutants_of((ROOT / name).read_text(), Random(f"{seed} {name}"))
    ]


def _modules_under(path: str) -> list[str]:
    paths = [ROOT / path] if path.endswith(".py") else sorted((ROOT / path).rglob("*.py"))
    return [str(module.relative_to(ROOT)) for module in paths]


@click.command()
@click.argument("modules", nargs=-1)
@click.option("--sample", type=int, default=0, help="Try so many lines, drawn at random.")
@click.option("--seed", type=int, default=0, help="Chooses the lines and how each is broken.")
def main(modules: Sequence[str], sample: int, seed: int) -> None:
    """Breaks one line at a time, and lists those that no test fails for."""
    chosen = candidates(modules, seed)
    if sample:
        drawn = Random(seed).sample(chosen, min(sample, len(chosen)))
        chosen = sorted(drawn, key=chosen.index)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trials = Trials(Path(folder).resolve())
        subprocess.run(
            ["git", "checkout-index", "-a", f"--prefix={trials.tree}/"], cwd=ROOT, check=True
        )
        for library in (ROOT / "upr_kernel").glob("_native*.so"):
            shutil.copy(library, trials.tree / "upr_kernel")
        costs = {
            tests: trials.costs(tests, {c.module for c in chosen if c.tests == tests})
            for tests in dict.fromkeys(candidate.tests for candidate in chosen)
        }
        survivors: Counter[str] = Counter()
        for index, candidate in enumerate(chosen, 1):
            module, mutant, tests = candidate.module, candidate.mutant, candidate.tests
            if not trials.is_found(module, mutant, tests, costs[tests]):
                survivors[module] += 1
                click.echo(str(candidate))
            if index % 20 == 0 or index == len(chosen):
                click.echo(
                    f"{index} of {len(chosen)} lines broken, {survivors.total()} survived",
                    err=True,
                )
        for module, lines in Counter(candidate.module for candidate in chosen).items():
            click.echo(f"{survivors[module]:4} of {lines:4} survived: {module}")


if __name__ == "__main__":
    main()
