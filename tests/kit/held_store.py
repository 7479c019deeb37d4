"""A store whose commits can be held back."""

from __future__ import annotations

import trio

from upr_server.storage.calls import AnyCall, Commit
from upr_server.storage.simulated_store import SimulatedRoom, SimulatedStore


class HeldStore(SimulatedStore):
    """Commits wait while `released` is not set.

    Attributes:
        released: Set to let commits through.
    """

    def __init__(self, room: SimulatedRoom | None = None) -> None:
        super().__init__(room)
        self.released = trio.Event()

    async def _wait(self, call: AnyCall) -> None:
        if isinstance(call, Commit):
            await self.released.wait()
        await super()._wait(call)
