"""What one connection has waiting: requests in queues, and answers that its peer has not taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from upr_protocol.concurrency import Notifier
from upr_protocol.session import ServerSession

REPLIES_BYTES_MAX: Final = 1024 * 1024
"""Answers that may wait for a peer to take them. Above it the next request waits, until the peer
reads or the send deadline passes. This, queued requests (`QUEUED_REQUESTS_MAX`), replies that wait
for durability (`OWED_BYTES_MAX`) and an unfinished frame while memory for frames is short
(`frame_budget`) are the only cases in which a connection is not read. The acknowledgements and
barriers of a peer that reads, and keeps below that many requests for what is on disk and that many
bytes of replies, get through before the frames that it begins after them."""

QUEUED_REQUESTS_MAX: Final = 16
"""Requests of one connection that may wait: in queues (`partition_request_queue`), of all
partitions together, or because they are answered one after the other (`reply_in_order`). With so
many the disk's reader always has one to go on with; more would only be memory, and work for
connections that end. Until one of them was answered the connection is not read: what its peer says
meanwhile, acknowledgements and barriers too, waits as long as the disk takes for one of 16 reads.
This cannot last for ever: tasks of their own answer the requests, and none of these tasks waits for
something that the peer has yet to send.

A queue answers nothing to a connection that has more than `REPLIES_BYTES_MAX` to send, but as many
as may wait there may have been begun before: a peer that takes nothing has at most 16 answers more
waiting, each of 1 MiB (`GET_REPLY_BYTES`), of which one may be a larger value (`large_turns`)."""

QUEUED_BYTES_MAX: Final = 1024 * 1024
"""Bytes of requests that may wait, which the bucket's quota does not count, and whose credit is
granted again when they come. The request that exceeds it is still queued."""

OWED_BYTES_MAX: Final = 16 * 1024 * 1024
"""Bytes of what is known of replies that wait for the disk, for replicas or behind others. No quota
counts them, and the credit of their requests is granted again when these come. So a connection
could make 4,096 replies wait, with up to 0.8 MB each. These are 30 to 40 bundles of the largest
kind, or 8,000 single changes, or 33,000 `Await`s; the reply that exceeds it is still made. While
there is more, what the peer says waits, acknowledgements and barriers too: no longer than the disk
takes for a commit, or replicas have for a batch; or, of `Await`s, than their deadlines."""


class ConnectionBacklog:
    """Counts what a connection has waiting, and holds it back above the limits.

    Args:
        session: The connection's session.
        wake: Has what is in the session sent.

    Attributes:
        large_turns: The turns of queued requests that need much from disk: one holds it at a time.
    """

    __slots__ = (
        "_being_written_bytes",
        "_owed_bytes",
        "_progressed",
        "_queued_bytes",
        "_queued_requests",
        "_session",
        "_wake",
        "large_turns",
    )

    def __init__(self, session: ServerSession, wake: Callable[[], None]) -> None:
        self._session = session
        self._wake = wake
        # Notified when the peer took answers, a request left its queue, or enough replies left.
        self._progressed = Notifier()
        self._being_written_bytes = 0
        self._owed_bytes = 0
        self._queued_requests = 0
        self._queued_bytes = 0
        self.large_turns = trio.StrictFIFOLock()

    @property
    def queued_requests(self) -> int:
        """How many requests wait in queues."""
        return self._queued_requests

    @property
    def queued_bytes(self) -> int:
        """How many bytes the queued requests have."""
        return self._queued_bytes

    @property
    def owed_bytes(self) -> int:
        """About how many bytes the replies take that wait."""
        return self._owed_bytes

    @property
    def unsent_bytes(self) -> int:
        """Bytes of answers that the peer has not taken."""
        return self._being_written_bytes + self._session.outgoing_bytes

    @property
    def is_full(self) -> bool:
        """Whether no more of the peer's requests are to be taken now."""
        return (
            self._being_written_bytes + self._session.outgoing_bytes > REPLIES_BYTES_MAX
            or self._queued_requests >= QUEUED_REQUESTS_MAX
            or self._queued_bytes > QUEUED_BYTES_MAX
            or self._owed_bytes > OWED_BYTES_MAX
        )

    async def wait_until_not_full(self) -> None:
        """Waits until the next request may be taken."""
        while self.is_full:
            self._wake()
            await self._progressed.wait()

    @property
    def has_reply_room(self) -> bool:
        """Whether the peer has not too many replies to take."""
        return self.unsent_bytes <= REPLIES_BYTES_MAX

    async def wait_for_reply_room(self) -> None:
        """Waits while the peer has too many replies to take."""
        while not self.has_reply_room:
            self._wake()
            await self._progressed.wait()

    def request_queued(self, nbytes: int) -> None:
        """A request of so many bytes waits in a queue."""
        self._queued_requests += 1
        self._queued_bytes += nbytes

    def request_dequeued(self, nbytes: int) -> None:
        """Such a request was answered."""
        self._queued_requests -= 1
        self._queued_bytes -= nbytes
        self._progressed.notify()
        self._wake()

    def reply_owed(self, nbytes: int) -> None:
        """A reply waits, which takes about so many bytes."""
        self._owed_bytes += nbytes

    def reply_sent(self, nbytes: int) -> None:
        """Such a reply waits no longer."""
        owed_bytes = self._owed_bytes
        self._owed_bytes -= nbytes
        if self._owed_bytes <= OWED_BYTES_MAX < owed_bytes:
            self._progressed.notify()

    def begin_write(self, nbytes: int) -> None:
        """Answers of so many bytes were taken out of the session, and are being written."""
        self._being_written_bytes = nbytes

    def end_write(self) -> None:
        """The answers have been written."""
        self._being_written_bytes = 0
        self._progressed.notify()
