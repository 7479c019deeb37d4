"""How to connect, over Trio or over plain sockets."""

from __future__ import annotations

import secrets
from typing import Final, Self

import attrs

from upr_protocol.limits import (
    HANDSHAKE_TIMEOUT_S,
    IDLE_INTERVAL_S_DEFAULT,
    WINDOW_BYTES_DEFAULT,
)
from upr_protocol.scram import NONCE_BYTES
from upr_protocol.session import ClientSession
from upr_protocol.transport import FrameMemory

IDENTITY_DEFAULT: Final = "client:python"

CREDIT_TIMEOUT_S_DEFAULT: Final = 30.0
"""How long to wait for a server that grants no credit."""

FIRST_ATTEMPT_TIMEOUT_S: Final = 2.0
"""How long the first connection to a host may take where the URL names others that may be up: a
machine that is off refuses nothing. A host that takes longer has the whole time if no other can be
reached."""


def new_nonce() -> str:
    """A text for one log-in, which nobody can guess."""
    return secrets.token_urlsafe(NONCE_BYTES)


def new_lease_id() -> int:
    """A random number that is not 0, for a lease of one's own."""
    return secrets.randbits(64) | 1


@attrs.frozen
class DriverOptions:
    """How to connect: see `ConnectOptions`. A server may send `window_bytes` unacknowledged bytes
    on streams."""

    identity: str = IDENTITY_DEFAULT
    window_bytes: int = WINDOW_BYTES_DEFAULT
    idle_interval_s: int = IDLE_INTERVAL_S_DEFAULT
    connect_timeout_s: float = HANDSHAKE_TIMEOUT_S

    def for_first_attempt(self) -> Self:
        """The options of a first attempt at a host that others follow."""
        timeout_s = min(FIRST_ATTEMPT_TIMEOUT_S, self.connect_timeout_s)
        return attrs.evolve(self, connect_timeout_s=timeout_s)

    def session(self, now: float) -> ClientSession:
        """A new session, with its `Hello` queued."""
        return ClientSession(
            self.identity,
            window_bytes=self.window_bytes,
            idle_interval_s=self.idle_interval_s,
            now=now,
            allocate=FrameMemory().allocate,
        )
