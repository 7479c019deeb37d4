"""Numbers at the edges that somebody who writes a client gets wrong: docs/protocol.md answers each
of these questions, and the code agrees with the answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from crc32c import crc32c

from docs.generate_vectors import checksums, encoded
from tests.protocol.session.kit import Pair, hello
from upr_protocol import limits
from upr_protocol.chunk import Chunk, encoded_bytes, plain_chunk
from upr_protocol.errors import LocalProtocolError, RemoteProtocolError, Status
from upr_protocol.failover import FailoverLog, PartialSnapshot, Position, Start, decide_start
from upr_protocol.hashing import partition_of
from upr_protocol.ids import NO_PARTITION, SEQ_MAX, HistoryId, SeqNo
from upr_protocol.session.flow_control import Allowance
from upr_protocol.session.keepalive import DEAD_AFTER_INTERVALS
from upr_protocol.wire import HEADER_BYTES, MESSAGES, Ack, Barrier, Message, SessionState, Stats
from upr_server.engine.memory_account import MemoryAccount
from upr_server.engine.publisher_answers import (
    BATCHES_MAX,
    WRITERS_MAX,
    PublisherAnswers,
    WriterToken,
)

TEXT: Final = " ".join(
    (Path(__file__).resolve().parents[1] / "docs" / "protocol.md").read_text().split()
)


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
    left = Allowance()
    left.grant(10)
    left.use(25)
    left.grant(15)
    return left.left == 0 and not left.open


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


def start_at(seq: int) -> object:
    log = FailoverLog.of([(1, 0)])
    return decide_start(log, SeqNo(9), SeqNo(0), Position(log, SeqNo(seq), SeqNo(seq), None))


def start_inside(last_complete: int, highest_received: int, end: int) -> object:
    """The decision about a client that was interrupted inside a snapshot."""
    log = FailoverLog.of([(1, 0)])
    partial = PartialSnapshot(HistoryId(1), SeqNo(last_complete), SeqNo(end))
    position = Position(log, SeqNo(last_complete), SeqNo(highest_received), partial)
    return decide_start(log, SeqNo(end), SeqNo(0), position)


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


FRAME: Final = encoded(hello(identity="test:clients"))
"""A frame whose body ends with padding."""

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
        "`length` and `body_crc` count the padding",
        lambda: (
            len(FRAME) % 8 == 0
            and len(FRAME) - HEADER_BYTES == int.from_bytes(FRAME[12:16], "little")
            and crc32c(FRAME[24:]) == int.from_bytes(FRAME[16:20], "little")
        ),
    ),
    "may eight zeros follow the last field?": (
        "More than 7 bytes behind a message, or anything but zeros, is an error",
        lambda: not is_readable(bytes(16)) and is_readable(bytes(8)),
    ),
    "how long may a frame be before the bucket is open?": (
        "may have a body longer than 4 KiB",
        lambda: limits.HANDSHAKE_BODY_BYTES_MAX == 4096,
    ),
    "how long may Hello take?": (
        "has not sent `Hello` within 10 s",
        lambda: limits.HANDSHAKE_TIMEOUT_S == 10,
    ),
    "in which partition of 64 is N14228, and by which checksum?": (
        "with the CRC-32 of zlib, not CRC32C. Of 64 partitions, `N14228` is in partition 5.",
        lambda: partition_of(b"N14228", 64) == 5,
    ),
    "how long may a key be?": (
        "never fall, and leave each key 1 to 250 bytes",
        lambda: limits.KEY_BYTES_MAX == 250,
    ),
    "what becomes of a key of 251 bytes in a bundle?": (
        "A key of a wrong length fails alone with `BAD_KEY`",
        lambda: plain_chunk([b"k", b"k" * 251], [b"", b""]).published_misfits() == {1: 37},
    ),
    "how many bytes has a chunk of no mutations?": (
        "chunk of no mutations has 48 bytes",
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
        "The server sends while anything is left, so the last frame may take the window below 0",
        below_zero,
    ),
    "may a client publish with a credit of 0?": (
        "The client sends while its credit is above 0, so the last frame may take it below 0",
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
    "after how long a silence is the other side dead?": (
        "A side that has received nothing for 2 times the interval takes the other for dead",
        lambda: DEAD_AFTER_INTERVALS == 2,
    ),
    "how many entries may a failover log have?": (
        "At most 25 entries; none has history ID 0",
        lambda: limits.FAILOVER_ENTRIES_MAX == 25,
    ),
    "how many runs of a writer does a partition remember, and of how many writers?": (
        "remembers the newest 64 runs of a writer, of the 1,024 writers that it heard from last",
        lambda: (BATCHES_MAX, WRITERS_MAX) == (64, 1024),
    ),
    "with which counter does a writer begin, and may it leave some out?": (
        "Counters begin at 1 and must rise; gaps are allowed",
        gaps_are_new,
    ),
    "what follows a chain that would be 0?": (
        "1 where that would be 0. The next run's chain then continues from this 1",
        lambda: 1 in [run.get("chain") for run in checksums()["chain"]],
    ),
    "where does an accepted stream continue?": (
        "the stream continues after `seq`, which is the client's `highest_received`",
        lambda: isinstance(start := start_at(7), Start) and start.seq == 7,
    ),
    "what if the end of a stream is the client's own position?": (
        "is answered with `OK`, and the stream ends at once with `END_REACHED`",
        lambda: (
            isinstance(start := start_at(9), Start) and (start.seq, start.end_at_least) == (9, 0)
        ),
    ),
    "what if the end lies below a snapshot that was interrupted?": (
        "is first sent the rest of it, whatever its `end_seq`",
        lambda: (
            isinstance(start := start_inside(5, 7, 9), Start)
            and (start.seq, start.end_at_least) == (7, 9)
        ),
    ),
    "how many streams may a connection have, beside its requests?": (
        "a request until it is answered, a stream until its opaque is free again",
        streams_are_open_requests,
    ),
    "which end has a stream that never ends?": (
        "Where the stream ends; all ones for never",
        lambda: SEQ_MAX == 2**64 - 1,
    ),
    "which opcodes below 0x80 does a server say?": (
        "below 0x80, and so do those of `Error` and `Noop`, which either side says",
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
