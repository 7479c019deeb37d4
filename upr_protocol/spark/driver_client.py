"""What a driver asks the server about its bucket."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Final, Protocol, TypeVar

from upr_protocol.client import (
    BlockingClient,
    HeldLease,
    Item,
    PartitionInfo,
    PartitionNumbers,
)
from upr_protocol.client.core import calls
from upr_protocol.client.core.calls import NEW_LEASE_TRIES
from upr_protocol.client.options import new_lease_id
from upr_protocol.errors import BrokenError, ServerError, Status, UprError
from upr_protocol.failover import FailoverLog
from upr_protocol.hashing import partition_of
from upr_protocol.ids import Durability, HistoryId, PartitionId, SeqNo
from upr_protocol.limits import LEASE_TIME_TO_LIVE_S_MAX
from upr_protocol.spark.driver_connection import ANSWERS, DriverConnection
from upr_protocol.spark.errors import OptionError
from upr_protocol.spark.read_options import ReadOptions

T = TypeVar("T")

OWNER: Final = "spark"
"""The owner of its leases."""

_WAIT_S: Final = 30.0
"""How long the server may take to put on disk what it has, before it is asked again."""


class DriverClient(Protocol):
    """What a Spark driver asks of a bucket. What a method raises is a `PipelineError`."""

    def seqnos(self) -> Mapping[PartitionId, PartitionNumbers]:
        """How far each partition of the bucket is."""

    def has_partition(self, partition: PartitionId, log: FailoverLog) -> bool:
        """Whether the bucket has a partition, asked for or not, with any history of a log, as of
        the numbers that were asked for last. It has none of them if it was deleted and created
        again. An empty log stands for any history."""

    def partition_infos(self, *, refresh: bool = False) -> Mapping[PartitionId, PartitionInfo]:
        """Each partition's failover log, at least as new as the numbers that were asked for last,
        and its purge number, which is asked for again only with `refresh`."""

    def wait_until_persisted(self) -> Mapping[PartitionId, PartitionNumbers]:
        """Waits until all is on disk that the bucket has when this is called: a barrier. Gives how
        far each partition is then."""

    def seqnos_at_time(self, time: datetime) -> Mapping[int, int]:
        """The last number of each partition from before a time, of all that the bucket has when
        this is called: what is not on disk yet is waited for."""

    def acquire_lease(self, lease_id: int, ranges: Sequence[tuple[int, int, int]]) -> HeldLease:
        """Pins ranges; see `BlockingClient.acquire_lease`. Raises `ServerError` with `RANGE_GONE`
        or `ROLLBACK_NEEDED`."""

    def renew_lease(self, lease_id: int) -> HeldLease:
        """Pins the ranges of a lease for longer. Raises `ServerError` with `RANGE_GONE`."""

    def release_lease(self, lease_id: int) -> None:
        """Ends a lease, if it is there."""

    def put_position(self, lease_id: int, owner: str, seqs: Mapping[int, int]) -> None:
        """Puts where a consumer stands, by partition: a lease that holds nothing. A position that
        the server cannot list any more, because deletions behind it are forgotten, is left out."""

    def close(self) -> None:
        """Closes the connection."""


def holds_ranges(lease: HeldLease, ranges: Iterable[tuple[PartitionId, SeqNo, SeqNo]]) -> bool:
    """Whether a lease holds these ranges: partition, start (exclusive) and end of each."""
    leased_ranges = {leased.partition: leased for leased in lease.ranges}
    return all(
        partition in leased_ranges
        and leased_ranges[partition].start <= start
        and end <= leased_ranges[partition].end
        for partition, start, end in ranges
    )


def acquire_new_lease(
    driver: DriverClient,
    ranges: Sequence[tuple[int, int, int]],
    new_id: Callable[[], int] = new_lease_id,
) -> HeldLease:
    """Pins ranges under a lease that nobody asked for before. Partitions may move between nodes
    meanwhile: then what was granted is released, and another ID is drawn.

    Args:
        driver: Asks the bucket.
        ranges: See `BlockingClient.acquire_lease`.
        new_id: Draws a fresh non-zero random number.

    Raises:
        ServerError: `ROLLBACK_NEEDED`; `RANGE_GONE` if partitions moved at each try.
        PipelineError: A node refused, or was away for too long. What others granted is released.
    """
    failure: ServerError | None = None
    for _ in range(NEW_LEASE_TRIES):
        lease_id = new_id()
        is_granted = False
        try:
            lease = driver.acquire_lease(lease_id, ranges)
            is_granted = True
            return lease
        except ServerError as error:
            if error.status is not Status.RANGE_GONE:
                raise
            failure = error
        finally:
            if not is_granted:
                # Of several nodes, one may have granted its part.
                driver.release_lease(lease_id)
    assert failure is not None
    raise failure


class BucketDriverClient:
    """Asks a server; connects at the first question, and again after a lost connection.

    Args:
        options: Which bucket; and how long to go on trying.
    """

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._connection = DriverConnection(options.address, options.timeout_s)
        self._numbers: dict[PartitionId, PartitionNumbers] = {}
        self._history_ids: dict[PartitionId, HistoryId] = {}
        """The history of each partition, asked for or not."""
        self._logs: Mapping[PartitionId, FailoverLog] = {}
        """The logs of all partitions, as they were when one of them was needed last."""

    def matching_buckets(self) -> tuple[str, ...]:
        """The buckets whose whole names `bucketPattern` matches."""
        pattern = self._options.bucket_pattern
        assert pattern is not None
        buckets = self._connection.ask(lambda client: client.list_buckets())
        return tuple(sorted(info.name for info in buckets if pattern.fullmatch(info.name)))

    def get_items(self, keys: Sequence[str | bytes]) -> list[Item | None]:
        """The items at `keys`, in their order; None for each that is missing."""
        return self._connection.ask(lambda client: client.get_many(keys))

    def seqnos(self) -> Mapping[PartitionId, PartitionNumbers]:
        rows = self._connection.ask(lambda client: client.seqnos())
        self._history_ids = {row.partition: row.history_id for row in rows}
        selected: Sequence[int] = self._options.partitions
        if self._options.key is not None:
            selected = (partition_of(self._options.key, len(rows)),)
        self._numbers = {
            row.partition: row for row in rows if not selected or row.partition in selected
        }
        for partition in selected:
            if partition not in self._numbers:
                raise OptionError(
                    f"the option partitions names {partition}, and "
                    f"{self._options.address.bucket} has 0 to {len(rows) - 1}"
                )
        return self._numbers

    def has_partition(self, partition: PartitionId, log: FailoverLog) -> bool:
        current_id = self._history_ids.get(partition)
        if current_id is None:
            return False
        history_ids = {entry.history_id for entry in log}
        if not history_ids or current_id in history_ids:
            return True
        if not self._knows_log(partition):
            self._logs = self._fetch_logs()
            if not self._knows_log(partition):
                # What a connection knows of the logs is from when it was made.
                self._connection.close()
                self._logs = self._fetch_logs()
        server_log = self._logs.get(partition, FailoverLog())
        return any(entry.history_id in history_ids for entry in server_log)

    def _knows_log(self, partition: PartitionId) -> bool:
        log = self._logs.get(partition, FailoverLog())
        return log.current == self._history_ids[partition]

    def _fetch_logs(self) -> Mapping[PartitionId, FailoverLog]:
        infos = self._connection.ask(lambda client: client.partitions())
        return {info.partition: info.log for info in infos}

    def partition_infos(self, *, refresh: bool = False) -> Mapping[PartitionId, PartitionInfo]:
        infos = self._fetch_infos()
        if refresh or any(
            partition not in infos or infos[partition].log.current != numbers.history_id
            for partition, numbers in self._numbers.items()
        ):
            # What a connection knows of the logs is from when it was made.
            self._connection.close()
            infos = self._fetch_infos()
        return infos

    def _fetch_infos(self) -> Mapping[PartitionId, PartitionInfo]:
        infos = self._connection.ask(lambda client: client.partitions())
        return {info.partition: info for info in infos if info.partition in self._numbers}

    def wait_until_persisted(self) -> Mapping[PartitionId, PartitionNumbers]:
        # After a failover, the new node may have what was acknowledged in memory alone. All is
        # asked again then, after a pause.
        self._connection.ask(lambda _: self._await_all_persisted())
        return self.seqnos()

    def _await_all_persisted(self) -> None:
        """Waits until all is on disk that the bucket has now.

        Raises:
            BrokenError: A partition has begun another history meanwhile.
        """
        changed_partitions = [
            numbers.partition
            for numbers in self.seqnos().values()
            if numbers.persisted_seq < numbers.high_seq
            and not self._connection.ask(partial(_await_persisted, numbers))
        ]
        if changed_partitions:
            raise BrokenError(f"partition {changed_partitions[0]} has begun another history")

    def seqnos_at_time(self, time: datetime) -> Mapping[int, int]:
        partitions = tuple(self.wait_until_persisted())
        rows = self._connection.ask(lambda client: client.seqnos_at_time(time, partitions))
        return {row.partition: row.seq for row in rows}

    def acquire_lease(self, lease_id: int, ranges: Sequence[tuple[int, int, int]]) -> HeldLease:
        return self._connection.ask(
            lambda client: client.acquire_lease(
                ranges, time_to_live_s=self._options.lease_s, owner=OWNER, lease_id=lease_id
            )
        )

    def renew_lease(self, lease_id: int) -> HeldLease:
        return self._connection.ask(
            lambda client: client.renew_lease(lease_id, time_to_live_s=self._options.lease_s)
        )

    def release_lease(self, lease_id: int) -> None:
        # It would end by itself: that is not worth waiting for a server that is away.
        with suppress(UprError, TimeoutError):
            self._connection.ask_once(lambda client: client.release_lease(lease_id))

    def put_position(self, lease_id: int, owner: str, seqs: Mapping[int, int]) -> None:
        ranges = [(partition, seq, seq) for partition, seq in seqs.items()]
        lease = self._put(lease_id, owner, ranges)
        if lease is None or {
            (leased_range.partition, leased_range.start, leased_range.end)
            for leased_range in lease.ranges
        } != set(ranges):
            # A lease that exists keeps its ranges, and it may not have been released: the server
            # did not answer then.
            self._put(lease_id, owner, ranges)

    def _put(
        self, lease_id: int, owner: str, ranges: Sequence[tuple[int, int, int]]
    ) -> HeldLease | None:
        """The lease of a position. An older one is first released, if the server can be told to.
        None where it cannot list the position."""
        self.release_lease(lease_id)
        try:
            return self._connection.ask(
                lambda client: client.acquire_lease(
                    ranges,
                    time_to_live_s=LEASE_TIME_TO_LIVE_S_MAX,
                    owner=owner,
                    lease_id=lease_id,
                )
            )
        except ServerError as error:
            if error.status not in ANSWERS:
                raise
            return None

    def close(self) -> None:
        self._connection.close()


def _await_persisted(numbers: PartitionNumbers, client: BlockingClient) -> bool:
    """Waits until a number is on disk; False if the partition is in another history by then, in
    which the number is another's."""
    deadline = time.monotonic() + _WAIT_S
    call = calls.await_durable(
        numbers.partition,
        numbers.history_id,
        numbers.high_seq,
        Durability.PERSISTED,
        0,
        lambda: deadline - time.monotonic(),
    )
    try:
        client.ask(call)
    except ServerError as error:
        if error.status is not Status.HISTORY_CHANGED:
            raise
        return False
    return True
