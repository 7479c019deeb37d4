"""What the indexer and its worker processes say to each other over a socket, and the nodes of an
indexer over a web socket.

A frame is its length, four bytes, and a message in MessagePack. Questions stand in it as JSON: a
query may have numbers that MessagePack has not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator
from struct import Struct
from typing import Any, Final, Protocol, TypeVar

import msgspec
import trio

from upr_protocol.concurrency import Notifier
from upr_protocol.errors import UprError
from upr_server.indexer.definitions import NoIndexError
from upr_server.indexer.freshness import WriteLostError
from upr_server.indexer.index_file import DiskFullError, IndexFileError
from upr_server.indexer.moments import MomentGoneError
from upr_server.indexer.pool import OverloadedError
from upr_server.indexer.pure.definition import IndexDefinition, IndexName
from upr_server.indexer.query import QueryError
from upr_server.indexer.slice_scanner import BuildingError, IndexFailedError, NotFreshError
from upr_server.indexer.slices import CatalogReport, SliceMissingError, SliceScan

RECEIVE_BYTES: Final = 256 * 1024

FRAME_BYTES_MAX: Final = 64 * 1024 * 1024
"""The longest message. A report has all design documents of a slice."""

_LENGTH: Final = Struct(">I")

# Questions.


class AskScan(msgspec.Struct, frozen=True, tag="Scan"):
    """Asks for `SliceHolder.scan`."""

    scan: SliceScan


class AskRelease(msgspec.Struct, frozen=True, tag="Release"):
    """Asks for `SliceHolder.release`."""

    token: str


class AskStatus(msgspec.Struct, frozen=True, tag="Status"):
    """Asks for `SliceHolder.status`."""

    name: IndexName
    definition: IndexDefinition
    newest_seqs: dict[int, int]


class AskStatistics(msgspec.Struct, frozen=True, tag="Statistics"):
    """Asks for `SliceHolder.statistics`."""


class AskConfirm(msgspec.Struct, frozen=True, tag="Confirm"):
    """Asks for `SliceHolder.confirm`."""


class AskStop(msgspec.Struct, frozen=True, tag="Stop"):
    """Asks for `SliceHolder.stop`; the worker ends after it."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Asks whether the worker is alive."""


NodeQuestion = AskScan | AskRelease | AskStatus | AskStatistics | AskConfirm | Ping
"""What one node may ask another: nothing that changes what a slice is, or ends it."""

Question = NodeQuestion | AskStop

# Messages to a worker.


class WorkerSettings(msgspec.Struct, frozen=True, tag="Start"):
    """The first message: what the worker is.

    Attributes:
        config: The indexer's configuration, as JSON.
        index: The slice.
        count: How many slices there are.
        pool_bytes: The worker's memory pool.
    """

    config: bytes
    index: int
    count: int
    pool_bytes: int


class DefineIndexes(msgspec.Struct, frozen=True, tag=True):
    """The indexes that the worker must keep, each with its name."""

    definitions: list[tuple[IndexName, IndexDefinition]]


class NumberedQuestion(msgspec.Struct, frozen=True, tag="Ask"):
    """A question.

    Attributes:
        number: The answer has it, too.
        question: The question, as JSON.
    """

    number: int
    question: bytes


class CancelQuestion(msgspec.Struct, frozen=True, tag="Cancel"):
    """Nobody waits for the answer to a question any more. It has one all the same, which may be a
    failure."""

    number: int


ToWorker = WorkerSettings | DefineIndexes | NumberedQuestion | CancelQuestion
ToNode = NumberedQuestion | CancelQuestion

# Messages of a worker, or of a node.


class ErrorMessage(msgspec.Struct, frozen=True):
    """An error.

    Attributes:
        kind: The name of its class.
        message: What it says.
        retry_after_s: When to ask again; 0 if that does not help.
    """

    kind: str
    message: str
    retry_after_s: float = 0.0


class NumberedAnswer(msgspec.Struct, frozen=True, tag="Answered"):
    """The answer to a question.

    Attributes:
        number: The question's.
        answer: What it asked for, in MessagePack.
        failure: Why there is none.
    """

    number: int
    answer: bytes = b""
    failure: ErrorMessage | None = None


class CatalogRead(msgspec.Struct, frozen=True, tag="Reported"):
    """The slice has read its design documents."""

    report: CatalogReport


class SliceRestarted(msgspec.Struct, frozen=True, tag="Began"):
    """The slice has begun to run again."""


class WorkerEnds(msgspec.Struct, frozen=True, tag="Ended"):
    """The worker ends, as nothing is left to do: to start it again would not help."""

    failure: ErrorMessage


FromWorker = NumberedAnswer | CatalogRead | WorkerEnds
FromNode = NumberedAnswer | CatalogRead | SliceRestarted

