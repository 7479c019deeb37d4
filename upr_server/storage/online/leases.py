"""Leases: ranges of numbers that compaction leaves as they are, and who holds them for how long.

Those that clients ask for survive a restart. One that is not renewed in time lapses: it holds
nothing back any more, but is remembered, and can be renewed for as long as nothing of its ranges
was dropped. Whoever reads a range under a lease therefore reads every time what was there when it
was granted, or is told that it is gone.

Backfills hold theirs for as long as they read, at most `BACKFILL_LEASE_S`: a consumer that has read
for so long begins again, behind what it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Final

import msgspec

from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import SEQ_MAX, PartitionId, SeqNo
from upr_protocol.limits import LEASE_RANGES_MAX, LEASE_TIME_TO_LIVE_S_MAX, LEASES_MAX
from upr_server.engine import Bucket
from upr_server.storage.api import Store
from upr_server.storage.calls import DeleteLeases, PutLease
from upr_server.storage.errors import DiskFullError
from upr_server.storage.records import LeaseRecord

BACKFILL_LEASE_S: Final = 3600.0
"""How long a backfill may hold its range."""

LAPSED_S: Final = 7 * 24 * 3600.0
"""How long a lapsed lease is remembered, unless others need its place."""

LAPSED_RANGES_MAX: Final = 64 * 1024
"""Ranges that all lapsed leases may have together: each is looked at in every step of a
compaction."""

GONE: Final = (
    "lease {:x} is not there, or compaction has dropped some of what it held after it lapsed"
)


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
        self._broken = 0

    def __len__(self) -> int:
        """Leases that clients hold."""
        return len(self._held())

    def _held(self) -> list[LeaseRecord]:
        now = self._time()
        return [lease for lease in self._leases.values() if lease.expires_at > now]

    def ranges(self) -> list[tuple[int, int, int]]:
        """(partition, start, end) of all that is held now."""
        held = [found for lease in self._held() for found in lease.ranges]
        return held + list(self._backfills.values())

    def lapsed(self) -> list[LeaseRecord]:
        """Those that hold nothing back, and are whole."""
        now = self._time()
        return [
            lease for lease in self._leases.values() if lease.expires_at <= now and lease.is_whole
        ]

    def mark_broken(self, lease_ids: Iterable[int]) -> None:
        """A compaction has dropped something of these; the disk has it already."""
        for lease_id in lease_ids:
            lease = self._leases[lease_id]
            self._leases[lease_id] = msgspec.structs.replace(lease, is_whole=False)
            self._broken += 1

    # Backfills.

    def hold_range(self, owner: object, partition: PartitionId, start: SeqNo, end: SeqNo) -> None:
        """Holds a range for a backfill until `release_range`. To be called under
        `Maintenance.paused`: a compaction under way has read the held ranges already."""
        self._backfills[owner] = (partition, start, end)

    def release_range(self, owner: object) -> None:
        """The backfill is over. Nothing happens when it held nothing."""
        self._backfills.pop(owner, None)

    # Clients.

    async def acquire(
        self,
        lease_id: int,
        owner: str,
        ranges: Sequence[tuple[int, int, int]],
        time_to_live_s: int,
    ) -> LeaseRecord:
        """A lease, on disk when this returns. To be called under `Maintenance.paused`.

        Args:
            lease_id: Its ID. If it is there already, it goes on for so long from now, with the
                ranges that it has. 0 for one that is drawn.
            owner: Who holds it.
            ranges: (partition, start, end), start exclusive. An end of `SEQ_MAX` is the snapshot
                end that is on disk.
            time_to_live_s: How long it lives without renewal.

        Raises:
            ServerError: `BAD_ARGUMENT`, `LIMIT_REACHED`, `RANGE_GONE`, or `ROLLBACK_NEEDED` when
                what is asked for is no longer whole.
        """
        if lease_id in self._leases:
            return await self.renew(lease_id, time_to_live_s)
        ranges = [
            (number, start, self._persisted(number) if end == SEQ_MAX else end)
            for number, start, end in ranges
        ]
        self._check(ranges, time_to_live_s)
        if len(self._leases) >= LEASES_MAX:
            await self._make_room()
        return await self._keep(
            LeaseRecord(
                lease_id or self._new_id(),
                owner,
                tuple(ranges),
                time_to_live_s,
                self._time() + time_to_live_s,
            )
        )

    def _persisted(self, partition: int) -> SeqNo:
        if partition >= len(self._bucket.partitions):
            raise ServerError(Status.BAD_ARGUMENT, f"there is no partition {partition}")
        return self._bucket.partitions[partition].manager.persistence.committed

    async def _make_room(self) -> None:
        """Forgets the lease that lapsed first."""
        first = min(self._leases.values(), key=attrgetter("expires_at"))
        if first.expires_at > self._time():
            raise ServerError(
                Status.LIMIT_REACHED, f"bucket {self._bucket.name} has {LEASES_MAX} leases"
            )
        await self._store.ask(DeleteLeases(self._bucket.name, [first.lease_id]))
        self._leases.pop(first.lease_id, None)

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
        if len({number for number, _, _ in ranges}) < len(ranges):
            raise ServerError(Status.BAD_ARGUMENT, "a lease has one range of a partition")
        for number, start, end in ranges:
            persisted = self._persisted(number)
            if not start <= end <= persisted:
                raise ServerError(
                    Status.BAD_ARGUMENT,
                    f"({start}, {end}] of partition {number} is no range that is on disk, where "
                    f"the last number is {persisted}",
                )
            partition = self._bucket.partitions[number]
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
            await self._store.ask(PutLease(self._bucket.name, lease))
        except DiskFullError:
            self._leases.pop(lease.lease_id, None)
            if before is not None:
                self._leases[lease.lease_id] = before
            raise
        return lease

    def get_whole(self, lease_id: int) -> LeaseRecord:
        """A lease that is whole, held or lapsed.

        Raises:
            ServerError: `RANGE_GONE`.
        """
        lease = self._leases.get(lease_id)
        if lease is None or not lease.is_whole:
            raise ServerError(Status.RANGE_GONE, GONE.format(lease_id))
        return lease

    def check_range(self, lease_id: int, partition: PartitionId, start: SeqNo, end: SeqNo) -> None:
        """Makes sure that (`start`, `end`] of a partition can be read under a lease.

        Raises:
            ServerError: `RANGE_GONE`, also when the lease is for something else.
        """
        lease = self.get_whole(lease_id)
        if not any(
            found == partition and low <= start and end <= high for found, low, high in lease.ranges
        ):
            raise ServerError(
                Status.RANGE_GONE,
                f"lease {lease_id:x} does not hold ({start}, {end}] of partition {partition}",
            )

    async def renew(self, lease_id: int, time_to_live_s: int) -> LeaseRecord:
        """A lease that goes on for so long from now. To be called under `Maintenance.paused`.

        Raises:
            ServerError: `RANGE_GONE` or `BAD_ARGUMENT`.
        """
        lease = self.get_whole(lease_id)
        if not 1 <= time_to_live_s <= LEASE_TIME_TO_LIVE_S_MAX:
            raise ServerError(
                Status.BAD_ARGUMENT, f"a lease lives 1 to {LEASE_TIME_TO_LIVE_S_MAX} seconds"
            )
        expires_at = self._time() + time_to_live_s
        return await self._keep(
            msgspec.structs.replace(lease, time_to_live_s=time_to_live_s, expires_at=expires_at)
        )

    async def release(self, lease_id: int) -> None:
        """Ends a lease, and forgets it. Raises `ServerError` when there is none."""
        if lease_id not in self._leases:
            raise ServerError(
                Status.BAD_ARGUMENT, f"there is no lease {lease_id:x}: it was released already"
            )
        await self._store.ask(DeleteLeases(self._bucket.name, [lease_id]))
        self._leases.pop(lease_id, None)

    async def delete_lapsed(self) -> None:
        """Forgets leases that lapsed long ago, and the first that did if they are too many."""
        now = self._time()
        lapsed = [lease for lease in self._leases.values() if lease.expires_at <= now]
        lapsed.sort(key=attrgetter("expires_at"), reverse=True)
        ranges = accumulate(len(lease.ranges) for lease in lapsed)
        over = [
            lease.lease_id
            for lease, total in zip(lapsed, ranges, strict=True)
            if lease.expires_at <= now - LAPSED_S or total > LAPSED_RANGES_MAX
        ]
        if over:
            await self._store.ask(DeleteLeases(self._bucket.name, over))
            # Not before: one that is left on disk, as that is full, must be known to compaction.
            for lease_id in over:
                self._leases.pop(lease_id, None)

    def statistics(self) -> dict[str, object]:
        """Figures, and every lease that a client holds."""
        now, held = self._time(), self._held()
        return {
            "held": len(held),
            "lapsed": len(self._leases) - len(held),
            "broken": self._broken,
            "backfills": len(self._backfills),
            "leases": [
                {
                    "id": f"{lease.lease_id:016x}",
                    "owner": lease.owner,
                    "partitions": len({found[0] for found in lease.ranges}),
                    "numbers": sum(end - start for _, start, end in lease.ranges),
                    "time_to_live_s": lease.time_to_live_s,
                    "expires_in_s": round(lease.expires_at - now, 1),
                }
                for lease in held
            ],
        }
