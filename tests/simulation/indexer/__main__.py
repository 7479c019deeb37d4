"""`python -m tests.simulation.indexer --seeds 1000`: many seeds in this process; or one, with its
story."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Final

import attrs

from tests.simulation.indexer.bugs import BUGS
from tests.simulation.indexer.scenario import Outcome, run_seed
from tests.simulation.story import digest, story

PROGRESS_S: Final = 30.0
VIOLATED: Final = 1


@attrs.define
class Totals:
    """What a run of many seeds comes to."""

    seeds: int = 0
    answers: int = 0
    refused: Counter[str] = attrs.field(factory=Counter)
    faults: Counter[str] = attrs.field(factory=Counter)
    rollbacks: int = 0
    virtual_s: float = 0.0
    violations: list[Outcome] = attrs.field(factory=list)

    def add(self, outcome: Outcome) -> None:
        """One seed more."""
        self.seeds += 1
        self.answers += outcome.answers
        self.refused += outcome.refused
        self.faults += outcome.faults
        self.rollbacks += outcome.rollbacks
        self.virtual_s += outcome.virtual_s
        if outcome.violation:
            self.violations.append(outcome)

    def __str__(self) -> str:
        return (
            f"{self.seeds:,} seeds: {self.answers:,} answers, {self.refused.total():,} refused "
            f"{dict(self.refused)}, {self.faults.total():,} faults {dict(self.faults)}, "
            f"{self.rollbacks:,} rollbacks in {self.virtual_s / 3600:.1f} virtual hours; "
            f"{len(self.violations)} violations"
        )


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module; the exit code: 1 if there was a violation."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.indexer", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="one seed, with its story")
    parser.add_argument("--bug", default="", choices=["", *BUGS], help="with this bug put in")
    options = parser.parse_args(arguments)
    with BUGS[options.bug]() if options.bug else nullcontext():
        if options.seed is not None:
            outcome, history = run_seed(options.seed)
            for line in story(history):
                _say(line)
            _say(f"\n{outcome}\ndigest {digest(history)}\n{outcome.violation or 'no violation'}")
            return VIOLATED if outcome.violation else 0
        return _run_many(range(options.first, options.first + options.seeds))


def _run_many(seeds: Sequence[int]) -> int:
    totals, began_at = Totals(), time.monotonic()
    said_at = began_at
    for seed in seeds:
        outcome, _ = run_seed(seed)
        totals.add(outcome)
        if outcome.violation:
            _say(f"seed {seed}: {outcome.violation:.600}")
        if time.monotonic() - said_at > PROGRESS_S:
            said_at = time.monotonic()
            _say(f"{totals}; {said_at - began_at:.0f} s")
    took_s = time.monotonic() - began_at
    _say(
        f"{totals}; {took_s:.0f} s, {took_s / len(seeds):.1f} s a seed, "
        f"{time.process_time() / len(seeds):.1f} s of processor time"
    )
    return VIOLATED if totals.violations else 0


if __name__ == "__main__":
    sys.exit(main())
