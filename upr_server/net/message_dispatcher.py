"""The messages of one connection: each is handled by its handler, whose errors become answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import structlog

from upr_protocol.errors import ServerError, Status
from upr_protocol.session import ServerSession
from upr_protocol.wire import CloseStream, Error, Message, Mutate
from upr_server.engine import BucketError
from upr_server.net.handlers.single_sets import apply_sets
from upr_server.net.request_context import Handler, RequestContext, remaining_steps

log = structlog.get_logger(__name__)


class MessageDispatcher:
    """Gives each message of one connection to its handler.

    Args:
        context: The connection's requests, and how they are answered.
        handlers: How requests are answered, by their kind.
        session: The connection's session.
        peer: The other end's address, for logs.
    """

    def __init__(
        self,
        context: RequestContext,
        handlers: Mapping[type[Message], Handler],
        session: ServerSession,
        peer: str,
    ) -> None:
        self._context = context
        self._handlers = handlers
        self._session = session
        self._peer = peer
        self._unjoined_frames = 0
        """How many of the next frames are handled one by one: they were joined with one that could
        not be applied at once. To join them again after each would take quadratic time."""

    def apply_sets(self) -> bool:
        """Applies and answers the plain `SET`s that come next; whether there was any."""
        if self._unjoined_frames:
            self._unjoined_frames -= 1
            return False
        # A frame whose body is being received by itself is no such `SET`.
        sets = None if self._session.unfinished_body_bytes else self._context.read_sets()
        if sets is None:
            return False
        try:
            count = apply_sets(self._context, sets)
        except Exception:
            log.exception("request failed", peer=self._peer, request=Mutate.__name__)
            self._context.fail_in(Mutate)
            return True
        if count:
            self._unjoined_frames = sets.frame_count - count
            return True
        self._unjoined_frames = sets.frame_count - 1
        return False

    def handle(self, message: Message) -> Iterator[None] | None:
        """Handles a message, and answers it if its handler refuses it or fails.

        Returns:
            The steps that are left to do: `go_on` does the next. None if none are left.
        """
        handler = self._handlers.get(type(message))
        if handler is not None:
            try:
                self._context.access.check_message(message)
                return handler(self._context, message)
            except (ServerError, BucketError) as error:
                self._context.refuse_for(message, error)
                if type(message) is Mutate:
                    # It has spent credit, too.
                    self._context.credit.top_up()
            except Exception:
                log.exception("request failed", peer=self._peer, request=type(message).__name__)
                self._context.fail(message)
        elif isinstance(message, CloseStream):
            self._context.streamer.end_stream(message.partition, Status.STREAM_CLOSED)
        elif isinstance(message, Error):
            log.warning(
                "client reports an error",
                peer=self._peer,
                identity=self._session.client_identity,
                error=message.sentence,
            )
        return None

    def go_on(self, message: Message, steps: Iterator[None]) -> bool:
        """Does the next of the steps that are left to do for a message; whether there are more."""
        try:
            return remaining_steps(steps) is not None
        except Exception:
            log.exception("request failed", peer=self._peer, request=type(message).__name__)
            self._context.fail(message)
            return False
