"""A worker: one consumer of this node, whose queue any number of callbacks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import structlog
import trio

from upr_protocol.bucket_event import EventFilter
from upr_server.events.bell import Bell
from upr_server.events.consumer import Consumer, News
from upr_server.events.errors import TooManyConsumersError
from upr_server.storage.errors import StorageError

POLLS_A_TIMEOUT: Final = 3
"""So often it says in its timeout that it is alive, however little there is to tell."""

RETRY_S: Final = 1.0

INTERVAL_S: Final = 1.0
"""How soon after a poll there is another: nothing in the node is in more of a hurry."""

Callback = Callable[[News], None]
"""Called with what its filter lets through, in the loop: it must not wait, nor raise."""

log = structlog.get_logger(__name__)


class Worker:
    """See the module. It polls while it has callbacks.

    Args:
        consumer: Whose queue it is.
        bell: Rings when something was put into queues.
    """

    def __init__(self, consumer: Consumer, bell: Bell) -> None:
        self._consumer = consumer
        self._bell = bell
        # By number, who is to be told of what.
        self._callbacks: dict[int, tuple[Callback, EventFilter]] = {}
        self._numbers = 0
        self._has_callbacks = trio.Event()

    @contextmanager
    def calling(self, callback: Callback, wanted: EventFilter) -> Iterator[None]:
        """Has `callback` told for as long as the context. It begins by looking at everything: what
        was in the queue before may have been told to others."""
        number = self._numbers
        self._numbers += 1
        callback(News(everything=True, events=()))
        self._callbacks[number] = (callback, wanted)
        self._has_callbacks.set()
        try:
            yield
        finally:
            del self._callbacks[number]

    async def run(self) -> None:
        """Polls and tells, for ever."""
        while True:
            if not self._callbacks:
                self._has_callbacks = trio.Event()
                await self._has_callbacks.wait()
            rung = self._bell.next()
            try:
                news = await self._consumer.poll()
            except (StorageError, TooManyConsumersError) as error:
                log.warning("events cannot be read", consumer=self._consumer.name, error=str(error))
                await trio.sleep(RETRY_S)
                continue
            self._tell(news)
            if news.is_all:
                await trio.sleep(INTERVAL_S)
                with trio.move_on_after(self._consumer.timeout_s / POLLS_A_TIMEOUT):
                    await rung.wait()

    def _tell(self, news: News) -> None:
        for callback, wanted in list(self._callbacks.values()):
            events = tuple(filter(None, map(wanted.apply, news.events)))
            if events or news.everything:
                callback(News(news.everything, events))
