"""A daemon runs until a signal comes, and a second one has it hurry."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import structlog
import trio
import trio.testing

from tests.kit.process import eventually
from upr_server.runtime import run_until_signal

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Running:
    """A daemon that says how far it came.

    Attributes:
        said: What it did.
        starts: Set when it may go on starting.
        ends: Set when it may go on ending.
    """

    def __init__(self) -> None:
        self.said: list[str] = []
        self.starts = trio.Event()
        self.ends = trio.Event()

    @asynccontextmanager
    async def run(self) -> AsyncIterator[str]:
        try:
            self.said.append("starting")
            await self.starts.wait()
            yield "port"
            self.said.append("ending")
            await self.ends.wait()
            self.said.append("in order")
        finally:
            self.said.append("gone")

    async def until(self, line: str) -> None:
        await eventually(lambda: self.said[-1:] == [line], line)


@pytest.fixture
async def running(nursery: trio.Nursery) -> Running:
    running = Running()
    nursery.start_soon(run_until_signal, running.run(), running.said.append)
    await running.until("starting")
    return running


@pytest.mark.parametrize("signal_number", SIGNALS)
async def test_a_first_signal_ends_the_process_in_order(
    running: Running, signal_number: signal.Signals
) -> None:
    running.starts.set()
    await running.until("port")
    signal.raise_signal(signal_number)
    await running.until("ending")
    running.ends.set()
    await running.until("gone")
    assert running.said == ["starting", "port", "ending", "in order", "gone"]


async def test_a_second_signal_ends_the_process_at_once(running: Running) -> None:
    running.starts.set()
    await running.until("port")
    signal.raise_signal(signal.SIGTERM)
    await running.until("ending")
    signal.raise_signal(signal.SIGINT)
    await running.until("gone")
    assert running.said == ["starting", "port", "ending", "gone"]


async def test_a_first_signal_waits_for_a_starting_process_and_a_second_one_does_not() -> None:
    first, second = Running(), Running()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_until_signal, first.run(), first.said.append)
        await first.until("starting")
        signal.raise_signal(signal.SIGTERM)
        await trio.testing.wait_all_tasks_blocked()
        first.starts.set()
        first.ends.set()
        await first.until("gone")
    assert first.said == ["starting", "port", "ending", "in order", "gone"]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_until_signal, second.run(), second.said.append)
        await second.until("starting")
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        await second.until("gone")
    assert second.said == ["starting", "gone"]


async def test_a_hangup_ends_nothing_and_what_runs_may_receive_it() -> None:
    """From the start to the end: a terminal that is closed sends one, whatever the daemon does."""
    running, unheard = Running(), list[int]()
    handler_before = signal.signal(signal.SIGHUP, lambda number, _: unheard.append(number))
    try:
        with structlog.testing.capture_logs() as logs:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run_until_signal, running.run(), running.said.append)
                await running.until("starting")
                signal.raise_signal(signal.SIGHUP)
                running.starts.set()
                await running.until("port")
                with trio.open_signal_receiver(signal.SIGHUP) as hangups:
                    signal.raise_signal(signal.SIGHUP)
                    assert await anext(hangups) == signal.SIGHUP
                signal.raise_signal(signal.SIGTERM)
                await running.until("ending")
                signal.raise_signal(signal.SIGHUP)
                await eventually(lambda: len(logs) == 3, "the last one is noted")
                running.ends.set()
                await running.until("gone")
    finally:
        signal.signal(signal.SIGHUP, handler_before)
    assert running.said == ["starting", "port", "ending", "in order", "gone"]
    assert not unheard
    assert [line["signal"] for line in logs if "signal" in line] == ["SIGHUP", "SIGTERM", "SIGHUP"]
