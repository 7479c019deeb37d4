"""Where a stream stands, as Spark keeps it in its offset log.

Spark compares offsets as texts, so the same offset is always the same JSON. It holds all that is
needed to read the batch that ends there again, also by another process: the numbers with their
histories, the snapshots that they are part of, the lease that pins them, and whether the batch
begins with a rollback.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Self

import attrs

from upr_protocol.failover import FailoverLog, Position
from upr_protocol.ids import SEQ_MAX, PartitionId, SeqNo
from upr_protocol.spark.errors import PipelineError

_VERSION: Final = 2
_FIRST_VERSION: Final = 1
"""Spelled each partition out as an object, in four times as many bytes. Checkpoints have it."""

BUCKETS: Final = "buckets"
"""The field of the offset of several buckets that has the offset of each."""

_TEXT: Final = re.compile(
    r"(?P<seq>\d+)(\[(?P<start>\d+)-(?P<end>\d+)\])?(<(?P<rolled_back_from>\d+))?"
    r"(>(?P<batch_ends>[\d,]+))?( (?P<log>\S+))?"
)


@attrs.frozen
class PartitionOffset:
    """Where a stream stands in one partition.

    Attributes:
        log: The failover log under which it came there.
        seq: The number.
        snapshot_start: Where the snapshot begins that the number is part of.
        snapshot_end: Where that ends: below it, some keys may be missing that were changed again
            before it.
        rolled_back_from: The number from which the batch that ends here went back to
            `snapshot_start` before it went on; None when it did not.
        batch_ends: Ends of earlier batches at which the partition was consistent, newest first. The
            stream may go back to them.
    """

    log: FailoverLog = attrs.field(factory=FailoverLog)
    seq: SeqNo = SeqNo(0)
    snapshot_start: SeqNo = SeqNo(0)
    snapshot_end: SeqNo = SeqNo(0)
    rolled_back_from: SeqNo | None = None
    batch_ends: tuple[SeqNo, ...] = ()

    @property
    def position(self) -> Position:
        """The offset as the start of a stream. Inside a snapshot, keys that changed again before
        the snapshot's end were left out. So a stream that goes on from here needs everything up to
        that end."""
        is_inside = self.snapshot_start < self.seq < self.snapshot_end
        complete_through = self.snapshot_end if is_inside else self.seq
        return Position(self.log, complete_through, complete_through, None)

    def to_text(self) -> str:
        """As text: `SEQ[START-END]<ROLLED_BACK_FROM>END,END HISTORY@SEQ,HISTORY@SEQ`. The snapshot
        is left out where it begins and ends at the number, `<` where the batch did not go back, `>`
        where there are no ends of earlier batches."""
        text = str(self.seq)
        if not self.snapshot_start == self.snapshot_end == self.seq:
            text += f"[{self.snapshot_start}-{self.snapshot_end}]"
        if self.rolled_back_from is not None:
            text += f"<{self.rolled_back_from}"
        if self.batch_ends:
            text += f">{','.join(map(str, self.batch_ends))}"
        log = ",".join(f"{history_id:016x}@{seq}" for history_id, seq in self.log.pairs())
        return f"{text} {log}" if log else text

    @classmethod
    def of_text(cls, text: str) -> Self:
        """The reverse of `to_text`.

        Raises:
            ValueError: It is no such text.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not an offset of a partition")
        seq = _number(int(match["seq"]))
        start, end, rolled_back_from, log = (
            match[name] for name in ("start", "end", "rolled_back_from", "log")
        )
        batch_ends = match["batch_ends"]
        entries = [entry.split("@") for entry in log.split(",")] if log else []
        return cls(
            FailoverLog.of_pairs(
                (_number(int(history, 16)), _number(int(first_seq)))
                for history, first_seq in entries
            ),
            seq,
            seq if start is None else _number(int(start)),
            seq if end is None else _number(int(end)),
            None if rolled_back_from is None else _number(int(rolled_back_from)),
            tuple(_number(int(end)) for end in batch_ends.split(",")) if batch_ends else (),
        )

    @classmethod
    def of_first_version(cls, document: Mapping[str, Any]) -> Self:
        """Reads what the first version wrote."""
        start, end = document["snapshot"]
        rolled_back_from = document.get("came_from")
        return cls(
            FailoverLog.of_pairs(
                (_number(int(text, 16)), _number(seq)) for text, seq in document["log"]
            ),
            _number(document["seq"]),
            _number(start),
            _number(end),
            None if rolled_back_from is None else _number(rolled_back_from),
        )


