"""The corpus: small inputs that reach far, from which mutation begins.

`python -m tests.fuzz.corpus` writes the files that are made from valid messages anew. Those that
are called `found-…` are what a fuzzer found: they were put there by hand, and stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from tests.fuzz import links, log_in, tls
from tests.fuzz.frames import MENDED
from tests.fuzz.sessions import CHALLENGE, FIRST, LATE, LOG_IN, PROOF, RESPONSE
from tests.protocol.session.kit import (
    SAMPLES,
    chunk,
    close_stream,
    encoded,
    end,
    hello,
    hello_reply,
    partition_log,
    published,
    snapshot,
    start,
    stored,
    stream,
    stream_end,
    stream_reply,
)
from upr_protocol.chunk import Chunk, CounterDelta, Mutation
from upr_protocol.errors import Status
from upr_protocol.failover import FailoverLog, PartialSnapshot, Position
from upr_protocol.ids import (
    PUBLISHED_OPERATIONS,
    STORED_OPERATIONS,
    Cas,
    HistoryId,
    Operation,
    PartitionId,
    PartitionState,
    SeqNo,
)
from upr_protocol.partition_map import Assignment, PartitionMap
from upr_protocol.scram import EXTERNAL, SCRAM
from upr_protocol.wire import (
    Ack,
    Barrier,
    BarrierReply,
    Close,
    ContinueLogIn,
    CycleEnd,
    Go,
    LoggedIn,
    Message,
    Noop,
    Open,
    Opened,
    PartitionAnswers,
    Refusal,
    ReplicaAck,
    Role,
    StartLogIn,
    Stream,
)
from upr_server.engine.mutate_result import MutateResult, pack_result
from upr_server.indexer.pure.definition import IndexDefinition, IndexName
from upr_server.indexer.query import Query
from upr_server.indexer.slices import CatalogReport, SliceAnswer, SliceScan
from upr_server.indexer.worker_messages import (
    AskConfirm,
    AskRelease,
    AskScan,
    AskStatistics,
    AskStatus,
    AskStop,
    CancelQuestion,
    CatalogRead,
    ErrorMessage,
    NodeQuestion,
    NumberedAnswer,
    NumberedQuestion,
    Ping,
    SliceRestarted,
)
from upr_server.storage.records import (
    PARTITION,
    BucketRecord,
    KeyIndexEntry,
    LeaseRecord,
    PartialRecord,
    PartitionRecord,
    Watermark,
    chunk_head,
    chunk_key,
    pack_record,
    partition_key,
)

FOLDER: Final = Path(__file__).with_name("corpus")

_WHOLE, _BYTEWISE, _FOURS = bytes([7]), bytes([0]), bytes([1])
_MENDED: Final = bytes([MENDED | 7])


def corpus(target: str) -> Mapping[str, bytes]:
    """The inputs of a target, by the names of their files."""
    return {path.name: path.read_bytes() for path in sorted((FOLDER / target).iterdir())}


def _frames() -> Iterator[tuple[str, bytes]]:
    several = encoded(Noop(), Barrier(b"cookie"), SAMPLES[Open], Noop())
    long = encoded(chunk(3, 9, 0, 10, b"v" * 200))
    yield "several", _MENDED + several
    yield "bytewise", _BYTEWISE + several
    yield "long", _FOURS + long
    yield "cut", _WHOLE + long[:-100]


def _messages() -> Iterator[tuple[str, bytes]]:
    for kind, message in SAMPLES.items():
        yield kind.__name__, encoded(message)
    log = FailoverLog.of_pairs([(9, 30), (8, 20), (7, 0)])
    cut = Position(log, SeqNo(40), SeqNo(45), PartialSnapshot(HistoryId(9), SeqNo(40), SeqNo(50)))
    yield "Stream-cut", encoded(stream(3, 9, cut))


# The second byte: 0 behind nothing, 1 `Hello`, 2 `Open`, 3 streams, 4 `Go`. With users: `LOG_IN`
# behind nothing, 1 more behind `Hello`, 2 more behind `StartLogIn`, or `LogInChallenge`.


def _server() -> Iterator[tuple[str, bytes]]:
    client_messages = [message for kind, message in SAMPLES.items() if kind.sender & Role.CLIENT]
    requests = [
        msgspec.structs.replace(message, opaque=100 + index)
        for index, message in enumerate(client_messages)
        if type(message).answers and not isinstance(message, Open | Stream)
    ]
    flow = [stream(5, 8), Barrier(b"a"), close_stream(3, 6), Ack(10), Barrier(b"b")]
    for name, behind, messages in (
        ("handshake", 0, [hello(), Open("bucket", (3,)), stream(3, 6), Go(), Close()]),
        ("log-in", LOG_IN, [hello(), FIRST, RESPONSE, Open("bucket", (3,))]),
        ("log-in-wrong", LOG_IN + 2, [ContinueLogIn(RESPONSE.data[:-4] + b"AAA=")]),
        ("log-in-external", LOG_IN + 1, [StartLogIn(EXTERNAL)]),
        ("management", 1, requests[:4]),
        ("requests", 2, requests),
        ("streams", 2, [stream(3, 6), stream(4, 7), Go(), *flow]),
        ("requests-late", 2, requests),
        ("closing", 4, [close_stream(4, 7), Barrier(b"a"), Noop()]),
        ("flow", 4, [*flow, SAMPLES[ReplicaAck], Noop()]),
        ("refused", 4, [Go()]),
    ):
        yield from _conversation(name, behind, messages)


def _client() -> Iterator[tuple[str, bytes]]:
    answers = [
        msgspec.structs.replace(
            SAMPLES[kind.answers[-1]], opaque=kind.opcode, partition=PartitionId(3)
        )
        for kind in SAMPLES
        if kind.answers and kind is not Open and kind is not Stream
    ]
    refusals = [Refusal("no", opaque=message.opaque, status=7) for message in answers]
    opaque = Stream.opcode
    first = [start(3, opaque, 0, 10), chunk(3, opaque, 0, 10), end(3, opaque, 10)]
    whole = [snapshot(3, opaque, 10, 20), BarrierReply(b"cookie", ((PartitionId(3), SeqNo(20)),))]
    # The client closes its streams then; the rest is dropped.
    dropped = [CycleEnd(1), start(3, opaque, 20, 30), snapshot(3, opaque, 20, 30)]
    replica = [
        start(3, opaque, 0, 10),
        msgspec.structs.replace(SAMPLES[PartitionAnswers], opaque=opaque),
    ]
    for name, behind, messages in (
        (
            "handshake",
            0,
            [hello_reply(), partition_log(3, Open.opcode), Opened(64, 1, opaque=Open.opcode)],
        ),
        (
            "log-in",
            LOG_IN,
            [hello_reply(mechanisms=(SCRAM,)), CHALLENGE, PROOF, Opened(64, 1, opaque=Open.opcode)],
        ),
        ("log-in-wrong", LOG_IN + 2, [LoggedIn(b"v=AAAA")]),
        ("answers", 3, answers),
        ("refusals", 3, refusals),
        ("streams", 3, [*first, *whole, *dropped, Noop(), stream_end(3, opaque)]),
        ("streams-late", 3, [*first, *whole]),
        ("replica", 3, replica),
        ("refused", 2, [stream_reply(3, opaque, status=3), *replica]),
    ):
        yield from _conversation(name, behind, messages)


def _conversation(
    name: str, behind: int, messages: Iterable[Message]
) -> Iterator[tuple[str, bytes]]:
    first = MENDED | 5 | (LATE if name.endswith("late") else 0)
    yield name, bytes([first, behind]) + encoded(*messages)


def _log_in() -> Iterator[tuple[str, bytes]]:
    for name, kind, message in (
        ("first", log_in.FIRST, log_in.client().client_first()),
        ("first-unbound", log_in.FIRST, b"n,,n=a=2Cb=3D,r=client"),
        ("final", log_in.FINAL, log_in.RIGHT_FINAL),
        ("challenge", log_in.CHALLENGE, log_in.RIGHT_CHALLENGE),
        ("outcome", log_in.OUTCOME, log_in.RIGHT_OUTCOME),
        # The least that has an algorithm of a signature: ECDSA with SHA-256.
        ("certificate", log_in.CERTIFICATE, bytes.fromhex("300e3000300a06082a8648ce3d040302")),
    ):
        yield name, bytes([kind]) + message


def _tls() -> Iterator[tuple[str, bytes]]:
    alert, data = bytes.fromhex("15030300020100"), bytes.fromhex("1703030013") + bytes(19)
    yield "hello", bytes([tls.FIRST]) + tls.HELLO
    yield "in-clear", bytes([tls.FIRST]) + encoded(hello())
    yield "proof", bytes([tls.PROOF]) + bytes.fromhex("140303000101") + data
    yield "alert", bytes([tls.PROOF]) + alert
    yield "to-server", bytes([tls.TO_SERVER]) + data
    yield "to-client", bytes([tls.TO_CLIENT]) + alert


def _several(has_seqs: bool) -> Chunk:
    """Keys and values of several lengths, and every operation."""
    operations = STORED_OPERATIONS if has_seqs else PUBLISHED_OPERATIONS
    return Chunk.build(
        Mutation(
            Operation(operation),
            b"key" * seq,
            CounterDelta(1).encode() if operation > Operation.EXPIRE else b"v" * (seq - 1),
            SeqNo(2 * seq if has_seqs else 0),
            flags=seq,
            expiry=1000 * seq,
        )
        for seq, operation in enumerate(operations, 1)
    )


def _chunk() -> Iterator[tuple[str, bytes]]:
    yield "published", _MENDED + bytes(published())
    yield "published-several", _MENDED + bytes(_several(has_seqs=False))
    yield "stored", _MENDED + bytes(stored(0, 3))
    yield "stored-several", _MENDED + bytes(_several(has_seqs=True))
    yield "empty", _MENDED + bytes(Chunk.build([], SeqNo(3), SeqNo(9)))
    yield "as-it-is", _WHOLE + bytes(stored(5, 7))


def _stored() -> Iterator[tuple[str, bytes]]:
    for name, first, stored_chunk in (
        ("one", _MENDED, stored(0, 1)),
        ("several", _MENDED, _several(has_seqs=True)),
        ("empty", _MENDED, Chunk.build([], SeqNo(3), SeqNo(9))),
        ("as-it-is", _WHOLE, stored(5, 7)),
    ):
        key = chunk_key(3, stored_chunk.end)
        head = chunk_head(key, stored_chunk.crc, ends_snapshot=True)
        yield name, first + key[1:] + head + bytes(stored_chunk)


def _record() -> Iterator[tuple[str, bytes]]:
    key = partition_key(PARTITION, 3)
    partial = PartialRecord(HistoryId(7), SeqNo(10), SeqNo(20), SeqNo(15))
    active = PartitionState.ACTIVE
    for name, record in (
        ("bucket", BucketRecord("bucket", 64, 1 << 30)),
        ("partition", PartitionRecord(active, ((9, 5), (7, 0)), SeqNo(10), 11, partial)),
        ("lease", LeaseRecord(1, "owner", ((3, 0, 10),), 60, 1e9)),
        ("watermark", Watermark(SeqNo(10), 5, 100)),
        ("number", 10),
    ):
        packed = pack_record(key, record)
        yield name, _MENDED + key + packed[4:]
    nodes = {"a": "host:1", "b": "[::1]:12000", "c": "h:1"}
    assignment = Assignment(active="a", replicas={"b": "", "c": "b"})
    partition_map = PartitionMap(
        bucket="b", revision=3, nodes=nodes, partitions=(assignment, Assignment())
    )
    yield "map", _MENDED + key + partition_map.encode().encode()
    result = MutateResult(
        HistoryId(7), SeqNo(1), SeqNo(2), Cas(1), [(1, Status.EXISTS)], [(0, 5)], chain=1
    )
    yield "map-without-host", _MENDED + key + partition_map.encode().replace("host", ".").encode()
    yield "answer", _MENDED + key + pack_result(result)
    yield "as-it-is", _WHOLE + key + pack_record(key, Watermark())
    yield "index-entry", _WHOLE + b"key" + KeyIndexEntry(7, 1000).pack(b"key")


def _links() -> Iterator[tuple[str, bytes]]:
    scan = SliceScan(IndexName("d", "i"), IndexDefinition(("a",)), Query(hold_s=9), 100)
    questions: list[NodeQuestion] = [
        AskScan(scan),
        AskRelease("x"),
        AskStatus(IndexName("d", "i"), IndexDefinition(("a",)), {0: 3}),
        AskStatistics(),
        AskConfirm(),
        Ping(),
    ]
    for question in questions:
        numbered_question = NumberedQuestion(1, msgspec.json.encode(question))
        yield (
            f"ask-{str(question.__struct_config__.tag).lower()}",
            _framed(links.TO_NODE, numbered_question),
        )
    yield "ask-stop", _framed(links.TO_NODE, NumberedQuestion(1, msgspec.json.encode(AskStop())))
    pair = NumberedQuestion(1, msgspec.json.encode(AskScan(scan))), CancelQuestion(1)
    yield "ask-and-cancel", _framed(links.TO_NODE, *pair)
    answer = SliceAnswer(
        searches=1,
        entries_read=1,
        index_entries=1,
        freshness="barrier",
        waits=[],
        read_seconds=0.5,
        entries=[b"a"],
    )
    answers = (
        NumberedAnswer(1, msgspec.msgpack.encode(None)),
        NumberedAnswer(2, msgspec.msgpack.encode(answer)),
    )
    yield "answers", _framed(links.FROM_NODE, *answers)
    failure = ErrorMessage("BuildingError", "it is being built", 1.0)
    yield "failure", _framed(links.FROM_NODE, NumberedAnswer(2, failure=failure))
    report = CatalogRead(CatalogReport({"d": b"{}"}, 1))
    yield "report", _framed(links.FROM_NODE, SliceRestarted(), report)


def _framed(kind: int, *messages: Any) -> bytes:
    encoded_messages = [msgspec.msgpack.encode(message) for message in messages]
    return bytes([kind]) + b"".join(
        len(data).to_bytes(4, "big") + data for data in encoded_messages
    )


_MADE: Final = {
    "frames": _frames,
    "messages": _messages,
    "server": _server,
    "client": _client,
    "log-in": _log_in,
    "tls": _tls,
    "links": _links,
    "chunk": _chunk,
    "stored": _stored,
    "record": _record,
}


def made(target: str) -> dict[str, bytes]:
    """What is made from valid messages, by the names of its files."""
    return dict(_MADE[target]())


def main() -> None:
    """Writes what is made anew."""
    for target in _MADE:
        folder = FOLDER / target
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if not path.name.startswith("found-"):
                path.unlink()
        for name, data in made(target).items():
            (folder / name).write_bytes(data)


if __name__ == "__main__":
    main()
