"""The handshake: versions and limits, the bucket, and its partitions' histories."""

from __future__ import annotations

from struct import Struct
from typing import Any, Final

import construct as cs

from upr_protocol.chunk import Buffer
from upr_protocol.errors import Status
from upr_protocol.failover import FailoverLog, Position
from upr_protocol.ids import SEQ_MAX, PartitionState, SeqNo
from upr_protocol.wire.columns import (
    LOG,
    POSITION,
    member,
    member_of,
    octets,
    pack_log,
    pack_position,
    pack_text,
    text,
    tuple_of,
    unpack_log,
    unpack_position,
    unpack_text,
)
from upr_protocol.wire.message import (
    DATA,
    NOT_CLOSED,
    Message,
    Role,
    SessionState,
    allowed_in,
    check_end,
)

_U16: Final = Struct("<H")
_U64: Final = Struct("<Q")
_STREAM: Final = Struct("<BQQ?")
_PARTITION: Final = Struct("<BQQQ")
_TERMS: Final = Struct("<IIH")
_AGREED: Final = Struct("<BIHIHH")


class Hello(Message, frozen=True):
    """The client's first frame. Its layout is the same in all versions.

    Attributes:
        identity: 1 to 200 bytes, for logs and statistics: best `what:who`, e.g. `indexer:node-7`.
            It has no control, format or separator characters except the space.
        versions: The versions the client speaks. This page describes version 1.
        features: A bit for each feature the client wants; none is defined yet.
        window_bytes: The flow-control window: how many bytes of stream frames the server may send
            before the client acknowledges some. At least 65,536.
        idle_interval_s: A side that has sent nothing for this time sends `Noop`. 1 to 3,600
            seconds.
    """

    opcode = 0x01
    sender = Role.CLIENT
    states = allowed_in(SessionState.GREETING, leads_to=SessionState.GREETED)
    layout = cs.Struct(
        "versions" / tuple_of(cs.Int8ul, cs.Int8ul) * "versions the client speaks",
        "features" / cs.Int32ul * "a bit for each feature wanted",
        "window_bytes" / cs.Int32ul * "the flow-control window",
        "idle_interval_s" / cs.Int16ul * "seconds of silence before `NOOP`",
        "identity" / text() * "`what:who`, at most 200 bytes, without control characters",
    )

    identity: str
    versions: tuple[int, ...]
    features: int
    window_bytes: int
    idle_interval_s: int

    # A client that looks for a node that answers connects again and again.

    def body_buffers(self) -> tuple[Buffer, ...]:
        versions = bytes((len(self.versions), *self.versions))
        terms = _TERMS.pack(self.features, self.window_bytes, self.idle_interval_s)
        return (versions + terms + pack_text(self.identity),)

    @classmethod
    def unpack_body(cls, body: Buffer) -> tuple[Any, ...]:
        data = bytes(body)
        offset = 1 + data[0]
        features, window_bytes, idle_interval_s = _TERMS.unpack_from(data, offset)
        identity, end = unpack_text(data, offset + _TERMS.size)
        check_end(data, end)
        return identity, tuple(data[1:offset]), features, window_bytes, idle_interval_s


class HelloReply(Message, frozen=True):
    """The server's answer: what was agreed, and the limits for the client. If it names mechanisms,
    the client must log in first: the session is then `UNAUTHENTICATED`, not `READY`. The message is
    malformed if it has a feature that `Hello` does not have, a longer idle interval, a
    `frame_body_bytes_max` below 4,096, or another limit of 0."""

    opcode = 0x81
    sender = Role.SERVER
    states = allowed_in(SessionState.GREETED, leads_to=SessionState.READY)
    layout = cs.Struct(
        "version" / cs.Int8ul * "the version chosen",
        "features" / cs.Int32ul * "the features both have",
        "idle_interval_s" / cs.Int16ul * "the interval both keep: at most what `Hello` asked for",
        "frame_body_bytes_max"
        / cs.Int32ul
        * "the longest body the server takes, if the message's own limit is not lower",
        "open_barriers_max" / cs.Int16ul * "barriers that may be open at a time",
        "requests_open_max" / cs.Int16ul * "requests that may be open at a time",
        "identity" / text() * "the server's own name, with the same limits",
        "mechanisms" / tuple_of(text(), cs.Int8ul) * "ways to log in; none: not needed",
    )

    version: int
    features: int
    idle_interval_s: int
    frame_body_bytes_max: int
    open_barriers_max: int
    requests_open_max: int
    identity: str
    mechanisms: tuple[str, ...] = ()

    def body_buffers(self) -> tuple[Buffer, ...]:
        agreed = _AGREED.pack(
            self.version, self.features, self.idle_interval_s, self.frame_body_bytes_max,
            self.open_barriers_max, self.requests_open_max,
        )  # fmt: skip
        mechanisms = b"".join(map(pack_text, self.mechanisms))
        count = bytes((len(self.mechanisms),))
        return (agreed + pack_text(self.identity) + count + mechanisms,)

    @classmethod
    def unpack_body(cls, body: Buffer) -> tuple[Any, ...]:
        data = bytes(body)
        mechanisms = []
        version, features, idle_interval_s, body_max, barriers, requests = _AGREED.unpack_from(data)
        identity, offset = unpack_text(data, _AGREED.size)
        count, offset = data[offset], offset + 1
        for _ in range(count):
            mechanism, offset = unpack_text(data, offset)
            mechanisms.append(mechanism)
        check_end(data, offset)
        return (
            version,
            features,
            idle_interval_s,
            body_max,
            barriers,
            requests,
            identity,
            tuple(mechanisms),
        )


