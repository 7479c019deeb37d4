"""Whether a bucket still has the items that were looked up in it."""

from __future__ import annotations

from collections.abc import Callable

from upr_protocol.client import Address, PartitionInfo
from upr_protocol.failover import Position, RollBack, decide_start
from upr_protocol.ids import HistoryId, PartitionId, SeqNo
from upr_protocol.spark.driver_client import DriverClient
from upr_protocol.spark.errors import PipelineError


class LookupHistory:
    """Follows the histories of a bucket whose items are looked up. A stream notices only the loss
    of what its batches had; an item that is looked up may be newer, and in memory alone.

    Args:
        address: The bucket.
        connect: Connects to its server. Each connection is closed again.
    """

    def __init__(self, address: Address, connect: Callable[[], DriverClient]) -> None:
        self._address = address
        self._connect = connect
        self._history_ids: dict[PartitionId, HistoryId] = {}
        """By partition, the history at the beginning of the lookup."""
        self._positions: dict[PartitionId, Position] = {}
        """By partition, where it was after the last lookup, on disk."""

    def begin_lookup(self) -> None:
        """A lookup is to begin: makes sure that the bucket still has what was looked up before.

        Raises:
            PipelineError: `UPR_ROLLBACK`: it lost some of it. Or the server cannot be asked.
        """
        driver = self._connect()
        try:
            seqnos = driver.seqnos()
            infos = driver.partition_infos() if self._positions else {}
        finally:
            driver.close()
        for partition, position in self._positions.items():
            info = infos.get(partition)
            if info is None or has_lost(info, position):
                raise PipelineError(
                    "UPR_ROLLBACK",
                    f"{self._address}: partition {partition} has lost changes that were joined: "
                    "begin with a new checkpoint and an empty target",
                )
        self._history_ids = {partition: numbers.history_id for partition, numbers in seqnos.items()}

    def finish_lookup(self) -> bool:
        """A lookup is over: waits until all is on disk that it may have read, and notes where that
        is.

        Returns:
            Whether all partitions still have the history in which the lookup began. If not, a crash
            may have undone what was read: nothing is noted, and it is to be looked up again.

        Raises:
            PipelineError: The server cannot be asked.
        """
        driver = self._connect()
        try:
            seqnos, infos = driver.wait_until_persisted(), driver.partition_infos()
        finally:
            driver.close()
        if self._history_ids != {
            partition: numbers.history_id for partition, numbers in seqnos.items()
        }:
            return False
        # The logs may be newer than the numbers.
        if any(
            infos[partition].log.current != numbers.history_id
            for partition, numbers in seqnos.items()
        ):
            return False
        for partition, numbers in seqnos.items():
            seq = numbers.persisted_seq
            self._positions[partition] = Position(infos[partition].log, seq, seq, None)
        return True


def has_lost(info: PartitionInfo, position: Position) -> bool:
    """Whether a partition no longer has all that was read of it up to a position."""
    high = max(info.high_seq, position.highest_received)
    return isinstance(decide_start(info.log, high, SeqNo(0), position), RollBack)
