"""What a client must do, played by a scripted server.

The client is a command. It reads its task from standard input, as one JSON object. It executes the
task, writes one JSON object with the outcome to standard output, and ends with code 0. Numbers of
64 bits are decimal text; so are partitions as keys of an object. Status codes and other partitions
are numbers. Keys and values of items are text, in UTF-8 on the wire. The tasks:

- `{"task": "consume", "host", "port", "bucket", "partitions", "window_bytes", "idle_interval_s",
  "end_seqs": {partition: number}, "positions": {partition: position}}`: stream until every
  partition has reached its end, and connect again when a connection is lost. If a partition has no
  position, the client has nothing of it yet. The outcome is `{"items": {key: value}, "positions":
  {partition: position}, "rollbacks": [[partition, ceiling]]}`, with the streamed items. At a
  rollback, a client may always go back to 0.
- `{"task": "publish", "host", "port", "bucket", "partition_count", "operations": [{"operation",
  "key", "value"}]}`: publish these operations, those of one partition in this order, each with one
  effect, and connect again when a connection is lost. An operation has its name in capitals, and a
  value, which may be empty. The outcome is `{"results": [{"status", "seq", "cas", "counter"}]}`, in
  the order of the task; a missing number is null. An operation whose whole run is refused for good
  has the run's status. The value of an `INCREMENT` is the delta, as text; a missing counter begins
  with it. No task has a `DECREMENT`. The client may publish with `MEMORY` or `PERSISTED`: the
  runner accepts both, and loses no run that it has answered.
- `{"task": "get", "host", "port", "bucket", "partition", "keys"}`: the outcome is
  `{"items": {key: value}, "refused": {key: code}}`; a missing key is in neither.

A task may have `"user"` and `"password"`. Then the client logs in with them, by SCRAM-SHA-256. If
the server names no mechanism, or does not prove that it stores the user's verifier, the client
closes the connection without opening the bucket, and connects again.

A position has the fields of a position on this page, and its `log` is a list of [history, number].
(The vectors have objects instead.)
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import attrs
import trio

from upr_protocol.chunk import Chunk, CounterDelta, Mutation
from upr_protocol.errors import Status
from upr_protocol.failover import FailoverLog
from upr_protocol.hashing import partition_of
from upr_protocol.ids import Cas, HistoryId, Operation, PartitionId, SeqNo, SnapshotKind
from upr_protocol.limits import WINDOW_BYTES_MIN
from upr_protocol.wire import (
    Credit,
    Error,
    Get,
    GetReply,
    Mutate,
    MutateReply,
    Noop,
    PartitionChunk,
    Refusal,
    RunResult,
    Stream,
    StreamEnd,
    StreamReply,
)
from upr_server.conformance.failure import ConformanceError
from upr_server.conformance.scripted_server import (
    HISTORY,
    LOG,
    P5,
    PARTITION_COUNT,
    ScriptedServer,
    rows_of,
)

RUN_TIMEOUT_S: Final = 60.0

_LEAVE_S: Final = 0.2
"""How soon a client leaves that has nothing more to do."""

_P4: Final = PartitionId(4)

Accept = Callable[[], Awaitable[ScriptedServer]]
"""Waits for the client's next connection."""

Task = dict[str, Any]


@attrs.frozen
class ClientScenario:
    """One thing that a client must be able to do.

    Attributes:
        about: What, in a sentence.
        task: What the client is told to do, but for where the server is.
        play: The server's part.
        check: Looks at the client's outcome.
    """

    about: str
    task: Task
    play: Callable[[Accept], Awaitable[None]]
    check: Callable[[Any], None]


def _require(is_right: bool, sentence: str) -> None:
    if not is_right:
        raise ConformanceError(sentence)


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


