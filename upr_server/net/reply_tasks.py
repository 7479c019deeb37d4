"""Requests that take time to answer: a task answers each, and has it refused if it fails.

A connection's end cancels its tasks, and drops the requests that wait for one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

import structlog

from upr_protocol.errors import ServerError, Status
from upr_protocol.wire import Message
from upr_server.engine import BucketError
from upr_server.net.backlog import ConnectionBacklog
from upr_server.storage.errors import StorageError

log = structlog.get_logger(__name__)

ReplyTask = Callable[[], Awaitable[None]]
"""Answers a request, for as long as it takes."""


class AnsweredClient(Protocol):
    """The connection whose requests tasks answer, as they see it.

    Attributes:
        backlog: Counts what waits.
        peer: The other end's address, for logs.
    """

    backlog: ConnectionBacklog
    peer: str

    def start_task(self, task: Callable[[], Awaitable[None]]) -> None:
        """Runs `task`, which must not raise, until the connection's end cancels it."""

    def refuse(self, request: Message, status: Status, sentence: str) -> None:
        """Refuses a request."""

    def refuse_for(self, request: Message, error: ServerError | BucketError) -> None:
        """Refuses a request with what `error` says."""

    def fail(self, request: Message) -> None:
        """Ends the connection after the server failed to carry out a request."""

    def wake(self) -> None:
        """Wakes the writer, which writes what was sent."""


def start_reply_task(client: AnsweredClient, request: Message, answer: ReplyTask) -> None:
    """Runs `answer` as a task of its own."""
    client.start_task(partial(_run_reply_task, client, request, answer))


async def _run_reply_task(client: AnsweredClient, request: Message, answer: ReplyTask) -> None:
    try:
        await answer()
    except (ServerError, BucketError) as error:
        client.refuse_for(request, error)
    except StorageError as error:
        client.refuse(request, Status.TEMPORARY_FAILURE, str(error))
    except Exception:
        log.exception("request failed", peer=client.peer, request=type(request).__name__)
        client.fail(request)
    client.wake()


class ReplyTaskQueue:
    """Requests of one connection that are answered one after the other. The first is being
    answered.

    Args:
        counts_as_queued: Whether the requests count in the connection's backlog: while there are
            too many, nothing more is read.
    """

    # A queue refers to its client only by what waits in it, so `clear` leaves no reference cycle.
    __slots__ = ("_counts_as_queued", "_tasks")

    def __init__(self, *, counts_as_queued: bool) -> None:
        self._counts_as_queued = counts_as_queued
        self._tasks: deque[tuple[Message, ReplyTask, int]] = deque()

    def submit(
        self, client: AnsweredClient, request: Message, answer: ReplyTask, nbytes: int = 0
    ) -> None:
        """Runs `answer` once the requests before it are answered.

        Args:
            client: The connection.
            request: The request.
            answer: Answers it.
            nbytes: About what the request takes in memory, if that is much.
        """
        self._tasks.append((request, answer, nbytes))
        if self._counts_as_queued:
            client.backlog.request_queued(nbytes)
        if len(self._tasks) == 1:
            client.start_task(partial(self._run, client))

    async def _run(self, client: AnsweredClient) -> None:
        while self._tasks:
            request, answer, nbytes = self._tasks[0]
            await _run_reply_task(client, request, answer)
            self._tasks.popleft()
            if self._counts_as_queued:
                client.backlog.request_dequeued(nbytes)

    def clear(self) -> None:
        """Drops the requests: the connection is over, and its tasks are cancelled."""
        self._tasks.clear()
