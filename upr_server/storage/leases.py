"""Leases: ranges of numbers that compaction leaves readable, and who holds them for how long.

Those that clients ask for survive a restart, and expire unless they are renewed. Backfills hold
theirs for as long as they read, at most `BACKFILL_LEASE_S`: a consumer that has read for so long
begins again, behind what it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.limits import LEASE_RANGES_MAX, LEASE_TIME_TO_LIVE_S_MAX, LEASES_MAX
from upr_server.engine import Bucket
from upr_server.storage.errors import DiskFullError
from upr_server.storage.port import Store
from upr_server.storage.records import LeaseRecord

BACKFILL_LEASE_S: Final = 3600.0
"""How long a backfill may hold its range."""


class LeaseBook:
    """The leases on one bucket.

    Args:
        store: Where they are kept.
        bucket: The bucket.
        time: Seconds since 1970.
        new_id: Draws a fresh non-zero random number.
        leases: Those that were there.
    """

    def __init__(
        self,
        store: Store,
        bucket: Bucket,
        time: Callable[[], float],
        new_id: Callable[[], int],
        leases: Iterable[LeaseRecord] = (),
    ) -> None:
        self._store = store
        self._bucket = bucket
        self._time = time
        self._new_id = new_id
        self._leases = {lease.lease_id: lease for lease in leases}
        self._backfills: dict[object, tuple[PartitionId, SeqNo, SeqNo]] = {}
        self._expired = 0

    def __len__(self) -> int:
        """Leases that clients hold."""
        return len(self._leases)

    def ranges(self) -> list[tuple[int, int, int]]:
        """(partition, start, end) of all that is held now."""
        now = self._time()
        held = [
            found
            for lease in self._leases.values()
            if lease.expires_at > now
            for found in lease.ranges
        ]
        return held + list(self._backfills.values())

    # Backfills.

    def hold(self, owner: object, partition: PartitionId, start: SeqNo, end: SeqNo) -> None:
        """A backfill holds a range until `let_go`. Not to be called while a compaction is under
        way: see `Upkeeper.quiet`."""
        self._backfills[owner] = (partition, start, end)

    def let_go(self, owner: object) -> None:
        """The backfill is over. Nothing happens when it held nothing."""
        self._backfills.pop(owner, None)

    # Clients.

    async def acquire(
        self, owner: str, ranges: Sequence[tuple[int, int, int]], time_to_live_s: int
    ) -> LeaseRecord:
        """A new lease, on disk when this returns. To be called under `Upkeeper.quiet`.

        Raises:
            ServerError: `BAD_ARGUMENT`, `LIMIT_REACHED`, or `ROLLBACK_NEEDED` when what is asked
                for is no longer whole.
        """
        self._check(ranges, time_to_live_s)
        if len(self._leases) >= LEASES_MAX:
            raise ServerError(
                Status.LIMIT_REACHED, f"bucket {self._bucket.name} has {LEASES_MAX} leases"
            )
        return await self._keep(
            LeaseRecord(
                self._new_id(),
                owner,
                tuple(ranges),
                time_to_live_s,
                self._time() + time_to_live_s,
            )
        )

    def _check(self, ranges: Sequence[tuple[int, int, int]], time_to_live_s: int) -> None:
        if not 1 <= len(ranges) <= LEASE_RANGES_MAX:
            raise ServerError(
                Status.BAD_ARGUMENT,
                f"a lease has 1 to {LEASE_RANGES_MAX} ranges, not {len(ranges)}",
            )
        if not 1 <= time_to_live_s <= LEASE_TIME_TO_LIVE_S_MAX:
            raise ServerError(
                Status.BAD_ARGUMENT,
                f"a lease lives 1 to {LEASE_TIME_TO_LIVE_S_MAX} seconds, not {time_to_live_s}",
            )
        for number, start, end in ranges:
            if number >= len(self._bucket.partitions):
                raise ServerError(Status.BAD_ARGUMENT, f"there is no partition {number}")
            partition = self._bucket.partitions[number]
            if not start <= end <= partition.manager.persistence.committed:
                raise ServerError(
                    Status.BAD_ARGUMENT,
                    f"({start}, {end}] of partition {number} is no range that is on disk, where "
                    f"the last number is {partition.manager.persistence.committed}",
                )
            if 0 < start < partition.purge_seq:
                raise ServerError(
                    Status.ROLLBACK_NEEDED,
                    f"partition {number} has forgotten deletions up to {partition.purge_seq}",
                )

    async def _keep(self, lease: LeaseRecord) -> LeaseRecord:
        # It holds from now on, and its owner hears of it when it is on disk.
        before = self._leases.get(lease.lease_id)
        self._leases[lease.lease_id] = lease
        try:
            await self._store.put_lease(self._bucket.name, lease)
        except DiskFullError:
            self._leases.pop(lease.lease_id, None)
            if before is not None:
                self._leases[lease.lease_id] = before
            raise
        return lease

    def _held(self, lease_id: int) -> LeaseRecord:
        lease = self._leases.get(lease_id)
        if lease is None or lease.expires_at <= self._time():
            raise ServerError(
                Status.BAD_ARGUMENT, f"there is no lease {lease_id:x}: it was released, or expired"
            )
        return lease

    async def renew(self, lease_id: int, time_to_live_s: int) -> LeaseRecord:
        """A lease that goes on for so long from now. Raises `ServerError`."""
        lease = self._held(lease_id)
        if not 1 <= time_to_live_s <= LEASE_TIME_TO_LIVE_S_MAX:
            raise ServerError(
                Status.BAD_ARGUMENT, f"a lease lives 1 to {LEASE_TIME_TO_LIVE_S_MAX} seconds"
            )
        expires_at = self._time() + time_to_live_s
        return await self._keep(
            msgspec.structs.replace(lease, time_to_live_s=time_to_live_s, expires_at=expires_at)
        )

    async def release(self, lease_id: int) -> None:
        """Ends a lease. Raises `ServerError` when there is none."""
        self._held(lease_id)
        await self._store.delete_leases(self._bucket.name, [lease_id])
        self._leases.pop(lease_id, None)

    async def expire(self) -> None:
        """Forgets leases whose time is over."""
        now = self._time()
        over = [lease.lease_id for lease in self._leases.values() if lease.expires_at <= now]
        if over:
            self._expired += len(over)
            for lease_id in over:
                del self._leases[lease_id]
            await self._store.delete_leases(self._bucket.name, over)

    def statistics(self) -> dict[str, object]:
        """Figures, and every lease that a client holds."""
        now = self._time()
        return {
            "held": len(self._leases),
            "backfills": len(self._backfills),
            "expired": self._expired,
            "leases": [
                {
                    "id": f"{lease.lease_id:016x}",
                    "owner": lease.owner,
                    "partitions": len({found[0] for found in lease.ranges}),
                    "numbers": sum(end - start for _, start, end in lease.ranges),
                    "time_to_live_s": lease.time_to_live_s,
                    "expires_in_s": round(lease.expires_at - now, 1),
                }
                for lease in self._leases.values()
            ],
        }
