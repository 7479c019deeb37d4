"""One connection: a session between a reader and a writer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Final

import structlog
import trio

from upr_protocol.concurrency import first_failure
from upr_protocol.errors import RemoteProtocolError, Status, TlsError
from upr_protocol.session import ServerSession, SessionState
from upr_protocol.transport import (
    SCRATCH_BYTES,
    NotTlsError,
    TlsStream,
    new_memory,
    read_some,
    write_now,
)
from upr_protocol.wire import BEFORE_READY, ContinueLogIn, Message, StartLogIn
from upr_server.net.connection_writer import ConnectionWriter
from upr_server.net.frame_budget import UnfinishedFrame
from upr_server.net.log_in import offered_mechanisms
from upr_server.net.message_dispatcher import MessageDispatcher
from upr_server.net.request_context import Handler, RequestContext
from upr_server.net.resources import ServerResources
from upr_server.net.silence_watch import SilenceWatch
from upr_server.net.streamer import streams_in_steps
from upr_server.net.turns import LONG_STEP_S, SLICE_S
from upr_server.runtime import network_of

CLOSING_READ_S: Final = 2.0
"""How long what a peer still sends is read after the last word to it was written."""

CONNECTION_OBJECTS: Final = 250
"""Objects that are made for a connection as it begins, again until it is ready, and as it ends, as
Python's collector counts them."""

_LOG_IN: Final = (StartLogIn, ContinueLogIn)

Continuation = Callable[[], Awaitable[None]]
"""What a reader waits for before it goes on."""

log = structlog.get_logger(__name__)


