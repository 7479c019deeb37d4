"""What all messages have in common: the three header fields, and how a message becomes a frame."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum, unique
from io import BytesIO
from struct import Struct
from struct import error as StructError
from typing import Any, ClassVar, Final, Self

import construct as cs
import msgspec
from crc32c import crc32c

from upr_kernel import pack_header
from upr_protocol.chunk import Buffer
from upr_protocol.errors import ChunkError, RemoteProtocolError, Status
from upr_protocol.ids import NO_PARTITION, PartitionId
from upr_protocol.wire.columns import LayoutError
from upr_protocol.wire.frame import padding

_U64: Final = Struct("<Q")

_UNREADABLE: Final = (
    StructError,
    cs.ConstructError,
    ChunkError,
    ValueError,
    OverflowError,
    IndexError,
)
"""What reading a body raises when the body is not what it should be."""

_TRUNCATED: Final = (StructError, cs.StreamError, IndexError)
"""What reading raises where the body ends before the layout does."""

SMALL_BYTES: Final = 1024
"""A body up to this is sent in one piece with its header: a copy costs less than another piece."""

# `build` and `parse` make a context that refers to itself: a reference cycle for each message, with
# all that was built or parsed, until Python's collector comes by. Ending 40,960 streams left
# 123,000 objects, which took the collector 60 ms. So these contexts are given to what `build` and
# `parse` call, which construct documents for classes of one's own.
_BUILDING: Final = cs.Container(
    _params=None, _root=None, _parsing=False, _building=True, _sizing=False
)
_PARSING: Final = cs.Container(
    _params=None, _root=None, _parsing=True, _building=False, _sizing=False
)

BODY_BYTES_MAX_DEFAULT: Final = 4 * 1024
"""Enough for every message that holds no list."""


@unique
class Role(IntEnum):
    """The two sides of a session, as bits: `EITHER` is both."""

    CLIENT = 1
    SERVER = 2
    EITHER = 3


@unique
class SessionState(Enum):
    """How far a session has come, as one side sees it."""

    # That of `Enum` is a function in Python, and these are looked up for every message.
    __hash__ = object.__hash__

    GREETING = "waiting for the client's `Hello`"
    GREETED = "waiting for the server's answer to `Hello`"
    UNAUTHENTICATED = "waiting for the client's `StartLogIn`"
    AUTHENTICATING = "waiting for the server's answer to `StartLogIn` or `ContinueLogIn`"
    CHALLENGED = "waiting for the client's `ContinueLogIn`"
    READY = "the handshake is done; the client may manage buckets, or open one"
    OPENING = "the client has chosen a bucket; the server sends its partitions' histories"
    OPEN = "the client may publish, read, and ask for streams"
    STREAMING = "the client has sent `Go`; the server cycles over the streams"
    CLOSED = "the session is over; both sides ignore what still comes"


States = Mapping[SessionState, SessionState]
"""The states in which a message is allowed, each with the state that it leads to."""


def allowed_in(
    *states: SessionState, leads_to: SessionState | None = None
) -> dict[SessionState, SessionState]:
    """The declaration of a message that is allowed in `states`, and leads from each to `leads_to`.
    By default the session stays where it is."""
    return {state: leads_to or state for state in states}


BEFORE_READY: Final = frozenset(
    {
        SessionState.GREETING,
        SessionState.GREETED,
        SessionState.UNAUTHENTICATED,
        SessionState.AUTHENTICATING,
        SessionState.CHALLENGED,
    }
)
"""The states in which the other side of a server is a stranger."""

NOT_CLOSED: Final = allowed_in(
    *(state for state in SessionState if state is not SessionState.CLOSED)
)
"""Every state in which any message is allowed."""

AFTER_HANDSHAKE: Final = allowed_in(
    SessionState.READY, SessionState.OPENING, SessionState.OPEN, SessionState.STREAMING
)
"""The states after the handshake."""

CONTROL: Final = allowed_in(SessionState.READY, SessionState.OPEN, SessionState.STREAMING)
"""For messages that manage buckets. Not while a bucket is being opened: the refusal of another
request could not be told from that of `Open`."""

DATA: Final = allowed_in(SessionState.OPEN, SessionState.STREAMING)
"""For messages about the open bucket, and for long ones: a stranger can send no long frame."""

STREAMING: Final = allowed_in(SessionState.STREAMING)
"""For messages of the partition cycle."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message of the protocol.

    A subclass is the message's one declaration: its fields, its `layout` (field for field), who
    sends it in which states, what answers it, and how long its body may be. The tables of the
    session and the protocol document are made from that. Hot messages have `struct` code beside the
    layout, which the tests hold equal to it.

    Attributes:
        partition: The header's partition field.
        opaque: The header's opaque: an answer repeats its request's.
        status: The header's status field: a `Status`, 0 in a request.
    """

    opcode: ClassVar[int]
    sender: ClassVar[Role]
    """Who may send it."""
    states: ClassVar[States]
    """When it is allowed, and what state follows."""
    answers: ClassVar[tuple[type[Message], ...]] = ()
    """For a request: the messages that answer it, beside `Refusal`."""
    refusals: ClassVar[tuple[Status, ...]] = ()
    """For a request: the statuses with which it may be refused, beside `NOT_ALLOWED`, which every
    request may get where there are users."""
    layout: ClassVar[Any]
    body_bytes_max: ClassVar[int] = BODY_BYTES_MAX_DEFAULT
    about_partition: ClassVar[bool] = False
    """Whether the header's partition field names one."""
    status_meaning: ClassVar[str] = "0"
    """What the header's status field says, for the protocol document."""

    partition: PartitionId = NO_PARTITION
    opaque: int = 0
    status: int = 0

    def body_buffers(self) -> tuple[Buffer, ...]:
        """The body's bytes without padding, as pieces; all but the last are multiples of 8."""
        stream = BytesIO()
        fields = {name: getattr(self, name) for name in layout_fields(type(self))}
        if fields:
            type(self).layout._build(fields, stream, _BUILDING, "")  # noqa: SLF001  # see there
        return (stream.getvalue(),)

    @classmethod
    def unpack_body(cls, body: Buffer) -> tuple[Any, ...]:
        """The message's own fields, in their order; raises one of `_UNREADABLE`."""
        stream = BytesIO(body)
        parsed = cls.layout._parse(stream, _PARSING, "")  # noqa: SLF001  # see there
        check_end(body, stream.tell())
        return tuple(parsed[name] for name in layout_fields(cls))

    @classmethod
    def parse(cls, body: Buffer, partition: PartitionId, opaque: int, status: int) -> Self:
        """The message in `body`.

        Raises:
            RemoteProtocolError: The body does not fit the layout.
        """
        kind: Any = cls  # its fields are not those of `Message`
        try:
            message: Self = kind(
                *cls.unpack_body(body), partition=partition, opaque=opaque, status=status
            )
        except _UNREADABLE as error:
            raise RemoteProtocolError(f"{cls.__name__}: {_reason(error)}") from error
        return message

    def frame_buffers(self) -> list[Buffer]:
        """The whole frame, as pieces to be sent one after the other."""
        pieces = self.body_buffers()
        if len(pieces) == 1 and len(pieces[0]) <= SMALL_BYTES:
            body = bytes(pieces[0]) + padding(len(pieces[0]))
            crc, length = crc32c(body), len(body)
            return [
                pack_header(self.opcode, self.status, self.partition, self.opaque, length, crc)
                + body
            ]
        crc = length = 0
        for piece in pieces:
            crc = crc32c(piece, crc)
            length += len(piece)
        pad = padding(length)
        crc = crc32c(pad, crc)
        header = pack_header(
            self.opcode, self.status, self.partition, self.opaque, length + len(pad), crc
        )
        return [header, *pieces, pad] if pad else [header, *pieces]


