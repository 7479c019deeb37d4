"""`python -m tests.simulation.bug_table`: in how many seeds of its profile each planted bug is
found."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial

from tests.simulation.__main__ import outcome_of, pool_of, say
from tests.simulation.bugs import BUGS

SEEDS = 100

MISS_MAX = 0.001
"""How likely a test of a bug may miss it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Looks for every bug; 1 if one is found too seldom for its test."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bugs", nargs="*", default=list(BUGS), help="all of them if none is named")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many to run for each bug")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    print(  # noqa: T201
        "| bug | profile | found in | seeds of the test | chance of a miss | promises |\n"
        "|---|---|---|---|---|---|",
        flush=True,
    )
    rare = 0
    for name in options.bugs:
        promises = promises_broken(name, options.seeds, options.processes)
        bug = BUGS[name]
        miss = (1 - len(promises) / options.seeds) ** bug.seeds
        if miss > MISS_MAX:
            rare += 1
            say(f"{name}: {bug.seeds} seeds miss it with a chance of {miss:.1%}")
        print(  # noqa: T201
            f"| `{name}` | `{bug.profile.name}` | {len(promises)} of {options.seeds} | {bug.seeds} "
            f"| {miss:.1g} | {', '.join(sorted(set(promises)))} |",
            flush=True,
        )
    return 1 if rare else 0


def promises_broken(bug: str, seeds: int, processes: int) -> list[str]:
    """The promise that each seed breaks that finds the bug."""
    run = partial(outcome_of, bug, BUGS[bug].profile.name)
    with pool_of(processes) as pool:
        return [
            outcome.promise
            for outcome in pool.imap_unordered(run, range(seeds))
            if outcome.violation
        ]


if __name__ == "__main__":
    sys.exit(main())
