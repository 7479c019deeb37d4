"""Where a stream begins: at its earliest or latest rows, at numbers, or at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Final, TypeVar

import attrs

from upr_protocol.client import PartitionInfo, PartitionNumbers
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.spark.driver_client import DriverClient
from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.offset import PartitionOffset, StreamOffset
from upr_protocol.spark.partition_rollback import rollback_needed
from upr_protocol.spark.range_options import check_named

PLAN_TRIES: Final = 10
"""How often a plan is tried that failovers spoil. Mostly a failover takes longer than a plan."""

T = TypeVar("T")


class StreamStart:
    """Finds where a stream of one bucket begins.

    An offset names numbers and the histories that these are of. The two come in two answers, and a
    node may fail over in between.

    Args:
        driver: The server.
        bucket: The bucket's name.
        durable: Whether only what is on disk is read.
    """

    def __init__(self, driver: DriverClient, bucket: str, *, durable: bool) -> None:
        self._driver = driver
        self._bucket = bucket
        self._durable = durable

    def initial_offset(self, start: str | Mapping[int, int]) -> StreamOffset:
        """Where a new stream begins: at `earliest`, `latest`, or at numbers by partition.

        Raises:
            PipelineError: A partition does not have the number that is named.
        """
        if start == "earliest":
            return StreamOffset(self._bucket, {}, is_initial=True)
        seqnos, infos = self._in_one_history(lambda seqnos: seqnos)
        if not isinstance(start, str):
            check_named("startingOffsets", start, self._bucket, seqnos)
        partitions: dict[PartitionId, PartitionOffset] = {}
        for partition, numbers in seqnos.items():
            if isinstance(start, str):
                seq = numbers.persisted_seq if self._durable else numbers.high_seq
            else:
                seq = SeqNo(start.get(partition, 0))
            if seq > numbers.high_seq:
                raise PipelineError(
                    "UPR_OPTION",
                    f"startingOffsets names {seq} for partition {partition} of {self._bucket}, "
                    f"which has numbers up to {numbers.high_seq}",
                )
            if seq:
                partitions[partition] = PartitionOffset(infos[partition].log, seq, seq, seq)
        return StreamOffset(self._bucket, partitions, is_initial=True)

    def initial_offset_at_time(self, time: datetime) -> StreamOffset:
        """Where a new stream begins that has the changes since a time.

        Raises:
            PipelineError: The server cannot be asked.
        """
        return self.moved_to_time(StreamOffset(self._bucket, {}, is_initial=True), time)

    def moved_to_time(self, start: StreamOffset, time: datetime) -> StreamOffset:
        """The beginning of the stream, behind all rows from before `time` that there are now.

        Raises:
            PipelineError: The server cannot be asked.
        """

        def seqs_at_time(_: Mapping[PartitionId, PartitionNumbers]) -> Mapping[int, int]:
            seqs = self._driver.seqnos_at_time(time)
            # The logs are at least as new as these.
            self._driver.seqnos()
            return seqs

        seqs, infos = self._in_one_history(seqs_at_time)
        moved: dict[PartitionId, PartitionOffset] = {}
        for partition, info in infos.items():
            offset, seq = start.partition_offset(partition), SeqNo(seqs.get(partition, 0))
            # Nothing was read yet. So if the place was lost, there is nothing to undo, and the rows
            # since the time begin elsewhere.
            if seq > offset.seq or rollback_needed(offset, info) is not None:
                moved[partition] = PartitionOffset(info.log, seq, seq, seq)
        return attrs.evolve(start, partitions={**start.partitions, **moved})

    def _in_one_history(
        self, question: Callable[[Mapping[PartitionId, PartitionNumbers]], T]
    ) -> tuple[T, Mapping[PartitionId, PartitionInfo]]:
        """An answer with numbers, and the logs of the histories that these are numbers of. If a
        partition begins another history in between, all is asked again.

        Args:
            question: Asks, given how far each partition is.
        """
        for _ in range(PLAN_TRIES):
            seqnos = self._driver.seqnos()
            answer = question(seqnos)
            infos = self._driver.partition_infos()
            if all(
                partition in infos and infos[partition].log.current == numbers.history_id
                for partition, numbers in seqnos.items()
            ):
                return answer, infos
        raise failing_over_error()


def failing_over_error() -> PipelineError:
    """Each plan was spoiled by a failover."""
    return PipelineError(
        "UPR_SERVER",
        "partitions have begun other histories each time that a batch was planned, "
        f"{PLAN_TRIES} times: nodes fail over, or servers crash, again and again. Find out why, "
        "and run the query again",
    )
