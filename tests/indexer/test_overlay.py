"""What lies over the catalog, and for how long."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from upr_server.indexer import overlay as overlay_module
from upr_server.indexer.overlay import DesignOverlay


class Passage:
    """Barriers that are back when the test says so."""

    def __init__(self) -> None:
        self._waiting: list[trio.Event] = []
        self.asked = 0

    async def __call__(self) -> None:
        self.asked += 1
        event = trio.Event()
        self._waiting.append(event)
        await event.wait()

    async def let_pass(self) -> None:
        """All that are on their way are back, and what follows of it is done."""
        for event in self._waiting:
            event.set()
        self._waiting.clear()
        await trio.testing.wait_all_tasks_blocked()


@asynccontextmanager
async def running(
    passed: Callable[[], Awaitable[object]], on_change: Callable[[], None] = lambda: None
) -> AsyncIterator[DesignOverlay]:
    overlay = DesignOverlay(passed, on_change)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(overlay.run)
        yield overlay
        nursery.cancel_scope.cancel()


async def test_an_entry_stays_until_a_barrier_sent_after_it_has_returned() -> None:
    passage = Passage()
    changes: list[dict[str, bytes | None]] = []
    async with running(passage, lambda: changes.append(overlay.texts)) as overlay:
        assert overlay.texts == {}
        overlay.put("a", b"1")
        await trio.testing.wait_all_tasks_blocked()
        # This one comes too late for the barrier that is on its way.
        overlay.put("b", None)
        await passage.let_pass()
        assert overlay.texts == {"b": None}
        await passage.let_pass()
        assert overlay.texts == {}
        assert passage.asked == 2
    assert changes == [{"a": b"1"}, {"a": b"1", "b": None}, {"b": None}, {}]


async def test_an_entry_put_again_waits_for_a_barrier_of_its_own() -> None:
    passage = Passage()
    async with running(passage) as overlay:
        overlay.put("a", b"1")
        await trio.testing.wait_all_tasks_blocked()
        # Also where it says the same: in between it may have said something else.
        overlay.put("a", None)
        overlay.put("a", b"1")
        await passage.let_pass()
        assert overlay.texts == {"a": b"1"}
        await passage.let_pass()
        assert overlay.texts == {}


async def test_the_overlay_does_not_grow_while_no_barrier_returns() -> None:
    passage = Passage()
    async with running(passage) as overlay:
        for index in range(100):
            overlay.put("a", b"%d" % index)
            await trio.testing.wait_all_tasks_blocked()
        assert overlay.texts == {"a": b"99"}
        assert passage.asked == 1


async def test_the_overlay_takes_no_more_than_a_catalog_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a thousand long design documents took of the memory had no bound, nor the time to parse
    them."""
    monkeypatch.setattr(overlay_module, "CATALOG_BYTES_MAX", 1000)
    passage = Passage()
    async with running(passage) as overlay:
        assert overlay.put("a", b"x" * 600)
        assert not overlay.put("b", b"x" * 400)
        assert not overlay.put("a", b"x" * 1000)
        assert overlay.texts == {"a": b"x" * 600}
        assert overlay.put("a", b"x" * 200)
        assert overlay.put("b", b"x" * 400)
        assert overlay.put("c", None)
        overlay.check_invariants()
        await trio.testing.wait_all_tasks_blocked()
        await passage.let_pass()
        overlay.check_invariants()
        assert overlay.put("d", b"x" * 900)
        overlay.check_invariants()