class StartLogIn(Message, frozen=True):
    """Begins the log-in. A connection has one attempt: if it fails, the server sends `Error` and
    closes the connection."""

    opcode = 0x1D
    sender = Role.CLIENT
    states = allowed_in(SessionState.UNAUTHENTICATED, leads_to=SessionState.AUTHENTICATING)
    layout = cs.Struct(
        "mechanism" / text() * "one of those that `HelloReply` names",
        "data" / octets() * "the mechanism's first message; empty for `EXTERNAL`",
    )

    mechanism: str
    data: bytes = b""


class LogInChallenge(Message, frozen=True):
    """The server's message of the log-in; the client must answer it."""

    opcode = 0x9D
    sender = Role.SERVER
    states = allowed_in(SessionState.AUTHENTICATING, leads_to=SessionState.CHALLENGED)
    layout = cs.Struct("data" / octets() * "the mechanism's message")

    data: bytes


class ContinueLogIn(Message, frozen=True):
    """The answer to `LogInChallenge`."""

    opcode = 0x1E
    sender = Role.CLIENT
    states = allowed_in(SessionState.CHALLENGED, leads_to=SessionState.AUTHENTICATING)
    layout = cs.Struct("data" / octets() * "the mechanism's message")

    data: bytes


class LoggedIn(Message, frozen=True):
    """The log-in has succeeded. With some mechanisms, the server also proves its identity here."""

    opcode = 0x9E
    sender = Role.SERVER
    states = allowed_in(SessionState.AUTHENTICATING, leads_to=SessionState.READY)
    layout = cs.Struct("data" / octets() * "the mechanism's last message")

    data: bytes = b""


class Error(Message, frozen=True):
    """Why the sender closes the connection; the code is in the header's status field. Its layout is
    the same in all versions."""

    opcode = 0x02
    sender = Role.EITHER
    states = allowed_in(*NOT_CLOSED, leads_to=SessionState.CLOSED)
    status_meaning = "why the connection ends"
    layout = cs.Struct(
        "sentence" / text() * "what happened",
        "advice" / text() * "what to do about it",
    )

    sentence: str
    advice: str


class PartitionLog(Message, frozen=True):
    """One partition's state and failover log, in answer to `Open`. If the server does not have the
    partition, the status is `NOT_MY_PARTITION`, `state` is `DEAD`, all other numbers are 0, and the
    log is empty. If its copy is damaged and not served, the status is `DAMAGED`, and the rest is
    the same. A replica that has lost its copy is told as pending until it has copied again what
    the active node had; it streams as a replica does."""

    opcode = 0x85
    sender = Role.SERVER
    states = allowed_in(SessionState.OPENING)
    about_partition = True
    status_meaning = "`OK`, `NOT_MY_PARTITION` or `DAMAGED`"
    layout = cs.Struct(
        "state" / member(PartitionState) * "1 active, 2 replica, 3 pending, 4 dead",
        "high_seq" / cs.Int64ul * "the highest sequence number",
        "persisted_seq" / cs.Int64ul * "the last snapshot end on disk",
        "purge_seq" / cs.Int64ul * "deletions at or below it may be gone",
        "log" / LOG * "the failover log, newest entry first",
    )

    state: PartitionState
    high_seq: SeqNo
    persisted_seq: SeqNo
    purge_seq: SeqNo
    log: FailoverLog

    # `Open` is answered with one for each partition.

    def body_buffers(self) -> tuple[Buffer, ...]:
        head = _PARTITION.pack(self.state, self.high_seq, self.persisted_seq, self.purge_seq)
        return (head + pack_log(self.log),)

    @classmethod
    def unpack_body(cls, body: Buffer) -> tuple[Any, ...]:
        data = bytes(body)
        state, high, persisted, purge = _PARTITION.unpack_from(data)
        log, end = unpack_log(data, _PARTITION.size)
        check_end(data, end)
        return member_of(PartitionState, state), high, persisted, purge, log


class Opened(Message, frozen=True):
    """The end of the answer to `Open`: every `PartitionLog` was sent."""

    opcode = 0x84
    sender = Role.SERVER
    states = allowed_in(SessionState.OPENING, leads_to=SessionState.OPEN)
    layout = cs.Struct(
        "partition_count" / cs.Int16ul * "how many partitions the bucket has",
        "map_revision"
        / cs.Int64ul
        * "the revision of the partition map that all partitions followed when the first was told; "
        "0: the node has none",
    )

    partition_count: int
    map_revision: int