_KINDS: Final[dict[str, type[UprError]]] = {
    kind.__name__: kind
    for kind in (
        BuildingError,
        DiskFullError,
        IndexFailedError,
        IndexFileError,
        MomentGoneError,
        NoIndexError,
        NotFreshError,
        OverloadedError,
        QueryError,
        SliceMissingError,
        WriteLostError,
    )
}


def failure_of(error: BaseException) -> ErrorMessage:
    """An error as a message."""
    return ErrorMessage(type(error).__name__, str(error), getattr(error, "retry_after_s", 0.0))


def error_of(failure: ErrorMessage) -> UprError:
    """The error that a message tells of; an `UprError` if it is of a kind that slices do not
    raise."""
    kind = _KINDS.get(failure.kind, UprError)
    error = kind.__new__(kind, failure.message)
    if isinstance(error, QueryError):
        error.place = failure.message.partition(":")[0]
    if failure.retry_after_s:
        error.__dict__["retry_after_s"] = failure.retry_after_s
    return error


T = TypeVar("T")


def decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview) -> T:
    """What bytes of another process say.

    Raises:
        msgspec.MsgspecError: It is not what is expected. msgspec itself has other errors, too, for
            texts that are not UTF-8, and for values within too many others.
    """
    try:
        return decoder.decode(data)
    except (UnicodeError, RecursionError) as error:
        raise msgspec.DecodeError(f"not a message: {error}") from error


class ByteStream(Protocol):
    """What carries messages. Trio's streams are such."""

    async def send_all(self, data: bytes | bytearray | memoryview, /) -> None:
        """Sends bytes.

        Raises:
            trio.BrokenResourceError: The other side has gone.
        """

    async def receive_some(self, max_bytes: int, /) -> bytes | bytearray:
        """Bytes that came; none at the end.

        Raises:
            trio.BrokenResourceError: The other side has gone.
        """


class MessageStream:
    """A stream that carries messages.

    Args:
        stream: The stream.
        kind: What comes over it.
        frame_bytes_max: The longest message that may come.

    Messages are sent in the order of `queue_message`, by the task that runs `run_sender`.
    """

    def __init__(
        self, stream: ByteStream, kind: Any, frame_bytes_max: int = FRAME_BYTES_MAX
    ) -> None:
        self._stream = stream
        self._frame_bytes_max = frame_bytes_max
        self._outbox_bytes = 0
        self._was_sent = Notifier()
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._encoder = msgspec.msgpack.Encoder()
        self._outbox: deque[tuple[bytes, trio.Event]] = deque()
        self._was_put = Notifier()

    def queue_message(self, message: ToWorker | FromWorker | FromNode) -> trio.Event:
        """Queues a message. Returns an event that is set when the message is sent."""
        data, is_sent = self._encoder.encode(message), trio.Event()
        self._outbox.append((_LENGTH.pack(len(data)) + data, is_sent))
        self._outbox_bytes += _LENGTH.size + len(data)
        self._was_put.notify()
        return is_sent

    def withdraw_message(self, is_sent: trio.Event) -> None:
        """Removes a message from the queue, if its sending has not begun. O(messages).

        Args:
            is_sent: The event that `queue_message` returned.
        """
        for entry in self._outbox:
            if entry[1] is is_sent:
                self._outbox.remove(entry)
                self._outbox_bytes -= len(entry[0])
                return

    async def wait_until_unsent_below(self, nbytes: int) -> None:
        """Waits until less than so many bytes have yet to be sent."""
        await self._was_sent.wait_until(lambda: self._outbox_bytes < nbytes)

    async def run_sender(self) -> None:
        """Sends what was put, for ever.

        Raises:
            trio.BrokenResourceError: The other side has gone.
        """
        while True:
            await self._was_put.wait_until(lambda: bool(self._outbox))
            data, is_sent = self._outbox.popleft()
            await self._stream.send_all(data)
            self._outbox_bytes -= len(data)
            is_sent.set()
            self._was_sent.notify()

    async def _receive(self) -> bytes:
        """Bytes that came; none at the end."""
        try:
            return bytes(await self._stream.receive_some(RECEIVE_BYTES))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return b""

    async def received_messages(self) -> AsyncGenerator[Any, None]:
        """The messages that come, until the other side closes or is gone.

        Raises:
            msgspec.MsgspecError: What comes is no message, or too long.
        """
        buffer = bytearray()
        while True:
            data = await self._receive()
            if not data:
                return
            buffer += data
            offset = 0
            while len(buffer) - offset >= _LENGTH.size:
                start = offset + _LENGTH.size
                nbytes: int = _LENGTH.unpack_from(buffer, offset)[0]
                if nbytes > self._frame_bytes_max:
                    raise msgspec.DecodeError(f"a message of {nbytes} bytes is too long")
                end = start + nbytes
                if len(buffer) < end:
                    break
                with memoryview(buffer) as view:
                    message = decoded(self._decoder, view[start:end])
                yield message
                offset = end
            del buffer[:offset]
