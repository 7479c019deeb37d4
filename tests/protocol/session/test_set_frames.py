"""Single operations at a session: read many at a time, they are what they are one by one."""

from __future__ import annotations

from struct import Struct
from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from tests.kit.placed_keys import key_in
from tests.protocol.session.kit import encoded, frames, full_state, hello, taken
from upr_protocol.chunk import Bundle, BundleRun, Chunk, Mutation, chunk_of_plain_sets, decode_runs
from upr_protocol.errors import LocalProtocolError, RemoteProtocolError
from upr_protocol.ids import Cas, Durability, HistoryId, Operation, PartitionId, SeqNo
from upr_protocol.limits import REQUESTS_OPEN_MAX
from upr_protocol.session import ServerSession
from upr_protocol.wire import (
    Credit,
    Go,
    Message,
    Mutate,
    MutateReply,
    Noop,
    Open,
    Opened,
    RunResult,
    Seqnos,
)

PARTITIONS: Final = 3
WRITER: Final = b"sixteen bytes id"
HISTORY: Final = HistoryId(7)
LINE: Final = Struct("<IIQQQQ")

KEYS: Final = [key_in(partition, PARTITIONS) for partition in range(PARTITIONS)]


def single(partition: int, opaque: int, counter: int, mutation: Mutation | None = None) -> Mutate:
    mutation = mutation or Mutation(Operation.SET, KEYS[partition], b"v")
    chunk = Chunk.build([mutation], SeqNo(0), SeqNo(0))
    return Mutate(Bundle.of_one_run(PartitionId(partition), chunk, counter), WRITER, opaque=opaque)


def is_plain(message: Message) -> bool:
    """What a plain `SET` is, in words of messages."""
    if not isinstance(message, Mutate):
        return False
    chunk, (run, *other_runs) = message.bundle.chunk, message.bundle.runs
    row = chunk.mutation(0)
    return (
        chunk.count == 1
        and not other_runs
        and not run.chain
        and not message.attempt
        and not message.copies
        and not message.status
        and message.durability is Durability.MEMORY
        and row.op is Operation.SET
        and not row.cas
        and row.key in KEYS
        and KEYS.index(row.key) == run.partition
    )


@st.composite
def requests(draw: st.DrawFn) -> Message:
    partition, opaque = draw(st.integers(0, PARTITIONS - 1)), draw(st.integers(0, 5))
    key = KEYS[partition]
    plain = single(partition, opaque, draw(st.integers(0, 3)))
    chunk = plain.bundle.chunk
    other_messages = [
        Noop(),
        Seqnos((PartitionId(0),), opaque=opaque),
        Mutate(plain.bundle, WRITER, attempt=1, opaque=opaque),
        Mutate(plain.bundle, WRITER, Durability.PERSISTED, opaque=opaque),
        Mutate(plain.bundle, WRITER, copies=1, opaque=opaque),
        Mutate(Bundle.of_one_run(PartitionId(partition), chunk, 1, chain=9), WRITER, opaque=opaque),
        Mutate(
            Bundle.of_one_run(PartitionId(partition), chunk_of_plain_sets([key] * 2, [b""] * 2))
        ),
        Mutate(
            Bundle(
                chunk_of_plain_sets([b"a", b"b"], [b""] * 2),
                [BundleRun(PartitionId(n), 1) for n in (0, 1)],
            )
        ),
        single((partition + 1) % PARTITIONS, opaque, 1, Mutation(Operation.SET, key, b"v")),
        single(partition, opaque, 1, Mutation(Operation.ADD, key, b"v")),
        single(partition, opaque, 1, Mutation(Operation.SET, key, b"v", cas=Cas(3))),
        single(partition, opaque, 1, Mutation(Operation.SET, b"", b"v")),
        single(partition, opaque, 1, Mutation(Operation.SET, b"k" * 251, b"v")),
    ]
    sets = [
        plain,
        Mutate(plain.bundle, opaque=opaque),
        single(partition, opaque, 1, Mutation(Operation.SET, key, b"", flags=4, expiry=1000)),
    ]
    return draw(st.sampled_from([*sets, *sets, *sets, *other_messages]))


def opened(*, credit: int, in_use: list[int]) -> ServerSession:
    """A session with a bucket open, and requests under way."""
    session = ServerSession("test:server", now=0.0)
    session.receive(encoded(hello(), Open("b", opaque=99)), 0.0)
    assert len(list(session.messages())) == 2
    session.send(Opened(PARTITIONS, 0, opaque=99))
    session.send(Credit(1_000_000))
    for opaque in in_use:
        session.receive(encoded(single(0, opaque, 1)), 0.0)
        assert len(list(session.messages())) == 1
    session.credit.remaining_bytes = credit
    taken(session)
    return session


def reply(message: Mutate, seq: int) -> MutateReply:
    partition = message.bundle.runs[0].partition
    result = RunResult(partition, 0, HISTORY, SeqNo(seq), SeqNo(seq), Cas(seq))
    return MutateReply(0, (result,), opaque=message.opaque)


Seen = list[tuple[Message, bytes]]
"""Each message that came, and what was sent in answer to it."""


def one_by_one(session: ServerSession, answers: list[bool], log: Seen) -> None:
    for message in session.messages():
        if is_plain(message) and answers[len(log)]:
            assert isinstance(message, Mutate)
            session.send(reply(message, len(log)))
        log.append((message, taken(session)))


