"""The disk of a simulated node: it is slow, fails, fills, rots, and loses what was under way."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, TypeVar

import attrs

from tests.simulation.world import JumpingClock
from upr_server.storage.calls import StoreCall
from upr_server.storage.errors import StoreFailedError
from upr_server.storage.records import CHUNK
from upr_server.storage.simulated import SimulatedDirectory, SimulatedStore
from upr_server.storage.simulated_disk import SimulatedDisk

Answer = TypeVar("Answer")


@attrs.define
class Wear:
    """What a disk is like.

    Attributes:
        delay_s: How long a call takes on average.
        fails_next: Whether the next commit fails, as after EIO: it may be there or not.
        is_full: Whether there is no room.
    """

    delay_s: float = 0.001
    fails_next: bool = False
    is_full: bool = False


class FaultyStore(SimulatedStore):
    """A store on the disks of a room, for one life of a node.

    A change is carried out somewhere between its call and its answer, so that a node that is killed
    meanwhile finds it done or not.

    Args:
        clock: The world's.
        directory: The disks, which outlive it.
        wear: What they are like now.
        chance: For its delays.
        on_failure: Told of a failure; and of a change that is acknowledged after one.
    """

    def __init__(
        self,
        clock: JumpingClock,
        directory: SimulatedDirectory,
        wear: Wear,
        chance: Random,
        on_failure: Callable[[str], None],
    ) -> None:
        super().__init__(directory)
        self._clock = clock
        self._wear = wear
        self._chance = chance
        self._on_failure = on_failure
        self._has_failed = False
        self.is_dead = False

    async def execute(self, call: StoreCall[Any]) -> Any:
        if call.is_read:
            await self._pause()
            return call.run_on(self._reader)
        async with self._call_lock:
            await self._pause()
            self._set_faults()
            try:
                answer = call.run_on(self._writer)
            except StoreFailedError:
                self._has_failed = True
                self._on_failure("")
                # A kernel says so once, and goes on as if nothing had been.
                repaired(self.directory)
                raise
            await self._pause()
        return answer

    async def ask(self, call: StoreCall[Answer]) -> Answer:
        answer = await super().ask(call)
        if self._has_failed and not call.is_read:
            self._on_failure(f"a {type(call).__name__} is acknowledged")
        return answer

    async def _pause(self) -> None:
        # A disk that has failed answers at once, and before the server has stopped.
        delay_s = 0.0 if self._has_failed else self._wear.delay_s
        await self._clock.sleep(self._chance.random() * 2 * delay_s)
        if self.is_dead:
            raise StoreFailedError("the machine is off")

    def _set_faults(self) -> None:
        wear = self._wear
        for disks in self.directory.disks.values():
            for disk in disks:
                disk.bytes_max = 0 if wear.is_full else 1 << 62
        if wear.fails_next and self.directory.disks:
            wear.fails_next = False
            name = self._chance.choice(sorted(self.directory.disks))
            log: SimulatedDisk = self.directory.disks[name][0]
            log.keep_on_fault = self._chance.random() < 0.5
            log.fault = _fail


def _fail() -> None:
    raise StoreFailedError("EIO: the simulated disk does not write")


def spared(directory: SimulatedDirectory) -> None:
    """What was to fail at a commit that has not come yet does not fail any more."""
    for disks in directory.disks.values():
        for disk in disks:
            disk.fault = None


def repaired(directory: SimulatedDirectory) -> None:
    """The machine starts: what its disks have is there."""
    for disks in directory.disks.values():
        for disk in disks:
            disk.crash()
            disk.bytes_max = 1 << 62


def flip(directory: SimulatedDirectory, chance: Random) -> bool:
    """Turns a bit round in some records of a log, mostly in chunks; whether there were any."""
    names = sorted(directory.disks)
    if not names:
        return False
    log = directory.disks[chance.choice(names)][0]
    keys = log.keys()
    chunks = [key for key in keys if key.startswith(CHUNK)]
    if not chunks:
        return False
    for _ in range(chance.randint(1, 8)):
        key = chance.choice(chunks if chance.random() < 0.8 else keys)
        log.flip_bit(key, chance.randrange(1 << 16))
    return True
