"""A consumer that asks for what no client may be streamed: dead and pending partitions, again and
again, while maps move them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Final

import trio

from tests.kit.history import History, Streamed
from upr_protocol.client import consume
from upr_protocol.errors import LocalProtocolError, UprError
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.transport import Dial, dial_tcp

WRONG_STATES: Final = (PartitionState.DEAD, PartitionState.PENDING)

PATIENCE_S: Final = 1.0
"""How long it waits for a refusal before it asks another node."""


class WrongStateConsumer:
    """Asks one node after the other, each time for one partition in one state.

    Args:
        name: Its host.
        urls: The bucket's URL at each node.
        partition_count: How many partitions the bucket has.
        history: Records what was streamed to it.
        chance: The random number generator.
        dial: How it reaches nodes.
        sleep: How it waits.
    """

    def __init__(
        self,
        name: str,
        urls: Sequence[str],
        partition_count: int,
        history: History,
        chance: Random,
        *,
        dial: Dial = dial_tcp,
        sleep: Callable[[float], Awaitable[None]] = trio.sleep,
    ) -> None:
        self.name = name
        self._urls = urls
        self._partition_count = partition_count
        self._history = history
        self._chance = chance
        self._dial = dial
        self._sleep = sleep

    async def run(self) -> None:
        """Asks again and again, in spite of errors."""
        while True:
            await self._sleep(self._chance.random() * 0.2)
            try:
                with trio.move_on_after(PATIENCE_S):
                    await self._ask(
                        self._chance.choice(self._urls),
                        PartitionId(self._chance.randrange(self._partition_count)),
                        self._chance.choice(WRONG_STATES),
                    )
            except UprError as error:
                if isinstance(error, LocalProtocolError):
                    raise

    async def _ask(self, url: str, partition: PartitionId, state: PartitionState) -> None:
        async with consume(
            url,
            partitions=[partition],
            state=state,
            follow_map=False,
            identity=f"consumer:{self.name}",
            retry_timeout_s=0.0,
            dial=self._dial,
            draw=self._chance.random,
        ) as consumer:
            await anext(consumer)
            self._history.add(Streamed(self.name, url, partition, state))
