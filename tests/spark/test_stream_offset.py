"""The offsets of a stream, as Spark stores them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable

from tests.spark.model_driver_client import ModelDriverClient
from tests.spark.stream_reader import options_of, reader_of, written
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.offset import PartitionOffset, StreamOffset

SEQS = st.integers(0, 2**64 - 1).map(SeqNo)
LOGS = st.dictionaries(SEQS, st.integers(1, 2**64 - 1), max_size=3).map(
    lambda by_seq: FailoverLog.of_pairs(
        (history, seq)
        for seq, history in sorted(by_seq.items(), reverse=True)
        if list(by_seq.values()).count(history) == 1
    )
)
PARTITION_OFFSETS = st.builds(
    PartitionOffset,
    LOGS,
    SEQS,
    SEQS,
    SEQS,
    st.none() | SEQS,
    st.lists(SEQS, max_size=3).map(tuple),
)
OFFSETS = st.builds(
    StreamOffset,
    st.just("b"),
    st.dictionaries(st.integers(0, 1023).map(PartitionId), PARTITION_OFFSETS, max_size=4),
    st.integers(0, 2**64 - 1),
    st.none() | st.dictionaries(st.just(PartitionId(3)), PARTITION_OFFSETS),
    st.booleans(),
    st.integers(0, 2**40),
    st.none() | st.text(max_size=3),
)


@given(OFFSETS)
def test_an_offset_is_read_as_it_was_written(offset: StreamOffset) -> None:
    assert StreamOffset.of_json(json.loads(json.dumps(offset.to_json()))) == offset


def test_an_offset_is_short() -> None:
    log = FailoverLog.of_pairs([(2**63 + 1, 0)])
    at_end = PartitionOffset(log, SeqNo(20_000), SeqNo(20_000), SeqNo(20_000))
    partitions = {PartitionId(partition): at_end for partition in range(64)}
    assert len(json.dumps(StreamOffset("b", partitions, 7).to_json())) < 2500


def test_an_offset_of_the_first_version_is_read() -> None:
    first = {
        "version": 1,
        "bucket": "b",
        "lease": "0000000000000007",
        "partitions": {
            "3": {"log": [["00000000000000ff", 2]], "seq": 5, "snapshot": [4, 9], "came_from": 8}
        },
    }
    assert StreamOffset.of_json(first).to_json() == {
        "version": 2,
        "bucket": "b",
        "lease": "0000000000000007",
        "partitions": {"3": "5[4-9]<8 00000000000000ff@2"},
    }


def test_a_foreign_offset_is_refused() -> None:
    good = StreamOffset("b", {PartitionId(0): PartitionOffset(FailoverLog(), SeqNo(5))}).to_json()
    assert StreamOffset.of_json(good).to_json() == good
    for wrong, sentence in (
        ({**good, "version": 3}, "version 3"),
        ({}, "an offset of another data source"),
        ({"0": 5}, "an offset of another data source"),
        # Spark's own source `rate` has numbers.
        (5, "an offset of another data source"),
        ({"buckets": {"b": good}}, "a stream of several buckets, and not of one"),
        (
            {**good, "partitions": {"0": {"seq": -1, "log": [], "snapshot": [0, 0]}}},
            "another data source",
        ),
        (
            {**good, "version": 1, "partitions": {"0": {"seq": -1, "log": []}}},
            "another data source",
        ),
        ({**good, "partitions": {"0": "5 no log"}}, "another data source"),
        ({**good, "partitions": []}, "another data source"),
        ({**good, "partitions": {"0": f"5 1{'0' * 16}@0"}}, "another data source"),
        ({**good, "lease": "1" + "0" * 16}, "another data source"),
        ({**good, "lease": "-1"}, "another data source"),
        ({**good, "number_bytes": float("inf")}, "another data source"),
    ):
        with pytest.raises(PipelineError, match=sentence) as refusal:
            StreamOffset.of_json(wrong)
        assert refusal.value.code == "UPR_OFFSET"
    reader = reader_of(ModelDriverClient(1))
    with pytest.raises(PipelineError, match="of the bucket 'other'"):
        reader.commit({**good, "bucket": "other"})


def test_a_checkpoint_of_other_keys_is_refused() -> None:
    """The rows that those have had so far would be missing."""
    driver = written(1, 5)
    filters: list[dict[str, str]] = [{}, {"keyPrefix": "a"}, {"keyPrefix": "b"}, {"key": "a"}]
    for own in filters:
        reader = reader_of(driver, partitions=None, **own)
        initial = reader.initialOffset()
        start = reader.latestOffset(initial, ReadAllAvailable())
        of_older_version = {name: field for name, field in start.items() if name != "keys"}
        for other in filters:
            reader = reader_of(driver, partitions=None, **other)
            assert reader.latestOffset(of_older_version, ReadAllAvailable()) is of_older_version
            if other == own:
                assert reader.latestOffset(start, ReadAllAvailable()) is start
                continue
            with pytest.raises(PipelineError, match="begin with a new checkpoint") as failed:
                reader.latestOffset(start, ReadAllAvailable())
            assert failed.value.code == "UPR_OFFSET"
            with pytest.raises(PipelineError, match=r"of a stream with .*, and not with "):
                reader.partitions(initial, start)


def test_offsets_of_partitions_that_are_not_there() -> None:
    with pytest.raises(PipelineError, match="names partition 7 of b; the partitions read are"):
        reader_of(written(2, 5), startingOffsets='{"7": 1}').initialOffset()
    with pytest.raises(PipelineError, match="needs stability=durable"):
        options_of(stability="any", maxBytesPerTrigger="5")
