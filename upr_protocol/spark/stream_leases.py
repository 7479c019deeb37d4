"""The leases of a stream: what pins the changes that its batches have yet to read.

A batch may be read again until it is committed, so its lease is held until then. A lease that is
not released lapses by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from upr_protocol.client import HeldLease
from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.spark.driver_client import DriverClient, acquire_new_lease, holds_ranges
from upr_protocol.spark.offset import StreamOffset, is_mid_snapshot


class StreamLeases:
    """Acquires, renews and releases the leases of one stream.

    Args:
        driver: The server.
        new_lease_id: Draws a fresh non-zero random number.
    """

    def __init__(self, driver: DriverClient, new_lease_id: Callable[[], int]) -> None:
        self._driver = driver
        self._new_lease_id = new_lease_id
        self._ids: dict[int, None] = {}
        """Leases of this process that are not released, oldest first."""
        self._target_id = 0
        """The lease on what there was when the query began that is to end there; until it is known
        where in it the stream stands."""

    def acquire(
        self, starts: Mapping[PartitionId, SeqNo], ends: Mapping[PartitionId, SeqNo]
    ) -> HeldLease:
        """A new lease on what lies between `starts` and `ends`, by partition."""
        ranges = [(partition, seq, ends[partition]) for partition, seq in starts.items()]
        return acquire_new_lease(self._driver, ranges, self._new_lease_id)

    def renew(self, lease_id: int) -> HeldLease | None:
        """The lease under which the stream is inside a snapshot; None when it is gone. That does no
        harm: what it held of later batches was planned for none yet."""
        lease = self._renewed(lease_id)
        if lease is not None:
            self.release_on_commit(lease_id)
        return lease

    def _renewed(self, lease_id: int) -> HeldLease | None:
        try:
            return self._driver.renew_lease(lease_id)
        except ServerError as error:
            if error.status is not Status.RANGE_GONE:
                raise
            return None

    # Up to where the query is to end.

    def note_target(self, lease_id: int) -> None:
        """This lease has what there was when the query began that is to end there."""
        self._target_id = lease_id

    def holds_target(
        self, starts: Mapping[PartitionId, SeqNo], ends: Mapping[PartitionId, SeqNo]
    ) -> bool:
        """Whether a lease has all from where the stream stands to where its query is to end. None
        has it after a failover: what lies there now is another history's, or another node's, which
        has compacted as it liked."""
        if not self._target_id:
            return False
        lease = self._renewed(self._target_id)
        return lease is not None and holds_ranges(
            lease, ((partition, seq, ends[partition]) for partition, seq in starts.items())
        )

    def release_target(self) -> None:
        """What the stream has yet to read is pinned by a lease that begins where it stands, or
        there is nothing."""
        if self._target_id:
            target, self._target_id = self._target_id, 0
            self._driver.release_lease(target)

    # When they are released.

    def release_on_commit(self, lease_id: int) -> None:
        """A lease is to be released when the batches are committed that are planned so far."""
        self._ids.setdefault(lease_id)

    def note_committed(self, end: StreamOffset) -> None:
        """Nothing up to `end` is read again: its leases are not needed any more, but for the one
        that the stream is in."""
        lease_ids = list(self._ids)
        # If it is one of another process, what this one has acquired is for later batches.
        is_own = end.lease_id in self._ids
        finished_lease_ids = lease_ids[: lease_ids.index(end.lease_id)] if is_own else []
        if end.lease_id and not is_mid_snapshot(end.partitions):
            finished_lease_ids.append(end.lease_id)
        for lease_id in finished_lease_ids:
            self.release(lease_id)

    def release(self, lease_id: int) -> None:
        """Nothing that a lease pins is read any more; 0 for no lease."""
        if lease_id:
            self._ids.pop(lease_id, None)
            self._driver.release_lease(lease_id)
