"""What is due on a connection on which nobody says anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog
import trio

from upr_protocol.errors import Status
from upr_protocol.limits import HANDSHAKE_TIMEOUT_S
from upr_protocol.session import ServerSession, SessionState
from upr_server.net.connection_writer import ConnectionWriter
from upr_server.net.resources import ServerResources
from upr_server.net.turns import SLICE_S

BUSY_S: Final = 0.25
"""How often silence is looked at while something is being written."""

log = structlog.get_logger(__name__)


class SilenceWatch:
    """Watches one connection for silence. While this side has nothing to send, it sends `Noop` at
    each idle interval. A peer that is silent for two, or does not send `Hello` and log in in time,
    loses the connection.

    Args:
        resources: What all connections share.
        session: The connection's session.
        writer: The connection's writer.
        peer: The other end's address, for logs.
        wake: Has what is in the session sent.

    Attributes:
        is_unread: Whether the server itself has stopped reading, for example because too many
            requests wait. The peer does not count as silent then.
    """

    def __init__(
        self,
        resources: ServerResources,
        session: ServerSession,
        writer: ConnectionWriter,
        peer: str,
        wake: Callable[[], None],
    ) -> None:
        self.is_unread = False
        self._turns = resources.connection_turns
        self._session = session
        self._writer = writer
        self._peer = peer
        self._wake = wake
        self._opened_at = trio.current_time()
        self._ready = trio.Event()
        self._is_silent = False
        """Whether nothing was heard for too long when that was last looked at."""

    def note_ready(self) -> None:
        """The client has said who it is: the time for that has ended."""
        self._ready.set()

    async def run(self) -> None:
        """Sends `Noop` when it is due, and ends the session of a silent peer, until the session is
        over."""
        session = self._session
        with trio.move_on_at(self._opened_at + HANDSHAKE_TIMEOUT_S):
            await self._ready.wait()
        if not self._ready.is_set():
            await self._turns.take_turn(1)
        if not self._ready.is_set():
            awaited_message = "log-in" if session.client_identity else "Hello"
            session.fail(
                Status.IDLE, f"no {awaited_message} within {HANDSHAKE_TIMEOUT_S:.0f} seconds"
            )
            self._wake()
        while session.state is not SessionState.CLOSED:
            # What was sent or received meanwhile has moved the deadline on.
            await trio.sleep_until(session.keep_alive.next_check())
            if not self._writer.is_idle:
                # The writer decides how long a peer may take nothing.
                await trio.sleep(BUSY_S)
            elif trio.current_time() >= session.keep_alive.next_check():
                await self._turns.take_turn(1)
                if self._writer.is_idle:
                    await self._check_silence()
                    self._wake()

    async def _check_silence(self) -> None:
        session = self._session
        now = trio.current_time()
        if self.is_unread:
            session.keep_alive.note_received(now)
        if session.tick(now):
            self._is_silent = False
        elif not self._is_silent:
            # Perhaps it was this process that slept: what came meanwhile is read first.
            self._is_silent = True
            await trio.sleep(SLICE_S)
        else:
            log.warning(
                "peer is silent; closing connection",
                peer=self._peer,
                identity=session.client_identity,
            )
            session.fail(Status.IDLE, "the peer sent nothing for two idle intervals")
