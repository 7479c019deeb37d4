"""A sample of what `make simulate` does. New seeds would be another test each time: they are fixed.

What the simulation has found, and is mended, is put in again as a bug (`bugs`), where it has to be
found: a seed means another history once anything that draws has changed.
"""

from __future__ import annotations

from tests.kit.effort import effort
from tests.simulation.__main__ import Totals
from tests.simulation.scenario import run_seed

SAMPLE = range(1003, 1003 + effort(3, 30))


def test_a_sample_keeps_every_promise() -> None:
    totals = Totals()
    for seed in SAMPLE:
        totals.add(run_seed(seed)[0])
    assert not totals.violations, totals.violations
    assert not totals.void(), totals
