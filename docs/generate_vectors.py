"""Writes docs/vectors/*.json: what a client in any language can be tested against.

    python -m docs.generate_vectors --write docs/vectors
    python -m docs.generate_vectors --check docs/vectors

Bytes are hexadecimal text, numbers of 64 bits are decimal text. docs/protocol.md says what each
file holds.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Iterable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import construct as cs
import msgspec
from crc32c import crc32c

from docs.conversations import conversations
from docs.generate_protocol import EXAMPLE_MAP, bare, subcons
from docs.session_rules import session_rules
from upr_protocol import limits
from upr_protocol.bucket_event import BucketEvent, BucketFate, EventKind
from upr_protocol.chunk import Bundle, BundleRun, Chunk, CounterDelta, Mutation
from upr_protocol.client.core import resume_state
from upr_protocol.errors import Status
from upr_protocol.failover import (
    NOTHING_YET,
    FailoverLog,
    PartialSnapshot,
    Position,
    Retry,
    RollBack,
    decide_start,
)
from upr_protocol.hashing import partition_of
from upr_protocol.ids import (
    SEQ_MAX,
    Cas,
    Durability,
    HistoryId,
    Operation,
    PartitionId,
    PartitionState,
    SeqNo,
    SnapshotKind,
)
from upr_protocol.limits import KEY_BYTES_MAX
from upr_protocol.session.flow_control import Allowance
from upr_protocol.session.rules import WINDOW_MESSAGES
from upr_protocol.wire import (
    MESSAGES,
    Ack,
    Await,
    AwaitReply,
    Barrier,
    BarrierReply,
    BucketDone,
    ChangeUsers,
    Close,
    CloseStream,
    ContinueLogIn,
    CreateBucket,
    Credit,
    CycleEnd,
    DeleteBucket,
    Error,
    EventsReply,
    Get,
    GetMap,
    GetReply,
    GetUsers,
    Go,
    Hello,
    HelloReply,
    Join,
    Lease,
    LeaseAction,
    LeaseReply,
    ListBuckets,
    ListBucketsReply,
    ListUsers,
    LoggedIn,
    LogInChallenge,
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
    RunResult,
    Seqnos,
    SeqnosAt,
    SeqnosAtReply,
    SeqnosReply,
    SetMap,
    StartLogIn,
    Stats,
    StatsReply,
    Stream,
    StreamEnd,
    StreamReply,
    UsersReply,
)
from upr_protocol.wire.columns import BUNDLE, CHUNK, LOG, POSITION
from upr_server.conformance import WRONG_INPUTS

Json = Any

FRAME_BYTES_MAX: Final = 8 * 1024
"""Longer frames of wrong input are played by the conformance runner and are in no file."""

HISTORY: Final = HistoryId(0x1122334455667788)
OLDER: Final = HistoryId(0xFFEEDDCCBBAA9988)
LOG_OF_TWO: Final = FailoverLog.of_pairs([(HISTORY, 40), (OLDER, 0)])
P5: Final = PartitionId(5)


def encoded(message: Message) -> bytes:
    """A message's frame."""
    return b"".join(map(bytes, message.frame_buffers()))


# --- checksums ------------------------------------------------------------------------------------


def hashing() -> Json:
    """Partitions of keys."""
    keys = [b"a", b"N14228", "Zürich".encode(), bytes(range(250)), b"\0", b"_design/flights"]
    return [
        {
            "key": key.hex(),
            "crc32": crc32(key),
            "partitions": {str(count): partition_of(key, count) for count in (1, 8, 64, 100, 1024)},
        }
        for key in keys
    ]


