"""What a client must do that consumes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import trio

from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.errors import Status
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import Cas, HistoryId, Operation, PartitionId, SeqNo, SnapshotKind
from upr_protocol.limits import WINDOW_BYTES_MIN
from upr_protocol.wire import Error, Noop, PartitionChunk, Stream, StreamEnd, StreamReply
from upr_server.conformance.client_scenario import Accept, ClientScenario, Task, require
from upr_server.conformance.failure import ConformanceError
from upr_server.conformance.scripted_server import HISTORY, LOG, P5, ScriptedServer, rows_of

_LEAVE_S: Final = 0.2
"""How long a client that has nothing more to do may take to leave."""

_P4: Final = PartitionId(4)

_OTHER_LOG: Final = FailoverLog.of_pairs([(HistoryId(9), 4), (HISTORY, 0)])

# With the characters that SCRAM writes otherwise.
_USER: Final = "us=er,1"
_PASSWORD: Final = "pa\u00dfw\u00f6rt"


def _position(
    last_complete: int, log: FailoverLog = LOG, highest: int | None = None, end: int = 0
) -> Task:
    highest_received = last_complete if highest is None else highest
    is_partial = highest_received > last_complete
    return {
        "last_complete": str(last_complete),
        "highest_received": str(highest_received),
        "partial_history": str(HISTORY if is_partial else 0),
        "partial_start": str(last_complete if is_partial else 0),
        "partial_end": str(end if is_partial else 0),
        "log": [[str(history), str(seq)] for history, seq in log.pairs()],
    }


def _consume(end: int, **fields: Any) -> Task:
    return {
        "task": "consume",
        "bucket": "flights",
        "partitions": [P5],
        "window_bytes": 1 << 20,
        "idle_interval_s": 20,
        "end_seqs": {str(P5): str(end)},
        "positions": {},
        **fields,
    }


def _has(*seqs: int, position: int) -> Callable[[Any], None]:
    """Checks that the client's copy has `key-N` for these numbers, that its position is complete
    at `position`, and that it has not rolled back."""
    items = {f"key-{seq}": f"value-{seq}" for seq in seqs}

    def check(outcome: Any) -> None:
        require(outcome["items"] == items, f"the copy is {outcome['items']}, not {items}")
        actual_position = outcome["positions"][str(P5)]
        expected = _position(position)
        require(
            {**actual_position, "log": None} == {**expected, "log": None},
            f"the position is {actual_position}, not {expected}",
        )
        require(outcome["rollbacks"] == [], f"the rollbacks are {outcome['rollbacks']}")

    return check


async def _finish(script: ScriptedServer) -> None:
    """Ends the stream of partition 5, and waits for the client's end."""
    opaque = script.session.opaque_of(P5)
    await script.send(StreamEnd(partition=P5, opaque=opaque, status=Status.END_REACHED))
    await script.expect_end()


async def _play_consume(accept: Accept) -> None:
    script = await accept()
    request = await script.begin_streaming()
    require(request.position.highest_received == 0, "a new client has a position above 0")
    await script.begin_snapshot(0, 4)
    await script.send_chunk(0, 2, rows_of(1, 2))
    await script.send_chunk(2, 4, rows_of(4))
    await script.end_snapshot(4)
    await script.send_snapshot(4, 6, rows_of(5, 6))
    await _finish(script)


async def _play_window(accept: Accept) -> None:
    script = await accept()
    await script.begin_streaming()
    await script.begin_snapshot(0, 1)
    await script.send_chunk(0, 1, rows_of(1))
    await script.end_snapshot(1)
    for seq in range(2, 41):
        row = Mutation(Operation.SET, b"long", bytes(16 * 1024), SeqNo(seq), Cas(seq))
        await script.send_snapshot(seq - 1, seq, [row])
    row = Mutation(Operation.DELETE, b"long", b"", SeqNo(41), Cas(41))
    await script.send_snapshot(40, 41, [row])
    await _finish(script)


async def _play_resume_inside(accept: Accept) -> None:
    script = await accept()
    await script.begin_streaming()
    await script.begin_snapshot(0, 2)
    await script.send_chunk(0, 2, rows_of(1, 2))
    await script.end_snapshot(2)
    await script.begin_snapshot(2, 9)
    await script.send_chunk(2, 5, rows_of(4, 5))
    # The client acknowledges nothing so small: what it says next shows that it has the chunk.
    await script.cut_connection()
    script = await accept()
    await script.open_bucket()
    request = await script.expect(Stream)
    position = request.position
    require(position.last_complete == 2, f"last_complete is {position.last_complete}, not 2")
    if position.highest_received != 2:
        partial = position.partial
        require(position.highest_received == 5, f"highest_received is {position.highest_received}")
        require(partial is not None, "the partial snapshot is not named")
        assert partial is not None
        require((partial.history_id, partial.end) == (HISTORY, 9), f"it is {partial}")
    seq = position.highest_received
    await script.send(StreamReply(seq, "conformance", LOG, partition=P5, opaque=request.opaque))
    await script.expect_go()
    await script.begin_snapshot(seq, 9)
    await script.send_chunk(seq, 9, rows_of(*range(seq + 1, 10)))
    await script.end_snapshot(9)
    await _finish(script)


