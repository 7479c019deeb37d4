"""How a publisher has its batches applied, and the defaults."""

from __future__ import annotations

from typing import Final

import attrs

from upr_protocol.ids import Durability

IN_FLIGHT_DEFAULT: Final = 16
"""Unanswered batches of one partition. The server remembers the last 64 answers of a writer: what
is in doubt after a lost connection must be among them."""

BUFFER_BYTES_DEFAULT: Final = 64 * 1024 * 1024
"""Bytes that a publisher holds, unsent or unanswered, before its callers wait."""

IN_FLIGHT_LIMIT: Final = 64
"""As many answers of a writer and partition as the server remembers."""


@attrs.frozen
class PublishOptions:
    """How a publisher has its batches applied: how many at once, how durably, how long it retries.
    See also the arguments of `publisher`.

    Attributes:
        in_flight: Unanswered batches of one partition, at most.
        buffer_bytes: Bytes that the publisher holds, unsent or unanswered, before its callers wait.
        retry_timeout_s: How long it resends a batch that servers refuse for a reason that may pass.
        durability: What an answer means.
        copies: How many replicas beside the active node, for the replicated levels; otherwise 0.
        linger_s: How long batches wait for others to fill a bundle with, at most, unless
            `BUSY_NODE_ROWS` are unanswered at level memory. They wait only while an earlier bundle
            is on its way.
    """

    in_flight: int = attrs.field(
        default=IN_FLIGHT_DEFAULT,
        validator=[attrs.validators.ge(1), attrs.validators.le(IN_FLIGHT_LIMIT)],
    )
    buffer_bytes: int = BUFFER_BYTES_DEFAULT
    retry_timeout_s: float = 60.0
    durability: Durability = Durability.MEMORY
    copies: int = 0
    linger_s: float = 0.0