def checksums() -> Json:
    """CRC32C of bytes, and the chain of a writer's runs to one partition."""
    texts = [b"", b"\0", b"123456789", bytes(32), b"\xff" * 32, bytes(range(256))]
    runs: list[Json] = []
    chain = 0
    for row in (
        [_set(b"one", b"1")],
        [_set(b"two", b"2"), Mutation(Operation.DELETE, b"one")],
        [_set(b"zero", _value_for_zero([_set(b"one", b"1")], b"zero"))],
        [_set(b"three", b"3")],
    ):
        chunk = Chunk.build(row, SeqNo(0), SeqNo(0))
        if row[0].key == b"zero":
            # A new chain, whose second run would have 0.
            chain = Chunk.build([_set(b"one", b"1")], SeqNo(0), SeqNo(0)).chained_crc(0)
            runs.append({"begins_anew_with": chain})
            assert crc32c(chunk.crc.to_bytes(4, "little"), chain) == 0
        chain = chunk.chained_crc(chain)
        runs.append({"chunk": bytes(chunk).hex(), "crc32c": chunk.crc, "chain": chain})
    return {
        "crc32c": [{"bytes": text.hex(), "crc32c": crc32c(text)} for text in texts],
        "chain": runs,
    }


def _set(key: bytes, value: bytes, seq: int = 0) -> Mutation:
    return Mutation(Operation.SET, key, value, SeqNo(seq), Cas(seq and seq + 100))


def _value_for_zero(first: Sequence[Mutation], key: bytes) -> bytes:
    """Four bytes with which a second run's chain would be 0. A CRC is affine in the bytes: the
    equations over GF(2) are solved."""
    before = Chunk.build(first, SeqNo(0), SeqNo(0)).chained_crc(0)

    def chain(value: int) -> int:
        chunk = Chunk.build([_set(key, value.to_bytes(4, "little"))], SeqNo(0), SeqNo(0))
        return crc32c(chunk.crc.to_bytes(4, "little"), before)

    constant = chain(0)
    pivots: dict[int, tuple[int, int]] = {}
    for bit in range(32):
        image, source = chain(1 << bit) ^ constant, 1 << bit
        while image:
            top = image.bit_length()
            if top not in pivots:
                pivots[top] = image, source
                break
            image, source = image ^ pivots[top][0], source ^ pivots[top][1]
    factor, value = constant, 0
    while factor:
        image, source = pivots[factor.bit_length()]
        factor, value = factor ^ image, value ^ source
    return value.to_bytes(4, "little")


# --- messages -------------------------------------------------------------------------------------

_CHUNK: Final = Chunk.build(
    [
        Mutation(Operation.SET, b"N14228", b'{"dep":"EWR"}', SeqNo(41), Cas(9), 7, 1_800_000_000),
        Mutation(Operation.DELETE, b"N24211", b"", SeqNo(43), Cas(10)),
    ],
    SeqNo(40),
    SeqNo(44),
)
_POSITION: Final = Position(
    LOG_OF_TWO, SeqNo(40), SeqNo(42), PartialSnapshot(HISTORY, SeqNo(40), SeqNo(50))
)
_BUNDLE: Final = Bundle(
    Chunk.build(
        [
            _set(b"a", b"1"),
            _set(b"b", b"2"),
            Mutation(Operation.INCREMENT, b"c", CounterDelta(3).encode()),
        ],
        SeqNo(0),
        SeqNo(0),
    ),
    (BundleRun(P5, 2, 7, 0xCAFE), BundleRun(PartitionId(9), 1, 8, 0xBEEF)),
)
_OF: Final[dict[str, Any]] = {"partition": P5, "opaque": 77}
_ASK: Final[dict[str, Any]] = {"opaque": 78}

