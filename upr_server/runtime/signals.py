"""Running a process until SIGINT or SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

import structlog
import trio

T = TypeVar("T")

log = structlog.get_logger(__name__)


async def run_until_signal(
    running: AbstractAsyncContextManager[T], on_running: Callable[[T], None]
) -> bool:
    """Stays in a context until SIGINT or SIGTERM comes, and leaves it then; one that comes while it
    is being entered is heard when it is. A second signal cancels it, wherever it is. SIGHUP ends
    nothing, also where what runs does not receive it.

    Args:
        running: What runs.
        on_running: Called with what the context gives, once it is entered.

    Returns:
        Whether the context was left in order, and not cancelled by a second signal.
    """
    is_orderly = False
    stop = trio.Event()
    with (
        trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals,
        # A terminal that is closed sends it, and service managers and scripts that rotate logs do.
        trio.open_signal_receiver(signal.SIGHUP) as hangups,
    ):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_listen, signals, stop, nursery.cancel_scope)
            nursery.start_soon(_note_hangups, hangups)
            async with running as entered:
                on_running(entered)
                await stop.wait()
            is_orderly = True
            nursery.cancel_scope.cancel()
    log.info("stopped")
    return is_orderly


async def _listen(signals: AsyncIterator[int], stop: trio.Event, scope: trio.CancelScope) -> None:
    log.info("stopping", signal=await _next(signals))
    stop.set()
    log.warning("stopping at once", signal=await _next(signals))
    scope.cancel()


async def _note_hangups(hangups: AsyncIterator[int]) -> None:
    """Those that what runs does not receive itself."""
    while True:
        name = await _next(hangups)
        log.info("signal ignored: there is no certificate to read again now", signal=name)


async def _next(signals: AsyncIterator[int]) -> str:
    return signal.Signals(await anext(signals)).name
