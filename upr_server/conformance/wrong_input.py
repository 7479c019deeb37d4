"""What a client may do wrong, and what a server must make of it: one table.

The protocol document shows the table, the vectors hold its frames, and `check_server` plays it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, unique
from itertools import count
from typing import Any, Final

import attrs
from crc32c import crc32c

from upr_kernel import pack_header
from upr_protocol.chunk import Bundle, Chunk, CounterDelta, Mutation, chunk_of_plain_sets
from upr_protocol.errors import Status
from upr_protocol.failover import NOTHING_YET, FailoverLog, Position
from upr_protocol.hashing import partition_of
from upr_protocol.ids import (
    Cas,
    Durability,
    HistoryId,
    Operation,
    PartitionId,
    PartitionState,
    SeqNo,
)
from upr_protocol.limits import (
    BUNDLE_MUTATIONS_MAX,
    BUNDLE_RUNS_MAX,
    GET_KEYS_MAX,
    KEY_BYTES_MAX,
    LEASE_OWNER_BYTES_MAX,
    LEASE_TIME_TO_LIVE_S_MAX,
)
from upr_protocol.wire import (
    VERSION,
    Ack,
    Await,
    Barrier,
    ChangeUsers,
    CreateBucket,
    DeleteBucket,
    Get,
    GetMap,
    Go,
    Hello,
    Lease,
    LeaseAction,
    Message,
    Mutate,
    NextEvents,
    Open,
    Opened,
    Seqnos,
    SeqnosAt,
    SetMap,
    StartLogIn,
    Stats,
    Stream,
)
from upr_protocol.wire.frame import padding

PARTITION_COUNT: Final = 4
"""Partitions of the bucket that the cases are played in."""

P0: Final = PartitionId(0)
P1: Final = PartitionId(1)
MISSING: Final = PartitionId(PARTITION_COUNT)
OPAQUE: Final = 1000
"""The first opaque of a case; those below are used on the way to it."""

BUCKET: Final = "conformance"
UNKNOWN_HISTORY: Final = HistoryId(0x0BAD_0BAD_0BAD_0BAD)


@unique
class Progress(Enum):
    """How far a connection has come when the wrong input arrives."""

    CONNECTED = "before `Hello`"
    GREETED = "before `Open`"
    OPENED = "a bucket is open"
    STREAMING = "after `Go`"


@unique
class Outcome(Enum):
    """What becomes of wrong input."""

    CLOSED = "`Error`, and the connection is closed"
    REFUSED = "`Refusal`"
    NO_STREAM = "`StreamReply`"
    ROW_FAILED = "the row is in `failures`"
    LOG = "`PartitionLog`"
    KEY_REFUSED = "a `DELETE` with the code in its flags"
    IGNORED = "nothing"


@attrs.frozen
class WrongInput:
    """One thing that may be wrong.

    Attributes:
        topic: What it is about; rows of the table with the same topic stand together.
        wrong: What is wrong.
        progress: Where in a conversation it is played.
        frames: The bytes that the client sends. None for what cannot be brought about at will: then
            it is in the table only.
        outcome: What becomes of it.
        status: The code.
    """

    topic: str
    wrong: str
    progress: Progress
    frames: bytes | None
    outcome: Outcome
    status: Status


def key_in(partition: int, prefix: str = "key") -> bytes:
    """A key of this partition."""
    for suffix in count():
        key = f"{prefix}-{suffix}".encode()
        if partition_of(key, PARTITION_COUNT) == partition:
            return key
    raise AssertionError


KEY: Final = key_in(0)
TEXT_KEY: Final = key_in(0, "text")
"""A key that the player stores before each case, with the value `text`."""


def encoded(*messages: Message) -> bytes:
    """The frames of messages."""
    return b"".join(bytes(piece) for message in messages for piece in message.frame_buffers())


def frame_of(
    kind: type[Message],
    body: bytes,
    *,
    opaque: int = OPAQUE,
    partition: int = 0xFFFF,
    pad: bytes | None = None,
) -> bytes:
    """A frame with right checksums around any body."""
    body += padding(len(body)) if pad is None else pad
    return pack_header(kind.opcode, 0, partition, opaque, len(body), crc32c(body)) + body


def changed(frame: bytes, offset: int, value: int, *, mend: bool = True) -> bytes:
    """A frame with another byte in its header; the header's checksum is right if `mend`."""
    data = bytearray(frame)
    data[offset] = value
    if mend:
        data[20:24] = crc32c(bytes(data[:20])).to_bytes(4, "little")
    return bytes(data)


