"""Numbers at the edges that somebody who writes a client gets wrong: docs/protocol.md answers each
of these questions, and the code agrees with the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest
from crc32c import crc32c

from docs.generate_vectors import checksums, encoded
from tests.protocol.session.kit import Pair, hello, hello_reply, stream
from upr_protocol import limits
from upr_protocol.address import Address
from upr_protocol.chunk import (
    Bundle,
    Chunk,
    CounterDelta,
    Mutation,
    chunk_of_plain_sets,
    encoded_bytes,
)
from upr_protocol.client.core.log_in import ClientLogIn
from upr_protocol.client.core.metadata import ClusterMetadata
from upr_protocol.client.core.publish_options import PublishOptions
from upr_protocol.client.core.retry import is_retryable
from upr_protocol.client.core.unanswered_batches import UnansweredBatches
from upr_protocol.client.core.writer_identity import WriterIdentity
from upr_protocol.errors import (
    ChunkError,
    LocalProtocolError,
    RemoteProtocolError,
    ServerError,
    Status,
)
from upr_protocol.failover import FailoverLog, PartialSnapshot, Position, Start, decide_start
from upr_protocol.hashing import partition_of
from upr_protocol.ids import (
    NO_PARTITION,
    SEQ_MAX,
    Cas,
    HistoryId,
    Operation,
    PartitionId,
    PartitionState,
    SeqNo,
)
from upr_protocol.partition_map import Assignment, PartitionMap
from upr_protocol.scram import (
    EXTERNAL,
    SCRAM,
    SCRAM_PLUS,
    FirstMessage,
    ScramClient,
    ScramError,
)
from upr_protocol.security import Credentials
from upr_protocol.session.flow_control import Allowance
from upr_protocol.session.keepalive import DEAD_AFTER_INTERVALS
from upr_protocol.users import UsersError
from upr_protocol.wire import (
    HEADER_BYTES,
    MESSAGES,
    Ack,
    Barrier,
    BarrierReply,
    CloseStream,
    Credit,
    EventsReply,
    FrameBuffer,
    Go,
    Message,
    Mutate,
    Refusal,
    SessionState,
    Stats,
    Stream,
)
from upr_server.engine import (
    QUOTA_BYTES_MIN,
    BucketError,
    BundleBatches,
    Partition,
    batch_of,
    check_bucket,
)
from upr_server.engine.memory_account import MemoryAccount
from upr_server.engine.mutate_result import MutateResult, pack_result
from upr_server.engine.operations import JoinedValue, StoredOutcome, operation_outcome
from upr_server.engine.publisher_answers import (
    ANSWER_BYTES,
    BATCHES_MAX,
    WRITERS_MAX,
    PublisherAnswers,
    WriterToken,
)
from upr_server.net import backlog

TEXT: Final = " ".join(
    (Path(__file__).resolve().parents[1] / "docs" / "protocol.md").read_text().split()
)


SET: Final = Operation.SET
VALUE_MAX: Final = limits.VALUE_BYTES_MAX


def begins_log_in(name: str, nonce: str) -> bool:
    """Whether a server answers a log-in that begins so."""
    try:
        FirstMessage.read(SCRAM, f"n,,n={name},r={nonce}".encode(), offers_binding=False)
    except (ScramError, UsersError):
        return False
    return True


def is_bucket_name(name: str) -> bool:
    try:
        check_bucket(name, 1, QUOTA_BYTES_MIN)
    except BucketError:
        return False
    return True


def is_allowed(message: Message) -> bool:
    """Whether a client may say this once it streams."""
    try:
        Pair.in_state(SessionState.STREAMING).client.send(message)
    except LocalProtocolError:
        return False
    return True


def below_zero() -> bool:
    """Whether the last frame may take an allowance below 0, and none follows before it is made up
    for."""
    allowance = Allowance()
    allowance.grant(10)
    allowance.note_sent(25)
    allowance.grant(15)
    return allowance.remaining_bytes == 0 and not allowance.is_open


def is_readable(body: bytes) -> bool:
    """Whether an acknowledgement, which is one number of 64 bits, may have this body."""
    try:
        Ack.parse(body, NO_PARTITION, 0, 0)
    except RemoteProtocolError:
        return False
    return True


def gaps_are_new() -> bool:
    """Whether a run is new that leaves out some counters, and one that goes back is not."""
    answers, writer = PublisherAnswers(MemoryAccount()), b"writer of tests!"
    answers.remember(WriterToken(writer, 1), b"")
    answers.remember(WriterToken(writer, 9), b"")
    return answers.answer_to(WriterToken(writer, 12)) == (None, False) and answers.answer_to(
        WriterToken(writer, 5)
    ) == (None, True)


def applied_after(refusal_count: int) -> bool:
    """Whether a run is applied if so many runs before it were refused, and none was sent again."""
    answers, writer = PublisherAnswers(MemoryAccount()), b"writer of tests!"
    answers.note_refused(WriterToken(writer, 1))
    for counter in range(2, refusal_count + 1):
        answers.refuse_overtaking(WriterToken(writer, counter))
    return not answers.refuse_overtaking(WriterToken(writer, refusal_count + 1))


def applied_behind_refused(writer: bytes) -> bool:
    """Whether a run is applied behind one that was refused and not sent again."""
    partition = Partition(PartitionId(0), lambda: HistoryId(1), state=PartitionState.REPLICA)
    for counter in (1, 2):
        bundle = Bundle.of_one_run(
            PartitionId(0), chunk_of_plain_sets([b"k"], [b"v"]), counter=counter
        )
        (batch,) = BundleBatches(bundle, writer)
        partition.mutate(batch, now=0)
        partition.state = PartitionState.ACTIVE
    return partition.high_seq == 1


def forgotten_runs(run_count: int) -> list[int]:
    """The runs of a task that a partition has forgotten after so many: their tokens are too old
    when the task runs again."""
    answers, writer = PublisherAnswers(MemoryAccount()), b"writer of tests!"
    counters = range(1, run_count + 1)
    for counter in counters:
        answers.remember(WriterToken(writer, counter), b"")
    return [
        counter
        for counter in counters
        if answers.answer_to(WriterToken(writer, counter)) == (None, True)
    ]


def publishing_pair() -> Pair:
    """A client that has credit, and its server."""
    pair = Pair.in_state(SessionState.OPEN)
    pair.server_sends(Credit(1 << 20))
    return pair


def received_bundles(pair: Pair) -> list[Mutate]:
    """What arrives at the server of what the client has sent."""
    return [message for message in pair.to_server() if isinstance(message, Mutate)]


def runs_after_move() -> tuple[list[int], int]:
    """Two runs are unanswered when the map names another node: which counters go there, and how
    many of the runs are done when the old node refuses them."""
    batches = UnansweredBatches(WriterIdentity(b"writer of tests!"), PublishOptions(), lambda: 0.0)
    old_node, new_node = batches.new_node(), batches.new_node()
    old_pair, new_pair = publishing_pair(), publishing_pair()
    batches.place(PartitionId(0), old_node)
    for _ in range(2):
        batches.add_all([(PartitionId(0), chunk_of_plain_sets([b"k"], [b"v"]))])
    old_node.send(old_pair.client, 0.0, is_due=True)
    batches.place(PartitionId(0), new_node)
    new_node.send(new_pair.client, 0.0, is_due=True)
    done_count = 0
    for bundle in received_bundles(old_pair):
        refusal = Refusal("", opaque=bundle.opaque, status=Status.BAD_ARGUMENT)
        done_count += len(old_node.receive(refusal, 0.0))
    return [
        run.counter for message in received_bundles(new_pair) for run in message.bundle.runs
    ], done_count


def is_dead_after_byte(silence_s: float) -> bool:
    """Whether a client gives up that received a byte of a frame so long ago, and a message before
    that. The interval is 20 s."""
    client = Pair.in_state(SessionState.STREAMING).client
    client.receive(FRAME[:1], 1000.0)
    return client.keep_alive.is_peer_dead(1000.0 + silence_s)


def is_identity(identity: str) -> bool:
    """Whether a client may call itself so."""
    try:
        Pair.in_state(SessionState.GREETING).client.send(hello(identity=identity))
    except LocalProtocolError:
        return False
    return True


def first_words(binding: bytes | None, *, server_offers_binding: bool) -> tuple[str, str]:
    """The mechanism of a log-in, and how its first message begins."""
    client = ScramClient(
        "user", "pencil", "nonce", binding, server_offers_binding=server_offers_binding
    )
    return client.mechanism, client.client_first().decode().partition("n=user")[0]


def log_in_mechanism(credentials: Credentials | None) -> str:
    """What a client uses that has shown a certificate."""
    start = ClientLogIn(credentials, "nonce").begin((SCRAM, EXTERNAL))
    assert start is not None
    return start.mechanism


def map_with_active(revision: int, active: str) -> PartitionMap:
    return PartitionMap(
        bucket="b",
        revision=revision,
        nodes={"a": "10.0.0.1:12000", "b": "10.0.0.2:12000"},
        partitions=(Assignment(active=active),),
    )


def actives_by_older_map() -> list[str]:
    """The node of a partition before and after another node tells an older map."""
    metadata = ClusterMetadata(Address.parse("upr://10.0.0.1:12000/b"))
    actives = []
    for partition_map in (map_with_active(8, "b"), map_with_active(7, "a")):
        metadata.update(partition_map)
        (holder,) = metadata.holders(PartitionId(0), PartitionState.ACTIVE)
        actives.append(holder.host)
    return actives


def ends_of_barrier_without_stream() -> object:
    """What a barrier brings back to a client that has no stream."""
    pair = Pair.in_state(SessionState.STREAMING)
    pair.client_sends(Barrier(b"cookie"))
    pair.server.next_partition()
    return [message.ends for message in pair.to_client() if isinstance(message, BarrierReply)]


def start_after_rollback(history_begins_at: int) -> object:
    """Where a client goes on that rolled back to 3, and whose log still has a history of its own
    that begins at this number."""
    server, client = (
        FailoverLog.of_pairs([(1, 0)]),
        FailoverLog.of_pairs([(2, history_begins_at), (1, 0)]),
    )
    position = Position(client, SeqNo(3), SeqNo(3), None)
    return decide_start(server, SeqNo(9), SeqNo(0), position)


def start_at(seq: int) -> object:
    log = FailoverLog.of_pairs([(1, 0)])
    return decide_start(log, SeqNo(9), SeqNo(0), Position(log, SeqNo(seq), SeqNo(seq), None))


def start_after_crash() -> object:
    """Where a client goes on that has saved its position at 5 and its data up to 8, when the server
    has lost 6 to 8 and has others."""
    position = Position(FailoverLog.of_pairs([(1, 0)]), SeqNo(5), SeqNo(5), None)
    return decide_start(FailoverLog.of_pairs([(2, 5), (1, 0)]), SeqNo(9), SeqNo(0), position)


def is_right(log: FailoverLog, history_id: int, seq: int) -> bool:
    """Whether a record of a received key is right, as the document has it."""
    for newer, entry in pairwise([None, *log]):
        if entry is not None and entry.history_id == history_id:
            return newer is None or seq <= newer.seq
    return False


def records_are_compared_so() -> bool:
    """Whether UPR's own client compares received keys in the same way."""
    log = FailoverLog.of_pairs([(3, 7), (2, 5), (1, 0)])
    return all(
        log.contains(HistoryId(history_id), SeqNo(seq)) == is_right(log, history_id, seq)
        for history_id in range(1, 5)
        for seq in range(1, 10)
    )


