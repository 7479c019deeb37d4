"""The writer of a connection: gives the socket what the session has to say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import structlog
import trio

from upr_protocol.chunk import Buffer
from upr_protocol.concurrency import Notifier
from upr_protocol.errors import Status
from upr_protocol.session import ServerSession, SessionState
from upr_protocol.transport import write_all, write_now, write_rest
from upr_protocol.wire import Noop
from upr_server.net.request_context import RequestContext
from upr_server.net.resources import ServerResources

YIELD_BYTES: Final = 64 * 1024
"""A connection that has sent so much at a time lets others have their turn before it sends more."""

LARGE_ANSWER_BYTES: Final = 1024 * 1024
"""What was put into a session in a step is written in another step if it is more than this."""

_CONVERSING: Final = (SessionState.OPEN, SessionState.STREAMING)

_STREAMING: Final = SessionState.STREAMING  # an enum's attributes are slow to look up

log = structlog.get_logger(__name__)


class ConnectionWriter:
    """Writes what a session has to say, and the streams' next chunks, to the connection's socket.

    At the end of a step `flush_now` writes what the socket takes at once. The rest is written by
    `run`, which has nothing to do where the socket takes it all.

    Args:
        resources: What all connections share.
        session: The connection's session.
        context: The connection's requests and streams.
        stream: The connection.
        peer: The other end's address, for logs.

    Attributes:
        is_idle: Whether `run` waits for something to write.
        bytes_out: How many bytes the socket was given.
    """

    def __init__(
        self,
        resources: ServerResources,
        session: ServerSession,
        context: RequestContext,
        stream: trio.abc.HalfCloseableStream,
        peer: str,
    ) -> None:
        self.is_idle = False
        self.bytes_out = 0
        self._resources = resources
        self._session = session
        self._context = context
        self._stream = stream
        self._peer = peer
        self._to_send = Notifier()
        self._idle_scope: trio.CancelScope | None = None
        """Around the wait for something to write, where the peer is a replica."""
        self._unwritten: Sequence[Buffer] = ()
        """What the socket has not taken yet."""
        self._has_sent_much = False
        """Whether so much was sent the last time that others have their turn before more is."""
        self._write_pause_s = 0.0
        """How long to write nothing, because of the user's limits."""

    def wake(self) -> None:
        """There is something for `run` to send, or to end."""
        self._to_send.notify()

    def flush_now(self, now: float) -> int:
        """Writes what the socket takes at the time `now`, if `run` does not write already; leaves
        the rest to `run`. Returns how many bytes there were."""
        length = 0
        session = self._session
        # A writer that was just woken is still idle until its next step. What the socket did not
        # take before goes first, so it is left to the writer. So is a large answer, which takes a
        # step of its own: its checksum alone takes 2 ms.
        if (
            self.is_idle
            and not self._unwritten
            and session.state in _CONVERSING
            and session.outgoing_bytes < LARGE_ANSWER_BYTES
            and (not self._has_sent_much or self._resources.write_turns.may_begin)
        ):
            try:
                length = self._send(now)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                # Counts as much sent, so that the writer is woken: it meets the error itself.
                length = YIELD_BYTES
            is_over = session.state not in _CONVERSING
            is_done = not self._unwritten and length < YIELD_BYTES and not self._write_pause_s
            if is_done and not is_over and self._resumes_after_report(now):
                return length
        self._to_send.notify()
        return length

    def _resumes_after_report(self, now: float) -> bool:
        """Has the idle writer wake when the wait for a replica's report times out, if there is such
        a wait. Returns False where the writer itself must be woken to set that time."""
        report_wait = self._context.report_wait
        if not report_wait.holds_back(now):
            return True
        if self._idle_scope is None:
            return False
        self._idle_scope.deadline = report_wait.ends_at
        return True

    async def run(self) -> None:
        """Writes until the session is over, and everything is written.

        Raises:
            trio.BrokenResourceError: The peer is gone.
            trio.ClosedResourceError: The connection was closed.
            trio.TooSlowError: The peer takes nothing, for too long.
        """
        while True:
            # Taken first: what is added while it writes must not be slept through.
            to_send = self._to_send.next_event()
            await self._flush()
            if self._session.state is SessionState.CLOSED:
                return
            self.is_idle = True
            report_wait = self._context.report_wait
            if report_wait.was_used:
                is_held = report_wait.holds_back(trio.current_time())
                deadline = report_wait.ends_at if is_held else math.inf
                with trio.CancelScope(deadline=deadline) as self._idle_scope:
                    await to_send.wait()
                self._idle_scope = None
            else:
                await to_send.wait()
            self.is_idle = False

    async def _flush(self) -> None:
        """Writes until there is nothing to write now."""
        resources = self._resources
        if not self._unwritten:
            await self._pause_writing()
        if self._has_sent_much:
            await self._wait_for_write_turn()
        length = len(self._unwritten) or self._send(trio.current_time())
        while length:
            if self._unwritten:
                await write_rest(
                    self._stream, self._unwritten, resources.send_timeout_s, resources.write_turns
                )
                self._note_sent()
            elif length >= YIELD_BYTES:
                await trio.lowlevel.checkpoint()
            await self._pause_writing()
            if self._has_sent_much:
                await self._wait_for_write_turn()
            length = self._send(trio.current_time())

    async def _wait_for_write_turn(self) -> None:
        """Much was sent the last time: others have their turn before more is, where that adds
        up."""
        if not self._resources.write_turns.may_begin:
            await self._resources.write_turns.next_turn()

    async def _pause_writing(self) -> None:
        """Waits as long as the user's limits say. Meanwhile it writes only the `Noop`s that are
        due, or the peer would regard the connection as broken. To be called between two frames."""
        if not self._write_pause_s:
            return
        session, now = self._session, trio.current_time()
        deadline, self._write_pause_s = now + self._write_pause_s, 0.0
        # A session that is over, as its user was removed, ends at once.
        while now < deadline and session.state is not SessionState.CLOSED:
            if session.keep_alive.is_noop_due(now):
                session.keep_alive.note_sent(now)
                await write_all(
                    self._stream, Noop().frame_buffers(), self._resources.send_timeout_s
                )
            with trio.move_on_at(min(deadline, session.keep_alive.noop_due_at)):
                await self._to_send.wait()
            now = trio.current_time()

    def _send(self, now: float) -> int:
        """Gives the socket what there is to send at the time `now`; what it does not take at once
        is left in `_unwritten`.

        Returns:
            How many bytes there were, with those of the rows that were left out: reading these
            took time, too.
        """
        session, context, left_out = self._session, self._context, 0
        reply_bytes = session.outgoing_bytes
        if session.state is _STREAMING and not context.report_wait.holds_back(now):
            try:
                left_out = context.streamer.step()
                if (replica_end := context.streamer.replica_end) is not None:
                    # A step that ends before all was sent counts as a large batch.
                    nbytes = session.outgoing_bytes + left_out
                    context.report_wait.note_sent(nbytes, *replica_end, now)
            except Exception:
                log.exception("stream failed", peer=self._peer)
                session.fail(
                    Status.INTERNAL, "internal error in a stream; the server's log has the cause"
                )
        length = session.outgoing_bytes
        self._has_sent_much = length + left_out >= YIELD_BYTES
        if not length:
            return left_out
        self.bytes_out += length
        if (usage := context.log_in.usage) is not None:
            self._write_pause_s = usage.pause_after_writing(length, now)
        self._unwritten = session.take_outgoing(now)
        self._unwritten = write_now(self._stream, self._unwritten)
        if self._has_sent_much:
            unwritten_bytes = sum(map(len, self._unwritten))
            self._resources.write_turns.note_used(length + left_out - unwritten_bytes)
        if self._unwritten:
            # What the streamer has added is bounded by itself, and holds up no request.
            context.backlog.begin_write(reply_bytes)
        else:
            self._note_sent()
        return length + left_out

    def _note_sent(self) -> None:
        self._unwritten = ()
        if self._context.streamer.disk_streams:
            self._context.streamer.note_sent()
        self._context.backlog.end_write()
