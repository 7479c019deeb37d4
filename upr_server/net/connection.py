"""One connection: a session between a reader and a writer."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import structlog
import trio

from upr_protocol.chunk import Buffer
from upr_protocol.concurrency import Notifier
from upr_protocol.errors import RemoteProtocolError, ServerError, Status
from upr_protocol.limits import HANDSHAKE_TIMEOUT_S
from upr_protocol.session import ServerSession, SessionState
from upr_protocol.transport import SCRATCH_BYTES, read_some, write_now, write_rest
from upr_protocol.wire import CloseStream, Error, Get, Message, Mutate, Refusal
from upr_server.buckets import BucketCatalog
from upr_server.engine import Bucket, BucketError, Partition
from upr_server.net.credit import PublisherCredit
from upr_server.net.frame_budget import LARGE_FRAME_BYTES, frame_timeout_s
from upr_server.net.partition_queue import Apply
from upr_server.net.replies import Replies
from upr_server.net.request_context import Cluster, Events
from upr_server.net.resources import ServerResources
from upr_server.net.streamer import Streamer
from upr_server.storage.errors import StorageError
from upr_server.storage.online.bucket_disk import BucketDisk

REPLIES_BYTES_MAX: Final = 1024 * 1024
"""Answers that may wait for a peer to take them. Above it the next request waits, until the peer
reads or the send deadline passes. This, queued requests (`QUEUED_REQUESTS_MAX`) and a large frame
that waits for its turn (`frame_budget`) are the only cases in which a connection is not read. The
acknowledgements and barriers of a peer that reads, keeps below that many requests for what is on
disk, and sends no frame above 1 MiB, always get through."""

QUEUED_REQUESTS_MAX: Final = 16
"""Requests of one connection that may wait in queues (`partition_queue`), of all partitions
together. With so many the disk's reader always has one to go on with; more would only be memory,
and work for connections that end. Until one of them was answered the connection is not read: what
its peer says meanwhile, acknowledgements and barriers too, waits as long as the disk takes for one
of 16 reads. Tasks of their own answer them, and wait for nothing that is not yet read.