def _stream(
    state: PartitionState = PartitionState.ACTIVE,
    position: Position = NOTHING_YET,
    *,
    partition: PartitionId = P0,
    opaque: int = OPAQUE,
    **fields: Any,
) -> Stream:
    return Stream(state, position, partition=partition, opaque=opaque, **fields)


def _mutate(*rows: Mutation, partition: PartitionId = P0, **fields: Any) -> Mutate:
    chunk = Chunk.build(rows, SeqNo(0), SeqNo(0))
    counter, chain = fields.pop("counter", 0), fields.pop("chain", 0)
    fields.setdefault("opaque", OPAQUE)
    return Mutate(Bundle.of_one_run(partition, chunk, counter, chain), **fields)


def _set(key: bytes = KEY, value: bytes = b"v") -> Mutation:
    return Mutation(Operation.SET, key, value)


def _bundle(runs: list[tuple[int, int]], chunk: bytes | None = None) -> bytes:
    """A `Mutate` whose runs are (partition, row count), right or wrong."""
    rows = sum(row_count for _, row_count in runs)
    if chunk is None:
        chunk = bytes(chunk_of_plain_sets([KEY] * rows, [b""] * rows))
    directory = b"".join(
        partition.to_bytes(4, "little") + row_count.to_bytes(4, "little") + bytes(16)
        for partition, row_count in runs
    )
    return frame_of(Mutate, bytes(16 + 8 + 4) + len(runs).to_bytes(4, "little") + directory + chunk)


def _altered(chunk: Chunk, offset: int, data: bytes) -> bytes:
    """A bundle of one run whose chunk has other bytes at `offset`."""
    encoded_chunk = bytes(chunk)
    altered = encoded_chunk[:offset] + data + encoded_chunk[offset + len(data) :]
    return _bundle([(0, chunk.count)], altered)


_HELLO: Final = Hello("conformance", (VERSION,), 0, 1 << 20, 20)
_ONE: Final = Chunk.build([_set()], SeqNo(0), SeqNo(0))
_TWO: Final = Chunk.build([_set(), _set()], SeqNo(0), SeqNo(0))
_WRITER: Final = b"conformance test"


def _hello(**fields: Any) -> bytes:
    defaults = {
        "identity": "conformance",
        "versions": (VERSION,),
        "features": 0,
        "window_bytes": 1 << 20,
        "idle_interval_s": 20,
    }
    return encoded(Hello(**{**defaults, **fields}))


def _runs_of_one_writer() -> bytes:
    """65 runs of one writer, and the first again."""
    frames = [
        encoded(_mutate(_set(), writer=_WRITER, counter=counter, opaque=OPAQUE + counter))
        for counter in range(1, 66)
    ]
    return b"".join([*frames, encoded(_mutate(_set(), writer=_WRITER, counter=1))])


def _position(history: HistoryId, seq: int) -> Position:
    return Position(FailoverLog.of_pairs([(history, 0)]), SeqNo(seq), SeqNo(seq), None)


