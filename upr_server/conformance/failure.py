"""Waiting for a message, and the error of a scenario when the other side breaks the protocol."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from upr_protocol.errors import Status, UprError
from upr_protocol.wire import Error, Message, Refusal

M = TypeVar("M", bound=Message)

_STATUS_NAMES: Final = {status.value: status.name for status in Status}


class ConformanceError(UprError):
    """The client or server under test did something else than the scenario asks for."""


async def expect_message(
    peer: str,
    kind: type[M],
    receive: Callable[[], Awaitable[Message | None]],
    ignored_types: tuple[type[Message], ...],
) -> M:
    """The next message, which must be of one kind.

    Args:
        peer: The side under test: `client` or `server`.
        kind: The kind of message that should come.
        receive: Waits for the next message; None for the end of the connection.
        ignored_types: Kinds of messages that may come before it.

    Raises:
        ConformanceError: Another message came, or the end.
    """
    while True:
        message = await receive()
        if isinstance(message, kind):
            return message
        if not isinstance(message, ignored_types):
            raise ConformanceError(f"expected {kind.__name__}; the {peer} {what_was_done(message)}")


def what_was_done(message: Message | None) -> str:
    """What the other side did, in words: it `said` a message, or closed the connection (None). A
    refusal is told with its reason."""
    if message is None:
        return "closed the connection"
    name = type(message).__name__
    if isinstance(message, Error | Refusal):
        status = _STATUS_NAMES.get(message.status, message.status)
        # Quoted: it may have characters that a terminal obeys.
        return f"said {name} ({status}, {message.sentence!r})"
    return f"said {name}"