@attrs.frozen
class StreamOffset:
    """Where a stream stands.

    Attributes:
        bucket: The bucket's name.
        partitions: Its partitions; one that is missing is at 0.
        lease_id: The lease that pins what lies between the offset before and this; 0 for none.
        initial: Of the offset where the stream's first batch ends, where that began; None of all
            others. Spark asks a second time where to begin when it is restarted before it committed
            the first batch, and by then the answer may be another.
        is_initial: Whether this is where the stream begins.
        number_bytes: Bytes a sequence number of the batch that ends here, on average, as it was
            planned; 0 if unknown. The batch is divided into tasks by it: the server measures other
            sizes after a compaction, and a batch that runs again needs the same tasks.
        keys: Which keys the stream reads, as `key=a` or `keyPrefix=a`; empty for all. None in
            offsets of older versions, which do not say.
    """

    bucket: str
    partitions: Mapping[PartitionId, PartitionOffset]
    lease_id: int = 0
    initial: Mapping[PartitionId, PartitionOffset] | None = None
    is_initial: bool = False
    number_bytes: int = 0
    keys: str | None = None

    def partition_offset(self, partition: PartitionId) -> PartitionOffset:
        """Where the stream stands in a partition."""
        return self.partitions.get(partition, PartitionOffset())

    def to_json(self) -> dict[str, Any]:
        """As JSON: equal offsets are equal texts."""
        document: dict[str, Any] = {"version": _VERSION, "bucket": self.bucket}
        if self.lease_id:
            document["lease"] = f"{self.lease_id:016x}"
        if self.is_initial:
            document["is_initial"] = True
        if self.number_bytes:
            document["number_bytes"] = self.number_bytes
        if self.keys is not None:
            document["keys"] = self.keys
        if self.initial is not None:
            document["initial"] = _partitions_to_json(self.initial)
        document["partitions"] = _partitions_to_json(self.partitions)
        return document

    @classmethod
    def of_json(cls, document: object) -> Self:
        """The reverse of `to_json`.

        Raises:
            PipelineError: It is not an offset of this data source, or one of several buckets.
        """
        if not isinstance(document, Mapping):
            # As that of Spark's source `rate`.
            raise foreign_offset_error(f"{document!r} is not an object")
        if BUCKETS in document:
            raise PipelineError(
                "UPR_OFFSET",
                "the checkpoint is of a stream of several buckets, and not of one: set buckets or "
                "bucketPattern as before, or begin with a new checkpoint",
            )
        try:
            version = document["version"]
            if version not in (_FIRST_VERSION, _VERSION):
                raise PipelineError(
                    "UPR_OFFSET",
                    f"the checkpoint holds offsets of version {version}, and this library reads "
                    f"{_FIRST_VERSION} and {_VERSION}: use the one it was made with, or begin "
                    "with a new checkpoint",
                )
            initial, keys = document.get("initial"), document.get("keys")
            return cls(
                str(document["bucket"]),
                _partitions_of_json(document["partitions"], version),
                _number(int(document.get("lease", "0"), 16)),
                None if initial is None else _partitions_of_json(initial, version),
                bool(document.get("is_initial", False)),
                int(document.get("number_bytes", 0)),
                None if keys is None else str(keys),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise foreign_offset_error(repr(error)) from error


def foreign_offset_error(reason: str) -> PipelineError:
    """The error of a checkpoint whose offset is not one of this data source.

    Args:
        reason: How that shows.
    """
    return PipelineError(
        "UPR_OFFSET",
        f"the checkpoint holds an offset of another data source ({reason}). Begin with a new "
        "checkpoint",
    )


def _partitions_to_json(partitions: Mapping[PartitionId, PartitionOffset]) -> dict[str, str]:
    return {str(partition): partitions[partition].to_text() for partition in sorted(partitions)}


def _partitions_of_json(
    documents: Mapping[str, Any], version: int
) -> dict[PartitionId, PartitionOffset]:
    is_first = version == _FIRST_VERSION
    parse = PartitionOffset.of_first_version if is_first else PartitionOffset.of_text
    numbered = sorted((PartitionId(int(name)), value) for name, value in documents.items())
    return {partition: parse(value) for partition, value in numbered}


def _number(value: Any) -> SeqNo:
    if not isinstance(value, int) or not 0 <= value <= SEQ_MAX:
        raise ValueError(f"{value!r} is not a 64-bit number")
    return SeqNo(value)


def is_mid_snapshot(partitions: Mapping[PartitionId, PartitionOffset]) -> bool:
    """Whether there is more of the snapshots that were begun."""
    return any(offset.seq < offset.snapshot_end for offset in partitions.values())
