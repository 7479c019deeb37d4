"""How tasks wake each other: nobody sleeps through a change, and nobody wakes without one."""

from __future__ import annotations

import trio
from trio.testing import wait_all_tasks_blocked

from upr_protocol.concurrency import Notifier, first_failure


async def test_a_notification_wakes_every_task_that_waits(nursery: trio.Nursery) -> None:
    notifier, woken = Notifier(), []

    async def wait(name: str) -> None:
        await notifier.wait()
        woken.append(name)

    nursery.start_soon(wait, "a")
    nursery.start_soon(wait, "b")
    await wait_all_tasks_blocked()
    assert not woken
    notifier.notify()
    await wait_all_tasks_blocked()
    assert sorted(woken) == ["a", "b"]


async def test_a_notification_is_not_kept_for_a_later_task(autojump_clock: trio.abc.Clock) -> None:
    notifier = Notifier()
    notifier.notify()
    with trio.move_on_after(1) as scope:
        await notifier.wait()
    assert scope.cancelled_caught


async def test_an_event_taken_before_a_look_misses_no_change() -> None:
    notifier = Notifier()
    event = notifier.next_event()
    notifier.notify()
    await event.wait()
    assert not notifier.next_event().is_set()


async def test_a_condition_is_looked_at_after_every_notification(nursery: trio.Nursery) -> None:
    notifier = Notifier()
    looks: list[None] = []

    def condition() -> bool:
        looks.append(None)
        return len(looks) == 3

    nursery.start_soon(notifier.wait_until, condition)
    await wait_all_tasks_blocked()
    assert len(looks) == 1
    notifier.notify()
    await wait_all_tasks_blocked()
    assert len(looks) == 2
    notifier.notify()
    await wait_all_tasks_blocked()
    assert len(looks) == 3
    notifier.notify()
    await wait_all_tasks_blocked()
    assert len(looks) == 3


def test_the_first_failure_of_nested_groups_is_found() -> None:
    first, second = OSError("a"), OSError("b")
    assert first_failure(first) is first
    inner = ExceptionGroup("", [first])
    assert first_failure(ExceptionGroup("", [inner, second])) is first
