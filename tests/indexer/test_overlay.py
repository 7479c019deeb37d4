"""The overlay: announced design documents that replace the catalog's until the catalog has them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from upr_server.indexer import overlay as overlay_module
from upr_server.indexer.overlay import DesignOverlay


class FakeBarriers:
    """Barriers that return when the test calls `return_all`."""

    def __init__(self) -> None:
        self._waiting: list[trio.Event] = []
        self.sent_count = 0

    async def __call__(self) -> None:
        self.sent_count += 1
        event = trio.Event()
        self._waiting.append(event)
        await event.wait()

    async def return_all(self) -> None:
        """Makes all waiting barriers return, and waits until the overlay has acted on that."""
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
    barriers = FakeBarriers()
    changes: list[dict[str, bytes | None]] = []
    async with running(barriers, lambda: changes.append(overlay.texts)) as overlay:
        assert overlay.texts == {}
        overlay.put("a", b"1")
        await trio.testing.wait_all_tasks_blocked()
        # The waiting barrier was sent before this entry was put, so it does not count for it.
        overlay.put("b", None)
        await barriers.return_all()
        assert overlay.texts == {"b": None}
        await barriers.return_all()
        assert overlay.texts == {}
        assert barriers.sent_count == 2
    assert changes == [{"a": b"1"}, {"a": b"1", "b": None}, {"b": None}, {}]


async def test_an_entry_put_again_waits_for_a_barrier_of_its_own() -> None:
    barriers = FakeBarriers()
    async with running(barriers) as overlay:
        overlay.put("a", b"1")
        await trio.testing.wait_all_tasks_blocked()
        # This holds even if the text is the same: it was another text in between.
        overlay.put("a", None)
        overlay.put("a", b"1")
        await barriers.return_all()
        assert overlay.texts == {"a": b"1"}
        await barriers.return_all()
        assert overlay.texts == {}


async def test_the_overlay_does_not_grow_while_no_barrier_returns() -> None:
    barriers = FakeBarriers()
    async with running(barriers) as overlay:
        for index in range(100):
            overlay.put("a", b"%d" % index)
            await trio.testing.wait_all_tasks_blocked()
        assert overlay.texts == {"a": b"99"}
        assert barriers.sent_count == 1


async def test_the_overlay_takes_no_more_than_a_catalog_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a bound, a thousand long design documents would take any amount of memory, and of
    time to parse."""
    monkeypatch.setattr(overlay_module, "CATALOG_BYTES_MAX", 1000)
    barriers = FakeBarriers()
    async with running(barriers) as overlay:
        assert overlay.put("a", b"x" * 600)
        assert not overlay.put("b", b"x" * 400)
        assert not overlay.put("a", b"x" * 1000)
        assert overlay.texts == {"a": b"x" * 600}
        assert overlay.put("a", b"x" * 200)
        assert overlay.put("b", b"x" * 400)
        assert overlay.put("c", None)
        overlay.check_invariants()
        await trio.testing.wait_all_tasks_blocked()
        await barriers.return_all()
        overlay.check_invariants()
        assert overlay.put("d", b"x" * 900)
        overlay.check_invariants()
