"""The options of a read or a stream."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Self

import attrs

from upr_protocol.client import Address
from upr_protocol.limits import (
    KEY_BYTES_MAX,
    LEASE_OWNER_BYTES_MAX,
    LEASE_TIME_TO_LIVE_S_MAX,
)
from upr_protocol.spark.batch_delay import BatchDelay
from upr_protocol.spark.errors import OptionError
from upr_protocol.spark.index_query import IndexQuery, index_query
from upr_protocol.spark.options import SourceOptions
from upr_protocol.spark.range_options import offsets_option, partitions_option, time_option
from upr_protocol.spark.read_tasks import TASKS_MAX

LEASE_S_DEFAULT: Final = 3600
"""How long a range stays pinned though nobody renews it: longer than most batches take."""

DELAY_S_DEFAULT: Final = 900.0
"""Kafka's own: `maxTriggerDelay` of 15 minutes."""

TASK_BYTES_DEFAULT: Final = 64 * 1024 * 1024
"""A task costs Spark some 50 ms, whatever it does: this much takes it longer."""

_OF_STREAMS: Final = (
    *("onRollback", "consumerName", "minOffsetsPerTrigger", "maxTriggerDelay"),
    *("maxOffsetsPerTrigger", "maxBytesPerTrigger"),
)
_OF_READS: Final = (
    *("deduplicate", "endingOffsets", "endingTimestamp"),
    *("index", "indexer", "indexPrefix", "indexFrom", "indexTo"),
)

INFER: Final = "infer"
"""The `value_schema` that is to be inferred."""

INFER_SAMPLE_DEFAULT: Final = 1000