def _has(
    *seqs: int, position: int, rollbacks: Sequence[int] = (), **fields: str
) -> Callable[[Any], None]:
    """The client's copy has `key-N` for these numbers, and its position is complete there."""
    items = {f"key-{seq}": f"value-{seq}" for seq in seqs} | fields

    def check(outcome: Any) -> None:
        _require(outcome["items"] == items, f"the copy is {outcome['items']}, not {items}")
        actual_position = outcome["positions"][str(P5)]
        expected = _position(position)
        _require(
            {**actual_position, "log": None} == {**expected, "log": None},
            f"the position is {actual_position}, not {expected}",
        )
        ceilings = [[P5, str(ceiling)] for ceiling in rollbacks]
        _require(outcome["rollbacks"] == ceilings, f"the rollbacks are {outcome['rollbacks']}")

    return check


async def _finish(script: ScriptedServer) -> None:
    """Ends the stream of partition 5, and waits for the client's end."""
    opaque = script.session.opaque_of(P5)
    await script.send(StreamEnd(partition=P5, opaque=opaque, status=Status.END_REACHED))
    await script.expect_end()


# Consumers.


async def _play_consume(accept: Accept) -> None:
    script = await accept()
    request = await script.begin_streaming()
    _require(request.position.highest_received == 0, "a new client has a position above 0")
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
    _require(position.last_complete == 2, f"last_complete is {position.last_complete}, not 2")
    if position.highest_received != 2:
        partial = position.partial
        _require(position.highest_received == 5, f"highest_received is {position.highest_received}")
        _require(partial is not None, "the partial snapshot is not named")
        assert partial is not None
        _require((partial.history_id, partial.end) == (HISTORY, 9), f"it is {partial}")
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
    _require(request.position.highest_received == 9, "the client does not bring its position")
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
    _require(seq <= 4, f"the client went back to {seq}, above the ceiling 4")
    _require(
        request.position.highest_received == seq, "a client that went back has a partial snapshot"
    )
    entries = [history for history, start in request.position.log.pairs() if start > seq]
    _require(not entries, "the log has entries above the number that the client went back to")
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
        _require(request.position.last_complete == 2, "the client lost its position")
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
    _require(
        reply is None or (isinstance(reply, Error) and reply.status == Status.BAD_CHECKSUM),
        f"a damaged frame is an error, and the client said {reply}",
    )
    await script.cut_connection()
    script = await accept()
    request = await script.begin_streaming()
    _require(request.position.highest_received == 0, "the client took a damaged chunk in")
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


# Publishers.


def _publish(*operations: tuple[str, str, str]) -> Task:
    return {
        "task": "publish",
        "bucket": "flights",
        "partition_count": PARTITION_COUNT,
        "operations": [
            {"operation": operation, "key": key, "value": value}
            for operation, key, value in operations
        ],
    }


