"""Ctrl-C and SIGTERM, for commands that run on Trio."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from typing import TypeVarTuple

import trio

Ts = TypeVarTuple("Ts")


def run_interruptible(function: Callable[[*Ts], Awaitable[None]], *args: *Ts) -> int | None:
    """Runs an async function, which the first Ctrl-C or SIGTERM cancels.

    Cancelled, and not interrupted: what the function cleans up is cleaned up, and it is not torn
    out of the middle of a line.

    Returns:
        The exit code that tells of the signal; None when there was none.
    """

    async def run() -> int | None:
        ended_by: int | None = None
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with trio.open_nursery() as nursery:

                async def watch() -> None:
                    nonlocal ended_by
                    async for number in signals:
                        ended_by = 128 + number
                        nursery.cancel_scope.cancel()

                nursery.start_soon(watch)
                await function(*args)
                nursery.cancel_scope.cancel()
        return ended_by

    return trio.run(run)