@attrs.frozen(kw_only=True)
class ReadOptions:
    """Options of a read or a stream, as docs/spark.md describes them.

    Attributes:
        address: Server and bucket; without the bucket, where several are read.
        buckets: The names of several buckets that are read.
        bucket_pattern: Or a pattern: those are read whose whole name it matches.
        partitions: The partitions to read; empty for all.
        key: The only key whose rows are read; None for every key.
        key_prefix: How the keys begin whose rows are read.
        start: Where to start: `earliest`, `latest`, or a number for each partition named.
        start_time: Instead: the time since which changes are read.
        bucket_starts: Of several buckets, numbers where to start, by bucket and partition.
        end: Where a read ends: `latest`, or a number for each partition named.
        end_time: Instead: the time before which changes are read.
        bucket_ends: Of several buckets, numbers where to end, by bucket and partition.
        index: Instead of all changes, the items that these entries of an index are of.
        metadata: Whether the columns are all there are, or the few that most need.
        include_value: Whether values are among them.
        value_schema: The fields of the values, which are read as structs: a list of columns as in
            SQL, or `infer`; empty to read values as bytes.
        infer_sample: How many values are looked at to infer the fields.
        deduplicate: Whether a read has only the newest row of each key.
        durable: Whether only what is on disk is read. What is not may be undone by a crash.
        marks_rollback: Whether a rollback becomes a row; if not, it fails the query.
        rewinds: Whether a partition that rolls back goes on from the end of an earlier batch; if
            not, it starts again at 0.
        fails_on_data_loss: Whether a range that is not whole any more fails the query.
        consumer_name: The name under which the server lists how far the stream is; empty for none.
        min_rows: Sequence numbers that a batch of a stream waits for; None for no wait.
        delay_s: How long it waits for them, at most.
        max_rows: Sequence numbers in one batch of a stream, at most; None for any number.
        max_bytes: Bytes in one batch of a stream, about; None for any number.
        task_bytes: Bytes that one task reads, about.
        min_tasks: Tasks there are at least, if there is enough to read.
        lease_s: How long ranges stay pinned though nobody renews them.
        timeout_s: How long to go on without a server.
    """

    address: Address
    buckets: tuple[str, ...]
    bucket_pattern: re.Pattern[str] | None
    partitions: tuple[int, ...]
    key: bytes | None
    key_prefix: bytes
    start: str | Mapping[int, int]
    start_time: datetime | None
    bucket_starts: Mapping[str, Mapping[int, int]]
    end: str | Mapping[int, int] = "latest"
    end_time: datetime | None = None
    bucket_ends: Mapping[str, Mapping[int, int]] = attrs.field(factory=dict)
    index: IndexQuery | None = None
    metadata: bool
    include_value: bool
    value_schema: str
    infer_sample: int
    deduplicate: bool = False
    durable: bool
    marks_rollback: bool = False
    rewinds: bool = False
    fails_on_data_loss: bool
    consumer_name: str = ""
    min_rows: int | None = None
    delay_s: float = DELAY_S_DEFAULT
    max_rows: int | None = None
    max_bytes: int | None = None
    task_bytes: int
    min_tasks: int
    lease_s: int
    timeout_s: int

    @classmethod
    def parse(cls, texts: Mapping[str, str], *, streaming: bool | None = False) -> Self:
        """Takes them out of what Spark hands over.

        Args:
            texts: By name, in whatever case.
            streaming: Whether a stream is asked for, or a read; None when that is not known yet.

        Raises:
            OptionError: One is missing, unknown, or wrong.
        """
        options = SourceOptions(texts)
        if streaming:
            options.refuse(_OF_READS, "is for a read, and this is a stream: leave it out")
        elif streaming is False:
            options.refuse(_OF_STREAMS, "is for a stream, and this is a read: leave it out")
        buckets, bucket_pattern = _buckets(options)
        are_several = bool(buckets or bucket_pattern)
        address = options.address(has_bucket=not are_several)
        partitions, key, key_prefix = _keys(options)
        start, bucket_starts = offsets_option(
            options, "startingOffsets", "earliest", ("earliest", "latest"), by_bucket=are_several
        )
        include_value = options.flag("includeValue", default=True)
        value_schema = _value_schema(options, include_value=include_value)
        durable = options.choice("stability", "durable", ("durable", "any")) == "durable"
        parsed = cls(
            address=address,
            buckets=buckets,
            bucket_pattern=bucket_pattern,
            partitions=partitions,
            key=key,
            key_prefix=key_prefix,
            start=start,
            start_time=time_option(options, "startingTimestamp", "startingOffsets"),
            bucket_starts=bucket_starts,
            metadata=options.flag("metadata", default=True),
            include_value=include_value,
            value_schema=value_schema,
            infer_sample=_infer_sample(options, value_schema),
            durable=durable,
            fails_on_data_loss=options.flag("failOnDataLoss", default=True),
            task_bytes=options.number("maxPartitionBytes", TASK_BYTES_DEFAULT, low=1),
            min_tasks=options.number("minPartitions", 1, low=1, high=TASKS_MAX),
            lease_s=_lease_s(options, durable=durable),
            timeout_s=options.timeout_s(),
            **({} if streaming is False else _of_stream(options)),
            **({} if streaming else _of_read(options, address, by_bucket=are_several)),
        )
        parsed._check_together(streaming=streaming)
        options.refuse_unknown()
        return parsed

    def _check_together(self, *, streaming: bool | None) -> None:
        """Raises `OptionError` if some options exclude each other. `streaming` is that of
        `parse`."""
        if (
            self.start_time is not None
            and self.end_time is not None
            and self.start_time >= self.end_time
        ):
            raise OptionError(
                f"the option endingTimestamp is {self.end_time.isoformat()}, which is not after "
                f"startingTimestamp, {self.start_time.isoformat()}"
            )
        if streaming is False and self.start == "latest":
            raise OptionError("the option startingOffsets is latest: a read would return nothing")
        if streaming is False and not self.fails_on_data_loss:
            raise OptionError(
                "the option failOnDataLoss is false, which is for streams: a read does not go "
                "on without its rows. Leave it out"
            )
        if not self.durable and self.max_bytes is not None:
            raise OptionError(
                "the option maxBytesPerTrigger needs stability=durable: the server does not report "
                "the size of data in memory. Use maxOffsetsPerTrigger"
            )
        if (
            self.min_rows is not None
            and self.max_rows is not None
            and self.min_rows > self.max_rows
        ):
            raise OptionError(
                f"the option minOffsetsPerTrigger is {self.min_rows}, which is more than "
                f"maxOffsetsPerTrigger, {self.max_rows}"
            )
        if self.rewinds and not (self.durable and self.fails_on_data_loss):
            raise OptionError(
                "the option onRollback is rewind, which needs stability=durable and "
                "failOnDataLoss=true: else the end of a batch may lack rows. Use onRollback=marker"
            )
        if self.buckets:
            _check_named(self.bucket_starts, self.bucket_ends, self.buckets)

    @property
    def are_several_buckets(self) -> bool:
        """Whether several buckets are read."""
        return bool(self.buckets or self.bucket_pattern)

    @property
    def keys_text(self) -> str:
        """Which keys are read, as `key=a` or `keyPrefix=a`; empty for all."""
        if self.key is not None:
            return f"key={self.key.decode()}"
        return f"keyPrefix={self.key_prefix.decode()}" if self.key_prefix else ""

    def batch_delay(self) -> BatchDelay | None:
        """How long the batches of a stream wait; None if they do not."""
        return None if self.min_rows is None else BatchDelay(self.min_rows, self.delay_s)

    def check_bucket_names(self, names: Sequence[str]) -> None:
        """Makes sure that the numbers where to start and end are of buckets that are read.

        Args:
            names: The buckets that are read.

        Raises:
            OptionError: Some are of another bucket.
        """
        _check_named(self.bucket_starts, self.bucket_ends, names)

    def of_bucket(self, bucket: str) -> Self:
        """The options for reading one of the buckets alone."""
        return attrs.evolve(
            self,
            address=attrs.evolve(self.address, bucket=bucket),
            buckets=(),
            bucket_pattern=None,
            start=self.bucket_starts.get(bucket, self.start),
            bucket_starts={},
            end=self.bucket_ends.get(bucket, self.end),
            bucket_ends={},
        )