def _reason(error: Exception) -> str:
    """Why a body cannot be read, in a sentence for a peer that knows nothing of Python."""
    if isinstance(error, LayoutError | ChunkError):
        return str(error)
    if isinstance(error, _TRUNCATED):
        return "the body ends inside a field"
    if isinstance(error, UnicodeError | cs.StringError):
        return "a text is not UTF-8"
    return "a field has a value that the layout does not allow"


def check_end(body: Buffer, end: int) -> None:
    """Checks that a message that takes `end` bytes fills `body`, but for the padding.

    Raises:
        LayoutError: It does not.
    """
    padding = bytes(body[end : end + 8])
    if len(body) < end:
        raise LayoutError(f"{end - len(body)} bytes are missing at the end of the body")
    if len(padding) > 7 or any(padding):
        raise LayoutError(
            f"{len(body) - end} bytes follow the fields; only padding, 0 to 7 zeros, may"
        )


def unpack_whole(layout: Struct, body: Buffer) -> tuple[Any, ...]:
    """The fields of a body that is one structure, and nothing else but padding.

    Raises:
        LayoutError: The body has another length.
    """
    check_end(body, layout.size)
    return layout.unpack_from(body)


_FIELDS: dict[type[Message], tuple[str, ...]] = {}


def layout_fields(kind: type[Message]) -> tuple[str, ...]:
    """The names of a message's own fields, which are those of its layout."""
    names = _FIELDS.get(kind)
    if names is None:
        common = Message.__struct_fields__
        names = tuple(name for name in kind.__struct_fields__ if name not in common)
        _FIELDS[kind] = names
    return names


class U64Message(Message, frozen=True):
    """A message whose body is one u64."""

    def body_buffers(self) -> tuple[Buffer, ...]:
        return (_U64.pack(getattr(self, self.__struct_fields__[0])),)

    @classmethod
    def unpack_body(cls, body: Buffer) -> tuple[Any, ...]:
        return unpack_whole(_U64, body)
