"""Logging a failure that ends the server when it happens.

A nursery raises only when all of its tasks have ended. That may take a while, and what those raise
as they end may come first in what is printed then.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import wraps
from typing import Final, ParamSpec

import structlog

from upr_protocol.errors import UprError

IS_LOGGED: Final = "(the log has this failure, with the time when it happened)"
"""A note on an exception that was logged: tasks lie in one another, and each raises it."""

OUT_OF_MEMORY: Final = (
    "the system gives the server no more memory: raise its limit (`ulimit -v`, or that of its "
    "container), or lower the quotas of its buckets, and start it again"
)
"""What is said where memory runs out. That is no fault: what was asked for may be needed."""

P = ParamSpec("P")

log = structlog.get_logger(__name__)


def essential(task: Callable[P, Awaitable[None]]) -> Callable[P, Awaitable[None]]:
    """`task`, to be started as a part of the server without which it cannot go on. If the task
    raises, the exception is logged at once, and then raised."""

    @wraps(task)
    async def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            await task(*args, **kwargs)
        except BaseException as error:
            for failure in _failures(error):
                _log_failure(failure)
            raise

    return run


def _failures(error: BaseException) -> Iterator[Exception]:
    """The exceptions in a group, however deep; not a cancellation."""
    if isinstance(error, BaseExceptionGroup):
        for inner_error in error.exceptions:
            yield from _failures(inner_error)
    elif isinstance(error, Exception):
        yield error


def _log_failure(failure: Exception) -> None:
    if IS_LOGGED in getattr(failure, "__notes__", ()):
        return
    failure.add_note(IS_LOGGED)
    if isinstance(failure, UprError):
        log.critical("the server has to stop", error=str(failure))
        return
    if isinstance(failure, MemoryError):
        log.critical("the server has to stop", error=OUT_OF_MEMORY)
        return
    log.critical(
        "the server has to stop because of a fault of its own; start it again, and report the fault"
        " with this traceback",
        error=repr(failure),
        exc_info=failure,
    )
