"""`python -m tests.simulation.bug_table`: how many seeds it takes to find each bug put in."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial

from tests.simulation.__main__ import outcome_of, pool_of, say
from tests.simulation.bugs import BUGS

SEEDS_MAX = 500


def main(arguments: Sequence[str] | None = None) -> int:
    """Looks for every bug; 1 when one was not found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bugs", nargs="*", default=list(BUGS), help="all of them if none is named")
    parser.add_argument("--seeds", type=int, default=SEEDS_MAX, help="to look for each in")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args(arguments)
    missed = 0
    print("| bug | seeds needed | seed | promise |\n|---|---|---|---|", flush=True)  # noqa: T201
    for bug in given.bugs:
        found = first_found(bug, given.seeds, given.processes)
        if found is None:
            missed += 1
            say(f"{bug} is not found in {given.seeds} seeds")
        else:
            seed, promise = found
            print(f"| `{bug}` | {seed + 1} | {seed} | {promise} |", flush=True)  # noqa: T201
    return 1 if missed else 0


def first_found(bug: str, seeds: int, processes: int) -> tuple[int, str] | None:
    """The lowest seed that finds a bug, and no violation without it; and the broken promise."""
    with pool_of(processes) as pool:
        for outcome in pool.imap(partial(outcome_of, bug), range(seeds)):
            if outcome.violation and not outcome_of("", outcome.seed).violation:
                return outcome.seed, outcome.promise
    return None


if __name__ == "__main__":
    sys.exit(main())
