"""Answering questions to a slice that come over a stream of messages."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import structlog
import trio

from upr_protocol.errors import UprError
from upr_protocol.ids import PartitionId, SeqNo
from upr_server.indexer.index_file import entries_bytes
from upr_server.indexer.pool import (
    ANSWER_BYTES_MAX,
    SCAN_OVERHEAD_BYTES,
    MemoryPool,
    OverloadedError,
)
from upr_server.indexer.slices import SliceHolder, SliceScan
from upr_server.indexer.worker_messages import (
    AskConfirm,
    AskRelease,
    AskScan,
    AskStatistics,
    AskStatus,
    AskStop,
    CancelQuestion,
    ErrorMessage,
    MessageStream,
    NumberedAnswer,
    NumberedQuestion,
    Ping,
    failure_of,
)

log = structlog.get_logger(__name__)

QUESTIONS_MAX: Final = 1000
"""How many questions of one link are answered at once."""

OWN_QUESTIONS_MAX: Final = 100
"""How many of the indexer's own questions may come beside them. A slice that has much to do is
alive, and says so; it tells which indexes there are; and it applies what it has read when it is
stopped."""

_OWN_QUESTIONS: Final = frozenset(map(msgspec.json.encode, (Ping(), AskConfirm(), AskStop())))


def _limit_of(question: bytes) -> int:
    """How many questions may be answered already when this one comes, as JSON."""
    return QUESTIONS_MAX + OWN_QUESTIONS_MAX if question in _OWN_QUESTIONS else QUESTIONS_MAX


class SliceServer:
    """Answers questions to a slice.

    Args:
        frames: The stream on which they come.
        holder: The slice.
        pool: The memory pool of this process.
        questions: Which questions may come.
        stop_s: How long a stop applies what was read.
    """

    def __init__(
        self,
        frames: MessageStream,
        holder: SliceHolder,
        pool: MemoryPool,
        questions: Any,
        stop_s: float = 0.0,
    ) -> None:
        self._frames = frames
        self._holder = holder
        self._pool = pool
        self._decoder = msgspec.json.Decoder(questions)
        self._stop_s = stop_s
        self._scopes: dict[int, trio.CancelScope] = {}

    def handle_message(
        self, message: NumberedQuestion | CancelQuestion, nursery: trio.Nursery
    ) -> None:
        """Does what a message says, in a task of the nursery, which a stop cancels.

        Raises:
            msgspec.ValidationError: The question's number is one that is being answered.
        """
        match message:
            case NumberedQuestion(number) if number in self._scopes:
                raise msgspec.ValidationError(f"question {number} is being answered")
            case NumberedQuestion(question=data) if len(self._scopes) >= _limit_of(data):
                number = message.number
                error = OverloadedError(f"{QUESTIONS_MAX} questions are being answered")
                self._frames.queue_message(NumberedAnswer(number, failure=failure_of(error)))
            case NumberedQuestion(number, question):
                self._scopes[number] = trio.CancelScope()
                nursery.start_soon(self._answer, number, question, nursery)
            case CancelQuestion(number):
                if number in self._scopes:
                    self._scopes[number].cancel()

    async def _answer(self, number: int, data: bytes, nursery: trio.Nursery) -> None:
        with self._scopes[number] as scope:
            try:
                question = self._decoder.decode(data)
                await self._answer_to(question, number)
                if isinstance(question, AskStop):
                    nursery.cancel_scope.cancel()
            except UprError as error:
                self._frames.queue_message(NumberedAnswer(number, failure=failure_of(error)))
            except Exception as error:
                # A question that cannot be answered does not end the slice.
                log.exception("a question to a slice failed", slice=str(self._holder.slice_id))
                failure = ErrorMessage("UprError", f"the indexer failed: {error!r}")
                self._frames.queue_message(NumberedAnswer(number, failure=failure))
        if scope.cancelled_caught:
            # The other side keeps the question until it is answered. If the answer was put before,
            # it comes first, and counts.
            self._frames.queue_message(
                NumberedAnswer(number, failure=ErrorMessage("UprError", "cancelled"))
            )
        del self._scopes[number]

    async def _answer_to(self, question: Any, number: int) -> None:
        holder = self._holder
        answer: Any = None
        match question:
            case AskScan(scan):
                await self._answer_scan(scan, number)
                return
            case AskRelease(token):
                await holder.release(token)
            case AskStatus(name, definition, newest_seqs):
                seqs = {PartitionId(key): SeqNo(seq) for key, seq in newest_seqs.items()}
                answer = await holder.status(name, definition, seqs)
            case AskStatistics():
                answer = {**self._pool.figures(), **await holder.statistics()}
            case AskConfirm():
                answer = await holder.confirm()
            case AskStop():
                with trio.move_on_after(self._stop_s):
                    await holder.stop()
            case Ping():
                await holder.ping()
        await self._put(number, answer).wait()

    async def _answer_scan(self, scan: SliceScan, number: int) -> None:
        bytes_max = min(scan.bytes_max, ANSWER_BYTES_MAX)
        # It counts until it is sent.
        with self._pool.reserve_for_scan() as reservation:
            answer = await self._holder.scan(msgspec.structs.replace(scan, bytes_max=bytes_max))
            nbytes = entries_bytes(answer.entries) + entries_bytes(answer.payloads)
            reservation.reduce_to(nbytes + SCAN_OVERHEAD_BYTES)
            await self._put(number, answer).wait()

    def _put(self, number: int, answer: Any) -> trio.Event:
        return self._frames.queue_message(NumberedAnswer(number, msgspec.msgpack.encode(answer)))