def start_inside(last_complete: int, highest_received: int, end: int) -> object:
    """The decision about a client that was interrupted inside a snapshot."""
    log = FailoverLog.of_pairs([(1, 0)])
    partial = PartialSnapshot(HistoryId(1), SeqNo(last_complete), SeqNo(end))
    position = Position(log, SeqNo(last_complete), SeqNo(highest_received), partial)
    return decide_start(log, SeqNo(end), SeqNo(0), position)


def closing_error(*, is_accepted: bool, opaque: int = 1) -> int | None:
    """Why a client may not close the stream with the opaque 1; None if it may."""
    pair = Pair.in_state(SessionState.STREAMING)
    if is_accepted:
        pair.accept(0, 1)
    else:
        pair.client_sends(stream(0, 1))
    try:
        pair.client.send(CloseStream(partition=PartitionId(0), opaque=opaque))
    except LocalProtocolError as error:
        return error.status
    return None


def has_no_partial_without_a_history() -> bool:
    """Whether a position's start and end of a partial snapshot are ignored without its history."""
    body = bytearray(b"".join(map(bytes, stream(0, 1).body_buffers())))
    body[42], body[50] = 4, 9  # where the table of `Stream` has the start and the end
    return Stream.parse(bytes(body), PartitionId(0), 1, 0).position.partial is None


