"""The same seed is the same history, wherever it runs; and Trio still is as it is counted on."""

from __future__ import annotations

import os
import subprocess
import sys
from random import Random

import trio
import trio._core._run as trio_run

from tests.kit.process import ROOT
from tests.simulation.world import JumpingClock, run_in_world

SEED = 1003


def test_the_same_seed_is_the_same_history_in_two_processes() -> None:
    digests = []
    for hash_seed in ("1", "2"):
        process = subprocess.run(
            [sys.executable, "-m", "tests.simulation", "--seed", str(SEED)],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stderr[-2000:]
        lines = process.stderr.splitlines()
        digests.append(next(line for line in lines if line.startswith("digest ")))
        assert len(lines) > 50
    assert digests[0] == digests[1]


def test_tasks_take_turns_as_the_seed_says_and_time_is_virtual() -> None:
    def order(seed: int) -> tuple[list[int], float]:
        finished: list[int] = []

        async def one(task: int) -> None:
            for _ in range(5):
                await trio.lowlevel.checkpoint()
                finished.append(task)
            await trio.sleep(1000)

        async def main(_clock: JumpingClock) -> float:
            async with trio.open_nursery() as nursery:
                for index in range(8):
                    nursery.start_soon(one, index)
            return trio.current_time()

        return finished, run_in_world(seed, main)

    assert order(1) == order(1)
    assert order(1)[0] != order(2)[0]
    assert order(1)[1] >= 1000


def test_what_the_world_waits_for_and_deadlines_come_in_their_order() -> None:
    woken: list[tuple[str, float]] = []

    async def main(clock: JumpingClock) -> None:
        async def of_the_world(after_s: float) -> None:
            await clock.sleep(after_s)
            woken.append(("world", trio.current_time()))

        async def of_trio(after_s: float) -> None:
            await trio.sleep(after_s)
            woken.append(("trio", trio.current_time()))

        # That nobody waits for it any more holds nobody up.
        clock.set_at(2.5, trio.Event())
        async with trio.open_nursery() as nursery:
            for after_s in (3.0, 1.0, 0.0):
                nursery.start_soon(of_the_world, after_s)
            for after_s in (2.0, 4.0):
                nursery.start_soon(of_trio, after_s)

    run_in_world(1, main)
    assert woken == [("world", 0.0), ("world", 1.0), ("trio", 2.0), ("world", 3.0), ("trio", 4.0)]


def test_trio_is_as_it_was_outside_of_a_world() -> None:
    """Hypothesis, in the same process, has wishes of its own."""
    before = trio_run._r.getstate(), trio_run._ALLOW_DETERMINISTIC_SCHEDULING

    async def main(_clock: JumpingClock) -> None:
        await trio.lowlevel.checkpoint()

    run_in_world(1, main)
    assert (trio_run._r.getstate(), trio_run._ALLOW_DETERMINISTIC_SCHEDULING) == before
    assert isinstance(trio_run._r, Random)