def _cases() -> list[WrongInput]:
    cases: list[WrongInput] = []

    def topic(
        name: str, progress: Progress
    ) -> Callable[[str, bytes | Message | None, Outcome, Status], None]:
        def case(
            wrong: str, data: bytes | Message | None, outcome: Outcome, status: Status
        ) -> None:
            frames = encoded(data) if isinstance(data, Message) else data
            cases.append(WrongInput(name, wrong, progress, frames, outcome, status))

        return case

    connection_closed, request_refused = Outcome.CLOSED, Outcome.REFUSED
    hello = encoded(_HELLO)

    case = topic("a frame's header", Progress.CONNECTED)
    case("the magic", changed(hello, 0, 0), connection_closed, Status.BAD_MAGIC)
    case(
        "its checksum",
        changed(hello, 20, hello[20] ^ 1, mend=False),
        connection_closed,
        Status.BAD_CHECKSUM,
    )
    case("the version", changed(hello, 2, 2), connection_closed, Status.BAD_VERSION)
    case(
        "a length that is not a multiple of 8",
        changed(hello, 12, 1),
        connection_closed,
        Status.MALFORMED,
    )
    case(
        "an opcode that is not in use",
        changed(hello, 3, 0x7F),
        connection_closed,
        Status.UNKNOWN_MESSAGE,
    )
    case(
        "a message that only the server sends",
        Opened(1, 0),
        connection_closed,
        Status.OUT_OF_TURN,
    )
    case("a message that the state does not allow", Go(), connection_closed, Status.OUT_OF_TURN)
    too_long = pack_header(Hello.opcode, 0, 0xFFFF, 0, 4096 + 8, 0)
    case(
        "a body longer than the message may have",
        too_long,
        connection_closed,
        Status.FRAME_TOO_LONG,
    )

    case = topic("a frame's body", Progress.CONNECTED)
    damaged = hello[:-8] + bytes((hello[-8] ^ 1,)) + hello[-7:]
    case("its checksum", damaged, connection_closed, Status.BAD_CHECKSUM)
    body = b"".join(map(bytes, _HELLO.body_buffers()))
    case(
        "it ends inside a field",
        frame_of(Hello, body[:16], opaque=0),
        connection_closed,
        Status.MALFORMED,
    )
    case(
        "8 bytes after the fields",
        frame_of(Hello, body + bytes(8)),
        connection_closed,
        Status.MALFORMED,
    )
    case(
        "padding that is not zeros",
        frame_of(Hello, body + b"x"),
        connection_closed,
        Status.MALFORMED,
    )
    not_utf8 = body[:-1] + b"\xff"
    case("a text that is not UTF-8", frame_of(Hello, not_utf8), connection_closed, Status.MALFORMED)

    case = topic("`Hello`", Progress.CONNECTED)
    case(
        "no version that the server speaks",
        _hello(versions=(9,)),
        connection_closed,
        Status.BAD_VERSION,
    )
    case("a window below 64 KiB", _hello(window_bytes=65_535), connection_closed, Status.MALFORMED)
    case("an idle interval of 0 s", _hello(idle_interval_s=0), connection_closed, Status.MALFORMED)
    case(
        "an idle interval of 3,601 s",
        _hello(idle_interval_s=3601),
        connection_closed,
        Status.MALFORMED,
    )
    case("an identity of no bytes", _hello(identity=""), connection_closed, Status.MALFORMED)
    case(
        "an identity of 201 bytes", _hello(identity="x" * 201), connection_closed, Status.MALFORMED
    )
    control = _hello(identity="a\x1b[2J")
    case("an identity with control characters", control, connection_closed, Status.MALFORMED)
    case("nothing within 10 s", None, connection_closed, Status.IDLE)

    case = topic("the log-in", Progress.GREETED)
    unasked = StartLogIn("SCRAM-SHA-256", b"n,,n=user,r=nonce")
    case("`StartLogIn` in a cluster without users", unasked, connection_closed, Status.OUT_OF_TURN)
    case(
        "another message before it, in a cluster with users",
        None,
        connection_closed,
        Status.OUT_OF_TURN,
    )
    case(
        "a mechanism that `HelloReply` does not name", None, connection_closed, Status.LOG_IN_FAILED
    )
    case("a message that does not fit the mechanism", None, connection_closed, Status.MALFORMED)
    case("`y,,`, if `HelloReply` names channel binding", None, connection_closed, Status.MALFORMED)
    case("a wrong user, password or certificate", None, connection_closed, Status.LOG_IN_FAILED)
    case("one more attempt, after too many have failed", None, connection_closed, Status.TOO_MANY)

    case = topic("any request", Progress.OPENED)
    in_use = encoded(_stream(), Stats(opaque=OPAQUE))
    case("an opaque that is in use", in_use, connection_closed, Status.OPAQUE_IN_USE)
    case("more than `requests_open_max` at a time", None, connection_closed, Status.TOO_MANY)
    case("about a bucket that was deleted meanwhile", None, request_refused, Status.NO_BUCKET)

    case = topic("`Open`", Progress.GREETED)
    case(
        "a bucket that does not exist",
        Open("nowhere", opaque=OPAQUE),
        request_refused,
        Status.NO_BUCKET,
    )
    case(
        "a partition that the bucket does not have",
        Open(BUCKET, (MISSING,), opaque=OPAQUE),
        Outcome.LOG,
        Status.NOT_MY_PARTITION,
    )
    named_twice = Open(BUCKET, (P0, P0), opaque=OPAQUE)
    case("a partition that is named twice", named_twice, request_refused, Status.BAD_ARGUMENT)
    case = topic("`Open`", Progress.OPENED)
    case("a second bucket", Open(BUCKET, opaque=OPAQUE), connection_closed, Status.OUT_OF_TURN)

    case = topic("`Stream`", Progress.OPENED)
    no_stream = Outcome.NO_STREAM
    twice = encoded(_stream(), _stream(opaque=OPAQUE + 1))
    case("a partition that is streamed already", twice, connection_closed, Status.OUT_OF_TURN)
    contradiction = _stream(position=Position(FailoverLog(), SeqNo(9), SeqNo(3), None))
    case("a position that contradicts itself", contradiction, connection_closed, Status.MALFORMED)
    case(
        "a partition that the bucket does not have",
        _stream(partition=MISSING),
        no_stream,
        Status.NOT_MY_PARTITION,
    )
    case("the state dead", _stream(PartitionState.DEAD), no_stream, Status.BAD_ARGUMENT)
    case(
        "the state pending, without `with_answers`",
        _stream(PartitionState.PENDING),
        no_stream,
        Status.BAD_ARGUMENT,
    )
    case(
        "another state than it has", _stream(PartitionState.REPLICA), no_stream, Status.WRONG_STATE
    )
    case(
        "`with_answers`, from a client that is not a replica",
        _stream(with_answers=True),
        no_stream,
        Status.WRONG_STATE,
    )
    case(
        "a `key_prefix` that is longer than a key",
        _stream(key_prefix=b"k" * (KEY_BYTES_MAX + 1)),
        no_stream,
        Status.BAD_ARGUMENT,
    )
    case("a lease that does not exist", _stream(lease_id=7), no_stream, Status.RANGE_GONE)
    unknown = _stream(position=_position(UNKNOWN_HISTORY, 5))
    case("a history that the server does not know", unknown, no_stream, Status.ROLLBACK)
    case("a number that the server has not reached", None, no_stream, Status.SEQ_TOO_HIGH)

    case = topic("`CloseStream`", Progress.STREAMING)
    case("a partition that is not streamed", None, Outcome.IGNORED, Status.OK)
    case("another opaque than the stream's", None, connection_closed, Status.MALFORMED)
    case("a stream that is not answered yet", None, connection_closed, Status.OUT_OF_TURN)

    case = topic("`Ack`", Progress.STREAMING)
    case(
        "more than was taken from the window", Ack(1 << 40), connection_closed, Status.FLOW_CONTROL
    )

    case = topic("`Barrier`", Progress.STREAMING)
    case("a cookie of no bytes", Barrier(b""), connection_closed, Status.MALFORMED)
    case("a cookie of 65 bytes", Barrier(bytes(65)), connection_closed, Status.MALFORMED)
    case("the cookie of an open barrier", None, connection_closed, Status.COOKIE_IN_USE)
    case("more than `open_barriers_max` at a time", None, connection_closed, Status.TOO_MANY)

    _add_publishing(topic)
    _add_requests(topic)
    return cases


