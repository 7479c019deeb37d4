"""Partitions as users write them."""

from __future__ import annotations

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upr_protocol.cli.parameters import partition_numbers
from upr_protocol.ids import PARTITIONS_END
from upr_protocol.partition_numbers import parse_partition_numbers

PARTITIONS = st.integers(0, PARTITIONS_END - 1)
RANGES = st.lists(st.tuples(PARTITIONS, PARTITIONS).map(sorted), min_size=1, max_size=4)


@given(ranges=RANGES, space=st.sampled_from(["", " ", "  "]))
def test_ranges_and_numbers_name_each_partition_once(ranges: list[list[int]], space: str) -> None:
    parts = [f"{low}{space}-{space}{high}" if low < high else str(low) for low, high in ranges]
    expected = {number for low, high in ranges for number in range(low, high + 1)}
    assert parse_partition_numbers(f",{space}".join(parts)) == tuple(sorted(expected))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        *(
            (text, "is not a partition; write them like 0-3,7")
            for text in ("", " ", "x", "-1", "1,,2", "1,", "3-", "1 2", "+1", "1_0", "٣", "0-1-2")
        ),
        *(
            (text, "is not a partition, or a rising range, within 0 to 1023")
            for text in ("3-1", "1024", "0-1024", "9" * 9)
        ),
    ],
)
def test_text_that_names_no_partition_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_partition_numbers(text)
    with pytest.raises(click.BadParameter, match=sentence):
        partition_numbers(text)