def streams_are_open_requests() -> bool:
    """Whether a stream that was accepted takes one of the places of `requests_open_max`."""
    pair = Pair.in_state(SessionState.STREAMING)
    pair.accept(0, 1)
    places = pair.client.agreed.requests_open_max - 1
    for opaque in range(2, 2 + places):
        pair.client.send(Stats(opaque=opaque))
    try:
        pair.client.send(Stats(opaque=2 + places))
    except LocalProtocolError as error:
        return error.status is Status.TOO_MANY
    return False


def stored_by(
    operation: Operation,
    value: bytes = b"",
    item: bytes | None = None,
    *,
    cas: int = 0,
    flags: int = 0,
) -> object:
    """What an operation stores, or why it fails; an item has the CAS 9 and the flags 3."""
    request = Mutation(operation, b"k", value, cas=Cas(cas), flags=flags)
    existing = None if item is None else Mutation(SET, b"k", item, cas=Cas(9), flags=3)
    result = operation_outcome(request, existing)
    if not isinstance(result, StoredOutcome):
        return result
    value_stored = result.value
    if isinstance(value_stored, JoinedValue):
        value_stored = value_stored.join()
    return value_stored, result.flags


def change(delta: int, initial: int = 0) -> bytes:
    return CounterDelta(delta, initial).encode()


