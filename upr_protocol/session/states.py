"""Who may say what when: two tables.

The conversation, as seed 002 tells it, goes one way: the client introduces itself, chooses a bucket
and learns its partitions' histories, asks for streams, and says `Go`. `SESSION` holds a row for
each state of the connection: the messages that may be said in it, each with the state that it leads
to. A message that is not in the row is out of turn, whoever sends it; who may send it at all stands
in its declaration. Authentication will have its place between `GREETED` and `READY`.

The two sides are not in the same state at the same time: each moves when it sends or receives. That
does no harm, because only the client moves the conversation on, and it waits for the answer
wherever the state before and after differ in what the server may say: `Open` is sent with no other
request open, nothing but `Noop` and `Close` may follow it before the answer, and nothing at all may
follow `Hello`.

Within a connection each partition's stream has a state of its own. `STREAM` is its table; its
inputs are not quite messages, because an answer that accepts and one that refuses lead to different
states. Here both sides may act at once, and both cases are provided for: what the server sent
before it heard of a `CloseStream` is dropped by the client, and a `CloseStream` that was sent
before a `StreamEnd` arrived finds no stream, and is dropped by the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, unique
from typing import Final

from upr_protocol.errors import Status
from upr_protocol.wire import (
    Ack,
    Await,
    AwaitReply,
    Barrier,
    BarrierReply,
    BucketDone,
    Close,
    CloseStream,
    Completed,
    CreateBucket,
    Credit,
    DeleteBucket,
    Error,
    EventsReply,
    Get,
    GetMap,
    GetReply,
    Go,
    Hello,
    HelloReply,
    Join,
    Lease,
    LeaseReply,
    ListBuckets,
    ListBucketsReply,
    MapReply,
    Message,
    Mutate,
    MutateReply,
    NextEvents,
    Noop,
    Open,
    Opened,
    PartitionAnswers,
    PartitionChunk,
    PartitionEnd,
    PartitionLog,
    PartitionSnapshot,
    PartitionStart,
    Refusal,
    ReplicaAck,
    Seqnos,
    SeqnosReply,
    SetMap,
    Stats,
    StatsReply,
    Stream,
    StreamEnd,
    StreamReply,
)


@unique
class SessionState(Enum):
    """How far a connection has come, as one side sees it."""

    # That of `Enum` is a function in Python, and these are looked up for every message.
    __hash__ = object.__hash__

    GREETING = "nothing was said; the client says `Hello`"
    GREETED = "the client said `Hello`; the server answers"
    READY = "acquainted; the client may manage buckets, or open one"
    OPENING = "the client chose a bucket; the server tells its partitions' histories"
    OPEN = "the client may publish, read, and ask for streams"
    STREAMING = "the client said `Go`; the server cycles over the streams"
    CLOSED = "over; nothing more is said, and what still comes is ignored"


_ALWAYS: Final[dict[type[Message], SessionState]] = {
    Error: SessionState.CLOSED,
}


def _row(
    stays: SessionState, *messages: type[Message], leads: Mapping[type[Message], SessionState]
) -> dict[type[Message], SessionState]:
    return {**dict.fromkeys(messages, stays), **leads, **_ALWAYS}


_ADMIN: Final = (
    Noop,
    CreateBucket,
    DeleteBucket,
    BucketDone,
    ListBuckets,
    ListBucketsReply,
    Stats,
    StatsReply,
    GetMap,
    Join,
    MapReply,
    NextEvents,
    EventsReply,
    Refusal,
)

_DATA: Final = (
    *_ADMIN,
    # A map is long, and strangers say nothing long: the bucket is opened first.
    SetMap,
    Mutate,
    MutateReply,
    Credit,
    Get,
    GetReply,
    Seqnos,
    SeqnosReply,
    Await,
    AwaitReply,
    ReplicaAck,
    Lease,
    LeaseReply,
    Stream,
    StreamReply,
    CloseStream,
    StreamEnd,
)

SESSION: Final[Mapping[SessionState, Mapping[type[Message], SessionState]]] = {
    SessionState.GREETING: _row(
        SessionState.GREETING,
        leads={Hello: SessionState.GREETED},
    ),
    SessionState.GREETED: _row(
        SessionState.GREETED,
        leads={HelloReply: SessionState.READY},
    ),
    SessionState.READY: _row(
        SessionState.READY,
        *_ADMIN,
        leads={Open: SessionState.OPENING, Close: SessionState.CLOSED},
    ),
    SessionState.OPENING: _row(
        SessionState.OPENING,
        Noop,
        PartitionLog,
        leads={
            Opened: SessionState.OPEN,
            Refusal: SessionState.READY,
            Close: SessionState.CLOSED,
        },
    ),
    SessionState.OPEN: _row(
        SessionState.OPEN,
        *_DATA,
        leads={Go: SessionState.STREAMING, Close: SessionState.CLOSED},
    ),
    SessionState.STREAMING: _row(
        SessionState.STREAMING,
        *_DATA,
        PartitionStart,
        PartitionChunk,
        PartitionSnapshot,
        PartitionAnswers,
        PartitionEnd,
        Completed,
        Barrier,
        BarrierReply,
        Ack,
        leads={Close: SessionState.CLOSED},
    ),
    SessionState.CLOSED: {},
}
"""For each state, what may be said and where it leads."""


@unique
class StreamState(Enum):
    """The state of one partition's stream in one connection."""

    # That of `Enum` is a function in Python, and these are looked up for every message.
    __hash__ = object.__hash__

    ABSENT = "there is no stream of this partition"
    REQUESTED = "the client asked; the server decides"
    BETWEEN = "no snapshot is under way"
    INSIDE = "a snapshot is under way"
    CLOSING = "the client closed it; what is on its way is dropped"


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


def stream_input(message: Message) -> StreamInput | None:
    """What `message` is to its partition's stream; None when it concerns no stream."""
    if isinstance(message, StreamReply):
        return StreamInput.ACCEPT if message.status == Status.OK else StreamInput.REFUSE
    return STREAM_INPUTS.get(type(message))