SAMPLES: Final[tuple[Message, ...]] = (
    Hello("indexer:node-7", (1, 2), 0, 1 << 20, 20),
    HelloReply(1, 0, 20, 32 << 20, 64, 4096, "node-a", ("SCRAM-SHA-256",)),
    StartLogIn("SCRAM-SHA-256", b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"),
    LogInChallenge(
        b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
    ),
    ContinueLogIn(
        b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
        b"p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    ),
    LoggedIn(b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="),
    Error("what happened", "what to do", status=Status.MALFORMED),
    Open("flights", (5, 9), **_ASK),
    Opened(64, 7, **_ASK),
    PartitionLog(PartitionState.ACTIVE, SeqNo(44), SeqNo(40), SeqNo(3), LOG_OF_TWO, **_OF),
    Stream(PartitionState.ACTIVE, _POSITION, SEQ_MAX, 3, True, b"user:", **_OF),
    StreamReply(SeqNo(42), "why there", LOG_OF_TWO, 7, **_OF),
    Go(),
    PartitionStart(HISTORY, SeqNo(40), SeqNo(44), SeqNo(3), SnapshotKind.DISK, True, **_OF),
    PartitionChunk(_CHUNK, **_OF),
    PartitionEnd(SeqNo(44), **_OF),
    CycleEnd(3),
    Barrier(b"cookie"),
    BarrierReply(b"cookie", ((P5, SeqNo(44)),)),
    Ack(1234),
    PartitionSnapshot(_CHUNK, **_OF),
    Noop(),
    CloseStream(**_OF),
    StreamEnd(status=Status.TOO_SLOW, **_OF),
    Close(),
    Mutate(_BUNDLE, b"writer of docs!!", Durability.REPLICATED, 2, 4, **_ASK),
    MutateReply(
        7,
        (
            RunResult(P5, Status.OK, HISTORY, SeqNo(45), SeqNo(45), Cas(11)),
            RunResult(PartitionId(9), Status.NOT_MY_PARTITION),
        ),
        ((1, Status.EXISTS),),
        ((2, 8),),
        **_ASK,
    ),
    Credit(1 << 20),
    Get((b"a", b"bc", b"d"), HISTORY, **_OF),
    GetReply(
        HISTORY,
        3,
        Chunk.build(
            [
                Mutation(Operation.SET, b"a", b"1", SeqNo(9), Cas(3)),
                Mutation(Operation.DELETE, b"bc"),
                Mutation(Operation.DELETE, b"d", flags=Status.DAMAGED),
            ],
            SeqNo(0),
            SeqNo(44),
        ),
        **_OF,
    ),
    Seqnos((5,), True, **_ASK),
    SeqnosReply(((5, HISTORY, 44, 40, 39),), **_ASK),
    SeqnosAt(1_700_000_000_123_456_789, (5,), **_ASK),
    SeqnosAtReply(((5, HISTORY, 40),), **_ASK),
    Await(HISTORY, SeqNo(44), 5000, Durability.PERSISTED, **_OF),
    AwaitReply(SeqNo(44), **_OF),
    ReplicaAck(((P5, HISTORY, SeqNo(44), SeqNo(40)),)),
    Lease(LeaseAction.ACQUIRE, 3, 60, "backup", ((5, 0, SEQ_MAX),), **_ASK),
    LeaseReply(3, 60, ((5, HISTORY, 0, 40, 4096),), **_ASK),
    CreateBucket("flights", 64, 1 << 30, **_ASK),
    BucketDone(**_ASK),
    DeleteBucket("flights", **_ASK),
    ListBuckets(**_ASK),
    ListBucketsReply((("flights", 64, 1 << 30),), **_ASK),
    Stats("flights", **_ASK),
    StatsReply('{"items":1}', **_ASK),
    GetMap("flights", **_ASK),
    MapReply(7, EXAMPLE_MAP.encode(), "a", **_ASK),
    SetMap(6, EXAMPLE_MAP.encode(), **_ASK),
    Join("flights", "10.0.0.1:12000", **_ASK),
    ListUsers(**_ASK),
    UsersReply(7, '{"revision":7,"users":[]}', **_ASK),
    ChangeUsers('{"type":"RemoveUser","name":"bob"}', **_ASK),
    GetUsers(7, bytes(range(32)), **_ASK),
    PartitionAnswers(((b"writer of docs!!", 7, SeqNo(44), b"\x01\x02"),), **_OF),
    NextEvents("c", 4, 60, 1000, EventKind.CREATED | EventKind.UPDATED, "fl*", **_ASK),
    EventsReply(
        5, True, (BucketEvent("flights", 3, BucketFate.CREATED, 2, (b"_design/a",)),), **_ASK
    ),
    Refusal("why", 7, status=Status.NO_BUCKET, **_ASK),
)


def messages() -> Json:
    """A sample of every message: its fields, and its frame."""
    assert {type(message) for message in SAMPLES} == set(MESSAGES.values())
    return [
        {
            "message": type(message).__name__,
            "partition": message.partition,
            "opaque": message.opaque,
            "status": int(message.status),
            "fields": fields_of(
                type(message).layout,
                type(message).layout.parse(b"".join(map(bytes, message.body_buffers()))),
            ),
            "frame": encoded(message).hex(),
        }
        for message in SAMPLES
    ]


def fields_of(layout: Any, parsed: Any) -> Json:
    """The fields of a layout, as JSON; those of a bundle stand beside the others."""
    fields: dict[str, Json] = {}
    for sub in subcons(layout):
        if sub.name == "padding" or sub.name is None:
            continue
        inner = bare(sub)
        if inner is BUNDLE:
            bundle = parsed[sub.name]
            fields |= fields_of(BUNDLE.subcon, {"runs": bundle.runs, "chunk": bundle.chunk})
        else:
            fields[sub.name] = json_of(inner, parsed[sub.name])
    return fields


def json_of(construct: Any, value: Any) -> Json:
    """One field's value, as JSON."""
    if construct is CHUNK:
        return chunk_json(value)
    if construct is LOG:
        return log_json(value)
    if construct is POSITION:
        return position_json(value)
    if isinstance(value, BucketEvent):
        value = msgspec.structs.astuple(value)
    match construct:
        case cs.Struct():
            names = [sub for sub in subcons(construct) if sub.name != "padding"]
            return {
                sub.name: json_of(bare(sub), item) for sub, item in zip(names, value, strict=True)
            }
        case cs.FocusedSeq():
            _, items = map(bare, subcons(construct))
            return [json_of(bare(items.subcon), item) for item in value]
        case cs.FormatField() if construct.length == 8:
            return str(int(value))
        case _ if isinstance(value, bytes):
            return value.hex()
        case _ if isinstance(value, IntEnum | int) and not isinstance(value, bool):
            return int(value)
    return value


def log_json(log: FailoverLog) -> Json:
    """A failover log."""
    return [{"history_id": str(history), "seq": str(seq)} for history, seq in log.pairs()]


def position_json(position: Position) -> Json:
    """A position."""
    partial = position.partial
    return {
        "last_complete": str(position.last_complete),
        "highest_received": str(position.highest_received),
        "partial_history": str(partial.history_id if partial else 0),
        "partial_start": str(partial.start if partial else 0),
        "partial_end": str(partial.end if partial else 0),
        "log": log_json(position.log),
    }


def chunk_json(chunk: Chunk) -> Json:
    """A chunk, row by row."""
    return {
        "start": str(chunk.start),
        "end": str(chunk.end),
        "rows": [
            {
                "operation": int(row.op),
                "key": row.key.hex(),
                "value": row.value.hex(),
                "seq": str(row.seq),
                "cas": str(row.cas),
                "flags": row.flags,
                "expiry": row.expiry,
            }
            for row in chunk
        ],
    }


# --- chunks and bundles ---------------------------------------------------------------------------


def chunks() -> Json:
    """Good chunks with their rows, and bad ones with what is wrong."""
    published = Chunk.build(
        [_set(b"k", b"v"), Mutation(Operation.TOUCH, b"k" * KEY_BYTES_MAX, expiry=9)],
        SeqNo(0),
        SeqNo(0),
    )
    empty = Chunk.build([], SeqNo(3), SeqNo(9))
    good = [("stored", _CHUNK), ("stored", empty), ("published", published)]
    stored, two = bytes(_CHUNK), bytes(published)
    key_offsets = 32 + 2 * 16 + 2 * 8
    bad = [
        ("stored", stored[:31], "it ends inside its head"),
        ("stored", stored[:-8], "its lengths do not add up to its bytes"),
        ("stored", _with(stored, 12, 1), "the reserved field is not 0"),
        ("stored", _with(stored, 0, 2**20 + 1, 4), "it has more mutations than a chunk may"),
        ("stored", _with(stored, 24, 30, 8), "it ends before its start"),
        ("stored", _with(stored, 32, 40, 8), "a number is not above the start"),
        ("stored", _with(stored, 32 + 8, 45, 8), "a number is above the end"),
        ("stored", _with(stored, 32 + 8, 41, 8), "the numbers do not rise strictly"),
        ("stored", _with(stored, key_offsets, 1, 4), "the key offsets do not begin with 0"),
        ("stored", _with(stored, key_offsets + 4, 100, 4), "the key offsets fall"),
        ("stored", _with(stored, key_offsets + 4, 0, 4), "a key has no bytes"),
        ("stored", _with(stored, key_offsets + 16, 2, 4), "the value offsets do not begin with 0"),
        ("stored", _with(stored, key_offsets + 16 + 4, 100, 4), "the value offsets fall"),
        ("stored", _with(stored, key_offsets + 32, 4), "an operation may not be stored"),
        ("stored", _with(stored, key_offsets + 32, 0), "there is no such operation"),
        ("published", _with(two, key_offsets + 32, 3), "an operation may not be published"),
        ("published", _with(two, 32, 1, 8), "a published chunk has a sequence number"),
        ("published", _with(two, 24, 1, 8), "a published chunk has a range"),
    ]
    return {
        "good": [{"kind": kind, "chunk": bytes(c).hex(), **chunk_json(c)} for kind, c in good],
        "bad": [{"kind": kind, "chunk": data.hex(), "wrong": wrong} for kind, data, wrong in bad],
    }


def _with(data: bytes, offset: int, value: int, length: int = 1) -> bytes:
    return data[:offset] + value.to_bytes(length, "little") + data[offset + length :]


def bundles() -> Json:
    """A good bundle as its bytes and runs. Bad ones are among the wrong input."""
    return [
        {
            "frame": encoded(Mutate(_BUNDLE, b"writer of docs!!", opaque=1)).hex(),
            "runs": [
                {
                    "partition": run.partition,
                    "row_count": run.row_count,
                    "counter": str(run.counter),
                    "chain": run.chain,
                    "chunk": bytes(chunk).hex(),
                }
                for run, chunk in zip(_BUNDLE.runs, _BUNDLE.run_chunks(), strict=True)
            ],
        }
    ]


def wrong_input() -> Json:
    """What a client may do wrong, and what a server makes of it."""
    return [
        {
            "topic": case.topic,
            "wrong": case.wrong,
            "when": case.progress.name,
            "frames": case.frames.hex()
            if case.frames is not None and len(case.frames) <= FRAME_BYTES_MAX
            else None,
            "outcome": case.outcome.name,
            "status": int(case.status),
        }
        for case in WRONG_INPUTS
    ]


# --- positions, starts, windows, maps -------------------------------------------------------------


def positions() -> Json:
    """What each message of a stream makes of the client's position."""
    steps: list[Json] = []
    position: Position = NOTHING_YET
    of: dict[str, Any] = {"partition": P5, "opaque": 2}
    history, snapshot_end = HISTORY, SeqNo(0)

    def step(message: Message, after: Position) -> Position:
        steps.append(
            {
                "message": type(message).__name__,
                "frame": encoded(message).hex(),
                "position": position_json(after),
            }
        )
        return after

    def reply(log: FailoverLog) -> Position:
        message = StreamReply(position.highest_received, "", log, **of)
        return step(message, resume_state.position_after_acceptance(position, log))

    def start(first: int, end: int) -> SeqNo:
        step(
            PartitionStart(
                history, SeqNo(first), SeqNo(end), SeqNo(0), SnapshotKind.MEMORY, False, **of
            ),
            position,
        )
        return SeqNo(end)

    def chunk(first: int, end: int) -> Position:
        rows = [_set(b"k%d" % seq, b"v", seq) for seq in range(first + 1, end + 1)]
        message = PartitionChunk(Chunk.build(rows, SeqNo(first), SeqNo(end)), **of)
        after = resume_state.position_after_chunk(position, history, snapshot_end, SeqNo(end))
        return step(message, after)

    def whole(first: int, end: int) -> Position:
        rows = [_set(b"k%d" % seq, b"v", seq) for seq in range(first + 1, end + 1)]
        message = PartitionSnapshot(Chunk.build(rows, SeqNo(first), SeqNo(end)), **of)
        return step(message, resume_state.position_after_snapshot(position, SeqNo(end)))

    position = reply(FailoverLog.of_pairs([(HISTORY, 0)]))
    snapshot_end = start(0, 4)
    position = chunk(0, 2)
    position = chunk(2, 4)
    position = step(
        PartitionEnd(SeqNo(4), **of), resume_state.position_after_snapshot(position, SeqNo(4))
    )
    position = whole(4, 6)
    snapshot_end = start(6, 12)
    position = chunk(6, 9)
    steps.append({"lost": "the connection; the client comes back with its position"})
    position = reply(FailoverLog.of_pairs([(HISTORY, 0)]))
    snapshot_end = start(9, 13)
    position = chunk(9, 13)
    steps.append({"lost": "the connection, before the snapshot's end"})
    position = reply(FailoverLog.of_pairs([(HISTORY, 0)]))
    refusal = StreamReply(SeqNo(8), "", LOG_OF_TWO, status=Status.ROLLBACK, **of)
    position = step(refusal, resume_state.position_after_rollback(position, SeqNo(6)))
    steps[-1]["rolled_back_to"] = "6"
    history = OLDER
    log = FailoverLog.of_pairs([(OLDER, 8), (HISTORY, 0)])
    position = reply(log)
    snapshot_end = start(6, 9)
    position = chunk(6, 9)
    step(PartitionEnd(SeqNo(9), **of), resume_state.position_after_snapshot(position, SeqNo(9)))
    return steps


def starts() -> Json:
    """Where a server lets a stream start."""
    unbranched: list[tuple[int, int]] = [(HISTORY, 0)]
    branched: list[tuple[int, int]] = [(OLDER, 40), (HISTORY, 0)]

    def at(log: list[tuple[int, int]], seq: int, received: int = 0, end: int = 0) -> Position:
        partial = (
            PartialSnapshot(HistoryId(log[0][0]), SeqNo(seq), SeqNo(end)) if received else None
        )
        return Position(FailoverLog.of_pairs(log), SeqNo(seq), SeqNo(received or seq), partial)

    cases = [
        ("nothing yet", unbranched, 50, 0, NOTHING_YET),
        ("the same history", unbranched, 50, 0, at(unbranched, 30)),
        ("all of it", unbranched, 50, 0, at(unbranched, 50)),
        ("more than the server has", unbranched, 50, 0, at(unbranched, 60)),
        ("inside a snapshot", unbranched, 50, 0, at(unbranched, 30, 35, 40)),
        (
            "inside a snapshot that the server has not got whole",
            unbranched,
            50,
            0,
            at(unbranched, 30, 35, 60),
        ),
        ("the server branched above the client's number", branched, 50, 0, at(unbranched, 30)),
        ("the server branched at the client's number", branched, 50, 0, at(unbranched, 40)),
        ("the server branched below the client's number", branched, 50, 0, at(unbranched, 45)),
        ("the client branched", unbranched, 50, 0, at(branched, 45)),
        ("inside a snapshot of an older history", branched, 50, 0, at(unbranched, 30, 35, 45)),
        (
            "inside a snapshot of a history that is not in its log",
            unbranched,
            50,
            0,
            Position(
                FailoverLog.of_pairs(unbranched),
                SeqNo(30),
                SeqNo(35),
                PartialSnapshot(HistoryId(OLDER), SeqNo(30), SeqNo(45)),
            ),
        ),
        ("a history that the server does not know", unbranched, 50, 0, at([(OLDER, 0)], 30)),
        ("below the purge number", unbranched, 50, 35, at(unbranched, 30)),
        ("at the purge number", unbranched, 50, 30, at(unbranched, 30)),
        ("nothing yet, below the purge number", unbranched, 50, 35, NOTHING_YET),
    ]
    rows = []
    for name, log, high, purge, client in cases:
        decision = decide_start(FailoverLog.of_pairs(log), SeqNo(high), SeqNo(purge), client)
        if isinstance(decision, Retry):
            status, seq = Status.SEQ_TOO_HIGH, SeqNo(high)
        elif isinstance(decision, RollBack):
            status, seq = Status.ROLLBACK, decision.ceiling
        else:
            status, seq = Status.OK, decision.seq
        rows.append(
            {
                "client": name,
                "server_log": log_json(FailoverLog.of_pairs(log)),
                "server_high_seq": str(high),
                "purge_seq": str(purge),
                "position": position_json(client),
                "status": int(status),
                "seq": str(seq),
                "reason": decision.reason.name,
            }
        )
    return rows


def window() -> Json:
    """What is left of a window, frame by frame. The server sends while it is above 0."""
    allowance = Allowance()
    allowance.grant(limits.WINDOW_BYTES_MIN)
    trace: list[Json] = [
        {
            "message": "Hello",
            "window_bytes": allowance.remaining_bytes,
            "left": allowance.remaining_bytes,
        }
    ]
    for size in (20_000, 30_000, 40_000):
        row = Mutation(Operation.SET, b"k", bytes(size), SeqNo(1), Cas(1))
        chunk = Chunk.build([row], SeqNo(0), SeqNo(1))
        for message in (
            PartitionChunk(chunk, partition=P5, opaque=2),
            PartitionSnapshot(chunk, partition=P5, opaque=2),
            PartitionEnd(SeqNo(1), partition=P5, opaque=2),
        ):
            frame_bytes = len(encoded(message))
            if type(message) in WINDOW_MESSAGES:
                if not allowance.is_open:
                    continue
                allowance.note_sent(frame_bytes)
            name = type(message).__name__
            trace.append(
                {"message": name, "frame_bytes": frame_bytes, "left": allowance.remaining_bytes}
            )
    for count in (20_000, allowance.used_bytes - 20_000):
        allowance.give_back(count)
        trace.append({"message": "Ack", "bytes": count, "left": allowance.remaining_bytes})
    return trace


def partition_map() -> Json:
    """The map of a bucket on two nodes, and where keys go."""
    keys = [b"N14228", b"N24211", b"N0", b"N1"]
    count = len(EXAMPLE_MAP.partitions)
    return {
        "document": EXAMPLE_MAP.encode(),
        "keys": [
            {
                "key": key.hex(),
                "partition": partition_of(key, count),
                "active": EXAMPLE_MAP.active_of(partition_of(key, count)),
                "replicas": EXAMPLE_MAP.replicas_of(partition_of(key, count)),
            }
            for key in keys
        ],
    }


def recorded_conversations() -> Json:
    """What this project's client and server say to each other, recorded now."""
    return [
        {
            "title": conversation.title,
            "about": conversation.about,
            "frames": [
                {"from": sender, "message": MESSAGES[frame[3]].__name__, "frame": frame.hex()}
                for sender, frame in conversation.frames
            ],
            "shown_from": conversation.shown_from,
        }
        for conversation in conversations()
    ]


def numbers() -> Json:
    """Every opcode, status and limit."""
    return {
        "opcodes": {kind.__name__: kind.opcode for kind in MESSAGES.values()},
        "body_bytes_max": {kind.__name__: kind.body_bytes_max for kind in MESSAGES.values()},
        "statuses": {status.name: int(status) for status in Status},
        # Those that the module declares, not what it imports.
        "limits": {name: getattr(limits, name) for name in inspect.get_annotations(limits)},
    }


VECTORS: Final = {
    "hashing": hashing,
    "checksums": checksums,
    "messages": messages,
    "chunks": chunks,
    "bundles": bundles,
    "wrong_input": wrong_input,
    "session_rules": session_rules,
    "positions": positions,
    "starts": starts,
    "window": window,
    "partition_map": partition_map,
    "conversations": recorded_conversations,
    "numbers": numbers,
}


def files() -> Iterable[tuple[str, str]]:
    """Each file's name and text."""
    for name, make in VECTORS.items():
        yield f"{name}.json", json.dumps(make(), indent=1, ensure_ascii=False) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Write docs/vectors, or check that it is current.")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", type=Path, metavar="FOLDER")
    mode.add_argument("--check", type=Path, metavar="FOLDER")
    options = parser.parse_args(arguments)
    for name, text in files():
        if options.write:
            options.write.mkdir(exist_ok=True)
            (options.write / name).write_text(text)
        else:
            path = options.check / name
            if not path.exists() or path.read_text() != text:
                sys.exit(f"{path} is not what the code does: run `make docs` and commit it")


if __name__ == "__main__":
    main()
