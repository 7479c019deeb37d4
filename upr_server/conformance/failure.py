"""Waiting for a message, and the error of a scenario when the other side breaks the protocol."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from upr_protocol.errors import UprError
from upr_protocol.wire import Message

M = TypeVar("M", bound=Message)


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
            action = (
                "closed the connection" if message is None else f"said {type(message).__name__}"
            )
            raise ConformanceError(f"expected {kind.__name__}; the {peer} {action}")
