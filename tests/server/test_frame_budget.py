"""The budget for large frames under way."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from upr_server.net.frame_budget import FrameBudget, frame_timeout_s


async def test_takes_what_fits_at_once() -> None:
    budget = FrameBudget(100)
    await budget.acquire(60)
    await budget.acquire(40)
    assert budget.used == 100


async def test_waits_for_room_and_is_served_in_order(nursery: trio.Nursery) -> None:
    budget = FrameBudget(100)
    await budget.acquire(60)
    served: list[int] = []

    async def take(count: int) -> None:
        await budget.acquire(count)
        served.append(count)

    nursery.start_soon(take, 70)
    await trio.testing.wait_all_tasks_blocked()
    # It would fit, but it came later.
    nursery.start_soon(take, 10)
    await trio.testing.wait_all_tasks_blocked()
    assert served == []
    budget.release(60)
    await trio.testing.wait_all_tasks_blocked()
    assert served == [70, 10]
    assert budget.used == 80


async def test_a_frame_above_the_limit_is_let_in_alone() -> None:
    budget = FrameBudget(100)
    await budget.acquire(500)
    with pytest.raises(trio.TooSlowError), trio.fail_after(0):
        await budget.acquire(1)
    budget.release(500)
    await budget.acquire(1)


async def test_cancelled_it_took_nothing_and_lets_the_next_pass(nursery: trio.Nursery) -> None:
    budget = FrameBudget(100)
    await budget.acquire(100)
    scope = trio.CancelScope()

    async def give_up() -> None:
        with scope:
            await budget.acquire(50)

    nursery.start_soon(give_up)
    await trio.testing.wait_all_tasks_blocked()
    scope.cancel()
    await trio.testing.wait_all_tasks_blocked()
    assert budget.used == 100
    budget.release(100)
    await budget.acquire(100)


def test_the_deadline_grows_with_the_frame() -> None:
    assert frame_timeout_s(32 * 1024 * 1024) == 60 + 512
