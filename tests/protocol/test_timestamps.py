"""Moments that users name."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upr_protocol.timestamps import parse_timestamp, to_nanoseconds

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@given(microseconds=st.integers(0, 10**16), zone_hours=st.integers(-23, 23))
def test_a_moment_is_the_same_in_every_time_zone(microseconds: int, zone_hours: int) -> None:
    moment = EPOCH + timedelta(microseconds=microseconds)
    elsewhere = moment.astimezone(timezone(timedelta(hours=zone_hours)))
    assert to_nanoseconds(moment) == to_nanoseconds(elsewhere) == 1000 * microseconds
    assert parse_timestamp(elsewhere.isoformat()) == moment


def test_seconds_are_a_moment_too() -> None:
    assert to_nanoseconds(1.5) == 1_500_000_000
    assert parse_timestamp("2026-01-31T12:00:00Z") == datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    "time",
    [-1, 2.0**63, datetime(2026, 1, 31), datetime(1969, 1, 1, tzinfo=UTC), float("inf")],  # noqa: DTZ001
)
def test_moments_that_have_no_number_are_refused(time: float | datetime) -> None:
    with pytest.raises(ValueError, match=r"has no time zone|not a time from 1970 to 2554"):
        to_nanoseconds(time)


@pytest.mark.parametrize("text", ["yesterday", "12:00", "2026-02-30T00:00:00Z", "2026-01-31"])
def test_texts_that_are_not_a_time_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="2026-01-31T12:00:00Z"):
        parse_timestamp(text)
