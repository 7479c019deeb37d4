"""One connection: a session between a reader and a writer."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog
import trio

from upr_protocol.chunk import Buffer
from upr_protocol.errors import RemoteProtocolError, ServerError, Status
from upr_protocol.limits import HANDSHAKE_TIMEOUT_S
from upr_protocol.session import ServerSession, SessionState
from upr_protocol.transport import SCRATCH_BYTES, read_some, write_now, write_rest
from upr_protocol.wire import (
    CloseStream,
    Credit,
    Error,
    Message,
    Refusal,
)
from upr_server.engine import Bucket, BucketError, Partition, Relief
from upr_server.net.budget import LARGE_FRAME_BYTES, frame_timeout_s
from upr_server.net.line import Line
from upr_server.net.replies import Replies
from upr_server.net.requests import HANDLERS
from upr_server.net.streamer import Streamer
from upr_server.storage.errors import StorageError
from upr_server.storage.online.bucket_disk import BucketDisk

if TYPE_CHECKING:
    from upr_server.net.service import Service

REPLIES_BYTES_MAX: Final = 1024 * 1024
"""Answers that may wait for a peer to take them. Above it the next request waits, until the peer
reads or the send deadline passes. This, requests in line (`LINE_REQUESTS_MAX`) and a large frame
that waits for its turn (`budget`) are the only cases in which a connection is not read. The
acknowledgements and barriers of a peer that reads, keeps below that many requests for what is on
disk, and sends no frame above 1 MiB, always get through."""

LINE_REQUESTS_MAX: Final = 16
"""Requests of one connection that may stand in lines (`line`), of all partitions together. With so
many the disk's reader always has one to go on with; more would only be memory, and work for those
who go. Until one of them was answered the connection is not read: what its peer says meanwhile,
acknowledgements and barriers too, waits as long as the disk takes for one of 16 reads. They are
worked off by tasks of their own, which wait for nothing that is not yet read.

A line answers nothing to a connection that owes more than `REPLIES_BYTES_MAX`, but as many as may
stand there may have been begun before: a peer that takes nothing is owed at most 16 answers more,
each of 1 MiB (`GET_REPLY_BYTES`) or one larger value."""

LINE_BYTES_MAX: Final = 1024 * 1024
"""The same in bytes of requests, which the bucket's quota does not count, and whose credit is paid
back when they come. The request that exceeds it still stands in line."""

_CREDIT_FRACTION: Final = 4
"""Credit is topped up once a quarter of it was spent: one message then serves for many batches."""

SLICE_S: Final = 0.001
"""How long one peer's requests are answered before others have their turn."""

YIELD_BYTES: Final = 64 * 1024
"""Who sends so much at a time lets others have their turn before there is more."""

BUSY_S: Final = 0.25
"""How often silence is looked at while something is being written."""

PARTING_S: Final = 2.0
"""How long what a peer still sends is read after the last word to it was written."""

_UNGREETED: Final = (SessionState.GREETING, SessionState.GREETED)

_SENTENCE_MAX: Final = 900
"""Characters of a refusal: in any script they fit its frame."""

log = structlog.get_logger(__name__)