class Open(Message, frozen=True):
    """Chooses a bucket, and names the partitions whose `PartitionLog` the client wants, each at
    most once."""

    opcode = 0x04
    sender = Role.CLIENT
    states = allowed_in(SessionState.READY, leads_to=SessionState.OPENING)
    answers = (PartitionLog, Opened)
    refusals = (Status.NO_BUCKET, Status.BAD_ARGUMENT, Status.DAMAGED)
    layout = cs.Struct(
        "bucket" / text() * "the bucket's name",
        "partitions" / tuple_of(cs.Int16ul) * "the partitions to tell about; an empty list for all",
    )

    bucket: str
    partitions: tuple[int, ...] = ()


class StreamReply(Message, frozen=True):
    """The answer to `Stream`. Its status says whether and where the stream starts."""

    opcode = 0x86
    sender = Role.SERVER
    states = DATA
    about_partition = True
    status_meaning = "`OK`, or why there is no stream"
    layout = cs.Struct(
        "seq"
        / cs.Int64ul
        * "after which number the stream continues, or the rollback's ceiling; with `SEQ_TOO_HIGH` "
        "the server's highest number",
        "reason" / text() * "why there, or why there is no stream",
        "map_revision" / cs.Int64ul * "the revision of the server's partition map, or 0",
        "log" / LOG * "the server's failover log; with `OK` the client stores it before any data",
    )

    seq: SeqNo
    reason: str
    log: FailoverLog
    map_revision: int = 0

    def body_buffers(self) -> tuple[Buffer, ...]:
        head = _U64.pack(self.seq) + pack_text(self.reason)
        return (head + _U64.pack(self.map_revision) + pack_log(self.log),)

    @classmethod
    def unpack_body(cls, body: Buffer) -> tuple[Any, ...]:
        data = bytes(body)
        (seq,) = _U64.unpack_from(data)
        reason, offset = unpack_text(data, _U64.size)
        (map_revision,) = _U64.unpack_from(data, offset)
        log, end = unpack_log(data, offset + _U64.size)
        check_end(data, end)
        return seq, reason, log, map_revision


class Stream(Message, frozen=True):
    """Asks for one partition's changes after those that the client has.

    Attributes:
        state: The state that the partition must have: active or replica; with `with_answers` also
            pending.
        position: What the client has.
        end_seq: Where the stream ends; all ones for never. If it is inside a snapshot, the stream
            ends at that snapshot's end.
        lease_id: A lease on the range from the position to `end_seq`. The stream then has exactly
            this range, from disk, with every version that the lease protects, and ends. 0 for none.
        with_answers: Whether to send the answers to publishers, too. A replica needs them, because
            it may become active, and must then give the same answers.
        key_prefix: The prefix of the keys to stream, at most 250 bytes. Chunks, snapshots and
            positions cover the same numbers as without it. Empty for all.
    """

    opcode = 0x06
    sender = Role.CLIENT
    states = DATA
    about_partition = True
    answers = (StreamReply,)
    refusals = (
        Status.NOT_MY_PARTITION,
        Status.WRONG_STATE,
        Status.ROLLBACK,
        Status.SEQ_TOO_HIGH,
        Status.NO_BUCKET,
        Status.BAD_ARGUMENT,
        Status.LIMIT_REACHED,
        Status.DAMAGED,
        Status.RANGE_GONE,
    )
    layout = cs.Struct(
        "state" / member(PartitionState) * "the state the client expects",
        "end_seq" / cs.Int64ul * "where the stream ends; all ones for never",
        "lease_id" / cs.Int64ul * "the lease whose range to read; 0 for none",
        "with_answers" / cs.Flag * "whether to send answers to publishers, too",
        "position" / POSITION * "what the client has",
        "key_prefix" / octets() * "what the keys begin with; empty for all keys",
    )

    state: PartitionState
    position: Position
    end_seq: SeqNo = SEQ_MAX
    lease_id: int = 0
    with_answers: bool = False
    key_prefix: bytes = b""

    def body_buffers(self) -> tuple[Buffer, ...]:
        head = _STREAM.pack(self.state, self.end_seq, self.lease_id, self.with_answers)
        prefix = _U16.pack(len(self.key_prefix)) + self.key_prefix
        return (head + pack_position(self.position) + prefix,)

    @classmethod
    def unpack_body(cls, body: Buffer) -> tuple[Any, ...]:
        data = bytes(body)
        state, end_seq, lease_id, with_answers = _STREAM.unpack_from(data)
        position, prefix_at = unpack_position(data, _STREAM.size)
        (length,) = _U16.unpack_from(data, prefix_at)
        end = prefix_at + _U16.size + length
        check_end(data, end)
        state = member_of(PartitionState, state)
        return state, position, end_seq, lease_id, with_answers, data[end - length : end]


class Go(Message, frozen=True):
    """The client has opened the streams that it begins with: start the cycle."""

    opcode = 0x07
    sender = Role.CLIENT
    states = allowed_in(SessionState.OPEN, leads_to=SessionState.STREAMING)
    layout = cs.Struct()
