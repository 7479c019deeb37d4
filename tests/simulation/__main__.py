"""`python -m tests.simulation --seeds 2000`: many seeds, on all cores; or one, with its story."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context
from multiprocessing.pool import Pool
from typing import Final

import attrs

from tests.simulation.bugs import BUGS
from tests.simulation.node import first_of
from tests.simulation.profiles import PROFILES
from tests.simulation.scenario import Outcome, run_seed
from tests.simulation.story import digest, story

FAILOVERS_MIN: Final = 3.0
ACKNOWLEDGED_MIN: Final = 50.0
FAULTS_MIN: Final = 6.0
"""What a seed must come to on average: a run with less has shown nothing."""

GENERAL: Final = "general"
"""The mix of all faults, in place of a profile."""

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
    without_effect: Counter[str] = attrs.field(factory=Counter)

    def add(self, outcome: Outcome) -> None:
        """One seed more."""
        self.seeds += 1
        for name in ("failovers", "acknowledged", "faults", "restarts", "rollbacks", "events"):
            setattr(self, name, getattr(self, name) + getattr(outcome, name))
        self.virtual_s += outcome.virtual_s
        self.without_effect.update(outcome.without_effect)
        if outcome.violation:
            self.violations.append(outcome)

    def void(self) -> str:
        """Why the run has shown nothing; empty when it has."""
        for name, least in (
            ("failovers", FAILOVERS_MIN),
            ("acknowledged", ACKNOWLEDGED_MIN),
            ("faults", FAULTS_MIN),
        ):
            mean = getattr(self, name) / max(1, self.seeds)
            if mean < least:
                return f"{mean:.1f} {name} a seed are too few: {least:.0f} are the least"
        return ""

    def __str__(self) -> str:
        return (
            f"{self.seeds:,} seeds: {self.failovers:,} failovers and takeovers, {self.faults:,} "
            f"faults, {self.restarts:,} kills, {self.acknowledged:,} operations acknowledged, "
            f"{self.rollbacks:,} rollbacks of consumers, {self.events:,} events in "
            f"{self.virtual_s / 3600:.1f} virtual hours; {len(self.violations)} violations"
        )


def outcome_of(bug: str, profile: str, seed: int) -> Outcome:
    """One seed, perhaps with a bug. One in which time stands still is a violation, too.

    Args:
        bug: The planted bug's name; empty for none.
        profile: The profile's name; empty for the general mix.
        seed: The seed.
    """

    def stop(_number: int, _frame: object) -> None:
        raise SpinsError(f"I11: after {PATIENCE_S} s of processor time it is not over")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, PATIENCE_S)
    outcome: Outcome | None = None
    try:
        with BUGS[bug].plant() if bug else nullcontext():
            outcome = run_seed(seed, PROFILES.get(profile))[0]
    except* SpinsError as errors:
        outcome = Outcome(seed, str(first_of(errors)), "I11")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    assert outcome is not None
    return outcome


def outcomes(seeds: Sequence[int], processes: int, bug: str, profile: str) -> Iterator[Outcome]:
    """What becomes of many seeds, in any order."""
    if processes == 1:
        yield from map(partial(outcome_of, bug, profile), seeds)
        return
    with pool_of(processes) as pool:
        yield from pool.imap_unordered(partial(outcome_of, bug, profile), seeds)


def pool_of(processes: int) -> Pool:
    """Processes that run seeds; Ctrl-C is for their parent."""
    gc.freeze()  # what is there now need not be looked at after each seed
    return get_context("fork").Pool(processes, signal.signal, (signal.SIGINT, signal.SIG_IGN))


def say(line: str) -> None:
    """A line for people."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def run_many(
    first: int, count: int, processes: int, bug: str, profile: str, *, until_found: bool
) -> int:
    """Runs seeds; the exit code."""
    repeated = (f" PROFILE={profile}" if profile else "") + (f" BUG={bug}" if bug else "")
    totals, began = Totals(), time.monotonic()
    said_at = began
    for outcome in outcomes(range(first, first + count), processes, bug, profile):
        totals.add(outcome)
        if outcome.violation:
            say(f"seed {outcome.seed}: {outcome.violation:.400}")
            say(f"  repeat it: make simulate SEED={outcome.seed}{repeated}")
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
    for kind, times in totals.without_effect.most_common():
        say(f"{kind} had no effect {times:,} times")
    if totals.violations:
        return VIOLATED
    why = totals.void()
    if why and count > 1 and not profile:
        say(f"the run is void: {why}")
        return VOID
    return 0


def run_one(seed: int, bug: str, profile: str) -> int:
    """Runs a seed, and tells its story; the exit code."""
    with BUGS[bug].plant() if bug else nullcontext():
        outcome, history = run_seed(seed, PROFILES.get(profile))
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
    parser.add_argument(
        "--profile",
        default="",
        choices=["", GENERAL, *PROFILES],
        help=f"the situation that seeds make; {GENERAL} if not given, or that of the bug",
    )
    parser.add_argument("--until-found", action="store_true", help="end with the first violation")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    profile = options.profile or (BUGS[options.bug].profile.name if options.bug else "")
    if profile == GENERAL:
        profile = ""
    try:
        if options.seed is not None:
            return run_one(options.seed, options.bug, profile)
        return run_many(
            options.first,
            options.seeds,
            options.processes,
            options.bug,
            profile,
            until_found=options.until_found,
        )
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
