"""Memory for frames that have begun and not ended: one budget for all connections.

What counts is the memory that a connection holds, not the length that a header announces. A peer
that sends the header of a 32 MiB frame and falls silent takes nothing from others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

import trio

from upr_protocol.concurrency import Notifier

BUDGET_BYTES: Final = 256 * 1024 * 1024
"""Eight frames of the largest size. Above it memory is short: connections with more than their
share are not read, and frames that make no progress are dropped."""

_HARD_FACTOR: Final = 1.25
"""Above this many times the budget, frames are dropped even if they make progress."""

FRAME_TIMEOUT_S: Final = 30.0
"""How far a frame may fall behind the slowest rate. A frame that has begun and stops is dropped
after this time, whatever idle interval its sender asked for."""

FRAME_BYTES_PER_S_MIN: Final = 16 * 1024
"""The slowest rate at which a frame may arrive: that of a bad mobile network."""

SHORT_TIMEOUT_S: Final = 0.5
"""`FRAME_TIMEOUT_S` while memory is short: longer than a lost packet takes to be sent again."""

SHORT_BYTES_PER_S_MIN: Final = 1024 * 1024
"""The slowest rate while memory is short: the largest frame then has about half a minute."""

STEP_BYTES: Final = 4 * 1024 * 1024
"""What one step gives up: to return a MiB to the system takes 0.3 to 1 ms."""

_SWEEP_S: Final = 10.0
_SHORT_SWEEP_S: Final = 0.1
"""How often frames are looked at: all of them, so not after each read. 10,000 take some 3 ms."""


class UnfinishedFrame:
    """What one connection holds of a frame that has begun and not ended.

    Its *lag* is by how many seconds it is behind the slowest rate at which a frame may arrive. Only
    time counts in which the server waits for the peer. What arrives makes up for lag; nobody can
    be ahead, so a peer cannot send much at once and then pause for long.

    Args:
        budget: The budget.
        address: The peer's address, without its port; of IPv6 the network, of whose addresses
            everybody has as many as there are connections.
        drop: Ends the connection, and releases what it holds. Called with the reason.

    Attributes:
        address: The peer's address, without its port; of IPv6 the network, of whose addresses
            everybody has as many as there are connections.
        drop: Ends the connection.
        nbytes: Bytes of memory that the connection holds; 0 between frames.
    """

    __slots__ = ("_budget", "_is_reading", "_lag_s", "_since", "address", "drop", "nbytes")

    def __init__(self, budget: FrameBudget, address: str, drop: Callable[[str], None]) -> None:
        self.address = address
        self.drop = drop
        self.nbytes = 0
        self._budget = budget
        self._lag_s = 0.0
        self._since = 0.0
        self._is_reading = False

    def note_read(self, count: int, now: float) -> None:
        """`count` bytes came at `now`. What they mean is looked at next, and takes its time."""
        if self.nbytes:
            rate = SHORT_BYTES_PER_S_MIN if self._budget.is_short else FRAME_BYTES_PER_S_MIN
            self._lag_s = max(0.0, self.lag_s(now) - count / rate)
            self._is_reading = False

    def set_held_bytes(self, nbytes: int, now: float, *, is_new: bool) -> None:
        """Notes that the connection holds so many bytes of a frame, and is read from `now` on.

        Args:
            nbytes: How many; 0 when no frame has begun.
            now: The time.
            is_new: Whether it is another frame than the one before.
        """
        if is_new:
            self._lag_s = 0.0
        self._since = now
        self._is_reading = nbytes > 0
        self._budget.set_held_bytes(self, nbytes, is_new=is_new)

    def stop_waiting(self, now: float) -> None:
        """Something came at `now`, and the server does not read it yet: from here on the peer is
        not the slower for it, until `note_read`."""
        self._lag_s = self.lag_s(now)
        self._is_reading = False

    async def wait_for_turn(self) -> None:
        """Waits while others come first. On cancellation it is as before."""
        self._is_reading = False
        await self._budget.wait_for_turn(self)
        self._since = trio.current_time()
        self._is_reading = True

    async def pause(self, pause_s: float) -> None:
        """Waits so long, as the server does not read; the peer is not the slower for it."""
        self._is_reading = False
        await trio.sleep(pause_s)
        self._since = trio.current_time()
        self._is_reading = self.nbytes > 0

    def release(self) -> None:
        """The connection holds nothing any more."""
        self._is_reading = False
        self._budget.set_held_bytes(self, 0, is_new=True)

    def close(self) -> None:
        """The connection is over: releases what it held, and forgets `drop`."""
        self.release()
        self.drop = lambda _reason: None

    def lag_s(self, now: float) -> float:
        """By how many seconds it is behind."""
        return self._lag_s + (now - self._since if self._is_reading else 0.0)


class FrameBudget:
    """Bytes that frames under way may hold together.

    While more are held than the limit, memory is short. Then

    - a frame that falls behind is dropped, the one furthest behind first;
    - a connection that holds more than its share is not read. Addresses have equal shares of the
      limit, and the connections of an address have equal shares of that. The frame that began first
      is read in any case, so that frames come to their ends.

    Frames are dropped some at a time, as it takes long to return memory to the system. No other
    unfinished frame is read before all of them are dropped. Otherwise more could come in a turn of
    the loop than is dropped in it.

    Args:
        limit: How many bytes.

    Attributes:
        used_bytes: Bytes that frames hold.
        dropped_count: How many frames were dropped.
        is_dropping: Whether frames are to be dropped that do not fit into one step.
    """

    def __init__(self, limit: int = BUDGET_BYTES) -> None:
        self.used_bytes = 0
        self.dropped_count = 0
        self.is_dropping = False
        self._limit = limit
        self._hard_limit = int(limit * _HARD_FACTOR)
        self._frames: dict[UnfinishedFrame, None] = {}
        """The frames that hold memory, in the order in which they began."""
        self._count_by_address: Counter[str] = Counter()
        self._is_exceeded = Notifier()
        """Notified when the limit, or the limit times `_HARD_FACTOR`, begins to be exceeded."""
        self._changed = Notifier()

    @property
    def is_short(self) -> bool:
        """Whether more is held than the limit."""
        return self.used_bytes > self._limit

    @property
    def holds_up_frames(self) -> bool:
        """Whether a frame that has begun may have to wait for its turn."""
        return self.is_dropping or self.used_bytes > self._limit

    def set_held_bytes(self, frame: UnfinishedFrame, nbytes: int, *, is_new: bool) -> None:
        """`frame` holds `nbytes` from now on. O(1)."""
        used_before = self.used_bytes
        self.used_bytes += nbytes - frame.nbytes
        is_removed = frame.nbytes > 0 and (is_new or not nbytes)
        if is_removed:
            # Taken out even if it holds something again: a new frame goes to the end of the order,
            # or a peer that sends frame after frame would be first for ever.
            self._remove(frame)
        frame.nbytes = nbytes
        if nbytes and frame not in self._frames:
            self._frames[frame] = None
            self._count_by_address[frame.address] += 1
        # A frame that grows lets none go on: hundreds may wait, and others grow with each read.
        if used_before > self._limit and (is_removed or not self.is_short):
            self._changed.notify()
        if (
            used_before <= self._limit < self.used_bytes
            or used_before <= self._hard_limit < self.used_bytes
        ):
            self._is_exceeded.notify()

    def _remove(self, frame: UnfinishedFrame) -> None:
        del self._frames[frame]
        self._count_by_address[frame.address] -= 1
        if not self._count_by_address[frame.address]:
            del self._count_by_address[frame.address]

    def share(self, frame: UnfinishedFrame) -> int:
        """How many bytes `frame` may hold while memory is short, and still be read. O(1)."""
        return self._limit // len(self._count_by_address) // self._count_by_address[frame.address]

    async def wait_for_turn(self, frame: UnfinishedFrame) -> None:
        """Waits while `frame`, which holds something, is not to be read: while others are dropped,
        and while memory is short, if it has more than its share and is not the first."""
        while frame.nbytes and (
            self.is_dropping
            or (
                self.is_short
                and frame is not next(iter(self._frames))
                and frame.nbytes > self.share(frame)
            )
        ):
            await self._changed.wait()

    def check_invariants(self) -> None:
        """Raises AssertionError when a rule of this class does not hold. O(n)."""
        assert all(frame.nbytes for frame in self._frames)
        assert self.used_bytes == sum(frame.nbytes for frame in self._frames)
        assert self._count_by_address == Counter(frame.address for frame in self._frames)

    async def run(self) -> None:
        """Drops frames that fall behind, until cancelled."""
        while True:
            with trio.move_on_after(_SHORT_SWEEP_S if self.is_short else _SWEEP_S):
                await self._is_exceeded.wait()
            try:
                for _ in self.sweep(trio.current_time()):
                    self.is_dropping = True
                    await trio.lowlevel.checkpoint()
            finally:
                self.is_dropping = False
                self._changed.notify()

    def sweep(self, now: float) -> Iterator[None]:
        """Drops the frames that are too far behind at `now`, some in each step. O(n log n) for n
        frames."""
        dropped_bytes = 0
        for frame, reason in self._due(now):
            dropped_bytes += frame.nbytes
            self._drop(frame, reason)
            if dropped_bytes >= STEP_BYTES:
                dropped_bytes = 0
                yield

    def _due(self, now: float) -> Iterator[tuple[UnfinishedFrame, str]]:
        """The frames to drop, one after the other, each with why. What was dropped may have ended
        the shortage, and the others then have their whole time again."""
        for frame in sorted(self._frames, key=lambda frame: frame.lag_s(now), reverse=True):
            timeout_s = SHORT_TIMEOUT_S if self.is_short else FRAME_TIMEOUT_S
            if frame in self._frames and frame.lag_s(now) > timeout_s:
                yield frame, "the rest takes too long to arrive"
        if self.used_bytes <= self._hard_limit:
            return
        for frame in sorted(self._frames, key=self._excess, reverse=True):
            if not self.is_short:
                return
            if frame in self._frames:
                yield frame, "the server is short of memory for frames"

    def _excess(self, frame: UnfinishedFrame) -> float:
        """How many times its share a frame holds."""
        return frame.nbytes / self.share(frame) if self.share(frame) else math.inf

    def _drop(self, frame: UnfinishedFrame, reason: str) -> None:
        self.dropped_count += 1
        frame.drop(f"an unfinished frame takes {frame.nbytes} bytes of memory, and {reason}")
        frame.release()
