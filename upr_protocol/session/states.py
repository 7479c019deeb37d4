"""Which messages are allowed when: two tables.

The conversation goes one way: the client introduces itself, chooses a bucket and learns its
partitions' histories, asks for streams, and sends `Go`. Each message declares in which states of
the session it is allowed, and where it leads; `SESSION` is the same by state. A message that is not
in a state's row is out of turn, whoever sends it; its declaration says which side may send it.
Where users must log in, that comes between `GREETED` and `READY`: until it is done, nothing but the
log-in is allowed. Only the content of `HelloReply` tells whether it is needed, so its row in the
table is the one that does not say all: see `state_after_hello`.

The two sides are not in the same state at the same time: each moves when it sends or receives. That
does no harm, because only the client moves the conversation on, and it waits for the answer
wherever the states before and after differ in what the server may send: `Open` is sent with no
other request open, nothing but `Noop` and `Close` may follow it before the answer, and nothing at
all may follow `Hello`.

Within a session each partition's stream has a state of its own. `STREAM` is its table; its inputs
are not quite messages, because an answer that accepts and one that refuses lead to different
states. Here both sides may act at once, and the tables provide for both cases: the client drops
what the server sent before it heard of a `CloseStream`, and the server drops a `CloseStream` that
was sent before a `StreamEnd` arrived, for which it finds no stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, unique
from typing import Final

from upr_protocol.errors import Status
from upr_protocol.wire import (
    MESSAGES,
    CloseStream,
    HelloReply,
    Message,
    PartitionAnswers,
    PartitionChunk,
    PartitionEnd,
    PartitionSnapshot,
    PartitionStart,
    SessionState,
    Stream,
    StreamEnd,
    StreamReply,
)

SESSION: Final[Mapping[SessionState, Mapping[type[Message], SessionState]]] = {
    state: {kind: kind.states[state] for kind in MESSAGES.values() if state in kind.states}
    for state in SessionState
}
"""For each state of a session, what is allowed and where it leads."""


def state_after_hello(reply: HelloReply) -> SessionState:
    """The state that `HelloReply` leads to: the log-in, if it names ways to log in."""
    return SessionState.UNAUTHENTICATED if reply.mechanisms else SessionState.READY


@unique
class StreamState(Enum):
    """The state of one partition's stream in one connection."""

    # That of `Enum` is a function in Python, and these are looked up for every message.
    __hash__ = object.__hash__

    ABSENT = "the partition is not streamed"
    REQUESTED = "the client has asked for the stream; the server has not answered"
    BETWEEN = "no snapshot has begun"
    INSIDE = "a snapshot has begun and not ended"
    CLOSING = "the client has closed the stream, and drops what still comes"


@unique
class StreamInput(Enum):
    """What can happen to a stream."""

    # That of `Enum` is a function in Python, and these are looked up for every message.
    __hash__ = object.__hash__

    REQUEST = "`Stream`"
    ACCEPT = "`StreamReply` with status OK"
    REFUSE = "`StreamReply` with another status"
    START = "`PartitionStart`"
    CHUNK = "`PartitionChunk`"
    WHOLE = "`PartitionSnapshot`"
    ANSWERS = "`PartitionAnswers`"
    END = "`PartitionEnd`"
    CLOSE = "`CloseStream`"
    ENDED = "`StreamEnd`"


STREAM: Final[Mapping[StreamState, Mapping[StreamInput, StreamState]]] = {
    StreamState.ABSENT: {StreamInput.REQUEST: StreamState.REQUESTED},
    StreamState.REQUESTED: {
        StreamInput.ACCEPT: StreamState.BETWEEN,
        StreamInput.REFUSE: StreamState.ABSENT,
    },
    StreamState.BETWEEN: {
        StreamInput.START: StreamState.INSIDE,
        StreamInput.WHOLE: StreamState.BETWEEN,
        # They are about the snapshot that comes whole behind them.
        StreamInput.ANSWERS: StreamState.BETWEEN,
        StreamInput.CLOSE: StreamState.CLOSING,
        StreamInput.ENDED: StreamState.ABSENT,
    },
    StreamState.INSIDE: {
        StreamInput.CHUNK: StreamState.INSIDE,
        StreamInput.ANSWERS: StreamState.INSIDE,
        StreamInput.END: StreamState.BETWEEN,
        # Its cursor was dropped: a new snapshot with a later end takes this one's place.
        StreamInput.START: StreamState.INSIDE,
        StreamInput.CLOSE: StreamState.CLOSING,
        StreamInput.ENDED: StreamState.ABSENT,
    },
    StreamState.CLOSING: {
        StreamInput.START: StreamState.CLOSING,
        StreamInput.CHUNK: StreamState.CLOSING,
        StreamInput.WHOLE: StreamState.CLOSING,
        StreamInput.ANSWERS: StreamState.CLOSING,
        StreamInput.END: StreamState.CLOSING,
        StreamInput.ENDED: StreamState.ABSENT,
    },
}
"""For each state of a stream, what may happen and where it leads."""

STREAM_INPUTS: Final[dict[type[Message], StreamInput]] = {
    Stream: StreamInput.REQUEST,
    PartitionStart: StreamInput.START,
    PartitionChunk: StreamInput.CHUNK,
    PartitionSnapshot: StreamInput.WHOLE,
    PartitionAnswers: StreamInput.ANSWERS,
    PartitionEnd: StreamInput.END,
    CloseStream: StreamInput.CLOSE,
    StreamEnd: StreamInput.ENDED,
}
"""What each message is to its partition's stream; `StreamReply` is one of two things."""

SNAPSHOT_MESSAGES: Final = frozenset(STREAM_INPUTS) - {Stream, CloseStream, StreamEnd}
"""What a snapshot consists of. That of a stream that was closed is dropped."""


def stream_input(message: Message) -> StreamInput | None:
    """What `message` is to its partition's stream; None when it does not concern one."""
    if isinstance(message, StreamReply):
        return StreamInput.ACCEPT if message.status == Status.OK else StreamInput.REFUSE
    return STREAM_INPUTS.get(type(message))