def _of_stream(options: SourceOptions) -> dict[str, Any]:
    """The attributes of a stream alone."""
    on_rollback = options.choice("onRollback", "fail", ("fail", "marker", "rewind"))
    min_rows = options.number("minOffsetsPerTrigger", None, low=1)
    return {
        "marks_rollback": on_rollback != "fail",
        "rewinds": on_rollback == "rewind",
        "consumer_name": _consumer_name(options),
        "min_rows": min_rows,
        "delay_s": _delay_s(options, min_rows),
        "max_rows": options.number("maxOffsetsPerTrigger", None, low=1),
        "max_bytes": options.number("maxBytesPerTrigger", None, low=1),
    }


def _of_read(options: SourceOptions, address: Address, *, by_bucket: bool) -> dict[str, Any]:
    """The attributes of a read alone."""
    end, bucket_ends = offsets_option(
        options, "endingOffsets", "latest", ("latest",), by_bucket=by_bucket
    )
    return {
        "deduplicate": options.flag("deduplicate", default=False),
        "index": index_query(options, address),
        "end": end,
        "bucket_ends": bucket_ends,
        "end_time": time_option(options, "endingTimestamp", "endingOffsets"),
    }


def _keys(options: SourceOptions) -> tuple[tuple[int, ...], bytes | None, bytes]:
    """The partitions that are read, the only key, and how keys begin."""
    partitions = partitions_option(options)
    key = _key_bytes(options, "key", low=1)
    key_prefix = _key_bytes(options, "keyPrefix", low=0) or b""
    if key is not None and (partitions or key_prefix):
        raise OptionError(
            "the option key excludes partitions and keyPrefix: a key has one partition"
        )
    return partitions, key, key_prefix


