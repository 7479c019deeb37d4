"""What a server has of the world around it: a clock, chance, and a network."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import attrs
import trio

from upr_protocol.ids import HistoryId
from upr_protocol.transport import Dial, dial_tcp
from upr_server.daemon.listeners import listening


@attrs.frozen
class Door:
    """Where those come in who connect.

    Attributes:
        listeners: They give streams that can be half-closed.
        port: The port they listen on, never 0.
    """

    listeners: Sequence[trio.abc.Listener[trio.abc.HalfCloseableStream]]
    port: int


@asynccontextmanager
async def open_door(listen: str) -> AsyncIterator[Door]:
    """A door of TCP, for as long as the context; `listen` is as in `listening`, as are errors."""
    async with listening(listen) as listeners:
        yield Door(listeners, listeners[0].socket.getsockname()[1])


@attrs.frozen
class Surroundings:
    """The real ones, unless others are given: a simulation has some in which the same happens each
    time.

    Attributes:
        time: Seconds since 1970.
        random_bits: Draws so many bits that nobody can guess.
        draw: Draws from [0, 1), for the waits between attempts.
        dial: How other servers are reached.
        open_door: How those are let in who connect.
    """

    time: Callable[[], float] = time.time
    random_bits: Callable[[int], int] = secrets.randbits
    draw: Callable[[], float] = random.random
    dial: Dial = dial_tcp
    open_door: Callable[[str], AbstractAsyncContextManager[Door]] = open_door

    def new_history_id(self) -> HistoryId:
        """A fresh one, never 0."""
        return HistoryId(self.random_bits(64) or 1)