Topic = Callable[[str, Progress], Callable[[str, bytes | Message | None, Outcome, Status], None]]


def _add_publishing(topic: Topic) -> None:
    connection_closed, request_refused, row_failed = (
        Outcome.CLOSED,
        Outcome.REFUSED,
        Outcome.ROW_FAILED,
    )
    case = topic("a bundle", Progress.OPENED)
    case("sent with no credit", None, connection_closed, Status.FLOW_CONTROL)
    case("an unknown durability", _wrong_durability(), connection_closed, Status.MALFORMED)
    case(
        "no run",
        _bundle([], bytes(chunk_of_plain_sets([], []))),
        connection_closed,
        Status.MALFORMED,
    )
    case("a run without rows", _bundle([(0, 1), (1, 0)]), connection_closed, Status.MALFORMED)
    case(
        "runs that are not in order", _bundle([(1, 1), (0, 1)]), connection_closed, Status.MALFORMED
    )
    case(
        "two runs of one partition", _bundle([(0, 1), (0, 1)]), connection_closed, Status.MALFORMED
    )
    case(
        "runs with other rows than the chunk",
        _bundle([(0, 2)], bytes(_ONE)),
        connection_closed,
        Status.MALFORMED,
    )
    runs = [(partition, 1) for partition in range(BUNDLE_RUNS_MAX + 1)]
    case(f"more than {BUNDLE_RUNS_MAX:,} runs", _bundle(runs), connection_closed, Status.MALFORMED)
    long_run = [(0, BUNDLE_MUTATIONS_MAX + 1)]
    case(
        f"more than {BUNDLE_MUTATIONS_MAX:,} mutations",
        _bundle(long_run),
        connection_closed,
        Status.MALFORMED,
    )
    lengths = _altered(_ONE, 4, (99).to_bytes(4, "little"))
    case("a chunk whose lengths do not add up", lengths, connection_closed, Status.MALFORMED)
    reserved = _altered(_ONE, 12, b"\x01")
    case("a chunk whose reserved field is not 0", reserved, connection_closed, Status.MALFORMED)
    numbered = _altered(_ONE, 32, b"\x01")
    case("a chunk with sequence numbers", numbered, request_refused, Status.BAD_ARGUMENT)
    expire = _mutate(Mutation(Operation.EXPIRE, KEY))
    case("a chunk with `EXPIRE`", expire, request_refused, Status.BAD_ARGUMENT)
    # Before the operation of one row lie 32 bytes of head, and six columns of 8.
    undefined = _altered(_ONE, 32 + 48, b"\x63")
    case("a chunk with an undefined operation", undefined, request_refused, Status.BAD_ARGUMENT)
    # Before the key offsets of two rows lie 32 bytes of head, and 48 of numbers and the like.
    falling = _altered(_TWO, 32 + 48 + 4, (100).to_bytes(4, "little"))
    case("a chunk whose offsets fall", falling, request_refused, Status.BAD_ARGUMENT)
    delta = _mutate(Mutation(Operation.INCREMENT, KEY, b"1"))
    case("a counter's value that is not 24 bytes", delta, request_refused, Status.BAD_ARGUMENT)

    case = topic("a run", Progress.OPENED)
    wrong_partition = _mutate(_set(), partition=MISSING)
    case(
        "a partition that the node is not active for",
        wrong_partition,
        request_refused,
        Status.NOT_MY_PARTITION,
    )
    elsewhere = _mutate(_set(key_in(1)))
    case("a key that belongs to another partition", elsewhere, request_refused, Status.BAD_ARGUMENT)
    replicated = _mutate(_set(), durability=Durability.REPLICATED, copies=1)
    case(
        "more copies than there are replicas", replicated, request_refused, Status.TOO_FEW_REPLICAS
    )
    case("a replicated level with 0 copies", None, request_refused, Status.BAD_ARGUMENT)
    case(
        "a run whose result was forgotten",
        _runs_of_one_writer(),
        request_refused,
        Status.TOKEN_TOO_OLD,
    )
    later = _mutate(_set(), writer=_WRITER, counter=1, attempt=2, opaque=OPAQUE + 1)
    earlier = _mutate(_set(), writer=_WRITER, counter=2, attempt=1)
    case("an older attempt", encoded(later, earlier), request_refused, Status.SUPERSEDED)
    first_run = _mutate(
        _set(), writer=_WRITER, counter=1, chain=_ONE.chained_crc(0), opaque=OPAQUE + 1
    )
    other_chain = _mutate(_set(value=b"w"), writer=_WRITER, counter=1, chain=1)
    case(
        "the token of a run with another chain",
        encoded(first_run, other_chain),
        request_refused,
        Status.REPLAY_DIFFERS,
    )
    broken = _mutate(_set(), writer=_WRITER, counter=2, chain=1)
    case(
        "a chain that does not continue the last one",
        encoded(first_run, broken),
        request_refused,
        Status.REPLAY_DIFFERS,
    )
    case(
        "the disk is full, or an earlier run was refused",
        None,
        request_refused,
        Status.TEMPORARY_FAILURE,
    )
    case(
        "operations that need too many bytes of old values",
        None,
        request_refused,
        Status.LIMIT_REACHED,
    )

    case = topic("a row of a run", Progress.OPENED)
    case("an empty key", _mutate(_set(b"")), row_failed, Status.BAD_KEY)
    case("a key of 251 bytes", _mutate(_set(b"k" * 251)), row_failed, Status.BAD_KEY)
    case("a value above 20 MiB", None, row_failed, Status.TOO_LARGE)
    case("`ADD` of a key that exists", _mutate(_row(Operation.ADD)), row_failed, Status.EXISTS)
    absent = key_in(0, "absent")
    for operation in (Operation.REPLACE, Operation.DELETE, Operation.APPEND, Operation.TOUCH):
        row = Mutation(operation, absent)
        case(f"`{operation.name}` of a missing key", _mutate(row), row_failed, Status.NOT_FOUND)
    no_create = Mutation(Operation.INCREMENT, absent, CounterDelta(1, create=False).encode())
    case(
        "`INCREMENT` without `create`, of a missing key",
        _mutate(no_create),
        row_failed,
        Status.NOT_FOUND,
    )
    text = Mutation(Operation.INCREMENT, TEXT_KEY, CounterDelta(1).encode())
    case(
        "`INCREMENT` of a value that is not a number",
        _mutate(text),
        row_failed,
        Status.NOT_A_NUMBER,
    )
    stale = Mutation(Operation.SET, TEXT_KEY, b"", cas=Cas(7))
    case("another CAS than the item's", _mutate(stale), row_failed, Status.CAS_MISMATCH)
    no_item = Mutation(Operation.SET, absent, b"", cas=Cas(7))
    case("an expected CAS, and a missing key", _mutate(no_item), row_failed, Status.NOT_FOUND)
    case(
        "a key whose old value is damaged, if the operation needs it",
        None,
        row_failed,
        Status.DAMAGED,
    )