def _buckets(options: SourceOptions) -> tuple[tuple[str, ...], re.Pattern[str] | None]:
    """The buckets that are named, and the pattern of those that are read."""
    text, pattern_text = options.text("buckets", None), options.text("bucketPattern", None)
    pattern = None
    if text is not None and pattern_text is not None:
        raise OptionError("the options buckets and bucketPattern exclude each other")
    names = tuple(dict.fromkeys(filter(None, map(str.strip, (text or "").split(",")))))
    if text is not None and not names:
        raise OptionError("the option buckets names no bucket; write it like planes,flights")
    if pattern_text is not None:
        try:
            pattern = re.compile(pattern_text)
        except (re.error, OverflowError, RecursionError) as error:
            raise OptionError(
                f"the option bucketPattern is {pattern_text!r}, and no regular expression: {error}"
            ) from error
    return names, pattern


def _check_named(
    starts: Mapping[str, Mapping[int, int]],
    ends: Mapping[str, Mapping[int, int]],
    names: Sequence[str],
) -> None:
    for name in {**starts, **ends}:
        if name not in names:
            raise OptionError(
                f"startingOffsets or endingOffsets names the bucket {name}; the buckets read are "
                f"{', '.join(names) or 'none'}"
            )


def _value_schema(options: SourceOptions, *, include_value: bool) -> str:
    text = options.text("valueSchema", "").strip()
    if text and not include_value:
        raise OptionError("the option valueSchema needs the values: leave out includeValue=false")
    return INFER if text.lower() == INFER else text


def _infer_sample(options: SourceOptions, value_schema: str) -> int:
    count = options.number("inferSample", INFER_SAMPLE_DEFAULT, low=1, high=100_000)
    if count != INFER_SAMPLE_DEFAULT and value_schema != INFER:
        raise OptionError(
            "the option inferSample needs valueSchema=infer: nothing else looks at a sample"
        )
    return count


def _lease_s(options: SourceOptions, *, durable: bool) -> int:
    lease_s = options.number("leaseSeconds", LEASE_S_DEFAULT, low=1, high=LEASE_TIME_TO_LIVE_S_MAX)
    if lease_s != LEASE_S_DEFAULT and not durable:
        raise OptionError(
            "the option leaseSeconds needs stability=durable: with any there is no lease"
        )
    return lease_s


def _key_bytes(options: SourceOptions, name: str, *, low: int) -> bytes | None:
    """A key, or how keys begin, of at least `low` bytes; None when the option was not given."""
    text = options.text(name, None)
    if text is None:
        return None
    data = text.encode()
    if not low <= len(data) <= KEY_BYTES_MAX:
        raise OptionError(
            f"the option {name} has {len(data)} bytes in UTF-8; write {low} to {KEY_BYTES_MAX}"
        )
    return data


def _consumer_name(options: SourceOptions) -> str:
    name = options.text("consumerName", "")
    if not name.isprintable() or len(name.encode()) > LEASE_OWNER_BYTES_MAX:
        raise OptionError(
            f"the option consumerName is {name!r}; write printable characters, at most "
            f"{LEASE_OWNER_BYTES_MAX} bytes in UTF-8"
        )
    return name


_UNITS_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def _delay_s(options: SourceOptions, min_rows: int | None) -> float:
    """How long a batch waits, in seconds: a number with a unit, as Kafka's option takes it."""
    text = options.text("maxTriggerDelay", None)
    if text is None:
        return DELAY_S_DEFAULT
    if min_rows is None:
        raise OptionError("the option maxTriggerDelay needs the option minOffsetsPerTrigger")
    match = re.fullmatch(r"(\d{1,9})\s*([a-z]+)", text.strip().lower(), re.ASCII)
    if match is None or match[2] not in _UNITS_S:
        raise OptionError(
            f"the option maxTriggerDelay is {text!r}; write a whole number and one of "
            f"{', '.join(_UNITS_S)}, like 15m"
        )
    return int(match[1]) * _UNITS_S[match[2]]
