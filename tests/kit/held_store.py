"""A store whose commits can be held back."""

from __future__ import annotations

from typing import Any

import trio

from upr_server.storage.calls import Commit, StoreCall
from upr_server.storage.simulated import SimulatedDirectory, SimulatedStore


class HeldStore(SimulatedStore):
    """A store in which commits wait while `released` is not set.

    Attributes:
        released: Set to let commits through.
    """

    def __init__(self, directory: SimulatedDirectory | None = None) -> None:
        super().__init__(directory)
        self.released = trio.Event()

    async def wait(self, call: StoreCall[Any]) -> None:
        if isinstance(call, Commit):
            await self.released.wait()
        await super().wait(call)
