"""`python -m tests.simulation --seeds 2000`: many seeds, on all cores; or one, with its story."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context
from multiprocessing.pool import Pool
from typing import Final

import attrs

from tests.simulation.bugs import BUGS
from tests.simulation.node import first_of
from tests.simulation.scenario import Outcome, run_seed
from tests.simulation.story import digest, story

FAILOVERS_MIN: Final = 3.0
ACKNOWLEDGED_MIN: Final = 50.0
FAULTS_MIN: Final = 6.0
"""What a seed must come to on average: a run with less has shown nothing."""

PROGRESS_S: Final = 5.0

PATIENCE_S: Final = 120.0
"""A seed takes a few seconds of processor time."""

VIOLATED: Final = 1
VOID: Final = 3
INTERRUPTED: Final = 130


class SpinsError(BaseException):
    """A seed does not come to its end; no code that it runs through is to catch this."""


@attrs.define
class Totals:
    """What a run of many seeds comes to."""

    seeds: int = 0
    failovers: int = 0
    acknowledged: int = 0
    faults: int = 0
    restarts: int = 0
    rollbacks: int = 0
    events: int = 0
    virtual_s: float = 0.0
    violations: list[Outcome] = attrs.field(factory=list)

    def add(self, one: Outcome) -> None:
        """One seed more."""
        self.seeds += 1
        for name in ("failovers", "acknowledged", "faults", "restarts", "rollbacks", "events"):
            setattr(self, name, getattr(self, name) + getattr(one, name))
        self.virtual_s += one.virtual_s
        if one.violation:
            self.violations.append(one)

    def void(self) -> str:
        """Why the run has shown nothing; empty when it has."""
        for name, least in (
            ("failovers", FAILOVERS_MIN),
            ("acknowledged", ACKNOWLEDGED_MIN),
            ("faults", FAULTS_MIN),
        ):
            found = getattr(self, name) / max(1, self.seeds)
            if found < least:
                return f"{found:.1f} {name} a seed are too few: {least:.0f} are the least"
        return ""

    def __str__(self) -> str:
        return (
            f"{self.seeds:,} seeds: {self.failovers:,} failovers and takeovers, {self.faults:,} "
            f"faults, {self.restarts:,} kills, {self.acknowledged:,} operations acknowledged, "
            f"{self.rollbacks:,} rollbacks of consumers, {self.events:,} events in "
            f"{self.virtual_s / 3600:.1f} virtual hours; {len(self.violations)} violations"
        )


def outcome_of(bug: str, seed: int) -> Outcome:
    """One seed, perhaps with a bug. One in which time stands still is a violation, too."""

    def stop(_number: int, _frame: object) -> None:
        raise SpinsError(f"I11: after {PATIENCE_S} s of processor time it is not over")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, PATIENCE_S)
    found: Outcome | None = None
    try:
        with BUGS[bug]() if bug else nullcontext():
            found = run_seed(seed)[0]
    except* SpinsError as errors:
        found = Outcome(seed, str(first_of(errors)), "I11")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    assert found is not None
    return found


def outcomes(seeds: Sequence[int], processes: int, bug: str) -> Iterator[Outcome]:
    """What becomes of many seeds, in any order."""
    if processes == 1:
        yield from map(partial(outcome_of, bug), seeds)
        return
    with pool_of(processes) as pool:
        yield from pool.imap_unordered(partial(outcome_of, bug), seeds)


def pool_of(processes: int) -> Pool:
    """Processes that run seeds; Ctrl-C is for their parent."""
    gc.freeze()  # what is there now need not be looked at after each seed
    return get_context("fork").Pool(processes, signal.signal, (signal.SIGINT, signal.SIG_IGN))


def say(line: str) -> None:
    """A line for people."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def run_many(first: int, count: int, processes: int, bug: str, *, until_found: bool) -> int:
    """Runs seeds; the exit code."""
    totals, began = Totals(), time.monotonic()
    said_at = began
    for one in outcomes(range(first, first + count), processes, bug):
        totals.add(one)
        if one.violation:
            say(f"seed {one.seed}: {one.violation:.400}")
            say(f"  repeat it: make simulate SEED={one.seed}" + (f" BUG={bug}" if bug else ""))
            if until_found:
                break
        if time.monotonic() - said_at > PROGRESS_S:
            said_at = time.monotonic()
            rate = totals.seeds / (said_at - began)
            say(
                f"{totals.seeds:,} of {count:,} seeds, {rate:.2f} a second, "
                f"{totals.failovers:,} failovers, {totals.faults:,} faults, "
                f"{len(totals.violations)} violations, "
                f"{(count - totals.seeds) / rate:.0f} s to go"
            )
    took_s = time.monotonic() - began
    say(
        f"{totals}; {took_s:.0f} s on {processes} cores, {totals.seeds / took_s:.2f} seeds a second"
    )
    if totals.violations:
        return VIOLATED
    why = totals.void()
    if why and count > 1:
        say(f"the run is void: {why}")
        return VOID
    return 0


def run_one(seed: int, bug: str) -> int:
    """Runs a seed, and tells its story; the exit code."""
    with BUGS[bug]() if bug else nullcontext():
        outcome, history = run_seed(seed)
    for line in story(history):
        say(line)
    say(f"\nseed {seed}: {outcome}\ndigest {digest(history)}")
    say(outcome.violation or "no violation")
    return VIOLATED if outcome.violation else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description="Simulate the cluster under faults. Exit codes: 0 no violation, 1 some, 3 too "
        "little happened to have shown anything, 130 interrupted.",
    )
    parser.add_argument("--seeds", type=int, default=500, help="how many; 500 if not given")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="one seed, with its story")
    parser.add_argument("--bug", default="", choices=["", *BUGS], help="with this bug put in")
    parser.add_argument("--until-found", action="store_true", help="end with the first violation")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args(arguments)
    try:
        if given.seed is not None:
            return run_one(given.seed, given.bug)
        return run_many(
            given.first, given.seeds, given.processes, given.bug, until_found=given.until_found
        )
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
