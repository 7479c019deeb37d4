"""How long a node waits before it logs in again at a node that has refused it."""

from __future__ import annotations

from typing import Final

import attrs
import trio

from upr_protocol.address import Address
from upr_protocol.errors import ServerError, Status, UprError

PAUSE_MIN_S: Final = 1.0
PAUSE_MAX_S: Final = 30.0
"""The first pause, and the longest: each is twice as long as the one before. A server gives a host
one attempt a second, and clients on this host need some of them, too."""

_REFUSED: Final = frozenset({Status.LOG_IN_FAILED, Status.LOG_IN_NEEDED})


@attrs.define
class _Refusal:
    status: Status
    sentence: str
    pause_s: float
    next_at: float


class LogInPauses:
    """Which nodes have refused to let this node log in, and when to try again. All of a node's
    connections to others share it: with a password that is wrong each of them would fail, and the
    others would soon listen to nobody from this node's address."""

    def __init__(self) -> None:
        self._refusals: dict[tuple[str, int], _Refusal] = {}

    def check(self, address: Address) -> None:
        """Call it before each attempt to connect. Of those that wait, one at a time may try again.

        Raises:
            ServerError: It is too early; the reason is that of the last refusal.
        """
        refusal = self._refusals.get((address.host, address.port))
        if refusal is not None:
            now = trio.current_time()
            if now < refusal.next_at:
                raise ServerError(refusal.status, refusal.sentence)
            refusal.pause_s = min(2 * refusal.pause_s, PAUSE_MAX_S)
            refusal.next_at = now + refusal.pause_s

    def note_error(self, address: Address, error: UprError) -> None:
        """An attempt has failed, or was too early."""
        if isinstance(error, ServerError) and error.status in _REFUSED:
            next_at = trio.current_time() + PAUSE_MIN_S
            refusal = self._refusals.setdefault(
                (address.host, address.port),
                _Refusal(error.status, error.sentence, PAUSE_MIN_S, next_at),
            )
            refusal.status, refusal.sentence = error.status, error.sentence

    def note_success(self, address: Address) -> None:
        """An attempt has succeeded."""
        self._refusals.pop((address.host, address.port), None)
