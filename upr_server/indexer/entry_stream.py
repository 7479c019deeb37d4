"""The entries of a scan as lines, however many there are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress

import msgspec
import trio

from upr_protocol.errors import UprError
from upr_server.indexer.answer import Answer
from upr_server.indexer.moments import HOLD_S_MAX
from upr_server.indexer.pure.definition import IndexName
from upr_server.indexer.query import LIMIT_MAX, Query, QueryError
from upr_server.indexer.scanner import UNDO_S, Scanner

Send = Callable[[bytes], Awaitable[None]]
"""Sends a piece of the answer; returns when there is room for the next one."""


class End(msgspec.Struct, frozen=True):
    """The last line. A stream without it was cut.

    Attributes:
        end: What an answer has beside its entries: the timestamps, if they were asked for; the
            continuation, if the limit was reached; the moment, if it is held.
    """

    end: Answer


class EntryStream:
    """Reads all entries of a scan, page by page, of one moment of the index.

    A page is read when the one before is sent. So a client that reads slowly costs a page's memory,
    and the moment.

    Args:
        scanner: Answers the pages.
        name: The index.
        query: The query. Without a limit it is for all entries.

    Raises:
        QueryError: The query is for no entries.
    """

    def __init__(self, scanner: Scanner, name: IndexName, query: Query) -> None:
        if query.is_summary or query.explain:
            place = "explain" if query.explain else "count" if query.count else "min"
            raise QueryError(place, "lines have entries only; ask for application/json")
        self._scanner = scanner
        self._name = name
        self._query = query
        self._remaining = query.limit

    async def run(self, send: Send) -> None:
        """Sends everything. However it ends, the moment is let go, unless the query holds it.

        Raises:
            UprError: See `Scanner.scan`. Some entries may have been sent.
        """
        moment, page, base_answer = self._query.moment, self._page(self._query), Answer()
        is_whole = is_sent = False
        try:
            while not is_whole:
                async with self._scanner.scan(self._name, page) as answer:
                    moment, base_answer = answer.moment, answer.rest
                    await _send_all(send, answer.lines())
                    if self._remaining is not None:
                        self._remaining -= answer.entry_count
                is_whole = not base_answer.continuation or self._remaining == 0
                page = self._page(_next(self._query, base_answer))
            own_moment = moment if self._query.hold_s else ""
            end = End(msgspec.structs.replace(base_answer, moment=own_moment))
            await send(msgspec.json.encode(end) + b"\n")
            is_sent = True
        finally:
            is_kept = self._query.hold_s and (is_sent or self._query.moment)
            if moment and not is_kept:
                with trio.move_on_after(UNDO_S, shield=True), suppress(UprError):
                    await self._scanner.release(moment)

    def _page(self, query: Query) -> Query:
        limit = LIMIT_MAX if self._remaining is None else min(self._remaining, LIMIT_MAX)
        return msgspec.structs.replace(query, limit=limit, hold_s=self._query.hold_s or HOLD_S_MAX)


def _next(query: Query, base_answer: Answer) -> Query:
    """The query for what comes behind a page: of the same moment, however that was chosen."""
    return msgspec.structs.replace(
        query,
        consistency="any",
        written=(),
        moment=base_answer.moment,
        continuation=base_answer.continuation,
    )


async def _send_all(send: Send, pieces: Iterator[bytes]) -> None:
    while (piece := await trio.to_thread.run_sync(next, pieces, None)) is not None:
        await send(piece)