def _row(operation: Operation) -> Mutation:
    return Mutation(operation, TEXT_KEY, b"v")


def _wrong_durability() -> bytes:
    body = bytearray(b"".join(map(bytes, _mutate(_set()).body_buffers())))
    body[24] = 9
    return frame_of(Mutate, bytes(body))


def _add_requests(topic: Topic) -> None:
    request_refused = Outcome.REFUSED
    bad, range_gone = Status.BAD_ARGUMENT, Status.RANGE_GONE
    case = topic("`Get`", Progress.OPENED)
    case("no key", Get((), partition=P0, opaque=OPAQUE), request_refused, bad)
    keys = (KEY,) * (GET_KEYS_MAX + 1)
    case(
        f"more than {GET_KEYS_MAX:,} keys",
        Get(keys, partition=P0, opaque=OPAQUE),
        request_refused,
        bad,
    )
    bad_key = Get((b"",), partition=P0, opaque=OPAQUE)
    case("a key of 0 or more than 250 bytes", bad_key, Outcome.KEY_REFUSED, Status.BAD_KEY)
    case("a key whose record on disk is damaged", None, Outcome.KEY_REFUSED, Status.DAMAGED)
    wrong_partition = Get((KEY,), partition=MISSING, opaque=OPAQUE)
    case(
        "a partition that the node is not active for",
        wrong_partition,
        request_refused,
        Status.NOT_MY_PARTITION,
    )
    elsewhere = Get((key_in(1),), partition=P0, opaque=OPAQUE)
    case("a key that belongs to another partition", elsewhere, request_refused, bad)
    other_history = Get((KEY,), UNKNOWN_HISTORY, partition=P0, opaque=OPAQUE)
    case("another history", other_history, request_refused, Status.HISTORY_CHANGED)

    case = topic("`Seqnos`", Progress.OPENED)
    seqnos = Seqnos((MISSING,), opaque=OPAQUE)
    case(
        "a partition that the node is not active for",
        seqnos,
        request_refused,
        Status.NOT_MY_PARTITION,
    )
    named_twice = Seqnos((P0, P0), opaque=OPAQUE)
    case("a partition that is named twice", named_twice, request_refused, bad)

    case = topic("`SeqnosAt`", Progress.OPENED)
    seqnos_at = SeqnosAt(0, (MISSING,), opaque=OPAQUE)
    case(
        "a partition that the node is not active for",
        seqnos_at,
        request_refused,
        Status.NOT_MY_PARTITION,
    )
    twice = SeqnosAt(0, (P0, P0), opaque=OPAQUE)
    case("a partition that is named twice", twice, request_refused, bad)

    case = topic("`Await`", Progress.OPENED)

    def waiting(history: HistoryId, durability: Durability = Durability.MEMORY) -> Await:
        return Await(history, SeqNo(1), 0, durability, partition=P0, opaque=OPAQUE)

    case("another history", waiting(UNKNOWN_HISTORY), request_refused, Status.HISTORY_CHANGED)
    case("a number that the partition has not given", None, request_refused, bad)
    case("a number that is not durable in time", None, request_refused, Status.TIMED_OUT)
    too_many = waiting(UNKNOWN_HISTORY, Durability.REPLICATED)
    case("more copies than there are replicas", too_many, request_refused, Status.TOO_FEW_REPLICAS)
    case("a replicated level with 0 copies", None, request_refused, bad)

    case = topic("`Lease`", Progress.OPENED)

    def lease(
        action: LeaseAction = LeaseAction.ACQUIRE,
        *ranges: tuple[int, int, int],
        seconds: int = 1,
        owner: str = "conformance",
    ) -> Lease:
        return Lease(action, 7, seconds, owner, ranges, opaque=OPAQUE)

    acquire = LeaseAction.ACQUIRE
    case("`ACQUIRE` without a range", lease(), request_refused, bad)
    case(
        "`ACQUIRE` of two ranges of one partition",
        lease(acquire, (0, 0, 0), (0, 0, 0)),
        request_refused,
        bad,
    )
    case("`ACQUIRE` or `RENEW` for 0 s", lease(acquire, (0, 0, 0), seconds=0), request_refused, bad)
    too_long = lease(acquire, (0, 0, 0), seconds=LEASE_TIME_TO_LIVE_S_MAX + 1)
    case(
        f"`ACQUIRE` or `RENEW` for {LEASE_TIME_TO_LIVE_S_MAX + 1:,} s",
        too_long,
        request_refused,
        bad,
    )
    long_name = lease(acquire, (0, 0, 0), owner="x" * (LEASE_OWNER_BYTES_MAX + 1))
    case(
        f"`ACQUIRE` with an owner of {LEASE_OWNER_BYTES_MAX + 1} bytes",
        long_name,
        request_refused,
        bad,
    )
    case(
        "`ACQUIRE` of a range that is not on disk",
        lease(acquire, (0, 0, 1 << 40)),
        request_refused,
        bad,
    )
    case("`RENEW` of an unknown lease", lease(LeaseAction.RENEW), request_refused, range_gone)
    case("`RELEASE` of an unknown lease", lease(LeaseAction.RELEASE), request_refused, bad)

    case = topic("buckets and maps", Progress.GREETED)
    exists = CreateBucket(BUCKET, 1, opaque=OPAQUE)
    case("`CreateBucket` of an existing bucket", exists, request_refused, Status.BUCKET_EXISTS)
    case("a name with a slash", CreateBucket("a/b", 1, opaque=OPAQUE), request_refused, bad)
    case(
        "a name that begins with a dot", CreateBucket(".a", 1, opaque=OPAQUE), request_refused, bad
    )
    case("1,025 partitions", CreateBucket("other", 1025, opaque=OPAQUE), request_refused, bad)
    case("a quota of 1 byte", CreateBucket("other", 1, 1, opaque=OPAQUE), request_refused, bad)
    no_bucket = Status.NO_BUCKET
    case(
        "`DeleteBucket` of an unknown bucket",
        DeleteBucket("nowhere", opaque=OPAQUE),
        request_refused,
        no_bucket,
    )
    case(
        "`Stats` of an unknown bucket", Stats("nowhere", opaque=OPAQUE), request_refused, no_bucket
    )
    case(
        "`GetMap` of an unknown bucket",
        GetMap("nowhere", opaque=OPAQUE),
        request_refused,
        no_bucket,
    )
    case("`Join` with an address that does not answer", None, request_refused, bad)
    case("`ChangeUsers` without a change", ChangeUsers("{}", opaque=OPAQUE), request_refused, bad)
    case = topic("buckets and maps", Progress.OPENED)
    case(
        "`SetMap` of bytes that are not a map", SetMap(0, "{}", opaque=OPAQUE), request_refused, bad
    )
    case("`SetMap` in place of another revision", None, request_refused, Status.REVISION_CONFLICT)

    case = topic("`NextEvents`", Progress.GREETED)
    case("an unknown kind", _wrong_kinds(), Outcome.CLOSED, Status.MALFORMED)
    case("a consumer without a name", NextEvents("", opaque=OPAQUE), request_refused, bad)
    case("a timeout of 0 s", NextEvents("c", timeout_s=0, opaque=OPAQUE), request_refused, bad)
    long = NextEvents("c", pattern="x" * 201, opaque=OPAQUE)
    case("a pattern of 201 bytes", long, request_refused, bad)
    case("a second open `NextEvents`", None, request_refused, Status.LIMIT_REACHED)


def _wrong_kinds() -> bytes:
    body = bytearray(b"".join(map(bytes, NextEvents("c").body_buffers())))
    body[16] = 16
    return frame_of(NextEvents, bytes(body))


WRONG_INPUTS: Final = tuple(_cases())
"""All of them, in the order of the document's table."""
