"""Moments that users name, as nanoseconds since 1970: what a CAS counts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from math import isfinite
from typing import Final

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_NANOSECONDS_END: Final = 1 << 64


def to_nanoseconds(time: float | datetime) -> int:
    """A moment in nanoseconds since 1970.

    Args:
        time: Seconds since 1970, or a `datetime` with a time zone.

    Raises:
        ValueError: The moment has no time zone, or is before 1970 or after 2554.
    """
    if isinstance(time, datetime):
        if time.tzinfo is None:
            raise ValueError(f"{time} has no time zone; write it like 2026-01-31T12:00:00Z")
        count = (time - _EPOCH) // _MICROSECOND * 1000
    else:
        count = int(time * 1_000_000_000) if isfinite(time) else -1
    if not 0 <= count < _NANOSECONDS_END:
        raise ValueError(f"{time} is not a time from 1970 to 2554")
    return count


def parse_timestamp(text: str) -> datetime:
    """A date and time in ISO 8601 with a time zone, as in `2026-01-31T12:00:00Z`.

    Raises:
        ValueError: The text is something else.
    """
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is not a date and time; write it like 2026-01-31T12:00:00Z"
        ) from None
    to_nanoseconds(time)
    return time
