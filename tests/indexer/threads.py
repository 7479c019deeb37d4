"""Calls in the event loop in place of a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import trio

T = TypeVar("T")


async def in_the_loop(function: Callable[..., T], *arguments: Any, **_options: Any) -> T:
    """Takes the place of a thread: the call can be cancelled before it begins, but not later."""
    await trio.lowlevel.checkpoint()
    result = function(*arguments)
    await trio.lowlevel.cancel_shielded_checkpoint()
    return result
