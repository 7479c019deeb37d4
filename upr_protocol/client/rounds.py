"""Barriers on their way: through one node, or through all that a consumer follows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

import attrs

from upr_protocol.client.events import BarrierReached
from upr_protocol.errors import LocalProtocolError, Status
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.limits import COOKIE_BYTES_MAX, OPEN_BARRIERS_MAX


@attrs.define
class _Round:
    ends: dict[PartitionId, SeqNo] = attrs.field(factory=dict)
    covered: set[PartitionId] = attrs.field(factory=set)


class Rounds:
    """The barriers that did not come back, oldest first.

    A barrier is back when each partition's stream was passed by it: as partitions may move between
    nodes while it is on its way, that is followed for each partition.
    """

    __slots__ = ("_rounds",)

    def __init__(self) -> None:
        self._rounds: dict[bytes, _Round] = {}

    def __len__(self) -> int:
        return len(self._rounds)

    def begin(self, cookie: bytes) -> None:
        """One more barrier.

        Raises:
            LocalProtocolError: Too many are open, or this one is, or it is too long.
        """
        # Checked here, as it may be sent only later, when nobody is there to be told.
        if not 1 <= len(cookie) <= COOKIE_BYTES_MAX:
            raise LocalProtocolError(f"a cookie is 1 to {COOKIE_BYTES_MAX} bytes")
        if len(self._rounds) >= OPEN_BARRIERS_MAX:
            raise LocalProtocolError(f"{OPEN_BARRIERS_MAX} barriers are open", Status.TOO_MANY)
        if cookie in self._rounds:
            raise LocalProtocolError(f"the barrier {cookie!r} is open", Status.OPAQUE_IN_USE)
        self._rounds[cookie] = _Round()

    def open_for(self, partitions: Set[PartitionId]) -> list[bytes]:
        """The barriers that have yet to pass one of `partitions`."""
        return [cookie for cookie, one in self._rounds.items() if partitions - one.covered]

    def passed(
        self, cookie: bytes, partitions: Iterable[PartitionId], ends: Mapping[PartitionId, SeqNo]
    ) -> None:
        """A barrier has passed `partitions`, whose last complete snapshots have these ends."""
        one = self._rounds.get(cookie)
        if one is not None:
            one.covered.update(partitions)
            one.ends.update(ends)

    def completed(self, left: Set[PartitionId]) -> list[BarrierReached]:
        """Those that have passed all of `left`; they are not open any more."""
        back = [cookie for cookie, one in self._rounds.items() if left <= one.covered]
        return [BarrierReached(cookie, self._rounds.pop(cookie).ends) for cookie in back]
