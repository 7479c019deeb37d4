"""What can go wrong for a consumer of events."""

from __future__ import annotations

from upr_protocol.errors import UprError


class TooManyConsumersError(UprError):
    """No more consumers can be registered."""


class UnknownConsumerError(UprError):
    """The consumer is not registered, or not any more: it may have missed anything."""