def is_misplaced_in_bundles(operation: int) -> bool:
    """Whether a bundle with this operation is refused, and not malformed."""
    chunk = bytearray(bytes(chunk_of_plain_sets([b"k"], [b"v"])))
    chunk[32 + 48] = operation  # behind the head, and six columns of 8 bytes
    bundle = Bundle.of_one_run(PartitionId(0), Chunk(bytes(chunk)))
    try:
        BundleBatches(bundle)
    except ChunkError:
        return True
    return False


def expires_at_its_second() -> bool:
    """Whether an item is there just before its expiry time, and not at it."""
    partition = Partition(PartitionId(0), lambda: HistoryId(1))
    chunk = Chunk.build([Mutation(SET, b"k", b"v", expiry=100)], SeqNo(0), SeqNo(0))
    partition.mutate(batch_of(chunk), now=50)
    before, at_expiry = (next(iter(partition.get([b"k"], now))).op for now in (99.9, 100.0))
    return (before, at_expiry) == (SET, Operation.DELETE)


def refused_header(header: bytes) -> Status | None:
    """What a receiver says to a header."""
    buffer = FrameBuffer(lambda _header: None)
    buffer.receive(header)
    try:
        buffer.next_frame()
    except RemoteProtocolError as error:
        return error.status
    return None


def resumes(last_complete: int, highest_received: int, start: int, end: int) -> bool:
    """Whether a client may send this position."""
    position = Position(
        FailoverLog.of_pairs([(1, 0)]),
        SeqNo(last_complete),
        SeqNo(highest_received),
        PartialSnapshot(HistoryId(1), SeqNo(start), SeqNo(end)),
    )
    return is_allowed(Stream(PartitionState.ACTIVE, position, partition=PartitionId(1), opaque=7))


def interval_agreed(seconds: int) -> bool:
    """Whether a client that asked for 20 s takes a server's idle interval."""
    pair = Pair.in_state(SessionState.GREETED)
    try:
        pair.server.send(hello_reply(idle_interval_s=seconds))
    except LocalProtocolError:
        return False
    return True


def has_no_token(writer: bytes) -> bool:
    """Whether the runs of this writer are new each time."""
    partition = Partition(PartitionId(0), lambda: HistoryId(1))
    bundle = Bundle.of_one_run(PartitionId(0), chunk_of_plain_sets([b"k"], [b"v"]), counter=1)
    for _ in range(2):
        (batch,) = BundleBatches(bundle, writer)
        partition.mutate(batch, now=0)
    return partition.high_seq == 2


FRAME: Final = encoded(hello(identity="test:clients"))
"""A frame whose body ends with padding."""


ROWS: Final = range(limits.BUNDLE_MUTATIONS_MAX)
"""Of the longest run."""


def counted_result_bytes(failed: Sequence[int], counted: Sequence[int]) -> int:
    """What a server counts of the longest result with these rows."""
    highest = 2**64 - 1
    result = MutateResult(
        HistoryId(highest),
        SeqNo(highest),
        SeqNo(highest),
        Cas(highest),
        failures=[(row, Status.EXISTS) for row in failed],
        counters=[(row, highest) for row in counted],
        chain=2**32 - 1,
        attempt=highest,
    )
    return ANSWER_BYTES + len(pack_result(result))


