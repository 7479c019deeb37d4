"""A consumer of events that records what it receives, crashes, and continues. It works with real
and simulated clusters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random

import trio

from tests.kit.history import Follows, History, Said, Told
from upr_protocol.bucket_event import ANY_DESIGN, EventKind
from upr_protocol.client import LookAtEverything, follow_events
from upr_protocol.errors import LocalProtocolError, UprError
from upr_protocol.transport import Dial, dial_tcp


class EventFollower:
    """Follows the events of a cluster.

    Args:
        name: Its host, and its name as a consumer.
        url: The nodes to which it may connect first.
        history: Records the events that it has processed.
        chance: The random number generator.
        pause_s: How long it takes over each event, on average.
        timeout_s: How long nodes keep its events while it is away.
        dial: How it reaches nodes.
        sleep: How it waits.
    """

    def __init__(
        self,
        name: str,
        url: str,
        history: History,
        chance: Random,
        *,
        pause_s: float,
        timeout_s: int,
        dial: Dial = dial_tcp,
        sleep: Callable[[float], Awaitable[None]] = trio.sleep,
    ) -> None:
        self.name = name
        self._url = url
        self._history = history
        self._chance = chance
        self._pause_s = pause_s
        self._timeout_s = timeout_s
        self._dial = dial
        self._sleep = sleep
        self._scope = trio.CancelScope()

    def crash(self) -> None:
        """Kills the consumer. Events that it has not processed must be delivered again."""
        self._scope.cancel()

    async def run(self) -> None:
        """Follows the events, with new connections after errors."""
        self._history.add(Follows(self.name))
        while True:
            with trio.CancelScope() as self._scope:
                await trio.lowlevel.checkpoint()
                try:
                    await self._follow()
                except UprError as error:
                    if isinstance(error, LocalProtocolError):
                        raise
                    self._history.add(Said(self.name, f"{error}"))
            await self._sleep(self._chance.random() * 0.5)

    async def _follow(self) -> None:
        async with follow_events(
            self._url,
            consumer=self.name,
            kinds=EventKind.DESIGN,
            timeout_s=self._timeout_s,
            identity=f"follower:{self.name}",
            retry_timeout_s=20.0,
            dial=self._dial,
            draw=self._chance.random,
        ) as feed:
            async for event in feed:
                received_at = trio.current_time()
                if self._pause_s:
                    await self._sleep(self._chance.random() * 2 * self._pause_s)
                designs = () if isinstance(event, LookAtEverything) else event.designs
                names_all = isinstance(event, LookAtEverything) or ANY_DESIGN in designs
                self._history.add(Told(self.name, received_at, designs, names_all))
