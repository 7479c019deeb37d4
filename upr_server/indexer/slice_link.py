"""Asking a slice that is elsewhere, over a stream of messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import aclosing, suppress
from math import inf
from typing import Any, Final, TypeVar

import attrs
import msgspec
import structlog
import trio

from upr_protocol.ids import PartitionId, SeqNo
from upr_server.indexer.pool import OverloadedError
from upr_server.indexer.pure.definition import IndexDefinition, IndexName
from upr_server.indexer.silence import Silence
from upr_server.indexer.slices import (
    SliceAnswer,
    SliceId,
    SliceMissingError,
    SliceObserver,
    SliceScan,
    SliceStatus,
)
from upr_server.indexer.worker_messages import (
    AskConfirm,
    AskRelease,
    AskScan,
    AskStatistics,
    AskStatus,
    CancelQuestion,
    CatalogRead,
    ErrorMessage,
    FromNode,
    FromWorker,
    MessageStream,
    NumberedAnswer,
    NumberedQuestion,
    Ping,
    Question,
    SliceRestarted,
    ToWorker,
    WorkerEnds,
    decoded,
    error_of,
)

log = structlog.get_logger(__name__)

T = TypeVar("T")

PING_S: Final = 0.5
"""The pause between two questions whether the slice is alive."""

HANG_S: Final = 10.0
"""A link that has brought no answer to such a question for so long is given up, unless this process
stood still. The other side's event loop answers it while a thread indexes."""


@attrs.define(eq=False)
class _Call:
    """A question that waits for its answer.

    Attributes:
        question: The question.
        is_answered: Set when there is an answer.
        answer: What it asked for, in MessagePack.
        failure: Why there is none.
        is_lost: Whether the other side has gone.
        is_abandoned: Whether nobody waits for the answer any more.
    """

    question: Question
    is_answered: trio.Event = attrs.field(factory=trio.Event)
    answer: bytes = b""
    failure: ErrorMessage | None = None
    is_lost: bool = False
    is_abandoned: bool = False


