"""Options of a read that say which partitions it reads, from where, and up to where."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import msgspec

from upr_protocol.client import PartitionNumbers
from upr_protocol.ids import PARTITIONS_END, SEQ_MAX, PartitionId
from upr_protocol.partition_numbers import parse_partition_numbers
from upr_protocol.spark.errors import OptionError
from upr_protocol.spark.options import SourceOptions
from upr_protocol.timestamps import parse_timestamp, to_nanoseconds


def partitions_option(options: SourceOptions) -> tuple[int, ...]:
    """The partitions to read; none for all."""
    text = options.text("partitions", None)
    if text is None:
        return ()
    try:
        return parse_partition_numbers(text)
    except ValueError as error:
        raise OptionError(f"the option partitions: {error}") from error


def time_option(options: SourceOptions, name: str, other_name: str) -> datetime | None:
    """A time: in ISO 8601 with a time zone, or milliseconds since 1970, as Kafka's options take
    it. None when the option was not given."""
    text = options.text(name, None)
    if text is None:
        return None
    if options.text(other_name, None) is not None:
        raise OptionError(f"the options {name} and {other_name} exclude each other")
    if not (text.isascii() and text.isdecimal()):
        try:
            return parse_timestamp(text)
        except ValueError as error:
            raise OptionError(f"the option {name}: {error}") from error
    try:
        time = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=int(text))
        to_nanoseconds(time)  # which servers take
    except (OverflowError, ValueError):
        raise OptionError(
            f"the option {name} is {text}, which is no time in milliseconds since 1970"
        ) from None
    return time


def offsets_option(
    options: SourceOptions, name: str, default: str, words: tuple[str, ...], *, by_bucket: bool
) -> tuple[str | Mapping[int, int], Mapping[str, Mapping[int, int]]]:
    """A word, or a number for each partition, as JSON: `{"0": 17, "3": 4}`; and of several buckets
    the numbers of each: `{"planes": {"0": 17}}`."""
    text = options.text(name, default)
    if text.lower() in words:
        return text.lower(), {}
    try:
        if by_bucket:
            decoded = msgspec.json.decode(text, type=dict[str, dict[str, int]])
            return default, {bucket: _numbers(seqs) for bucket, seqs in decoded.items()}
        return _numbers(msgspec.json.decode(text, type=dict[str, int])), {}
    except (msgspec.DecodeError, ValueError) as error:
        example = '{"planes": {"0": 17, "3": 4}}' if by_bucket else '{"0": 17, "3": 4}'
        kind = "bucket and partition" if by_bucket else "partition"
        raise OptionError(
            f"the option {name} is {text!r}; use {', '.join(words)}, or numbers by {kind} "
            f"like {example}"
        ) from error


def _numbers(seq_of_text: Mapping[str, int]) -> dict[int, int]:
    numbers: dict[int, int] = {}
    for text, seq in seq_of_text.items():
        # A partition has one name, so that none is named twice.
        if text != str(partition := int(text)):
            raise ValueError(f"{text!r} is not a partition")
        if not (0 <= partition < PARTITIONS_END and 0 <= seq < SEQ_MAX):
            raise ValueError(f"partition {partition} cannot have the number {seq}")
        numbers[partition] = seq
    return numbers


def check_named(
    option: str,
    seqs: Mapping[int, int],
    bucket: str,
    seqnos: Mapping[PartitionId, PartitionNumbers],
) -> None:
    """Makes sure that an option names only partitions of a bucket that are read. Raises
    `OptionError`."""
    for partition in seqs:
        if partition not in seqnos:
            raise OptionError(
                f"the option {option} names partition {partition} of {bucket}; the partitions read "
                f"are {min(seqnos)} to {max(seqnos)}"
            )