def many_at_a_time(session: ServerSession, answers: list[bool], log: Seen) -> None:
    events = session.messages()
    while True:
        sets = session.read_sets(PARTITIONS)
        count = 0
        if sets is not None:
            while count < sets.frame_count and answers[len(log) + count]:
                count += 1
        if sets is not None and count:
            lines, messages = b"", []
            opaques, first = memoryview(sets.opaques).cast("I"), sets.first(count)
            chunk = Chunk(sets.chunk)
            assert first.frame_count == count
            for row, run in enumerate(decode_runs(first.directory)):
                seq, writer_start = len(log) + row, 16 * row if len(first.writers) > 16 else 0
                message = single(run.partition, opaques[row], run.counter, chunk.mutation(row))
                writer = first.writers[writer_start : writer_start + 16]
                messages.append(Mutate(message.bundle, writer, opaque=opaques[row]))
                lines += LINE.pack(run.partition, 0, HISTORY, seq, seq, seq)
            session.answer_sets(sets, lines)
            outgoing_bytes, outgoing = session.outgoing_bytes, taken(session)
            assert outgoing_bytes == len(outgoing)
            replies = [encoded(answer) for answer in frames(outgoing)]
            log += zip(messages, replies, strict=True)
            continue
        event = next(events, None)
        if event is None:
            return
        if is_plain(event) and answers[len(log)]:
            # Its header had come alone.
            assert sets is None
            assert isinstance(event, Mutate)
            session.send(reply(event, len(log)))
        log.append((event, taken(session)))


@given(
    client_messages=st.lists(requests(), max_size=12),
    answers=st.lists(st.sampled_from([True, True, True, False]), min_size=12, max_size=12),
    credit=st.sampled_from([1, 300, 1_000, 2_000, 1_000_000]),
    in_use=st.lists(st.integers(0, 5), unique=True, max_size=2),
    damage=st.none() | st.integers(0, 2_000),
    split=st.integers(0, 3_000),
)
def test_sets_that_are_read_together_are_what_they_are_one_by_one(
    client_messages: list[Message],
    answers: list[bool],
    credit: int,
    in_use: list[int],
    damage: int | None,
    split: int,
) -> None:
    data = bytearray(encoded(*client_messages))
    if damage is not None and damage < len(data):
        data[damage] ^= 0x10
    results = []
    for read in (one_by_one, many_at_a_time):
        session = opened(credit=credit, in_use=in_use)
        log: Seen = []
        error = ""
        try:
            for piece in (bytes(data[:split]), bytes(data[split:])):
                session.receive(piece, 0.0)
                read(session, answers, log)
        except RemoteProtocolError as caught:
            error = str(caught)
        messages = [encoded(message) for message, _ in log]
        results.append((messages, [answer for _, answer in log], error, full_state(session)))
    assert results[0] == results[1]


def test_no_set_is_read_where_none_may_come() -> None:
    session = ServerSession("test:server", now=0.0)
    session.receive(encoded(hello()) + encoded(single(0, 1, 1)), 0.0)
    assert session.read_sets(PARTITIONS) is None
    session = opened(credit=1_000_000, in_use=[])
    session.receive(encoded(Go(), single(0, 1, 1)), 0.0)
    assert session.read_sets(PARTITIONS) is None
    assert isinstance(next(session.messages()), Go)
    assert session.read_sets(PARTITIONS) is not None
    session._requests = dict.fromkeys(range(10, 10 + REQUESTS_OPEN_MAX), Seqnos)
    assert session.read_sets(PARTITIONS) is None


def _readable(
    session: ServerSession, messages: list[Mutate], credit: int, in_use: list[int]
) -> list[int]:
    """The opaques of the sets that may come now: each while credit is left, none that is in use."""
    session.receive(encoded(*messages), 0.0)
    opaques: list[int] = []
    for message in messages:
        if credit <= 0 or message.opaque in in_use:
            break
        credit -= len(encoded(message))
        opaques.append(message.opaque)
    return opaques


@given(
    opaques=st.lists(st.integers(0, 9), min_size=1, max_size=10, unique=True),
    credit=st.integers(0, 2_000),
    in_use=st.lists(st.integers(0, 9), unique=True, max_size=3),
)
def test_as_many_sets_are_read_as_may_come_now(
    opaques: list[int], credit: int, in_use: list[int]
) -> None:
    session = opened(credit=credit, in_use=in_use)
    messages = [single(opaque % PARTITIONS, opaque, 1) for opaque in opaques]
    expected = _readable(session, messages, credit, in_use)
    sets = session.read_sets(PARTITIONS)
    assert (list(memoryview(sets.opaques).cast("I")) if sets else []) == expected


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True),
    st.lists(st.integers(0, 9), max_size=6),
    st.integers(1, 3),
)
def test_a_bundle_is_answered_as_with_a_message(
    in_use: list[int], answered: list[int], run_count: int
) -> None:
    runs = tuple(
        RunResult(PartitionId(n), 0, HISTORY, SeqNo(1), SeqNo(2), Cas(3)) for n in range(run_count)
    )
    lines = b"".join(LINE.pack(*run) for run in runs)
    sessions = [opened(credit=1_000_000, in_use=in_use) for _ in range(2)]
    for opaque in answered:
        errors = []
        for session in sessions:
            try:
                if session is sessions[0]:
                    session.answer_bundle(opaque, lines)
                else:
                    session.send(MutateReply(0, runs, opaque=opaque))
                errors.append("")
            except LocalProtocolError as error:
                errors.append(str(error))
        assert errors[0] == errors[1]
        assert sessions[0].outgoing_bytes == sessions[1].outgoing_bytes
        assert taken(sessions[0]) == taken(sessions[1])
        assert full_state(sessions[0]) == full_state(sessions[1])