class LinkedSlice(ABC):
    """Holds a slice that is at the other end of a stream; see `SliceHolder`.

    Args:
        slice_id: The slice.

    Attributes:
        slice_id: The slice.
        heard_at: When the slice last answered, in Trio's time; `-inf` while there is no link, or
            before its first answer.
    """

    def __init__(self, slice_id: SliceId) -> None:
        self.slice_id = slice_id
        self.heard_at = -inf
        self._frames: MessageStream | None = None
        self._scope = trio.CancelScope()
        """Of the link that `_frames` is."""
        self._calls: dict[int, _Call] = {}
        self._call_count = 0

    # The link.

    async def _talk(
        self,
        frames: MessageStream,
        observer: SliceObserver,
        first_message: ToWorker | None = None,
        first_answer_s: float = HANG_S,
    ) -> None:
        """Talks over a stream until the other side has gone, or hangs.

        Args:
            frames: The stream.
            observer: What the slice calls.
            first_message: What to say first.
            first_answer_s: How long the first answer may take.

        Raises:
            UprError: The other side says that it cannot go on.
            msgspec.MsgspecError: What comes is no message.
        """
        self._frames = frames
        try:
            if first_message is not None:
                frames.queue_message(first_message)
            observer.slice_restarted(self.slice_id.index)
            async with trio.open_nursery() as nursery:
                self._scope = nursery.cancel_scope
                nursery.start_soon(self._send, frames, nursery.cancel_scope)
                nursery.start_soon(self._keep_pinging, nursery.cancel_scope, first_answer_s)
                async with aclosing(frames.received_messages()) as messages:
                    async for message in messages:
                        self._take(message, observer)
                nursery.cancel_scope.cancel()
        finally:
            self._frames, self.heard_at = None, -inf
            self._lose_calls()

    def _lose_calls(self) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.is_lost = True
            call.is_answered.set()

    async def _send(self, frames: MessageStream, scope: trio.CancelScope) -> None:
        try:
            await frames.run_sender()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            scope.cancel()

    async def _keep_pinging(self, scope: trio.CancelScope, first_answer_s: float) -> None:
        silence = Silence(first_answer_s, PING_S)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_silent_link, silence, scope)
            while True:
                with silence.waiting():
                    await self._ping_link()
                silence.limit_s = HANG_S
                await trio.sleep(PING_S)

    async def _end_silent_link(self, silence: Silence, scope: trio.CancelScope) -> None:
        await silence.wait_until_too_long()
        log.warning("a slice does not answer; giving its link up", slice=self.title)
        scope.cancel()

    async def _ping_link(self) -> None:
        # A slice that has too much to do is alive.
        with suppress(OverloadedError):
            await self._ask(Ping())

    def _take(self, message: FromWorker | FromNode, observer: SliceObserver) -> None:
        match message:
            case SliceRestarted():
                observer.slice_restarted(self.slice_id.index)
            case CatalogRead(report):
                observer.catalog_read(self.slice_id.index, report)
            case NumberedAnswer(number, answer, failure):
                self.heard_at = trio.current_time()
                call = self._calls.pop(number, None)
                if call is not None:
                    call.answer, call.failure = answer, failure
                    call.is_answered.set()
                    if call.is_abandoned:
                        self._undo(call)
            case WorkerEnds(failure):
                raise error_of(failure)

    def _undo(self, call: _Call) -> None:
        """Lets go what an answer names that nobody reads."""
        if self._frames is None or call.failure is not None:
            return
        match call.question:
            case AskScan(scan) if scan.query.hold_s and not scan.query.moment:
                with suppress(SliceMissingError):
                    answer = self._decoded(call.answer, SliceAnswer)
                    # Nobody waits: the slice lets it go, or has let it go.
                    self._put_question(AskRelease(answer.moment))

    def _decoded(self, answer: bytes, kind: type[T]) -> T:
        """What an answer says. The link ends if it says something else.

        Raises:
            SliceMissingError: It does.
        """
        try:
            return decoded(msgspec.msgpack.Decoder(kind), answer)
        except msgspec.MsgspecError as error:
            log.warning("an answer cannot be read", slice=self.title, reason=str(error))
            self._scope.cancel()
            raise SliceMissingError(
                self.slice_id, f"has given an answer that cannot be read: {error}"
            ) from error

    @property
    @abstractmethod
    def title(self) -> str:
        """The slice, and where it is."""

    @abstractmethod
    def _reason(self) -> str:
        """Why there is no link."""

    # Questions.

    def _put_question(self, question: Question) -> int:
        assert self._frames is not None
        self._call_count += 1
        self._frames.queue_message(
            NumberedQuestion(self._call_count, msgspec.json.encode(question))
        )
        return self._call_count

    async def _ask(self, question: Question) -> bytes:
        """What the slice answers, in MessagePack.

        Raises:
            UprError: See `SliceHolder`.
        """
        if self._frames is None:
            # Where the indexer is being cancelled, its links may have ended before their callers.
            await trio.lowlevel.checkpoint_if_cancelled()
            raise SliceMissingError(self.slice_id, f"does not run: {self._reason()}")
        frames, call = self._frames, _Call(question)
        number = self._put_question(question)
        self._calls[number] = call
        try:
            await call.is_answered.wait()
        except trio.Cancelled:
            call.is_abandoned = True
            if number in self._calls:
                frames.queue_message(CancelQuestion(number))
            elif not call.is_lost:
                self._undo(call)
            raise
        if call.is_lost:
            await trio.lowlevel.checkpoint_if_cancelled()
            raise SliceMissingError(self.slice_id, "does not run: the link to it has ended")
        if call.failure is not None:
            raise error_of(call.failure)
        return call.answer

    async def ping(self) -> None:
        """Waits for an answer."""
        await self._ask(Ping())

    async def confirm(self) -> int:
        """Waits until the catalog has all that was acknowledged before the call. Returns the count
        of rollbacks; `SliceHolder.confirm` says what it is for."""
        return self._decoded(await self._ask(AskConfirm()), int)

    async def scan(self, scan: SliceScan) -> SliceAnswer:
        """Answers a query; see `SliceHolder.scan`."""
        return self._decoded(await self._ask(AskScan(scan)), SliceAnswer)

    async def release(self, token: str) -> None:
        """Lets a moment go.

        Raises:
            MomentGoneError: It is not held.
        """
        await self._ask(AskRelease(token))

    async def status(
        self, name: IndexName, definition: IndexDefinition, newest_seqs: Mapping[PartitionId, SeqNo]
    ) -> SliceStatus:
        """What can be told of an index."""
        seqs = {
            int(partition): int(seq)
            for partition, seq in newest_seqs.items()
            if self.slice_id.has(partition)
        }
        return self._decoded(await self._ask(AskStatus(name, definition, seqs)), SliceStatus)

    async def statistics(self) -> dict[str, Any]:
        """Figures of the slice, and of its process's memory."""
        return self._decoded(await self._ask(AskStatistics()), dict[str, Any])