A queue answers nothing to a connection that has more than `REPLIES_BYTES_MAX` to send, but as many
as may wait there may have been begun before: a peer that takes nothing has at most 16 answers more
waiting, each of 1 MiB (`GET_REPLY_BYTES`) or one larger value."""

QUEUED_BYTES_MAX: Final = 1024 * 1024
"""The same in bytes of requests, which the bucket's quota does not count, and whose credit is
granted again when they come. The request that exceeds it is still queued."""

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
    waits for the other, except for `REPLIES_BYTES_MAX`. A third task watches for silence.

    Handlers see it as a `RequestContext`, which documents what is not documented here.

    Args:
        resources: What all connections share.
        stream: The stream.
        peer: The other end's address, for logs and statistics.

    Attributes:
        session: The session.
        peer: See above.
    """

    def __init__(
        self, resources: ServerResources, stream: trio.abc.HalfCloseableStream, peer: str
    ) -> None:
        self.peer = peer
        self.session = ServerSession(resources.identity, now=trio.current_time())
        self.streamer = Streamer(self.session, peer, self.wake)
        self.replies = Replies(self.send, self.refuse, self.wake)
        self.credit = PublisherCredit(resources.credit_shares, self.session, self.wake)
        self.bucket: Bucket | None = None
        self.is_asking_for_events = False
        self.time = resources.time
        self.statistics_of = resources.statistics_of
        self._resources = resources
        self._disk: BucketDisk | None = None
        self._nursery: trio.Nursery | None = None
        self._replicas: dict[Partition, str] = {}
        """Partitions of which the peer has reported what it has, with its name."""
        self._turns: deque[tuple[Message, Callable[[], Awaitable[None]]]] = deque()
        """Requests that are answered in turn; the first is being answered."""
        self._stream = stream
        self._to_send = Notifier()
        self._greeted = trio.Event()
        self._is_idle = False
        """Whether the writer waits for something to write."""
        self._unwritten: Sequence[Buffer] = ()
        """What the socket has not taken yet."""
        self._progressed = Notifier()
        """Notified when the peer took answers or a request left its queue."""
        self._opened_at = trio.current_time()
        self._frame_bytes = 0
        """What the frame that is arriving has of the budget for large ones."""
        self._frame_deadline = math.inf
        self._is_unread = False
        """Whether it is the server that does not read, though nothing is being written."""
        self._is_silent = False
        """Whether nothing was heard for too long when that was last looked at."""
        self._reply_bytes_being_written = 0
        self._queued_requests = self._queued_bytes = 0
        self._bytes_in = 0
        self._bytes_out = 0

    async def run(self) -> None:
        """Serves the connection until it ends. Cancelled, it leaves at once. The stream is closed
        in any case."""
        try:
            await self._converse()
            if self.session.state is SessionState.CLOSED:
                await self._close_gracefully()
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            log.info("connection lost", peer=self.peer, identity=self.session.client_identity)
        except* trio.TooSlowError:
            log.warning(
                "send timeout; closing connection",
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
            self._release_frame()
            for partition, replica in self._replicas.items():
                partition.replicas.forget(replica, self)

    async def _close_gracefully(self) -> None:
        """Ends the conversation so that the peer hears the last word. A connection that is closed
        while bytes lie in it unread is reset, and the reset may overtake what was written."""
        with trio.move_on_after(PARTING_S):
            await self._stream.send_eof()
            while await self._stream.receive_some(SCRATCH_BYTES):
                pass

    def wake(self) -> None:
        """There is something to send."""
        self._to_send.notify()

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
                    self._release_frame()
                    self._handle(message)
                    if self._is_backlogged:
                        await self._wait_for_backlog()
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
            self._write_answers()
            if session.state is SessionState.CLOSED:
                return
            if session.unfinished_body_bytes > LARGE_FRAME_BYTES and not self._frame_bytes:
                await self._reserve_frame(session.unfinished_body_bytes)

    async def _read_some(self) -> int | None:
        """How many bytes came; None when a large frame takes too long."""
        scratch = self._resources.scratch
        if self._frame_deadline == math.inf:
            return await read_some(self._stream, self.session, scratch)
        with trio.move_on_at(self._frame_deadline):
            return await read_some(self._stream, self.session, scratch)
        return None

    def _write_answers(self) -> None:
        """Writes answers at once, where they are all there is to write; else leaves them to the
        writer."""
        session = self.session
        if session.state not in _UNGREETED:
            self._greeted.set()
        # Woken, the writer is idle for a moment still: what was left for it must go first.
        if self._is_idle and not self._unwritten and session.state is SessionState.OPEN:
            self._send()
            if not self._unwritten:
                return
        self.wake()

    async def _reserve_frame(self, length: int) -> None:
        """Reserves memory for a large frame whose header has come, before more of it is read."""
        self._is_unread = True
        await self._resources.frame_budget.acquire(length)
        self._is_unread = False
        self._frame_bytes = length
        self._frame_deadline = trio.current_time() + frame_timeout_s(length)

    def _release_frame(self) -> None:
        if self._frame_bytes:
            self._resources.frame_budget.release(self._frame_bytes)
            self._frame_bytes = 0
            self._frame_deadline = math.inf

    @property
    def _unsent_reply_bytes(self) -> int:
        """Bytes of answers that the peer has not taken."""
        return self._reply_bytes_being_written + self.session.outgoing_bytes

    @property
    def _is_backlogged(self) -> bool:
        """Whether no more of the peer's requests are to be taken now."""
        return (
            self._unsent_reply_bytes > REPLIES_BYTES_MAX
            or self._queued_requests >= QUEUED_REQUESTS_MAX
            or self._queued_bytes > QUEUED_BYTES_MAX
        )

    async def _wait_for_backlog(self) -> None:
        self._is_unread = True
        while self._is_backlogged:
            self.wake()
            await self._progressed.wait()
        self._is_unread = False

    # Its requests in queues: `QueuingConnection` documents these.

    def start(self, task: Callable[[], Awaitable[None]]) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(task)

    async def wait_for_reply_room(self) -> None:
        while self._unsent_reply_bytes > REPLIES_BYTES_MAX:
            self.wake()
            await self._progressed.wait()

    def request_queued(self, nbytes: int) -> None:
        self._queued_requests += 1
        self._queued_bytes += nbytes

    def request_dequeued(self, nbytes: int) -> None:
        self._queued_requests -= 1
        self._queued_bytes -= nbytes
        self._progressed.notify()
        self.wake()

    def fail(self, request: Message) -> None:
        self.session.fail(Status.INTERNAL, f"{type(request).__name__} met a fault")

    # Answering.

    def _handle(self, message: Message) -> None:
        handler = self._resources.handlers.get(type(message))
        if handler is not None:
            try:
                handler(self, message)
            except (ServerError, BucketError) as error:
                self._refuse_for(message, error)
            except Exception:
                # A fault of ours: the log has it, and the peer hears that there was one.
                log.exception("request failed", peer=self.peer, request=type(message).__name__)
                self.fail(message)
        elif isinstance(message, CloseStream):
            self.streamer.end(message.partition, Status.STREAM_CLOSED)
        elif isinstance(message, Error):
            log.warning(
                "client reports an error",
                peer=self.peer,
                identity=self.session.client_identity,
                error=message.sentence,
            )

    def answer_when_fetched(
        self, partition: Partition, request: Get | Mutate, apply: Apply
    ) -> None:
        self._resources.queues.of(self.disk, partition).answer(self, request, apply)

    def answer_later(self, request: Message, answer: Callable[[], Awaitable[None]]) -> None:
        self.start(partial(self._run_answer, request, answer))

    def answer_in_turn(self, request: Message, answer: Callable[[], Awaitable[None]]) -> None:
        self._turns.append((request, answer))
        if len(self._turns) == 1:
            self.start(self._run_turns)

    async def _run_turns(self) -> None:
        while self._turns:
            await self._run_answer(*self._turns[0])
            self._turns.popleft()

    async def _run_answer(self, request: Message, answer: Callable[[], Awaitable[None]]) -> None:
        try:
            await answer()
        except (ServerError, BucketError) as error:
            self._refuse_for(request, error)
        except StorageError as error:
            self.refuse(request, Status.TEMPORARY_FAILURE, str(error))
        except Exception:
            log.exception("request failed", peer=self.peer, request=type(request).__name__)
            self.fail(request)
        self.wake()

    def _refuse_for(self, request: Message, error: ServerError | BucketError) -> None:
        sentence = error.sentence if isinstance(error, ServerError) else str(error)
        self.refuse(request, error.status, sentence)

    def send(self, message: Message) -> None:
        if self.session.state is not SessionState.CLOSED:
            self.session.send(message)

    def refuse(self, request: Message, status: Status, sentence: str) -> None:
        """Refuses `request`, or what `request` is the answer to."""
        self.send(
            Refusal(
                sentence[:_SENTENCE_MAX],
                self.map_revision,
                partition=request.partition,
                opaque=request.opaque,
                status=status,
            )
        )

    # What handlers see.

    @property
    def catalog(self) -> BucketCatalog:
        return self._resources.catalog

    @property
    def cluster(self) -> Cluster:
        return self._resources.cluster

    @property
    def events(self) -> Events | None:
        return self._resources.events

    @property
    def replication_timeout_s(self) -> float:
        return self._resources.replication_timeout_s

    @property
    def disk(self) -> BucketDisk:
        if self._disk is None:
            raise ServerError(Status.NO_BUCKET, "the bucket was deleted")
        return self._disk

    @property
    def map_revision(self) -> int:
        return 0 if self.bucket is None else self._resources.cluster.revision(self.bucket.name)

    @property
    def client_identity(self) -> str:
        return self.session.client_identity

    def open_bucket(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._disk = self._resources.catalog.disks[bucket]

    def note_replica(self, partition: Partition, replica: str) -> None:
        self._replicas[partition] = replica

    def leave_bucket(self) -> None:
        """The bucket was deleted: its streams end, and requests about it are refused."""
        self.streamer.end_all(Status.BUCKET_DELETED)
        self.credit.leave_bucket()
        self.bucket = self._disk = None
        self.wake()

    # Writing.

    async def _write(self) -> None:
        while True:
            # Taken first: what is added while it writes must not be slept through.
            to_send = self._to_send.next_event()
            await self._flush()
            if self.session.state is SessionState.CLOSED:
                return
            self._is_idle = True
            await to_send.wait()
            self._is_idle = False

    async def _flush(self) -> None:
        """Writes until there is nothing to write now."""
        length = len(self._unwritten) or self._send()
        while length:
            if self._unwritten:
                await write_rest(self._stream, self._unwritten, self._resources.send_timeout_s)
                self._has_sent()
            elif length >= YIELD_BYTES:
                await trio.lowlevel.checkpoint()
            length = self._send()

    def _send(self) -> int:
        """Gives the socket what there is to send; what it does not take at once is left in
        `_unwritten`.

        Returns:
            How many bytes there were.
        """
        session = self.session
        # What the streamer adds is bounded by itself, and holds up no request.
        self._reply_bytes_being_written = session.outgoing_bytes
        try:
            self.streamer.step()
        except Exception:
            log.exception("stream failed", peer=self.peer)
            session.fail(Status.INTERNAL, "the stream met a fault")
        outgoing = session.take_outgoing(trio.current_time())
        if not outgoing:
            return 0
        length = sum(map(len, outgoing))
        self._bytes_out += length
        self._unwritten = write_now(self._stream, outgoing)
        if not self._unwritten:
            self._has_sent()
        return length

    def _has_sent(self) -> None:
        self._unwritten = ()
        self.streamer.sent()
        self._reply_bytes_being_written = 0
        self._progressed.notify()

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
                await self._check_silence()
                self.wake()

    async def _check_silence(self) -> None:
        session = self.session
        now = trio.current_time()
        if self._is_unread:
            session.keep_alive.received(now)
        if session.tick(now):
            self._is_silent = False
        elif not self._is_silent:
            # Perhaps it was this process that slept: what came meanwhile is read first.
            self._is_silent = True
            await trio.sleep(SLICE_S)
        else:
            log.warning(
                "peer is silent; closing connection",
                peer=self.peer,
                identity=session.client_identity,
            )
            session.fail(Status.IDLE, "nothing was heard for two idle intervals")

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