QUESTIONS: Final[dict[str, tuple[str, Callable[[], bool]]]] = {
    "how long is a header?": (
        "a header of 24 bytes and a body of `length` bytes",
        lambda: HEADER_BYTES == 24,
    ),
    "what does the header's checksum cover?": (
        "CRC32C of the 20 bytes before it",
        lambda: crc32c(FRAME[:20]) == int.from_bytes(FRAME[20:24], "little"),
    ),
    "does the body's checksum cover the padding?": (
        "`length` and `body_crc` include the padding",
        lambda: (
            len(FRAME) % 8 == 0
            and len(FRAME) - HEADER_BYTES == int.from_bytes(FRAME[12:16], "little")
            and crc32c(FRAME[24:]) == int.from_bytes(FRAME[16:20], "little")
        ),
    ),
    "may eight zeros follow the last field?": (
        "come at most 7 bytes, all zeros. Otherwise the message is malformed",
        lambda: not is_readable(bytes(16)) and is_readable(bytes(8)),
    ),
    "how long may a frame be before the bucket is open?": (
        "Until `Open` is answered, a frame of the client has a body of at most 4 KiB",
        lambda: limits.HANDSHAKE_BODY_BYTES_MAX == 4096,
    ),
    "how long may Hello take?": (
        "has not sent `Hello` within 10 s",
        lambda: limits.HANDSHAKE_TIMEOUT_S == 10,
    ),
    "in which partition of 64 is N14228, and by which checksum?": (
        "CRC-32 of zlib, not CRC32C. `Opened` has *n*. For example, `N14228` is in partition 5",
        lambda: partition_of(b"N14228", 64) == 5,
    ),
    "how long may a key be?": (
        "Each key has 1 to 250 bytes",
        lambda: limits.KEY_BYTES_MAX == 250,
    ),
    "what becomes of a key of 251 bytes in a bundle?": (
        "If a key has a wrong length, its row fails with `BAD_KEY`",
        lambda: chunk_of_plain_sets([b"k", b"k" * 251], [b"", b""]).published_misfits() == {1: 37},
    ),
    "how many bytes has a chunk of no mutations?": (
        "chunk without mutations has 48 bytes",
        lambda: encoded_bytes(0, 0, 0) == len(bytes(Chunk.build([]))) == 48,
    ),
    "how many mutations may one bundle have?": (
        "A bundle has at most 1,024 runs and 4,096 mutations",
        lambda: (limits.BUNDLE_RUNS_MAX, limits.BUNDLE_MUTATIONS_MAX) == (1024, 4096),
    ),
    "how many keys may one Get name, and what if there are more?": (
        "1 to 4,096 keys; another number is refused with `BAD_ARGUMENT`",
        lambda: limits.GET_KEYS_MAX == 4096,
    ),
    "may the server send while the window is exactly 0, and may the window be below 0?": (
        "The server sends while the window is above 0, so the last frame may take it below 0",
        below_zero,
    ),
    "may a client publish with a credit of 0?": (
        "while its credit is above 0, so the last frame may take the credit below 0",
        below_zero,
    ),
    "how small may a window be?": (
        "a window below 64 KiB | closed | `MALFORMED`",
        lambda: limits.WINDOW_BYTES_MIN == 64 << 10,
    ),
    "how long may a cookie be?": (
        "1 to 64 bytes of the client's choice",
        lambda: (
            is_allowed(Barrier(bytes(64)))
            and not is_allowed(Barrier(bytes(65)))
            and not is_allowed(Barrier(b""))
        ),
    ),
    "does a barrier come back if there is no stream?": (
        "If the client has no stream, the server returns the barrier at once, without `ends`",
        lambda: ends_of_barrier_without_stream() == [()],
    ),
    "what if a client never sends a refused run again?": (
        "the refused runs after 64 refusals in succession, the first one included",
        lambda: applied_after(64) and not applied_after(63),
    ),
    "does a client that rolls back to a number keep the entry at this number?": (
        "An entry whose `seq` is exactly that number remains",
        lambda: isinstance(answer := start_after_rollback(3), Start) and answer.seq == 3,
    ),
    "may a failover log have entries above the position?": (
        "it may have entries above `highest_received`",
        lambda: isinstance(answer := start_after_rollback(7), Start) and answer.seq == 3,
    ),
    "what does a bundle with an operation that is not defined get?": (
        "a chunk with an undefined operation | refused | `BAD_ARGUMENT`",
        lambda: is_misplaced_in_bundles(99) and is_misplaced_in_bundles(Operation.EXPIRE),
    ),
    "how many bytes does a remembered result count?": (
        "at most 330 bytes, 2 more for each row in `failures`, and 10 more for each row",
        lambda: all(
            counted_result_bytes(failed, counted) <= 330 + 2 * len(failed) + 10 * len(counted)
            for failed, counted in (
                (range(0), range(0)),
                (ROWS, range(0)),
                (range(0), ROWS),
                (ROWS[::2], ROWS[1::2]),
                (ROWS[127::128], ROWS[128::128]),
            )
        ),
    ),
    "after how long a silence is the other side dead?": (
        "has received nothing for 2 intervals, it regards the connection as broken",
        lambda: DEAD_AFTER_INTERVALS == 2,
    ),
    "how many entries may a failover log have?": (
        "A log has at most 25 entries. A history ID is not 0",
        lambda: limits.FAILOVER_ENTRIES_MAX == 25,
    ),
    "how many runs of a writer does a partition remember, and of how many writers?": (
        "the 1,024 writers that wrote last. Of each writer it remembers the newest 64 runs",
        lambda: (BATCHES_MAX, WRITERS_MAX) == (64, 1024),
    ),
    "with which counter does a writer begin, and may it leave some out?": (
        "It begins at 1 and must rise; gaps are allowed",
        gaps_are_new,
    ),
    "what follows a chain that would be 0?": (
        "If the result is 0, the client sends 1 and continues from 1",
        lambda: 1 in [run.get("chain") for run in checksums()["chain"]],
    ),
    "where does an accepted stream continue?": (
        "The stream continues after `seq`, which is the client's `highest_received`",
        lambda: isinstance(start := start_at(7), Start) and start.seq == 7,
    ),
    "what if the end of a stream is the client's own position?": (
        "the answer is `OK`, and `END_REACHED` follows at once",
        lambda: (
            isinstance(start := start_at(9), Start) and (start.seq, start.end_at_least) == (9, 0)
        ),
    ),
    "what if the end lies below a snapshot that was interrupted?": (
        "first sends the rest of this snapshot, whatever the `end_seq`",
        lambda: (
            isinstance(start := start_inside(5, 7, 9), Start)
            and (start.seq, start.end_at_least) == (7, 9)
        ),
    ),
    "how many streams may a connection have, beside its requests?": (
        "may be in use, so each open stream counts as a request",
        streams_are_open_requests,
    ),
    "which end has a stream that never ends?": (
        "Where the stream ends; all ones for never",
        lambda: SEQ_MAX == 2**64 - 1,
    ),
    "what is 2**64 - 1 plus 1?": (
        "Add to a decimal counter; wraps at 2**64",
        lambda: stored_by(Operation.INCREMENT, change(1), b"%d" % SEQ_MAX) == (b"0", 3),
    ),
    "what is 3 minus 5?": (
        "Subtract from a decimal counter; stops at 0",
        lambda: stored_by(Operation.DECREMENT, change(5), b"3") == (b"0", 3),
    ),
    "what has a counter that was missing, with a delta of 5 and an initial value of 100?": (
        "The value that a missing counter starts at; the delta is not applied to it",
        lambda: stored_by(Operation.DECREMENT, change(5, 100), flags=1) == (b"100", 1),
    ),
    "is 007 a counter, and is +7, or one of 21 digits?": (
        "20 decimal digits without a sign, below 2**64. It may begin with zeros; the server stores",
        lambda: (
            stored_by(Operation.INCREMENT, change(1), b"007") == (b"8", 3)
            and stored_by(Operation.INCREMENT, change(1), b"+7") is Status.NOT_A_NUMBER
            and stored_by(Operation.INCREMENT, change(1), b"7".zfill(21)) is Status.NOT_A_NUMBER
            and stored_by(Operation.INCREMENT, change(1), b"%d" % 2**64) is Status.NOT_A_NUMBER
        ),
    ),
    "why does a SET fail that expects a CAS of a missing key?": (
        "The row then fails with `NOT_FOUND` if the key is missing, and with `CAS_MISMATCH`",
        lambda: (
            stored_by(SET, cas=7) is stored_by(Operation.ADD, cas=7) is Status.NOT_FOUND
            and stored_by(SET, item=b"", cas=7) is Status.CAS_MISMATCH
        ),
    ),
    "why does an ADD of an existing key fail that expects another CAS?": (
        "(`ADD` of an existing key fails with `EXISTS`, whatever the CAS.)",
        lambda: stored_by(Operation.ADD, item=b"", cas=7) is Status.EXISTS,
    ),
    "which flags has an item that was touched?": (
        "| `TOUCH` | fails with `NOT_FOUND` | keeps the value | the item's flags",
        lambda: stored_by(Operation.TOUCH, b"ignored", b"v", flags=1) == (b"v", 3),
    ),
    "may an append make a value of exactly 20 MiB, and of one byte more?": (
        "Each value has at most 20 MiB",
        lambda: (
            stored_by(Operation.APPEND, b"v", bytes(VALUE_MAX - 1))
            == (bytes(VALUE_MAX - 1) + b"v", 3)
            and stored_by(Operation.APPEND, b"v", bytes(VALUE_MAX)) is Status.TOO_LARGE
        ),
    ),
    "is an item there in the second of its expiry time?": (
        "An item has expired when the server's clock has reached its expiry time",
        expires_at_its_second,
    ),
    "does a run of a writer of zeros have its effect twice?": (
        "the run has no token. The server ignores `counter`, `chain` and `attempt`",
        lambda: has_no_token(bytes(16)) and not has_no_token(b"writer of tests!"),
    ),
    "which value has a deletion that a publisher gave a value?": (
        "The server ignores the values of `DELETE` and `TOUCH` rows. The deletions that it streams",
        lambda: (
            stored_by(Operation.DELETE, b"ignored", b"v") == (b"", 0)
            and stored_by(Operation.TOUCH, b"ignored", b"v") == (b"v", 3)
        ),
    ),
    "may a client close a stream before the server has accepted it?": (
        "only after the `StreamReply`; while the stream is `REQUESTED`, it is out of turn",
        lambda: (
            closing_error(is_accepted=False) is Status.OUT_OF_TURN
            and closing_error(is_accepted=True) is None
        ),
    ),
    "may a CloseStream have an opaque of its own?": (
        "Its opaque is the stream's; another one is malformed",
        lambda: closing_error(is_accepted=True, opaque=9) is Status.MALFORMED,
    ),
    "has a position a partial snapshot if only its end is not 0?": (
        "A position has a partial snapshot if `partial_history` is not 0; otherwise the server",
        has_no_partial_without_a_history,
    ),
    "may a client say Go twice?": (
        "If a side sends another message, the receiver sends `Error` (`OUT_OF_TURN`)",
        lambda: not is_allowed(Go()),
    ),
    "which code has a header with a wrong magic and a wrong checksum?": (
        "checks a header in this order: the magic, the header checksum, the version; `length`",
        lambda: (
            refused_header(b"xx" + FRAME[2:24]) is Status.BAD_MAGIC
            and refused_header(FRAME[:2] + b"\x09" + FRAME[3:24]) is Status.BAD_CHECKSUM
        ),
    ),
    "which checksum has a body of no bytes?": (
        "The checksum of an empty body is 0",
        lambda: encoded(Go())[16:20] == bytes(4),
    ),
    "may a position stand at the start and at the end of its partial snapshot?": (
        "`partial_start` <= `highest_received` <= `partial_end`",
        lambda: (
            resumes(3, 3, 3, 7)
            and resumes(3, 7, 3, 7)
            and not resumes(3, 8, 3, 7)
            and not resumes(3, 3, 4, 7)
        ),
    ),
    "may two entries of a failover log have the same number?": (
        "Numbers never rise from one entry to the next; no history ID occurs twice",
        lambda: len(FailoverLog.of_pairs([(2, 5), (1, 5)])) == 2,
    ),
    "may the server's idle interval be longer than the client's?": (
        "the interval both keep: at most what `Hello` asked for",
        lambda: interval_agreed(20) and interval_agreed(5) and not interval_agreed(21),
    ),
    "what is a yes-or-no field of 2?": (
        "a receiver regards every number except 0 as yes",
        lambda: EventsReply.parse(bytes(8) + b"\x02" + bytes(7), NO_PARTITION, 0, 0).everything,
    ),
    "may a request have the opaque 0?": (
        "An opaque may be any number, also 0",
        lambda: is_allowed(Stats(opaque=0)),
    ),
    "does the length of a text count bytes or characters?": (
        "a u16 with the length in bytes, then the bytes",
        lambda: encoded(Stats("é", opaque=1))[24:28] == b"\x02\x00\xc3\xa9",
    ),
    "how many partitions may a bucket have, and which number has none of them?": (
        "1 to 1,024; 0 for the server's default",
        lambda: limits.PARTITIONS_MAX == 1024 and NO_PARTITION == 0xFFFF,
    ),
    "may a bucket's name begin with a dot?": (
        "1 to 100 of letters, digits, `.`, `_`, `-`; no `.` first",
        lambda: is_bucket_name("a.b") and not is_bucket_name(".a"),
    ),
    "does a server notice data that is ahead of the position, and that it has lost?": (
        "The server knows only the position, so its answer is `OK`",
        lambda: isinstance(answer := start_after_crash(), Start) and answer.seq == 5,
    ),
    "which recorded keys does a client read again?": (
        "its number is not above the `seq` of the next newer entry, if there is one",
        records_are_compared_so,
    ),
    "what becomes of the record of a key that is missing in an empty partition?": (
        "If this end is 0, the partition has nothing, and the client drops the record",
        lambda: (
            (log := FailoverLog.of_pairs([(2, 0), (1, 0)])).branch_of(SeqNo(0)) == 0
            and log.contains(HistoryId(0), SeqNo(0))
        ),
    ),
    "may a new run overtake a run that is not durable yet?": (
        "the client sends no new run to this partition, until the `Await` is answered",
        gaps_are_new,
    ),
    "does a client ask at the node of a map that is older than its own?": (
        "keeps this map or its own, whichever has the higher revision, and asks at the node in it",
        lambda: actives_by_older_map() == ["10.0.0.2", "10.0.0.2"],
    ),
    "does a client with a certificate and a password use EXTERNAL?": (
        "A client with a user's name and password uses SCRAM",
        lambda: (
            log_in_mechanism(Credentials("user", "pencil")) == SCRAM
            and log_in_mechanism(None) == EXTERNAL
        ),
    ),
    "is a stream asked for again that ended with SHUTTING_DOWN?": (
        "`SHUTTING_DOWN` also of a `StreamEnd`",
        lambda: is_retryable(ServerError(Status.SHUTTING_DOWN)),
    ),
    "which runs of a task of 70 get TOKEN_TOO_OLD if it runs again?": (
        "The server may have forgotten the first runs of a long task",
        lambda: forgotten_runs(70) == list(range(1, 7)) and not forgotten_runs(64),
    ),
    "does a publisher wait for a node that is not active any more?": (
        "If the map names another node for the partition, the publisher does not wait",
        lambda: runs_after_move() == ([1, 2], 0),
    ),
    "is a run without a token applied behind one that was refused?": (
        "if the server refuses it, it still applies the later ones",
        lambda: (
            applied_behind_refused(bytes(16)) and not applied_behind_refused(b"writer of tests!")
        ),
    ),
    "is a server silent that sends a frame byte by byte?": (
        "give up when no byte has come from the server for 2 intervals",
        lambda: not is_dead_after_byte(39) and is_dead_after_byte(40),
    ),
    "may an identity have a character for private use, or one that is not assigned?": (
        "forbids control characters, it also forbids the characters that Unicode does not assign",
        lambda: (
            not any(map(is_identity, ("a\ue000", "a\u0378", "a\u200b", "a\u3000")))
            and is_identity("a b")
        ),
    ),
    "how does a log-in begin without TLS, and how if the server binds nothing?": (
        "| `n,,` | | can bind | no | yes or no | `SCRAM-SHA-256` | `y,,` |",
        lambda: (
            first_words(None, server_offers_binding=False) == (SCRAM, "n,,")
            and first_words(b"hash", server_offers_binding=False) == (SCRAM, "y,,")
        ),
    ),
    "how does a log-in begin if both can bind?": (
        "| can bind | yes | yes | `SCRAM-SHA-256-PLUS` | `p=tls-server-end-point,,` |",
        lambda: (
            first_words(b"hash", server_offers_binding=True)
            == (SCRAM_PLUS, "p=tls-server-end-point,,")
        ),
    ),
    "is NO_BUCKET of a run asked again at another node?": (
        "This is final, also on several nodes: the client reports it",
        lambda: not is_retryable(ServerError(Status.NO_BUCKET)),
    ),
    "may a client send all of its requests before it reads an answer?": (
        (
            "reads nothing more from a connection while more than 1 MiB of answers wait for the "
            "client; while 16 of its requests, or more than 1 MiB of them, wait for data from disk "
            "or for their turn; or while what it knows of answers that wait for the disk or for "
            "replicas takes more than 16 MiB"
        ),
        lambda: (
            (backlog.REPLIES_BYTES_MAX, backlog.QUEUED_REQUESTS_MAX, backlog.QUEUED_BYTES_MAX)
            == (1 << 20, 16, 1 << 20)
            and backlog.OWED_BYTES_MAX == 16 << 20
        ),
    ),
    "how long may a name and a nonce be in a log-in?": (
        "A name has 1 to 128 bytes in UTF-8, and the client's nonce 1 to 128 characters",
        lambda: (
            begins_log_in("u" * 128, "n" * 128)
            and not begins_log_in("u" * 129, "n")
            and not begins_log_in("u", "n" * 129)
            and not begins_log_in("", "n")
            and not begins_log_in("u", "")
        ),
    ),
    "which opcodes below 0x80 does a server say?": (
        "below 0x80, also `Error` and `Noop`, which either side sends",
        lambda: (
            {kind.__name__ for kind in MESSAGES.values() if kind.opcode < 0x80 and kind.sender & 2}
            == {"Error", "Noop"}
        ),
    ),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_document_answers_and_the_code_agrees(question: str) -> None:
    answer, is_true = QUESTIONS[question]
    assert answer in TEXT
    assert is_true()
