"""A store on simulated disks, without threads or processes: for tests, and for a server that keeps
nothing.

It answers after a delay that is drawn for each call. So flushes overlap with other work, and reads
race with writes, in the virtual time of a mock clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import trio

from upr_server.storage.api import Store
from upr_server.storage.calls import StoreCall
from upr_server.storage.ordered_map import OrderedMap
from upr_server.storage.simulated_disk import SimulatedDisk
from upr_server.storage.storage_server import StorageServer

Answer = TypeVar("Answer")


class SimulatedEventQueues:
    """Event queues that outlive a clean stop.

    Attributes:
        data: What is saved; empty for nothing.
    """

    def __init__(self) -> None:
        self.data = b""

    def take(self) -> bytes:
        """What was saved, once."""
        data, self.data = self.data, b""
        return data

    def save(self, data: bytes) -> None:
        """Saves `data` in place of what was saved before."""
        self.data = data


class SimulatedUsers:
    """A cluster's users, which outlive their node.

    Attributes:
        data: What is saved; empty for nothing.
    """

    def __init__(self) -> None:
        self.data = b""

    def load(self) -> bytes:
        """What was saved last."""
        return self.data

    def save(self, data: bytes) -> None:
        """Saves `data` in place of what was saved before."""
        self.data = data


class SimulatedDirectory:
    """Simulated disks of buckets, which outlive the stores that use them.

    Attributes:
        disks: Log and index of each bucket.
        event_queues: Its event queues.
        users: Its cluster's users.
    """

    def __init__(self) -> None:
        self.event_queues = SimulatedEventQueues()
        self.users = SimulatedUsers()
        self.disks: dict[str, tuple[SimulatedDisk, SimulatedDisk]] = {}

    def names(self) -> list[str]:
        """The buckets, sorted."""
        return sorted(self.disks)

    def remove_leftovers(self) -> dict[str, str]:
        """Does nothing: no crash leaves anything half made."""
        return {}

    def open(self, name: str) -> tuple[OrderedMap, OrderedMap]:
        """Log and index of a bucket."""
        return self.disks[name]

    def create(self, name: str, fill: Callable[[OrderedMap, OrderedMap], None]) -> None:
        """Creates a bucket."""
        log, index = SimulatedDisk(), SimulatedDisk()
        fill(log, index)
        self.disks[name] = log, index

    def delete(self, name: str) -> None:
        """Deletes a bucket."""
        del self.disks[name]


class SimulatedStore(Store):
    """A store on simulated disks.

    Args:
        directory: The disks; by default new ones.
        delay: Draws how long a call takes, in seconds; None for no time at all.
    """

    def __init__(
        self,
        directory: SimulatedDirectory | None = None,
        delay: Callable[[StoreCall[Any]], float] | None = None,
    ) -> None:
        super().__init__()
        self.directory = SimulatedDirectory() if directory is None else directory
        self._delay = delay
        self._writer = StorageServer(self.directory)
        self._reader = StorageServer(self.directory)
        # Calls that change something are carried out one after the other.
        self._call_lock = trio.StrictFIFOLock()

    async def execute(self, call: StoreCall[Answer]) -> Answer:
        if call.is_read:
            await self.wait(call)
            return call.run_on(self._reader)
        async with self._call_lock:
            await self.wait(call)
            return call.run_on(self._writer)

    async def wait(self, call: StoreCall[Any]) -> None:
        """Waits for as long as a call takes."""
        if self._delay is None:
            await trio.lowlevel.checkpoint()
        else:
            await trio.sleep(self._delay(call))
