"""Bytes to messages and back. Pure: no I/O.

A message is declared once, in the module of its topic, and exported here. `MESSAGES` has them all
by opcode; `decode` makes one from a frame.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from upr_protocol.chunk import Buffer
from upr_protocol.ids import PartitionId
from upr_protocol.wire.admin import (
    BucketDone,
    CreateBucket,
    DeleteBucket,
    ListBuckets,
    ListBucketsReply,
    Refusal,
    Stats,
    StatsReply,
)
from upr_protocol.wire.cluster import GetMap, Join, MapReply, PartitionAnswers, ReplicaAck, SetMap
from upr_protocol.wire.events import EventsReply, NextEvents
from upr_protocol.wire.frame import HEADER_BYTES, VERSION, FrameBuffer, Header
from upr_protocol.wire.handshake import (
    ContinueLogIn,
    Error,
    Go,
    Hello,
    HelloReply,
    LoggedIn,
    LogInChallenge,
    Open,
    Opened,
    PartitionLog,
    StartLogIn,
    Stream,
    StreamReply,
)
from upr_protocol.wire.keyvalue import (
    Await,
    AwaitReply,
    Get,
    GetReply,
    Lease,
    LeaseAction,
    LeaseReply,
    Seqnos,
    SeqnosAt,
    SeqnosAtReply,
    SeqnosReply,
)
from upr_protocol.wire.message import BEFORE_READY, Message, Role, SessionState
from upr_protocol.wire.publishing import (
    RESULT_BYTES,
    Credit,
    Mutate,
    MutateReply,
    RunResult,
    decode_results,
)
from upr_protocol.wire.set_frames import (
    SetFrames,
    encode_reply,
    encode_set_replies,
    read_sets,
)
from upr_protocol.wire.streaming import (
    Ack,
    Barrier,
    BarrierReply,
    Close,
    CloseStream,
    CycleEnd,
    Noop,
    PartitionChunk,
    PartitionEnd,
    PartitionSnapshot,
    PartitionStart,
    StreamEnd,
    StreamEnds,
    chunk_frame,
    cycle_end_frame,
)
from upr_protocol.wire.users import ChangeUsers, GetUsers, ListUsers, UsersReply


def _declared(base: type[Message]) -> Iterator[type[Message]]:
    """The messages that are declared below `base`."""
    for kind in base.__subclasses__():
        if "opcode" in vars(kind):
            yield kind
        yield from _declared(kind)


MESSAGES: Final[Mapping[int, type[Message]]] = {
    kind.opcode: kind
    for kind in sorted(_declared(Message), key=lambda kind: (kind.opcode & 0x7F, kind.opcode))
}
"""Every message by its opcode, each answer after its request."""


def decode(header: Header, body: Buffer) -> Message:
    """The message of a frame whose opcode is known.

    Raises:
        RemoteProtocolError: The body does not fit the message's layout.
    """
    kind = MESSAGES[header.opcode]
    return kind.parse(body, PartitionId(header.partition), header.opaque, header.status)


__all__ = [
    "BEFORE_READY",
    "HEADER_BYTES",
    "MESSAGES",
    "RESULT_BYTES",
    "VERSION",
    "Ack",
    "Await",
    "AwaitReply",
    "Barrier",
    "BarrierReply",
    "BucketDone",
    "ChangeUsers",
    "Close",
    "CloseStream",
    "ContinueLogIn",
    "CreateBucket",
    "Credit",
    "CycleEnd",
    "DeleteBucket",
    "Error",
    "EventsReply",
    "FrameBuffer",
    "Get",
    "GetMap",
    "GetReply",
    "GetUsers",
    "Go",
    "Header",
    "Hello",
    "HelloReply",
    "Join",
    "Lease",
    "LeaseAction",
    "LeaseReply",
    "ListBuckets",
    "ListBucketsReply",
    "ListUsers",
    "LogInChallenge",
    "LoggedIn",
    "MapReply",
    "Message",
    "Mutate",
    "MutateReply",
    "NextEvents",
    "Noop",
    "Open",
    "Opened",
    "PartitionAnswers",
    "PartitionChunk",
    "PartitionEnd",
    "PartitionLog",
    "PartitionSnapshot",
    "PartitionStart",
    "Refusal",
    "ReplicaAck",
    "Role",
    "RunResult",
    "Seqnos",
    "SeqnosAt",
    "SeqnosAtReply",
    "SeqnosReply",
    "SessionState",
    "SetFrames",
    "SetMap",
    "StartLogIn",
    "Stats",
    "StatsReply",
    "Stream",
    "StreamEnd",
    "StreamEnds",
    "StreamReply",
    "UsersReply",
    "chunk_frame",
    "cycle_end_frame",
    "decode",
    "decode_results",
    "encode_reply",
    "encode_set_replies",
    "read_sets",
]