async def _play_missing_end(accept: Accept) -> None:
    script = await accept()
    await script.open_bucket()
    request = await script.accept_stream()
    require(request.position.highest_received == 9, "the client does not bring its position")
    # All of the snapshot is there, so the stream has reached its end.
    await _finish(script)


async def _play_rollback(accept: Accept) -> None:
    script = await accept()
    await script.open_bucket()
    request = await script.expect(Stream)
    foreign_log = FailoverLog.of_pairs([(HISTORY, 4), (7, 0)])
    await script.send(
        StreamReply(
            SeqNo(4), "conformance", foreign_log,
            partition=P5, opaque=request.opaque, status=Status.ROLLBACK,
        )
    )  # fmt: skip
    request = await script.expect(Stream)
    seq = request.position.last_complete
    require(seq <= 4, f"the client went back to {seq}, above the ceiling 4")
    require(
        request.position.highest_received == seq, "a client that went back has a partial snapshot"
    )
    entries = [history for history, start in request.position.log.pairs() if start > seq]
    require(not entries, "the log has entries above the number that the client went back to")
    await script.send(
        StreamReply(seq, "conformance", foreign_log, partition=P5, opaque=request.opaque)
    )
    await script.expect_go()
    await script.begin_snapshot(seq, 6)
    await script.send_chunk(seq, 6, rows_of(*range(seq + 1, 7)))
    await script.end_snapshot(6)
    await _finish(script)


async def _play_disk(accept: Accept) -> None:
    script = await accept()
    await script.begin_streaming()
    await script.begin_snapshot(0, 8, kind=SnapshotKind.DISK, may_repeat=True)
    old_mutation = Mutation(Operation.SET, b"key-4", b"old", SeqNo(1), Cas(1))
    deleted_later = Mutation(Operation.SET, b"gone", b"v", SeqNo(2), Cas(2))
    await script.send_chunk(0, 3, [old_mutation, deleted_later, *rows_of(3)])
    deletion = Mutation(Operation.DELETE, b"gone", b"", SeqNo(5), Cas(5))
    expired = Mutation(Operation.EXPIRE, b"key-3", b"", SeqNo(7), Cas(7))
    await script.send_chunk(3, 8, [*rows_of(4), deletion, expired, *rows_of(8)])
    await script.end_snapshot(8)
    await _finish(script)


async def _play_replaced(accept: Accept) -> None:
    script = await accept()
    await script.begin_streaming()
    await script.begin_snapshot(0, 4)
    await script.send_chunk(0, 2, rows_of(1, 2))
    await script.begin_snapshot(2, 7, turn=False)
    await script.send_chunk(2, 7, rows_of(4, 6, 7))
    await script.end_snapshot(7)
    await _finish(script)


async def _play_ended_early(accept: Accept) -> None:
    script = await accept()
    await script.begin_streaming()
    await script.begin_snapshot(0, 2)
    await script.send_chunk(0, 2, rows_of(1, 2))
    await script.end_snapshot(2)
    opaque = script.session.opaque_of(P5)
    await script.send(StreamEnd(partition=P5, opaque=opaque, status=Status.TOO_SLOW))
    # The client may ask again on this connection, or on another.
    message = await script.receive()
    while isinstance(message, Noop):
        message = await script.receive()
    if isinstance(message, Stream):
        await script.send(
            StreamReply(SeqNo(2), "conformance", LOG, partition=P5, opaque=message.opaque)
        )
    else:
        await script.cut_connection()
        script = await accept()
        request = await script.begin_streaming()
        require(request.position.last_complete == 2, "the client lost its position")
    await script.begin_snapshot(2, 3)
    await script.send_chunk(2, 3, rows_of(3))
    await script.end_snapshot(3)
    await _finish(script)


async def _play_ended_at_once(accept: Accept) -> None:
    script = await accept()
    await script.open_bucket()
    for _ in range(2):
        request = await script.expect(Stream)
        partition, opaque = request.partition, request.opaque
        await script.send(
            StreamReply(SeqNo(0), "conformance", LOG, partition=partition, opaque=opaque)
        )
        if partition == _P4:
            await script.send(
                StreamEnd(partition=partition, opaque=opaque, status=Status.END_REACHED)
            )
    await script.expect_go()
    with trio.move_on_after(_LEAVE_S):
        while isinstance(await script.receive(), Noop):
            pass
        raise ConformanceError("the client left before partition 5 had ended")
    await script.begin_snapshot(0, 2)
    await script.send_chunk(0, 2, rows_of(1, 2))
    await script.end_snapshot(2)
    await _finish(script)


