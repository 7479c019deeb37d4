"""Barriers in flight, through one node or through all nodes that a consumer follows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

import attrs

from upr_protocol.client.core.events import BarrierReached
from upr_protocol.errors import LocalProtocolError, Status
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.limits import COOKIE_BYTES_MAX, OPEN_BARRIERS_MAX


@attrs.define
class _Barrier:
    """How far a barrier has come. `ends` has by partition the last complete snapshot end then."""

    passed_partitions: set[PartitionId] = attrs.field(factory=set)
    ends: dict[PartitionId, SeqNo] = attrs.field(factory=dict)


class BarrierTracker:
    """The open barriers, oldest first.

    A barrier is complete when it has passed the stream of each partition. Partitions may move to
    other nodes meanwhile, so progress is tracked by partition and not by node.
    """

    __slots__ = ("_barriers",)

    def __init__(self) -> None:
        self._barriers: dict[bytes, _Barrier] = {}

    def __len__(self) -> int:
        return len(self._barriers)

    def open_barrier(self, cookie: bytes) -> None:
        """Opens a barrier.

        Raises:
            LocalProtocolError: Too many barriers are open, this one is, or the cookie is too long.
        """
        # Checked here: the barrier may be sent later, when there is no caller to raise it to.
        if not 1 <= len(cookie) <= COOKIE_BYTES_MAX:
            raise LocalProtocolError(f"a barrier's cookie must be 1 to {COOKIE_BYTES_MAX} bytes")
        if len(self._barriers) >= OPEN_BARRIERS_MAX:
            raise LocalProtocolError(
                f"{OPEN_BARRIERS_MAX} barriers are open; wait for one of them", Status.TOO_MANY
            )
        if cookie in self._barriers:
            raise LocalProtocolError(
                f"the barrier {cookie!r} is open; choose another cookie", Status.COOKIE_IN_USE
            )
        self._barriers[cookie] = _Barrier()

    def cookies_to_send(self, partitions: Set[PartitionId]) -> list[bytes]:
        """The barriers that have yet to pass one of `partitions`."""
        return [
            cookie
            for cookie, barrier in self._barriers.items()
            if partitions - barrier.passed_partitions
        ]

    def add_passed(
        self, cookie: bytes, partitions: Iterable[PartitionId], ends: Mapping[PartitionId, SeqNo]
    ) -> None:
        """A barrier has passed `partitions`, whose last complete snapshots have these ends."""
        barrier = self._barriers.get(cookie)
        if barrier is not None:
            barrier.passed_partitions.update(partitions)
            barrier.ends.update(ends)

    def forget_passed(self, partition: PartitionId) -> None:
        """A partition rolls back: what came before the barriers is given up, and has to come again
        before they return. So they have yet to pass its next stream."""
        for barrier in self._barriers.values():
            barrier.passed_partitions.discard(partition)
            barrier.ends.pop(partition, None)

    def close_completed(self, partitions: Set[PartitionId]) -> list[BarrierReached]:
        """Closes the barriers that have passed all of `partitions`, those still streamed."""
        cookies = [
            cookie
            for cookie, barrier in self._barriers.items()
            if partitions <= barrier.passed_partitions
        ]
        return [BarrierReached(cookie, self._barriers.pop(cookie).ends) for cookie in cookies]
