"""What a scenario raises when the other side does not keep the protocol."""

from upr_protocol.errors import UprError


class ConformanceError(UprError):
    """The client or server under test did something else than the scenario asks for."""