async def _play_damaged(accept: Accept) -> None:
    script = await accept()
    await script.begin_streaming()
    await script.begin_snapshot(0, 2)
    chunk = Chunk.build(rows_of(1, 2), SeqNo(0), SeqNo(2))
    message = PartitionChunk(chunk, partition=P5, opaque=script.session.opaque_of(P5))
    frame = bytearray(b"".join(map(bytes, message.frame_buffers())))
    frame[-8] ^= 1
    await script.send_bytes(bytes(frame))
    reply = await script.receive()
    while isinstance(reply, Noop):
        reply = await script.receive()
    require(
        reply is None or (isinstance(reply, Error) and reply.status == Status.BAD_CHECKSUM),
        f"a damaged frame is an error, and the client said {reply}",
    )
    await script.cut_connection()
    script = await accept()
    request = await script.begin_streaming()
    require(request.position.highest_received == 0, "the client took a damaged chunk in")
    await script.begin_snapshot(0, 2)
    await script.send_chunk(0, 2, rows_of(1, 2))
    await script.end_snapshot(2)
    await _finish(script)


async def _play_silence(accept: Accept) -> None:
    script = await accept()
    await script.begin_streaming()
    for _ in range(2):
        # Said here in time, so that it is the client's turn to be silent.
        await script.send(Noop())
        await script.expect(Noop)
    await script.begin_snapshot(0, 1)
    await script.send_chunk(0, 1, rows_of(1))
    await script.end_snapshot(1)
    await _finish(script)


async def _play_log_in(accept: Accept) -> None:
    # It asks for no log-in, and so proves nothing.
    stranger = await accept()
    await stranger.expect_end()
    impostor = await accept()
    await impostor.log_in(_USER, _PASSWORD, is_impostor=True)
    await impostor.expect_end()
    script = await accept()
    await script.log_in(_USER, _PASSWORD)
    await script.begin_streaming()
    await script.begin_snapshot(0, 1)
    await script.send_chunk(0, 1, rows_of(1))
    await script.end_snapshot(1)
    await _finish(script)


_AT_9: Final = {str(P5): _position(2, highest=9, end=9)}

CONSUMER_SCENARIOS: Final[Mapping[str, ClientScenario]] = {
    "consume": ClientScenario(
        "reads snapshots of one and of several frames, to the stream's end",
        _consume(6),
        _play_consume,
        _has(1, 2, 4, 5, 6, position=6),
    ),
    "window": ClientScenario(
        "acknowledges every frame that takes from a window of 64 KiB, 640 KiB in all",
        _consume(41, window_bytes=WINDOW_BYTES_MIN),
        _play_window,
        _has(1, position=41),
    ),
    "resume-inside": ClientScenario(
        "resumes inside a snapshot after the connection was lost, and finishes it",
        _consume(9),
        _play_resume_inside,
        lambda outcome: require(
            outcome["positions"][str(P5)]["last_complete"] == "9",
            f"the position is {outcome['positions']}",
        ),
    ),
    "missing-end": ClientScenario(
        "takes a snapshot that lacks only its end for complete once the stream is accepted",
        _consume(9, positions=_AT_9),
        _play_missing_end,
        _has(position=9),
    ),
    "rollback": ClientScenario(
        "goes back to the ceiling or below, and asks again",
        _consume(6, positions={str(P5): _position(6, _OTHER_LOG)}),
        _play_rollback,
        lambda outcome: require(
            outcome["rollbacks"] == [[P5, "4"]]
            and outcome["positions"][str(P5)]["last_complete"] == "6",
            f"the outcome is {outcome}",
        ),
    ),
    "disk": ClientScenario(
        "applies a snapshot from disk in which keys repeat, and some are deleted or expire",
        _consume(8),
        _play_disk,
        _has(4, 8, position=8),
    ),
    "replaced": ClientScenario(
        "continues at its position when a second PartitionStart replaces the first",
        _consume(7),
        _play_replaced,
        _has(1, 2, 4, 6, 7, position=7),
    ),
    "ended-early": ClientScenario(
        "asks again for the rest when a stream ends early",
        _consume(3),
        _play_ended_early,
        _has(1, 2, 3, position=3),
    ),
    "ended-at-once": ClientScenario(
        "reads on though another partition has nothing to send, and its stream ends at once",
        _consume(2, partitions=[_P4, P5], end_seqs={str(_P4): "0", str(P5): "2"}),
        _play_ended_at_once,
        _has(1, 2, position=2),
    ),
    "damaged": ClientScenario(
        "uses nothing from a damaged frame, and connects again",
        _consume(2),
        _play_damaged,
        _has(1, 2, position=2),
    ),
    "silence": ClientScenario(
        "sends Noop when it has sent nothing for the idle interval of 1 s",
        _consume(1, idle_interval_s=1),
        _play_silence,
        _has(1, position=1),
    ),
    "log-in": ClientScenario(
        "logs in by SCRAM-SHA-256, and leaves servers that do not prove to know the user",
        # In another form than the one that is compared.
        _consume(1, user=_USER, password=_PASSWORD.replace("\u00f6", "o\u0308")),
        _play_log_in,
        _has(1, position=1),
    ),
}
"""By name, in the order in which they are played."""
