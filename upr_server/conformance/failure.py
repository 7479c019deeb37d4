"""What a scenario raises when the other side does not keep the protocol."""

from upr_protocol.errors import UprError
from upr_protocol.wire import Message


class ConformanceError(UprError):
    """The client or server under test did something else than the scenario asks for."""


def unexpected_message(
    peer: str, expected: type[Message], message: Message | None
) -> ConformanceError:
    """Says what came in place of an expected message.

    Args:
        peer: The side under test: `client` or `server`.
        expected: The kind of message that should have come.
        message: What came; None for the end of the connection.
    """
    action = "closed the connection" if message is None else f"said {type(message).__name__}"
    return ConformanceError(f"expected {expected.__name__}; the {peer} {action}")
