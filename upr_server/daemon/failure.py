"""What ended a daemon."""

from __future__ import annotations


def first_failure(error: BaseException) -> BaseException:
    """The first exception in a group that is no group, or the exception itself: what went wrong for
    several reasons at once did so for the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
