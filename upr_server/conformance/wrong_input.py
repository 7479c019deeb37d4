"""What a client may do wrong, and what a server must make of it: one table.

The protocol document shows the table, the vectors hold its frames, and `check_server` plays it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, unique
from typing import Final

import attrs

from upr_kernel import pack_header
from upr_protocol.chunk import CounterDelta, Mutation, chunk_of_plain_sets
from upr_protocol.errors import Status
from upr_protocol.failover import FailoverLog, Position
from upr_protocol.ids import (
    Cas,
    Durability,
    HistoryId,
    Operation,
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
    NextEvents,
    Open,
    Opened,
    Seqnos,
    SeqnosAt,
    SetMap,
    StartLogIn,
    Stats,
)
from upr_server.conformance.wrong_frames import (
    BUCKET,
    HELLO,
    KEY,
    MISSING,
    ONE_ROW,
    OPAQUE,
    P0,
    TEXT_KEY,
    TWO_ROWS,
    UNKNOWN_HISTORY,
    WRITER,
    altered,
    bundle,
    changed,
    encoded,
    frame_of,
    hello_of,
    key_in,
    mutate,
    position_in,
    runs_of_one_writer,
    set_row,
    stream,
    text_row,
    wrong_durability,
    wrong_kinds,
)


@unique
class Progress(Enum):
    """How far a connection has come when the wrong input arrives."""

    CONNECTED = "before `Hello`"
    READY = "before `Open`"
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
    hello = encoded(HELLO)

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
    body = b"".join(map(bytes, HELLO.body_buffers()))
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
        hello_of(versions=(9,)),
        connection_closed,
        Status.BAD_VERSION,
    )
    case(
        "a window below 64 KiB", hello_of(window_bytes=65_535), connection_closed, Status.MALFORMED
    )
    case(
        "an idle interval of 0 s", hello_of(idle_interval_s=0), connection_closed, Status.MALFORMED
    )
    case(
        "an idle interval of 3,601 s",
        hello_of(idle_interval_s=3601),
        connection_closed,
        Status.MALFORMED,
    )
    case("an identity of no bytes", hello_of(identity=""), connection_closed, Status.MALFORMED)
    case(
        "an identity of 201 bytes",
        hello_of(identity="x" * 201),
        connection_closed,
        Status.MALFORMED,
    )
    control = hello_of(identity="a\x1b[2J")
    case("an identity with control characters", control, connection_closed, Status.MALFORMED)
    case("nothing within 10 s", None, connection_closed, Status.IDLE)

    case = topic("the log-in", Progress.READY)
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
    in_use = encoded(stream(), Stats(opaque=OPAQUE))
    case("an opaque that is in use", in_use, connection_closed, Status.OPAQUE_IN_USE)
    case("more than `requests_open_max` at a time", None, connection_closed, Status.TOO_MANY)
    case("about a bucket that was deleted meanwhile", None, request_refused, Status.NO_BUCKET)

    case = topic("`Open`", Progress.READY)
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
    twice = encoded(stream(), stream(opaque=OPAQUE + 1))
    case("a partition that is streamed already", twice, connection_closed, Status.OUT_OF_TURN)
    contradiction = stream(position=Position(FailoverLog(), SeqNo(9), SeqNo(3), None))
    case("a position that contradicts itself", contradiction, connection_closed, Status.MALFORMED)
    case(
        "a partition that the bucket does not have",
        stream(partition=MISSING),
        no_stream,
        Status.NOT_MY_PARTITION,
    )
    case("the state dead", stream(PartitionState.DEAD), no_stream, Status.BAD_ARGUMENT)
    case(
        "the state pending, without `with_answers`",
        stream(PartitionState.PENDING),
        no_stream,
        Status.BAD_ARGUMENT,
    )
    case("another state than it has", stream(PartitionState.REPLICA), no_stream, Status.WRONG_STATE)
    case(
        "`with_answers`, from a client that is not a replica",
        stream(with_answers=True),
        no_stream,
        Status.WRONG_STATE,
    )
    case(
        "a `key_prefix` that is longer than a key",
        stream(key_prefix=b"k" * (KEY_BYTES_MAX + 1)),
        no_stream,
        Status.BAD_ARGUMENT,
    )
    case("a lease that does not exist", stream(lease_id=7), no_stream, Status.RANGE_GONE)
    unknown = stream(position=position_in(UNKNOWN_HISTORY, 5))
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
    case("an unknown durability", wrong_durability(), connection_closed, Status.MALFORMED)
    case(
        "no run",
        bundle([], bytes(chunk_of_plain_sets([], []))),
        connection_closed,
        Status.MALFORMED,
    )
    case("a run without rows", bundle([(0, 1), (1, 0)]), connection_closed, Status.MALFORMED)
    case(
        "runs that are not in order", bundle([(1, 1), (0, 1)]), connection_closed, Status.MALFORMED
    )
    case("two runs of one partition", bundle([(0, 1), (0, 1)]), connection_closed, Status.MALFORMED)
    case(
        "runs with other rows than the chunk",
        bundle([(0, 2)], bytes(ONE_ROW)),
        connection_closed,
        Status.MALFORMED,
    )
    runs = [(partition, 1) for partition in range(BUNDLE_RUNS_MAX + 1)]
    case(f"more than {BUNDLE_RUNS_MAX:,} runs", bundle(runs), connection_closed, Status.MALFORMED)
    long_run = [(0, BUNDLE_MUTATIONS_MAX + 1)]
    case(
        f"more than {BUNDLE_MUTATIONS_MAX:,} mutations",
        bundle(long_run),
        connection_closed,
        Status.MALFORMED,
    )
    lengths = altered(ONE_ROW, 4, (99).to_bytes(4, "little"))
    case("a chunk whose lengths do not add up", lengths, connection_closed, Status.MALFORMED)
    reserved = altered(ONE_ROW, 12, b"\x01")
    case("a chunk whose reserved field is not 0", reserved, connection_closed, Status.MALFORMED)
    backwards = altered(ONE_ROW, 16, b"\x01")
    case("a chunk whose end is below its start", backwards, connection_closed, Status.MALFORMED)
    numbered = altered(ONE_ROW, 32, b"\x01")
    case("a chunk with sequence numbers", numbered, request_refused, Status.BAD_ARGUMENT)
    expire = mutate(Mutation(Operation.EXPIRE, KEY))
    case("a chunk with `EXPIRE`", expire, request_refused, Status.BAD_ARGUMENT)
    # Before the operation of one row lie 32 bytes of head, and six columns of 8.
    undefined = altered(ONE_ROW, 32 + 48, b"\x63")
    case("a chunk with an undefined operation", undefined, request_refused, Status.BAD_ARGUMENT)
    # Before the key offsets of two rows lie 32 bytes of head, and 48 of numbers and the like.
    falling = altered(TWO_ROWS, 32 + 48 + 4, (100).to_bytes(4, "little"))
    case("a chunk whose offsets fall", falling, request_refused, Status.BAD_ARGUMENT)
    delta = mutate(Mutation(Operation.INCREMENT, KEY, b"1"))
    case("a counter's value that is not 24 bytes", delta, request_refused, Status.BAD_ARGUMENT)

    case = topic("a run", Progress.OPENED)
    wrong_partition = mutate(set_row(), partition=MISSING)
    case(
        "a partition that the node is not active for",
        wrong_partition,
        request_refused,
        Status.NOT_MY_PARTITION,
    )
    elsewhere = mutate(set_row(key_in(1)))
    case("a key that belongs to another partition", elsewhere, request_refused, Status.BAD_ARGUMENT)
    replicated = mutate(set_row(), durability=Durability.REPLICATED, copies=1)
    case(
        "more copies than there are replicas", replicated, request_refused, Status.TOO_FEW_REPLICAS
    )
    case(
        "a replicated level with 0 copies, of a partition that has replicas",
        None,
        request_refused,
        Status.BAD_ARGUMENT,
    )
    case(
        "a run whose result was forgotten",
        runs_of_one_writer(),
        request_refused,
        Status.TOKEN_TOO_OLD,
    )
    later = mutate(set_row(), writer=WRITER, counter=1, attempt=2, opaque=OPAQUE + 1)
    earlier = mutate(set_row(), writer=WRITER, counter=2, attempt=1)
    case("an older attempt", encoded(later, earlier), request_refused, Status.SUPERSEDED)
    first_run = mutate(
        set_row(), writer=WRITER, counter=1, chain=ONE_ROW.chained_crc(0), opaque=OPAQUE + 1
    )
    other_chain = mutate(set_row(value=b"w"), writer=WRITER, counter=1, chain=1)
    case(
        "the token of a run with another chain",
        encoded(first_run, other_chain),
        request_refused,
        Status.REPLAY_DIFFERS,
    )
    broken = mutate(set_row(), writer=WRITER, counter=2, chain=1)
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
    case("an empty key", mutate(set_row(b"")), row_failed, Status.BAD_KEY)
    case("a key of 251 bytes", mutate(set_row(b"k" * 251)), row_failed, Status.BAD_KEY)
    case("a value above 20 MiB", None, row_failed, Status.TOO_LARGE)
    case("`ADD` of a key that exists", mutate(text_row(Operation.ADD)), row_failed, Status.EXISTS)
    absent = key_in(0, "absent")
    for operation in (Operation.REPLACE, Operation.DELETE, Operation.APPEND, Operation.TOUCH):
        row = Mutation(operation, absent)
        case(f"`{operation.name}` of a missing key", mutate(row), row_failed, Status.NOT_FOUND)
    no_create = Mutation(Operation.INCREMENT, absent, CounterDelta(1, create=False).encode())
    case(
        "`INCREMENT` without `create`, of a missing key",
        mutate(no_create),
        row_failed,
        Status.NOT_FOUND,
    )
    text = Mutation(Operation.INCREMENT, TEXT_KEY, CounterDelta(1).encode())
    case(
        "`INCREMENT` of a value that is not a number",
        mutate(text),
        row_failed,
        Status.NOT_A_NUMBER,
    )
    stale = Mutation(Operation.SET, TEXT_KEY, b"", cas=Cas(7))
    case("another CAS than the item's", mutate(stale), row_failed, Status.CAS_MISMATCH)
    no_item = Mutation(Operation.SET, absent, b"", cas=Cas(7))
    case("an expected CAS, and a missing key", mutate(no_item), row_failed, Status.NOT_FOUND)
    case(
        "a key whose old value is damaged, if the operation needs it",
        None,
        row_failed,
        Status.DAMAGED,
    )


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
    case(
        "a replicated level with 0 copies, of a partition that has replicas",
        None,
        request_refused,
        bad,
    )

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

    case = topic("buckets and maps", Progress.READY)
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

    case = topic("`NextEvents`", Progress.READY)
    case("an unknown kind", wrong_kinds(), Outcome.CLOSED, Status.MALFORMED)
    case("a consumer without a name", NextEvents("", opaque=OPAQUE), request_refused, bad)
    case("a timeout of 0 s", NextEvents("c", timeout_s=0, opaque=OPAQUE), request_refused, bad)
    long = NextEvents("c", pattern="x" * 201, opaque=OPAQUE)
    case("a pattern of 201 bytes", long, request_refused, bad)
    case("a second open `NextEvents`", None, request_refused, Status.LIMIT_REACHED)


WRONG_INPUTS: Final = tuple(_cases())
"""All of them, in the order of the document's table."""