class AcceptedConnection:
    """Drives one session over one stream until either side ends it.

    A reader takes bytes in and answers requests at once. At the end of its step it writes what that
    has made, for this connection and for others (`step_writes`). A writer sends what the session
    holds and then streams (`connection_writer`), and has nothing to do where the sockets took it at
    once. Neither ever waits for the other, except for `REPLIES_BYTES_MAX`. A third task watches for
    silence (`silence_watch`).

    Args:
        resources: What all connections share.
        handlers: How requests are answered, by their kind.
        stream: The stream.
        peer: The other end's address, for logs and statistics.

    Attributes:
        session: The session.
        context: The requests, and how they are answered.
        peer: The other end's address.
        network: Its address without the port, or the network of it; see `network_of`.
    """

    def __init__(
        self,
        resources: ServerResources,
        handlers: Mapping[type[Message], Handler],
        stream: trio.abc.HalfCloseableStream,
        peer: str,
    ) -> None:
        self.peer = peer
        self.network = network_of(peer)
        self.session = ServerSession(
            resources.identity,
            now=trio.current_time(),
            allocate=new_memory,
            mechanisms=partial(offered_mechanisms, resources.log_ins, stream),
        )
        # The connection's own `wake` would make a reference cycle here. Without one, what a
        # connection held is freed when the connection ends, and not at some later collection.
        wake = resources.step_writes.waker(self)
        self.context = RequestContext(resources, self.session, stream, peer, wake)
        self._writer = ConnectionWriter(resources, self.session, self.context, stream, peer)
        self._silence_watch = SilenceWatch(resources, self.session, self._writer, peer, wake)
        self._dispatcher = MessageDispatcher(self.context, handlers, self.session, peer)
        self._resources = resources
        self._stream = stream
        self._is_ready = False
        self._is_lost = False
        """Whether reading or writing has met an error."""
        self._tls_failure = ""
        """The error, if it is one of TLS; otherwise empty."""
        self._frame = UnfinishedFrame(resources.frame_budget, self.network, self._drop_frame)
        """What is held of the frame that is arriving."""
        self._handled_count = 0
        """How often a frame, or some frames together, were handled."""
        self._bytes_in = 0
        self._has_worked_long = False
        """Whether its last step took long."""

    async def run(self) -> None:
        """Serves the connection until it ends. Cancelled, it leaves at once. The stream is closed
        in any case."""
        try:
            if await self._converse() and self.session.state is SessionState.CLOSED:
                await self._close_gracefully()
                # Peers that leave together have all got here in one turn.
                await self._resources.connection_turns.take_turn(1)
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            self._log_loss()
        except* NotTlsError:
            await self._refuse_in_clear()
        except* TlsError as errors:
            log.warning("TLS failed", peer=self.peer, reason=str(first_failure(errors)))
        finally:
            if isinstance(self._stream, trio.SocketStream):
                # Its `aclose` does the same, and then passes a checkpoint, which takes two steps.
                self._stream.socket.close()
            else:
                with trio.move_on_after(0):
                    await self._stream.aclose()

    async def _converse(self) -> bool:
        """Converses until either side ends it. Returns whether the peer may still receive
        something."""
        # This stays False when the peer leaves: the reader then cancels the nursery, and with it
        # the writer.
        is_connected = False
        try:
            async with trio.open_nursery() as nursery:
                self.context.begin(nursery)
                # The objects are counted here, and not at the accept: 1,000 connections may be
                # accepted before any of these objects is made.
                self._resources.young_objects.note_made(CONNECTION_OBJECTS)
                nursery.start_soon(self._read, nursery.cancel_scope)
                nursery.start_soon(self._silence_watch.run)
                is_connected = await self._write()
                await self._close_streams()
                # The tasks are cancelled in a later turn, as 1,000 connections that time out
                # together come here together.
                self._resources.connection_ends.add(nursery.cancel_scope)
            return is_connected
        finally:
            if self._is_lost:
                # The error is logged here, and not where it occurred: thousands of connections that
                # are reset together meet theirs in one turn.
                self._log_loss()
            self._frame.close()
            self.session.forget_received()
            self.context.close()
            # If thousands of connections end together, their objects in reference cycles would
            # otherwise be collected in one step.
            self._resources.young_objects.note_made(CONNECTION_OBJECTS)

    def _log_loss(self) -> None:
        if self._tls_failure:
            log.warning("TLS failed", peer=self.peer, reason=self._tls_failure)
        else:
            log.info("connection lost", peer=self.peer, identity=self.session.client_identity)

    async def _refuse_in_clear(self) -> None:
        """Tells a peer that does not speak TLS so, in the clear."""
        log.warning("a client in the clear; closing connection", peer=self.peer)
        assert isinstance(self._stream, TlsStream)
        stream = self._stream.transport
        assert isinstance(stream, trio.abc.HalfCloseableStream)
        self._stream = stream
        self.session.fail(Status.BAD_MAGIC, "this server speaks TLS")
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            write_now(self._stream, self.session.take_outgoing(trio.current_time()))
            await self._close_gracefully()

    async def _close_gracefully(self) -> None:
        """Ends the conversation so that the peer hears the last word. A connection that is closed
        while bytes lie in it unread is reset, and the reset may overtake what was written."""
        with (
            # A peer that has left already needs no last word.
            suppress(trio.BrokenResourceError, TlsError),
            trio.move_on_after(CLOSING_READ_S),
        ):
            await self._stream.send_eof()
            while await self._stream.receive_some(SCRATCH_BYTES):
                pass

    def wake(self) -> None:
        """There is something to send."""
        self._resources.step_writes.add(self)

    def wake_writer(self) -> None:
        """There is something for the writer to send, or to end."""
        self._writer.wake()

    def flush_now(self, now: float) -> int:
        """Writes what the socket takes at the time `now`; see `ConnectionWriter.flush_now`."""
        return self._writer.flush_now(now)

    # Reading.

    async def _read(self, scope: trio.CancelScope) -> None:
        session = self.session
        while True:
            try:
                count = await read_some(
                    self._stream, session, self._resources.scratch, self._wait_for_read_turn
                )
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                # Raised into the nursery, it would end the streams in one step.
                self._is_lost = True
                count = 0
            except TlsError as error:
                if not self._is_ready:
                    # A stranger has no streams, and may be answered in the clear.
                    raise
                self._is_lost, self._tls_failure = True, str(error)
                count = 0
            if not count:
                # A peer that half-closes has no way to acknowledge or say goodbye: it is gone.
                await self._close_streams()
                self._resources.connection_ends.add(scope)
                return
            self._bytes_in += count
            self._resources.read_turns.note_used(count)
            if self._frame.nbytes:
                self._frame.note_read(count, session.now)
            has_whole_frame = await self._handle_frames()
            if session.state is SessionState.CLOSED:
                return
            held_bytes = session.unfinished_frame_bytes
            if held_bytes or self._frame.nbytes:
                self._frame.set_held_bytes(held_bytes, trio.current_time(), is_new=has_whole_frame)
                if held_bytes and self._resources.frame_budget.holds_up_frames:
                    await self._wait_for_frame_memory()
            if (usage := self.context.log_in.usage) is not None:
                await self._pause_reading(usage.pause_after_reading(count, session.now))

    async def _close_streams(self) -> None:
        """Closes the streams of a peer that has gone, some in each step: 1,024 that others follow
        beside it take 5 to 9 ms. If this is cancelled, `RequestContext.close` closes the rest."""
        turns, began = self._resources.step_turns, trio.current_time()
        for _ in streams_in_steps(self.context.streamer.close()):
            turns.note_used(trio.current_time() - began)
            if turns.may_begin:
                await trio.lowlevel.checkpoint()
            else:
                await turns.next_turn()
            began = trio.current_time()

    async def _handle_frames(self) -> bool:
        """Handles every whole frame that has come; whether there was any."""
        handled_before, events = self._handled_count, self.session.message_steps()
        if self._has_worked_long:
            await self._wait_for_step_turn()
        now = self.session.now
        try:
            while (continuation := self._handle_in_step(events, now)) is not None:
                if not self._is_ready:
                    self._note_ready()
                await continuation()
                if self._has_worked_long:
                    await self._wait_for_step_turn()
                now = trio.current_time()
        except RemoteProtocolError as error:
            log.warning(
                "protocol error",
                peer=self.peer,
                identity=self.session.client_identity,
                status=error.status.name,
                error=str(error),
            )
        if not self._is_ready:
            self._note_ready()
        return self._handled_count > handled_before

    def _note_ready(self) -> None:
        if self.session.state not in BEFORE_READY:
            self._is_ready = True
            self._silence_watch.note_ready()
            if self.session.state is not SessionState.CLOSED:
                self._resources.strangers.discard(self)
            self._resources.young_objects.note_made(CONNECTION_OBJECTS)

    async def _wait_for_step_turn(self) -> None:
        """The last step took long: others have their turn before the next, where such steps add
        up."""
        self._has_worked_long = False
        turns = self._resources.step_turns
        if not turns.may_begin:
            await turns.next_turn()

    def _note_worked(self, worked_s: float) -> None:
        """So much of a step is done."""
        if worked_s > LONG_STEP_S:
            self._has_worked_long = True
            self._resources.step_turns.note_used(worked_s)

    def _handle_in_step(self, events: Iterator[Message | None], now: float) -> Continuation | None:
        """Handles frames for one step that begins at `now`, and writes what that has made for this
        connection and for others.

        Returns:
            What comes before the next step; None when every whole frame was handled.
        """
        writes = self._resources.step_writes
        writes.begin(self)
        try:
            return self._handle_some(events, now)
        finally:
            writes.end(now)

    def _handle_some(self, events: Iterator[Message | None], began: float) -> Continuation | None:
        while True:
            has_applied = self._dispatcher.apply_sets()
            if not has_applied:
                try:
                    message = next(events)
                except StopIteration:
                    return None
                if message is not None and (steps := self._dispatcher.handle(message)) is not None:
                    self._handled_count += 1
                    self._note_worked(trio.current_time() - began)
                    return partial(self._finish_handling, message, steps)
                if type(message) in _LOG_IN:
                    self._handled_count += 1
                    return self._wait_after_log_in
            self._handled_count += 1
            if self.context.backlog.is_full:
                return self._wait_for_backlog
            if not self.session.has_unread:
                return None
            worked_s = trio.current_time() - began
            if worked_s > LONG_STEP_S:
                self._has_worked_long = True
                if worked_s > SLICE_S:
                    self._note_worked(worked_s)
                    return trio.lowlevel.checkpoint

    async def _wait_after_log_in(self) -> None:
        """Waits before anything is handled that the client has sent behind its log-in: until a
        failure is answered, or until the user may have more bytes read."""
        log_in = self.context.log_in
        if log_in.has_failed:
            await trio.sleep(self._resources.log_ins.failure_delay_s)
            log_in.tell_failure()
        elif log_in.usage is not None:
            await self._pause_reading(log_in.usage.pause_after_reading(0, trio.current_time()))

    async def _pause_reading(self, pause_s: float) -> None:
        if pause_s:
            self._silence_watch.is_unread = True
            await self._frame.pause(pause_s)
            self._silence_watch.is_unread = False

    async def _wait_for_read_turn(self) -> None:
        # A read of a MiB takes about a millisecond. Otherwise hundreds of peers that send at the
        # same time would hold the loop for hundreds of milliseconds.
        if not self._resources.read_turns.may_begin:
            self._frame.stop_waiting(trio.current_time())
            await self._resources.read_turns.next_turn()

    async def _wait_for_frame_memory(self) -> None:
        self._silence_watch.is_unread = True
        await self._frame.wait_for_turn()
        self._silence_watch.is_unread = False

    def _drop_frame(self, reason: str) -> None:
        log.warning(
            "unfinished frame dropped; closing connection",
            peer=self.peer,
            identity=self.session.client_identity,
            reason=reason,
        )
        self.session.fail(Status.TOO_SLOW, reason)
        self.wake()

    async def _wait_for_backlog(self) -> None:
        self._silence_watch.is_unread = True
        await self.context.backlog.wait_until_not_full()
        self._silence_watch.is_unread = False

    async def _finish_handling(self, message: Message, steps: Iterator[None]) -> None:
        """Does the steps that are left to do for a message; others have their turn before each."""
        turns, has_more = self._resources.step_turns, True
        while has_more:
            self.wake()
            if turns.may_begin:
                await trio.lowlevel.checkpoint()
            else:
                await turns.next_turn()
            began = trio.current_time()
            has_more = self._dispatcher.go_on(message, steps)
            worked_s = trio.current_time() - began
            turns.note_used(worked_s)
            self._has_worked_long = worked_s > LONG_STEP_S
        if self.context.backlog.is_full:
            await self._wait_for_backlog()

    # Writing.

    async def _write(self) -> bool:
        """Writes until the session is over; whether the peer has taken it all.

        An error is not raised into the nursery's body. It would cancel the other tasks from a frame
        that holds what the nursery then raises, and their `Cancelled` would hold that frame: a
        reference cycle, with everything that the connection has.
        """
        try:
            await self._writer.run()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._is_lost = True
            return False
        except trio.TooSlowError:
            log.warning(
                "send timeout; closing connection",
                peer=self.peer,
                identity=self.session.client_identity,
            )
            return False
        return True

    # Rights.

    def loses_rights(self) -> bool:
        """Whether a change of the users has taken something from the client: `end_revoked` ends
        it. O(1), where others have the same rights."""
        if self.session.state in BEFORE_READY or self.session.state is SessionState.CLOSED:
            return False
        return self.context.access.loses_rights()

    def end_revoked(self) -> Iterator[None]:
        """Ends what the client may not have any more: streams, some in each step, and the session
        of a user who was removed."""
        yield from self.context.end_revoked()
        if self.context.access.is_lost and self.session.state is not SessionState.CLOSED:
            self.session.fail(Status.NOT_ALLOWED, "the user of this connection was removed")
        self.wake()

    # The end.

    def shut_down(self) -> Iterator[None]:
        """The server stops: every stream ends with that reason, some in each step, and then the
        session."""
        yield from streams_in_steps(self.context.streamer.end_each(Status.SHUTTING_DOWN))
        self.session.fail(Status.SHUTTING_DOWN, "the server is stopping")
        self.wake()

    def statistics(self) -> dict[str, object]:
        """What the connection can tell about itself; sizes in bytes."""
        session, bucket = self.session.statistics(), self.context.bucket
        return {
            "peer": self.peer,
            "identity": self.session.client_identity,
            "user": self.context.access.user_name or "",
            "bucket": "" if bucket is None else bucket.name,
            "state": session.state.name.lower(),
            "streams": session.streams,
            "window_used": session.window_used,
            "credit_left": session.credit_left,
            "barriers": session.barriers,
            "cycles": session.cycles,
            "bytes_in": self._bytes_in,
            "bytes_out": self._writer.bytes_out,
        }