class Connection:
    """Drives one session over one stream until either side ends it.

    A reader takes bytes in and answers requests at once; a writer sends what the session holds and
    then streams, and has nothing to do where the socket took the answers at once. Neither ever
    waits for the other, but for `REPLIES_BYTES_MAX`. A third task minds the time.

    Attributes:
        session: The session.
        service: What all connections share.
        streamer: The connection's streams.
        bucket: The bucket that was opened, or None.
        asks_for_events: Whether a question about events waits for its answer: there is one at a
            time, which bounds what a peer may have wait.
        peer: The other end's address, for logs and statistics.
    """

    def __init__(self, service: Service, stream: trio.abc.HalfCloseableStream, peer: str) -> None:
        self.service = service
        self.peer = peer
        self.session = ServerSession(service.identity, now=trio.current_time())
        self.streamer = Streamer(self.session, peer, self.wake)
        self.replies = Replies(self, self.say)
        self.bucket: Bucket | None = None
        self.asks_for_events = False
        self._disk: BucketDisk | None = None
        self._nursery: trio.Nursery | None = None
        self._reported: dict[Partition, str] = {}
        self._errands: deque[tuple[Message, Callable[[], Awaitable[None]]]] = deque()
        self._stream = stream
        self._wakeup = trio.Event()
        self._greeted = trio.Event()
        self._is_idle = False
        """Whether the writer waits for something to write."""
        self._rest: Sequence[Buffer] = ()
        """What the socket has not taken yet."""
        self._relieved = trio.Event()
        """Set, and then replaced, when the peer took answers or a request left its line."""
        self._opened_at = trio.current_time()
        self._held = 0
        self._frame_deadline = math.inf
        self._deaf = False
        """Whether it is we who do not read, though nothing is being written."""
        self._silent = False
        """Whether nothing was heard for too long when that was last looked at."""
        self._replies_being_written = 0
        self._in_line = self._bytes_in_line = 0
        self._bytes_in = 0
        self._bytes_out = 0

    async def run(self) -> None:
        """Serves the connection until it ends. Cancelled, it leaves at once. The stream is closed
        in any case."""
        try:
            await self._converse()
            if self.session.state is SessionState.CLOSED:
                await self._part()
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            log.info("connection lost", peer=self.peer, identity=self.session.client_identity)
        except* trio.TooSlowError:
            log.warning(
                "connection closed: the peer takes nothing",
                peer=self.peer,
                identity=self.session.client_identity,
            )
        finally:
            with trio.move_on_after(0):
                await self._stream.aclose()

    async def _converse(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._read, nursery.cancel_scope)
                nursery.start_soon(self._keep_time)
                await self._write()
                nursery.cancel_scope.cancel()
        finally:
            self.streamer.close()
            self._let_go()
            for partition, replica in self._reported.items():
                partition.replicas.forget(replica, self)

    async def _part(self) -> None:
        """Ends the conversation so that the peer hears the last word. A connection that is closed
        while bytes lie in it unread is reset, and the reset may overtake what was written."""
        with trio.move_on_after(PARTING_S):
            await self._stream.send_eof()
            while await self._stream.receive_some(SCRATCH_BYTES):
                pass

    def wake(self) -> None:
        """There is something to send."""
        self._wakeup.set()

    # Reading.

    async def _read(self, scope: trio.CancelScope) -> None:
        session = self.session
        while True:
            count = await self._read_some()
            if count is None:
                session.fail(
                    Status.TOO_SLOW,
                    f"{session.unfinished_body_bytes} bytes take too long to arrive",
                )
                self.wake()
                return
            if not count:
                # A peer that half-closes has no way to acknowledge or say goodbye: it is gone.
                scope.cancel()
                return
            self._bytes_in += count
            now = session.now
            try:
                for message in session.events():
                    # Whatever frame was under way has ended.
                    self._let_go()
                    self._handle(message)
                    if self._has_enough:
                        await self._until_it_may_ask()
                    elif trio.current_time() - now > SLICE_S:
                        self.wake()
                        await trio.lowlevel.checkpoint()
                        now = trio.current_time()
            except RemoteProtocolError as error:
                log.warning(
                    "protocol error",
                    peer=self.peer,
                    identity=session.client_identity,
                    status=error.status.name,
                    error=str(error),
                )
            self._answer()
            if session.state is SessionState.CLOSED:
                return
            if session.unfinished_body_bytes > LARGE_FRAME_BYTES and not self._held:
                await self._hold(session.unfinished_body_bytes)

    async def _read_some(self) -> int | None:
        """How many bytes came; None when a large frame takes too long."""
        scratch = self.service.scratch
        if self._frame_deadline == math.inf:
            return await read_some(self._stream, self.session, scratch)
        with trio.move_on_at(self._frame_deadline):
            return await read_some(self._stream, self.session, scratch)
        return None

    def _answer(self) -> None:
        """Has what requests have led to written: at once, where that is all there is to write."""
        session = self.session
        if session.state not in _UNGREETED:
            self._greeted.set()
        # Woken, the writer is idle for a moment still: what was left for it must go first.
        if self._is_idle and not self._rest and session.state is SessionState.OPEN:
            self._send()
            if not self._rest:
                return
        self.wake()

    async def _hold(self, length: int) -> None:
        """Takes room for a large frame whose header has come, before more of it is read."""
        self._deaf = True
        await self.service.frame_budget.acquire(length)
        self._deaf = False
        self._held = length
        self._frame_deadline = trio.current_time() + frame_timeout_s(length)

    def _let_go(self) -> None:
        if self._held:
            self.service.frame_budget.release(self._held)
            self._held = 0
            self._frame_deadline = math.inf

    @property
    def _owed(self) -> int:
        """Bytes of answers that the peer has not taken."""
        return self._replies_being_written + self.session.outgoing_bytes

    @property
    def _has_enough(self) -> bool:
        """Whether no more of the peer's requests are to be taken now."""
        return (
            self._owed > REPLIES_BYTES_MAX
            or self._in_line >= LINE_REQUESTS_MAX
            or self._bytes_in_line > LINE_BYTES_MAX
        )

    async def _until_it_may_ask(self) -> None:
        self._deaf = True
        while self._has_enough:
            self.wake()
            await self._relieved.wait()
        self._deaf = False

    async def until_it_may_be_answered(self) -> None:
        """Waits while the peer is owed more than it may be."""
        while self._owed > REPLIES_BYTES_MAX:
            self.wake()
            await self._relieved.wait()

    def stands_in_line(self, nbytes: int) -> None:
        """A request of so many bytes waits in a line."""
        self._in_line += 1
        self._bytes_in_line += nbytes

    def has_left_line(self, nbytes: int) -> None:
        """It was answered."""
        self._in_line -= 1
        self._bytes_in_line -= nbytes
        self._relieve()
        self.wake()

    def _relieve(self) -> None:
        self._relieved.set()
        self._relieved = trio.Event()

    def _handle(self, message: Message) -> None:
        handler = HANDLERS.get(type(message))
        if handler is not None:
            try:
                handler(self, message)
            except (ServerError, BucketError) as error:
                self._refuse_for(message, error)
            except Exception:
                # A fault of ours: the log has it, and the peer hears that there was one.
                log.exception("a request failed", peer=self.peer, request=type(message).__name__)
                self.fault(message)
        elif isinstance(message, CloseStream):
            self.streamer.end(message.partition, Status.STREAM_CLOSED)
        elif isinstance(message, Error):
            log.warning(
                "the client reports an error",
                peer=self.peer,
                identity=self.session.client_identity,
                error=message.sentence,
            )

    def start(self, task: Callable[[], Awaitable[None]]) -> None:
        """Runs `task`, which must not raise, until the connection's end cancels it."""
        assert self._nursery is not None
        self._nursery.start_soon(task)

    def later(self, request: Message, settle: Callable[[], Awaitable[None]]) -> None:
        """Has `request` answered by a task of its own, which the connection's end cancels."""
        self.start(partial(self._settle, request, settle))

    def in_turn(self, request: Message, settle: Callable[[], Awaitable[None]]) -> None:
        """The same, behind those before it that were to be answered in turn."""
        self._errands.append((request, settle))
        if len(self._errands) == 1:
            self.start(self._run_errands)

    async def _run_errands(self) -> None:
        while self._errands:
            await self._settle(*self._errands[0])
            self._errands.popleft()

    async def _settle(self, request: Message, settle: Callable[[], Awaitable[None]]) -> None:
        try:
            await settle()
        except (ServerError, BucketError) as error:
            self._refuse_for(request, error)
        except StorageError as error:
            self.refuse(request, Status.TEMPORARY_FAILURE, str(error))
        except Exception:
            log.exception("a request failed", peer=self.peer, request=type(request).__name__)
            self.fault(request)
        self.wake()

    def _refuse_for(self, request: Message, error: ServerError | BucketError) -> None:
        sentence = error.sentence if isinstance(error, ServerError) else str(error)
        self.refuse(request, error.status, sentence)

    def fault(self, request: Message) -> None:
        """`request` met a fault of ours: the peer hears that, and the connection ends."""
        self.session.fail(Status.INTERNAL, f"{type(request).__name__} met a fault")

    def say(self, message: Message) -> None:
        """Sends an answer, unless the conversation has ended while it was found."""
        if self.session.state is not SessionState.CLOSED:
            self.session.send(message)

    def refuse(self, request: Message, status: Status, sentence: str) -> None:
        """Says no to `request`, or to what `request` is the answer to."""
        self.say(
            Refusal(
                sentence[:_SENTENCE_MAX],
                self._map_revision(),
                partition=request.partition,
                opaque=request.opaque,
                status=status,
            )
        )

    def _map_revision(self) -> int:
        return 0 if self.bucket is None else self.service.cluster.revision(self.bucket.name)

    def reported(self, partition: Partition, replica: str) -> None:
        """The peer is a replica, and has reported what it has of a partition."""
        self._reported[partition] = replica

    # Writing.

    async def _write(self) -> None:
        while True:
            self._wakeup = trio.Event()
            await self._flush()
            if self.session.state is SessionState.CLOSED:
                return
            self._is_idle = True
            await self._wakeup.wait()
            self._is_idle = False

    async def _flush(self) -> None:
        """Writes until there is nothing to write now."""
        length = len(self._rest) or self._send()
        while length:
            if self._rest:
                await write_rest(self._stream, self._rest, self.service.send_timeout_s)
                self._has_sent()
            elif length >= YIELD_BYTES:
                await trio.lowlevel.checkpoint()
            length = self._send()

    def _send(self) -> int:
        """Gives the socket what there is to send; what it does not take at once is left in `_rest`.

        Returns:
            How many bytes there were.
        """
        session = self.session
        # What the streamer adds is bounded by itself, and holds up no request.
        self._replies_being_written = session.outgoing_bytes
        try:
            self.streamer.step()
        except Exception:
            log.exception("a stream failed", peer=self.peer)
            session.fail(Status.INTERNAL, "the stream met a fault")
        outgoing = session.take_outgoing(trio.current_time())
        if not outgoing:
            return 0
        length = sum(map(len, outgoing))
        self._bytes_out += length
        self._rest = write_now(self._stream, outgoing)
        if not self._rest:
            self._has_sent()
        return length

    def _has_sent(self) -> None:
        self._rest = ()
        self.streamer.sent()
        self._replies_being_written = 0
        self._relieve()

    # Silence.

    async def _keep_time(self) -> None:
        """Says or does something about silence when it is time, until the conversation is over."""
        session = self.session
        with trio.move_on_at(self._opened_at + HANDSHAKE_TIMEOUT_S):
            await self._greeted.wait()
        if not self._greeted.is_set():
            session.fail(Status.IDLE, f"no Hello within {HANDSHAKE_TIMEOUT_S:.0f} seconds")
            self.wake()
        while session.state is not SessionState.CLOSED:
            # Whatever was said or heard meanwhile has moved it on.
            await trio.sleep_until(session.keep_alive.next_check())
            if not self._is_idle:
                # How long a peer may take nothing is the writer's to say.
                await trio.sleep(BUSY_S)
            elif trio.current_time() >= session.keep_alive.next_check():
                await self._look_at_silence()
                self.wake()

    async def _look_at_silence(self) -> None:
        session = self.session
        now = trio.current_time()
        if self._deaf:
            session.keep_alive.received(now)
        if session.tick(now):
            self._silent = False
        elif not self._silent:
            # Perhaps it was this process that slept: what came meanwhile is read first.
            self._silent = True
            await trio.sleep(SLICE_S)
        else:
            log.warning(
                "connection closed: the peer is silent",
                peer=self.peer,
                identity=session.client_identity,
            )
            session.fail(Status.IDLE, "nothing was heard for two idle intervals")

    # The bucket, and credit to publish to it.

    def open(self, bucket: Bucket) -> None:
        """The client has chosen its bucket."""
        self.bucket = bucket
        self._disk = self.service.disks[bucket]

    @property
    def disk(self) -> BucketDisk:
        """The disk of the bucket that was opened.

        Raises:
            ServerError: The bucket was deleted.
        """
        if self._disk is None:
            raise ServerError(Status.NO_BUCKET, "the bucket was deleted")
        return self._disk

    def line(self, partition: Partition) -> Line:
        """The line before a partition of the bucket that was opened."""
        return self.service.line(self.disk, partition)

    def leave_bucket(self) -> None:
        """The bucket was deleted: its streams end, and what is asked of it is refused."""
        self.streamer.end_all(Status.BUCKET_DELETED)
        self.bucket = self._disk = None
        self.wake()

    def published(self) -> None:
        """A batch came, and has spent its credit."""
        if self.bucket is not None:
            self.service.credit_shares.publishes(self.bucket, self)
            self.pay_credit()

    def pay_credit(self) -> None:
        """Tops up the publisher's credit when enough was spent, unless the bucket is over its
        quota: then it is paid when there is room again."""
        bucket, session = self.bucket, self.session
        if bucket is None or session.state is SessionState.CLOSED:
            return
        credit = self.service.credit_shares.of(bucket, self)
        owed = credit - session.credit.left
        if owed * _CREDIT_FRACTION < credit:
            return
        relief = bucket.relief()
        if relief is not Relief.NOTHING:
            self.service.relieve(bucket)
        if relief is Relief.REFUSE_CREDIT:
            self.service.wait_for_room(self)
            return
        session.send(Credit(owed))
        self.wake()

    # The end.

    def shut_down(self) -> None:
        """The server stops: every stream ends with that reason, and then the session."""
        self.streamer.end_all(Status.SHUTTING_DOWN)
        self.session.fail(Status.SHUTTING_DOWN, "the server is stopping")
        self.wake()

    def statistics(self) -> dict[str, object]:
        """What the connection can tell about itself; sizes in bytes."""
        session = self.session.statistics()
        return {
            "peer": self.peer,
            "identity": self.session.client_identity,
            "bucket": self.bucket.name if self.bucket else "",
            "state": session.state.name.lower(),
            "streams": session.streams,
            "window_used": session.window_used,
            "credit_left": session.credit_left,
            "barriers": session.barriers,
            "cycles": session.cycles,
            "bytes_in": self._bytes_in,
            "bytes_out": self._bytes_out,
        }
