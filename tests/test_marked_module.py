"""The mark of a whole module that its tests may run once more, as those of long steps have it."""

from __future__ import annotations

from itertools import count
from typing import Final

from tests.kit.longest_step import LongStepError, runs_again_if_long

pytestmark = runs_again_if_long

RUNS: Final = count(1)


async def test_it_counts_for_each_test() -> None:
    if next(RUNS) % 2:
        raise LongStepError