class _Store:
    """What a scripted server has made of bundles: runs by token, and rows in their order."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str]] = []
        self._results: dict[tuple[bytes, int, int], RunResult] = {}
        self._high = 0

    def check(self, request: Mutate) -> None:
        """Holds a bundle to the rules that only a server can know."""
        _require(any(request.writer), "the runs have no writer, so they cannot be sent again")
        for run, chunk in zip(request.bundle.runs, request.bundle.run_chunks(), strict=True):
            _require(run.counter > 0, "the counter of a run is 0")
            for key in chunk.check_published():
                partition = partition_of(key, PARTITION_COUNT)
                _require(partition == run.partition, f"{key!r} is in partition {partition}")

    def apply(self, request: Mutate) -> MutateReply:
        """Makes what is new of a bundle, and answers all of it."""
        self.check(request)
        results = []
        for run, chunk in zip(request.bundle.runs, request.bundle.run_chunks(), strict=True):
            token = (request.writer, run.partition, run.counter)
            if token not in self._results:
                first_seq = self._high + 1
                self._high += run.row_count
                self.rows += [(row.key.decode(), row.value.decode("latin1")) for row in chunk]
                self._results[token] = RunResult(
                    PartitionId(run.partition), Status.OK, HISTORY,
                    SeqNo(first_seq), SeqNo(self._high), Cas(first_seq),
                )  # fmt: skip
            results.append(self._results[token])
        return MutateReply(0, tuple(results), opaque=request.opaque)


_SETS: Final = [("SET", f"key-{row}", f"value-{row}") for row in range(40)]


def _check_sets(outcome: Any) -> None:
    statuses = [result["status"] for result in outcome["results"]]
    _require(statuses == [0] * len(_SETS), f"the statuses are {statuses}")
    seqs = sorted(int(result["seq"]) for result in outcome["results"])
    _require(seqs == list(range(1, len(_SETS) + 1)), f"the numbers are {seqs}")


def _check_made_once(store: _Store) -> None:
    rows = sorted(store.rows)
    expected = sorted((key, value) for _, key, value in _SETS)
    _require(rows == expected, f"{len(rows)} rows were made of {len(expected)}, or other ones")


async def _serve_bundles(
    script: ScriptedServer, store: _Store, count: int, credit: int = 0
) -> None:
    """Answers bundles until so many rows were made."""
    while len(store.rows) < count:
        request = await script.expect(Mutate)
        await script.send(store.apply(request))
        if script.session.credit.remaining_bytes <= 0 and credit:
            await script.send(Credit(credit))


async def _play_publish(accept: Accept) -> None:
    script, store = await accept(), _Store()
    await script.open_bucket()
    await _serve_bundles(script, store, len(_SETS))
    _check_made_once(store)
    await script.expect_end()


async def _play_credit(accept: Accept) -> None:
    # Little enough for a frame or two, so that it goes below 0: the next must wait.
    script, store = await accept(), _Store()
    await script.open_bucket(credit=100)
    await _serve_bundles(script, store, len(_SETS), credit=3000)
    _check_made_once(store)
    await script.expect_end()


async def _play_lost_answer(accept: Accept) -> None:
    script, store = await accept(), _Store()
    await script.open_bucket()
    unanswered = await script.expect(Mutate)
    store.apply(unanswered)
    await script.cut_connection()
    script = await accept()
    await script.open_bucket()
    request = await script.expect(Mutate)
    _require(request.writer == unanswered.writer, "the runs come again from another writer")
    before = dict(zip(unanswered.bundle.runs, unanswered.bundle.run_chunks(), strict=True))
    again = dict(zip(request.bundle.runs, request.bundle.run_chunks(), strict=True))
    tokens = {(run.partition, run.counter) for run in again}
    oldest = {(run.partition, run.counter) for run in before}
    _require(bool(tokens & oldest), "the runs without an answer do not come first")
    for run, chunk in again.items():
        if (run.partition, run.counter) in oldest:
            _require(before.get(run) == chunk, f"the run {run} has other contents than before")
    await script.send(store.apply(request))
    await _serve_bundles(script, store, len(_SETS))
    _check_made_once(store)
    await script.expect_end()


async def _play_refused_runs(accept: Accept) -> None:
    script, store = await accept(), _Store()
    await script.open_bucket()
    first_request = await script.expect(Mutate)
    store.check(first_request)
    if len(first_request.bundle.runs) == 1:
        busy = Refusal("try again", opaque=first_request.opaque, status=Status.TEMPORARY_FAILURE)
        await script.send(busy)
    else:
        results = tuple(
            RunResult(PartitionId(run.partition), Status.TEMPORARY_FAILURE)
            for run in first_request.bundle.runs
        )
        await script.send(MutateReply(0, results, opaque=first_request.opaque))
    lowest = {run.partition: run.counter for run in first_request.bundle.runs}
    while len(store.rows) < len(_SETS):
        request = await script.expect(Mutate)
        for run in request.bundle.runs:
            lowest_counter = lowest.pop(run.partition, run.counter)
            _require(
                run.counter == lowest_counter,
                f"run {run.counter} overtakes the refused {lowest_counter}",
            )
        await script.send(store.apply(request))
    _check_made_once(store)
    await script.expect_end()


async def _play_failed_rows(accept: Accept) -> None:
    script = await accept()
    await script.open_bucket()
    row_count, result, seq = 0, {}, 0
    while row_count < 3:
        request = await script.expect(Mutate)
        _Store().check(request)
        failures, counters, results, row = [], [], [], 0
        for run, chunk in zip(request.bundle.runs, request.bundle.run_chunks(), strict=True):
            first_seq = seq + 1
            for mutation in chunk:
                row_count += 1
                if mutation.op is Operation.ADD:
                    failures.append((row, int(Status.EXISTS)))
                else:
                    seq += 1
                    result[mutation.key] = seq
                if mutation.op is Operation.INCREMENT:
                    delta = CounterDelta.decode(mutation.value)
                    _require(
                        (delta.delta, delta.initial, bool(delta.create)) == (5, 5, True),
                        f"the delta is {delta}",
                    )
                    counters.append((row, 12))
                row += 1
            last_seq = seq if seq >= first_seq else 0
            results.append(
                RunResult(
                    PartitionId(run.partition), Status.OK, HISTORY,
                    SeqNo(first_seq if last_seq else 0), SeqNo(last_seq),
                    Cas(first_seq if last_seq else 0),
                )
            )  # fmt: skip
        reply = MutateReply(
            0, tuple(results), tuple(failures), tuple(counters), opaque=request.opaque
        )
        await script.send(reply)
    await script.expect_end()


def _check_failed_rows(outcome: Any) -> None:
    add_result, counter_result, set_result = outcome["results"]
    _require(
        add_result["status"] == Status.EXISTS, f"the ADD has the status {add_result['status']}"
    )
    _require(
        (counter_result["status"], counter_result["counter"]) == (0, "12"),
        f"the counter is {counter_result}",
    )
    _require(set_result["status"] == 0, f"the SET has the status {set_result['status']}")
    _require(add_result["seq"] is None, "a row that failed has a number")


async def _play_get(accept: Accept) -> None:
    script = await accept()
    await script.open_bucket()
    requested_keys: list[bytes] = []
    # Cut after the first key: the client asks for the rest.
    kinds = {b"missing": 0, b"damaged": Status.DAMAGED}
    for limit in (1, 9):
        request = await script.expect(Get)
        _require(request.partition == P5, f"the partition is {request.partition}, not 5")
        keys = request.keys[:limit]
        requested_keys += keys
        rows = [
            Mutation(Operation.SET, key, b"found", SeqNo(9 - index), Cas(1))
            if key not in kinds
            else Mutation(Operation.DELETE, key, flags=kinds[key])
            for index, key in enumerate(keys)
        ]
        chunk = Chunk.build(rows, SeqNo(0), SeqNo(9))
        await script.send(GetReply(HISTORY, len(keys), chunk, partition=P5, opaque=request.opaque))
    _require(
        requested_keys == [b"one", b"missing", b"damaged", b"two"],
        f"the client asked for {requested_keys}",
    )
    await script.expect_end()


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


def _check_get(outcome: Any) -> None:
    expected = {"one": "found", "two": "found"}
    _require(outcome["items"] == expected, f"the items are {outcome['items']}, not {expected}")
    refusals = {"damaged": Status.DAMAGED}
    _require(
        outcome["refused"] == refusals,
        f"the refused keys are {outcome['refused']}, not {{'damaged': {Status.DAMAGED:d}}}",
    )


_TASK_OF_GET: Final = {
    "task": "get",
    "bucket": "flights",
    "partition": P5,
    "keys": ["one", "missing", "damaged", "two"],
}
_AT_9: Final = {str(P5): _position(2, highest=9, end=9)}
_OTHER_LOG: Final = FailoverLog.of_pairs([(HistoryId(9), 4), (HISTORY, 0)])

# With the characters that SCRAM writes otherwise.
_USER: Final = "us=er,1"
_PASSWORD: Final = "pa\u00dfw\u00f6rt"

CLIENT_SCENARIOS: Final[Mapping[str, ClientScenario]] = {
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
        lambda outcome: _require(
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
        lambda outcome: _require(
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
    "publish": ClientScenario(
        "publishes each key to its partition, with a writer and counters",
        _publish(*_SETS),
        _play_publish,
        _check_sets,
    ),
    "credit": ClientScenario(
        "sends only while its credit is above 0",
        _publish(*_SETS),
        _play_credit,
        _check_sets,
    ),
    "lost-answer": ClientScenario(
        "sends runs again whose answer was lost, with the same tokens and contents",
        _publish(*_SETS),
        _play_lost_answer,
        _check_sets,
    ),
    "refused-runs": ClientScenario(
        "sends runs again that were refused for a passing reason, before later ones",
        _publish(*_SETS),
        _play_refused_runs,
        _check_sets,
    ),
    "failed-rows": ClientScenario(
        "tells failed rows from the others, and reads the new values of counters",
        _publish(("ADD", "a", "1"), ("INCREMENT", "n", "5"), ("SET", "b", "2")),
        _play_failed_rows,
        _check_failed_rows,
    ),
    "get": ClientScenario(
        "asks again for the keys that one GetReply did not answer, and tells refused keys from "
        "missing ones",
        _TASK_OF_GET,
        _play_get,
        _check_get,
    ),
}
"""Every scenario by its name."""


async def play_client_scenario(scenario: ClientScenario, command: Sequence[str]) -> None:
    """Runs a client against the scripted server of one scenario.

    Raises:
        ConformanceError: The client does something else than it must.
    """
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    listener = listeners[0]
    port: int = listener.socket.getsockname()[1]
    scripts: list[ScriptedServer] = []

    async def accept() -> ScriptedServer:
        with trio.move_on_after(RUN_TIMEOUT_S):
            scripts.append(ScriptedServer(await listener.accept()))
            return scripts[-1]
        raise ConformanceError("the client did not connect")

    task = json.dumps({**scenario.task, "host": "127.0.0.1", "port": port}).encode()
    try:
        async with trio.open_nursery() as nursery:
            client = _RunningClient()
            nursery.start_soon(_run_client, client, command, task)
            await scenario.play(accept)
            with trio.fail_after(RUN_TIMEOUT_S):
                await client.ended.wait()
            nursery.cancel_scope.cancel()
    except* ConformanceError as errors:
        raise _first(errors) from None
    except* trio.BrokenResourceError:
        raise ConformanceError("the client closed the connection in the middle") from None
    except* trio.TooSlowError:
        raise ConformanceError(f"the client did not end within {RUN_TIMEOUT_S:.0f} s") from None
    finally:
        await listener.aclose()
    scenario.check(_outcome_of(client))


def _first(errors: BaseExceptionGroup[ConformanceError]) -> ConformanceError:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


@attrs.define(eq=False)
class _RunningClient:
    ended: trio.Event = attrs.field(factory=trio.Event)
    code: int = 0
    output: bytes = b""


async def _run_client(client: _RunningClient, command: Sequence[str], task: bytes) -> None:
    try:
        process = await trio.run_process(command, stdin=task, capture_stdout=True, check=False)
    except OSError as error:
        raise ConformanceError(f"cannot start {command[0]}: {error.strerror}") from error
    client.code, client.output = process.returncode, process.stdout
    if process.returncode:
        raise ConformanceError(f"the client ended with code {process.returncode}")
    client.ended.set()


def _outcome_of(client: _RunningClient) -> Any:
    try:
        return json.loads(client.output)
    except ValueError as error:
        text = client.output[:200].decode(errors="replace")
        raise ConformanceError(f"the client wrote no JSON, but {text!r}") from error
