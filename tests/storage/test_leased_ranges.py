"""Leased ranges, against a set of their numbers."""

from __future__ import annotations

from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from upr_server.storage.leased_ranges import LeasedRanges, SeqRange, covered_ranges, covers_any
from upr_server.storage.records import LeaseRecord

SEQS: Final = range(20)
RANGES: Final = st.lists(
    st.tuples(st.integers(0, 15), st.integers(0, 6)).map(lambda pair: (pair[0], sum(pair))),
    max_size=6,
)
"""(start, end], some of them empty."""


def numbers_in(ranges: list[SeqRange]) -> set[int]:
    return {seq for start, end in ranges for seq in range(start + 1, end + 1)}


@given(RANGES)
def test_a_number_is_leased_if_it_lies_in_a_range(ranges: list[SeqRange]) -> None:
    leased_ranges, leased = LeasedRanges(ranges), numbers_in(ranges)
    assert bool(leased_ranges) == bool(leased)
    for seq in SEQS:
        leased_range = leased_ranges.range_of(seq)
        assert (leased_range is not None) == (seq in leased)
        if leased_range is not None:
            start, end = leased_range
            assert start < seq <= end
            assert numbers_in([leased_range]) <= leased
            # Ranges that touch each other count as one.
            assert not {start, end + 1} & leased


@given(RANGES, RANGES)
def test_a_range_is_covered_if_all_its_numbers_are_leased(
    ranges: list[SeqRange], by: list[SeqRange]
) -> None:
    asked = [(start, end) for start, end in ranges if start < end]
    expected = {range_ for range_ in asked if numbers_in([range_]) <= numbers_in(by)}
    assert covered_ranges(asked, by) == expected


@given(RANGES, st.sets(st.sampled_from(SEQS)))
def test_a_lease_covers_numbers_of_its_partition_only(
    ranges: list[SeqRange], seqs: set[int]
) -> None:
    lease = LeaseRecord(1, "owner", tuple((0, start, end) for start, end in ranges), 60, 0)
    rising_seqs = sorted(seqs)
    assert covers_any(lease, 0, rising_seqs) == bool(seqs & numbers_in(ranges))
    assert not covers_any(lease, 1, rising_seqs)
