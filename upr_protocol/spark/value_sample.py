"""A sample of a bucket's values, from which their fields are inferred."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from pyspark.sql.types import StructType

from upr_protocol.client import BlockingConsumer, ChunkReceived, ResumeState
from upr_protocol.errors import UprError
from upr_protocol.failover import Position
from upr_protocol.ids import Operation, PartitionId, SeqNo
from upr_protocol.limits import WINDOW_BYTES_MIN
from upr_protocol.spark.batch_reader import options_of_buckets
from upr_protocol.spark.driver_client import BucketDriverClient
from upr_protocol.spark.driver_connection import DRIVER
from upr_protocol.spark.errors import PipelineError, as_pipeline_error
from upr_protocol.spark.options import idle_interval_s
from upr_protocol.spark.read_options import ReadOptions
from upr_protocol.spark.schema import schema_with_fields
from upr_protocol.spark.value_schema import struct_of

PARTITIONS_READ: Final = 8
"""Partitions that a sample is from. Keys are in any partition by their hash, so each partition is a
sample already; several, as one may happen to have little."""


def inferred_schema(options: ReadOptions) -> StructType:
    """The columns of a read whose values become structs of the fields that a sample has.

    Raises:
        PipelineError: The server cannot be asked; or no value of the sample is a JSON object.
    """
    struct = struct_of(sample(options_of_buckets(options)))
    if struct is None:
        raise PipelineError(
            "UPR_NO_SAMPLE",
            f"none of the newest {options.infer_sample} values in {options.address} is a JSON "
            "object with a field that can be a column. Say the fields yourself: "
            '.option("valueSchema", "seats INT, model STRING")',
        )
    return schema_with_fields(options, struct)


def sample(buckets: Sequence[ReadOptions]) -> Iterator[bytes]:
    """The values of `infer_sample` of the newest changes, the buckets together, or fewer; of those
    that a read of these options has, without regard to its bounds. All together they may be longer
    than memory.

    Args:
        buckets: The options of each bucket.

    Raises:
        PipelineError: The server cannot be asked.
    """
    count = 0
    for index, options in enumerate(buckets):
        share = (options.infer_sample - count) // (len(buckets) - index)
        for value in islice(_newest_values(options, share), share):
            count += 1
            yield value


def _starts(options: ReadOptions, count: int) -> dict[PartitionId, Position]:
    """Where to read at least so many values from, if there are; nowhere if there are none."""
    driver = BucketDriverClient(options)
    try:
        seqnos, infos = driver.seqnos(), driver.partition_infos()
    finally:
        driver.close()
    nonempty_partitions = [partition for partition, numbers in seqnos.items() if numbers.high_seq]
    chosen_partitions = (
        nonempty_partitions[:PARTITIONS_READ] if _reads_all_keys(options) else nonempty_partitions
    )
    if not chosen_partitions or not count:
        return {}
    share = -(-count // len(chosen_partitions)) if _reads_all_keys(options) else SeqNo(1 << 62)
    starts = {
        partition: SeqNo(max(0, seqnos[partition].high_seq - share))
        for partition in chosen_partitions
    }
    return {
        partition: Position(infos[partition].log, start, start, None)
        for partition, start in starts.items()
    }


def _newest_values(options: ReadOptions, count: int) -> Iterator[bytes]:
    """At least so many values, if there are."""
    positions = _starts(options, count)
    if not positions:
        return
    try:
        with BlockingConsumer(
            options.address,
            partitions=sorted(positions),
            resume=ResumeState(options.address.bucket, positions),
            # The end is not the numbers above: after a crash the server may have yet to reach them.
            end="now",
            key_prefix=options.key or options.key_prefix,
            window_bytes=WINDOW_BYTES_MIN,
            identity=DRIVER,
            retry_timeout_s=options.timeout_s,
            idle_interval_s=idle_interval_s(options.timeout_s),
        ) as consumer:
            consumer.connect()
            for event in consumer:
                if isinstance(event, ChunkReceived):
                    for mutation in event.chunk:
                        if mutation.op is Operation.SET and options.key in (None, mutation.key):
                            yield mutation.value
    except UprError as error:
        raise as_pipeline_error(error, options.address, options.timeout_s) from error


def _reads_all_keys(options: ReadOptions) -> bool:
    return options.key is None and not options.key_prefix
