"""Leases: ranges of sequence numbers that compaction leaves as they are, for a limited time.

The leases of clients survive a restart. A lease that is not renewed in time lapses. It protects
nothing then, but it is remembered, and its owner can renew it while nothing of its ranges was
dropped. So a client that reads a range under a lease gets each time what was there when the lease
was granted, or the error `RANGE_GONE`.

A lapsed lease may have to make room for others. Then its ID is remembered: under the same ID, a
client that has the ranges of the old lease would get others.

A lease that is asked for with empty ranges holds nothing: it says where its owner stands. A
consumer that has put such a lease is listed with its distance, also while it is not connected.

A backfill holds its range for as long as it reads, at most `BACKFILL_LEASE_S`. A consumer that has
read for so long begins another backfill from where it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from operator import attrgetter
from typing import Final

import msgspec

from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import SEQ_MAX, PartitionId, SeqNo
from upr_protocol.limits import (
    LEASE_OWNER_BYTES_MAX,
    LEASE_RANGES_MAX,
    LEASE_TIME_TO_LIVE_S_MAX,
    LEASED_RANGES_MAX,
    LEASES_MAX,
)
from upr_server.engine import Bucket
from upr_server.storage.api import Store
from upr_server.storage.calls import DeleteLeases, PutLease
from upr_server.storage.errors import DiskFullError
from upr_server.storage.records import LeaseRecord

BACKFILL_LEASE_S: Final = 3600.0
"""How long a backfill may hold its range."""

LAPSED_S: Final = 7 * 24 * 3600.0
"""How long a lapsed lease is remembered, unless others need its place."""

EVICTED_LEASES_MAX: Final = 8 * LEASES_MAX
"""How many leases are remembered by their ID alone, because others needed their places: each takes
some 100 bytes on disk, and a few hundred in memory. The oldest is forgotten first."""

STEP_RANGES: Final = 2 * 1024
"""Ranges that one step of the statistics looks at: below a millisecond."""

GONE: Final = (
    "lease {:016x} does not exist; or, after it lapsed, compaction has dropped some of its range, "
    "or others needed its place"
)


class LeaseBook:
    """The leases on one bucket.

    Args:
        store: The disk, where they are stored.
        bucket: The bucket.
        time: Seconds since 1970.
        new_id: Draws a fresh non-zero random number.
        leases: The leases that the disk has.
        damaged_ids: The IDs of those whose records on disk are damaged. They are lost.
    """

    def __init__(
        self,
        store: Store,
        bucket: Bucket,
        time: Callable[[], float],
        new_id: Callable[[], int],
        leases: Iterable[LeaseRecord] = (),
        damaged_ids: Iterable[int] = (),
    ) -> None:
        self._store = store
        self._bucket = bucket
        self._time = time
        self._new_id = new_id
        by_expiry = sorted(leases, key=attrgetter("expires_at"))
        self._leases = {lease.lease_id: lease for lease in by_expiry if lease.ranges}
        # Those that others needed the places of, in the order in which they lapsed: each was the
        # first of all leases to lapse. They have no ranges any more.
        self._evicted_leases = {lease.lease_id: lease for lease in by_expiry if not lease.ranges}
        self._damaged_ids = set(damaged_ids)
        """The IDs of damaged leases whose records are still on disk. They are to be deleted: if one
        could be read at another start, it would protect ranges of which compaction may have dropped
        something."""
        self._backfills: dict[object, tuple[PartitionId, SeqNo, SeqNo]] = {}
        self._broken_count = 0

    def __len__(self) -> int:
        """How many leases clients hold."""
        return len(self._unexpired())

    def _unexpired(self) -> list[LeaseRecord]:
        now = self._time()
        return [lease for lease in self._leases.values() if lease.expires_at > now]

    def held_ranges(self) -> list[tuple[int, int, int]]:
        """(partition, start, end) of all ranges that clients and backfills hold now."""
        # An empty range marks a position. Compaction would keep the tombstones above it. To take
        # the tuples as they are takes 2 ms for `LEASED_RANGES_MAX`; to make new ones took 12 ms.
        of_clients = [
            leased_range
            for lease in self._unexpired()
            for leased_range in lease.ranges
            if leased_range[1] < leased_range[2]
        ]
        return of_clients + list(self._backfills.values())

    def lapsed_leases(self) -> list[LeaseRecord]:
        """The leases that have lapsed, and are whole: they can be renewed."""
        now = self._time()
        return [
            lease for lease in self._leases.values() if lease.expires_at <= now and lease.is_whole
        ]

    def mark_broken(self, lease_ids: Iterable[int]) -> None:
        """Marks leases of which something was dropped; on disk they are marked already."""
        for lease_id in lease_ids:
            lease = self._leases.get(lease_id)
            if lease is None:
                continue  # a damaged record of an evicted lease
            self._leases[lease_id] = msgspec.structs.replace(lease, is_whole=False)
            self._broken_count += 1

    # Backfills.

    def hold_range(self, owner: object, partition: PartitionId, start: SeqNo, end: SeqNo) -> None:
        """Holds a range for a backfill until `release_range`. To be called under
        `Maintenance.paused`: a compaction under way has read the held ranges already."""
        self._backfills[owner] = (partition, start, end)

    def release_range(self, owner: object) -> None:
        """Releases a backfill's range, if it holds one."""
        self._backfills.pop(owner, None)

    # Clients.

    async def acquire(
        self,
        lease_id: int,
        owner: str,
        ranges: Sequence[tuple[int, int, int]],
        time_to_live_s: int,
    ) -> LeaseRecord:
        """Grants a lease. It is on disk when this returns. To be called under `Maintenance.paused`:
        otherwise a step of compaction might drop something of it meanwhile.

        Args:
            lease_id: Its ID; 0 to draw one. A lease that exists already is renewed, with the ranges
                that it has.
            owner: The name of the client that holds it: printable, and at most 200 bytes.
            ranges: (partition, start, end), start exclusive. An end of `SEQ_MAX` stands for the
                persisted snapshot end.
            time_to_live_s: How long it lives without renewal.

        Raises:
            ServerError: `BAD_ARGUMENT`, `LIMIT_REACHED`, `RANGE_GONE`, or `ROLLBACK_NEEDED` if the
                range has lost tombstones already.
        """
        if lease_id in self._leases or lease_id in self._evicted_leases:
            return await self.renew(lease_id, time_to_live_s)
        # A reader that reads up to what there is, and finds nothing, is not at a position.
        is_position = all(start == end for _, start, end in ranges)
        ranges = [
            (partition, start, self._persisted_end(partition) if end == SEQ_MAX else end)
            for partition, start, end in ranges
        ]
        self._check(ranges, time_to_live_s)
        _check_owner(owner)
        while self._is_full(len(ranges)):
            await self._evict_first_lapsed()
        return await self._put(
            LeaseRecord(
                lease_id or self._new_id(),
                owner,
                tuple(ranges),
                time_to_live_s,
                self._time() + time_to_live_s,
                is_position=is_position,
            )
        )

    def _persisted_end(self, partition: int) -> SeqNo:
        if partition >= len(self._bucket.partitions):
            raise ServerError(Status.BAD_ARGUMENT, f"partition {partition} does not exist")
        return self._bucket.partitions[partition].manager.persistence.committed_seq

    def _is_full(self, range_count: int) -> bool:
        """Whether there is no room for one more lease, of so many ranges."""
        leased_count = sum(len(lease.ranges) for lease in self._leases.values())
        return len(self._leases) >= LEASES_MAX or leased_count + range_count > LEASED_RANGES_MAX

    async def _evict_first_lapsed(self) -> None:
        lease = min(self._leases.values(), key=attrgetter("expires_at"))
        if lease.expires_at > self._time():
            raise ServerError(
                Status.LIMIT_REACHED,
                f"bucket {self._bucket.name} has {len(self._leases)} leases already, and may have "
                f"{LEASES_MAX} with {LEASED_RANGES_MAX} ranges in all; release one first",
            )
        if lease.is_position:
            # Under its ID its owner puts other positions.
            await self._store.ask(DeleteLeases(self._bucket.name, [lease.lease_id]))
            self._leases.pop(lease.lease_id, None)
            return
        evicted_lease = msgspec.structs.replace(lease, owner="", ranges=(), is_whole=False)
        await self._store.ask(PutLease(self._bucket.name, evicted_lease))
        self._leases.pop(lease.lease_id, None)
        self._evicted_leases[lease.lease_id] = evicted_lease
        if len(self._evicted_leases) > EVICTED_LEASES_MAX:
            oldest_id = next(iter(self._evicted_leases))
            await self._store.ask(DeleteLeases(self._bucket.name, [oldest_id]))
            self._evicted_leases.pop(oldest_id, None)

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
        if len({partition for partition, _, _ in ranges}) < len(ranges):
            raise ServerError(Status.BAD_ARGUMENT, "a lease has at most one range of a partition")
        for partition, start, end in ranges:
            persisted_end = self._persisted_end(partition)
            if not start <= end <= persisted_end:
                raise ServerError(
                    Status.BAD_ARGUMENT,
                    f"({start}, {end}] of partition {partition} is not a range on disk; end it at "
                    f"{persisted_end} or below",
                )
            purge_seq = self._bucket.partitions[partition].purge_seq
            # From 0 on nothing is missed: a reader without any key lacks no deletion.
            if 0 < start < purge_seq:
                raise ServerError(
                    Status.ROLLBACK_NEEDED,
                    f"the server has removed deletions of partition {partition} up to {purge_seq}; "
                    "start the range there or above, or at 0",
                )

    async def _put(self, lease: LeaseRecord) -> LeaseRecord:
        # It protects its ranges from now on, and its owner hears of it when it is on disk. The
        # other way round, compaction could break it in between.
        previous_lease = self._leases.get(lease.lease_id)
        self._leases[lease.lease_id] = lease
        # It takes the place of the damaged record, also if who asks for it leaves meanwhile.
        was_damaged = lease.lease_id in self._damaged_ids
        self._damaged_ids.discard(lease.lease_id)
        try:
            await self._store.ask(PutLease(self._bucket.name, lease))
        except DiskFullError:
            self._leases.pop(lease.lease_id, None)
            if previous_lease is not None:
                self._leases[lease.lease_id] = previous_lease
            if was_damaged:
                self._damaged_ids.add(lease.lease_id)
            raise
        return lease

    def get_whole(self, lease_id: int) -> LeaseRecord:
        """A whole lease, lapsed or not.

        Raises:
            ServerError: `RANGE_GONE`: it does not exist, or is broken.
        """
        lease = self._leases.get(lease_id)
        if lease is None or not lease.is_whole:
            raise ServerError(Status.RANGE_GONE, GONE.format(lease_id))
        return lease

    def check_range(self, lease_id: int, partition: PartitionId, start: SeqNo, end: SeqNo) -> None:
        """Checks that (`start`, `end`] of a partition can be read under a lease.

        Raises:
            ServerError: `RANGE_GONE`, also if the lease is for another range.
        """
        lease = self.get_whole(lease_id)
        if not any(
            leased_partition == partition and low <= start and end <= high
            for leased_partition, low, high in lease.ranges
        ):
            raise ServerError(
                Status.RANGE_GONE,
                f"lease {lease_id:016x} does not hold ({start}, {end}] of partition {partition}",
            )

    async def renew(self, lease_id: int, time_to_live_s: int) -> LeaseRecord:
        """Has a lease live for so long from now. To be called under `Maintenance.paused`.

        Raises:
            ServerError: `RANGE_GONE` or `BAD_ARGUMENT`.
        """
        lease = self.get_whole(lease_id)
        if not 1 <= time_to_live_s <= LEASE_TIME_TO_LIVE_S_MAX:
            raise ServerError(
                Status.BAD_ARGUMENT, f"a lease lives 1 to {LEASE_TIME_TO_LIVE_S_MAX} seconds"
            )
        expires_at = self._time() + time_to_live_s
        return await self._put(
            msgspec.structs.replace(lease, time_to_live_s=time_to_live_s, expires_at=expires_at)
        )

    async def release(self, lease_id: int) -> None:
        """Ends and deletes a lease.

        Raises:
            ServerError: `BAD_ARGUMENT`: it does not exist.
        """
        if lease_id not in self._leases:
            raise ServerError(
                Status.BAD_ARGUMENT,
                f"lease {lease_id:016x} does not exist: it was released or has expired",
            )
        await self._store.ask(DeleteLeases(self._bucket.name, [lease_id]))
        self._leases.pop(lease_id, None)

    def limit_times_left(self) -> None:
        """Has no lease live for longer from now than its owner asked for: the clock may have been
        set back since. On disk the lease keeps its time, and a start does the same again."""
        now = self._time()
        for lease in list(self._leases.values()):
            expires_at = now + lease.time_to_live_s
            if lease.expires_at > expires_at:
                self._leases[lease.lease_id] = msgspec.structs.replace(lease, expires_at=expires_at)

    async def delete_lapsed(self) -> None:
        """Deletes leases that lapsed long ago, and damaged ones, before compaction goes on."""
        lapsed_before = self._time() - LAPSED_S
        expired_ids = [
            *sorted(self._damaged_ids),
            *(
                lease.lease_id
                for lease in self._leases.values()
                if lease.expires_at <= lapsed_before
            ),
        ]
        for lease in self._evicted_leases.values():
            if lease.expires_at > lapsed_before:
                break
            expired_ids.append(lease.lease_id)
        if expired_ids:
            await self._store.ask(DeleteLeases(self._bucket.name, expired_ids))
            # They are forgotten only now: if the disk is full they stay on disk, and compaction
            # must know of them.
            for lease_id in expired_ids:
                self._leases.pop(lease_id, None)
                self._evicted_leases.pop(lease_id, None)
            self._damaged_ids.clear()

    def statistics(self) -> dict[str, object]:
        """How many leases there are, of each kind."""
        held_count = len(self)
        return {
            "held": held_count,
            "lapsed": len(self._leases) - held_count,
            "broken": self._broken_count,
            "backfills": len(self._backfills),
        }

    def list_held(self) -> Generator[None, None, list[dict[str, object]]]:
        """Every lease that a client holds. In steps, between which others may have their turn."""
        now = self._time()

        def row(lease: LeaseRecord) -> dict[str, object]:
            return {
                "id": f"{lease.lease_id:016x}",
                "owner": lease.owner[:LEASE_OWNER_BYTES_MAX],  # an older server took any
                "partitions": len(lease.ranges),
                "numbers": sum([end - start for _, start, end in lease.ranges]),
                "time_to_live_s": lease.time_to_live_s,
                "expires_in_s": round(lease.expires_at - now, 1),
            }

        return _rows_in_steps(self._unexpired(), row)

    def list_consumers(self) -> Generator[None, None, list[dict[str, object]]]:
        """The newest position of each consumer that has put one, and its distance. In steps,
        between which others may have their turn."""
        now = self._time()
        highs = [partition.high_seq for partition in self._bucket.partitions]
        positions = [lease for lease in self._leases.values() if lease.is_position]
        newest = {lease.owner: lease for lease in sorted(positions, key=attrgetter("expires_at"))}

        def row(lease: LeaseRecord) -> dict[str, object]:
            numbers_behind = [highs[partition] - start for partition, start, _ in lease.ranges]
            return {
                "name": lease.owner[:LEASE_OWNER_BYTES_MAX],
                "id": f"{lease.lease_id:016x}",
                "partitions": len(lease.ranges),
                "numbers_behind": sum([max(0, numbers) for numbers in numbers_behind]),
                "position_age_s": round(now + lease.time_to_live_s - lease.expires_at, 1),
            }

        return _rows_in_steps(sorted(newest.values(), key=attrgetter("owner")), row)


def _rows_in_steps(
    leases: Iterable[LeaseRecord], row: Callable[[LeaseRecord], dict[str, object]]
) -> Generator[None, None, list[dict[str, object]]]:
    rows: list[dict[str, object]] = []
    range_count = 0
    for lease in leases:
        rows.append(row(lease))
        range_count += len(lease.ranges)
        if range_count >= STEP_RANGES:
            range_count = 0
            yield
    return rows


def _check_owner(owner: str) -> None:
    if len(owner.encode()) > LEASE_OWNER_BYTES_MAX or not owner.isprintable():
        raise ServerError(
            Status.BAD_ARGUMENT,
            f"the owner of a lease has at most {LEASE_OWNER_BYTES_MAX} bytes, and no control, "
            "format or separator characters",
        )
