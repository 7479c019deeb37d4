"""What a server must do, played by a client against it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final

import attrs
import trio

from upr_protocol.chunk import Bundle, Chunk, CounterDelta, Mutation
from upr_protocol.errors import Status
from upr_protocol.failover import NOTHING_YET, FailoverLog, Position
from upr_protocol.ids import (
    Durability,
    HistoryId,
    Operation,
    PartitionState,
    SeqNo,
)
from upr_protocol.wire import (
    Await,
    AwaitReply,
    Barrier,
    BarrierReply,
    BucketDone,
    CreateBucket,
    Credit,
    CycleEnd,
    DeleteBucket,
    Error,
    Get,
    GetReply,
    Go,
    Message,
    Mutate,
    MutateReply,
    PartitionChunk,
    PartitionEnd,
    PartitionLog,
    PartitionSnapshot,
    PartitionStart,
    Refusal,
    Stream,
    StreamEnd,
    StreamReply,
)
from upr_server.conformance.failure import ConformanceError, what_was_done
from upr_server.conformance.plain_client import PlainClient, plain_client
from upr_server.conformance.wrong_frames import (
    BUCKET,
    KEY,
    OPAQUE,
    P0,
    P1,
    PARTITION_COUNT,
    TEXT_KEY,
    UNKNOWN_HISTORY,
    key_in,
)
from upr_server.conformance.wrong_input import Outcome, Progress, WrongInput
from upr_server.conformance.wrong_input_table import WRONG_INPUTS

CLEANUP_TIMEOUT_S: Final = 5.0
"""How long the bucket's deletion may take when the scenario was cancelled."""

WRITER: Final = b"conformance-0001"


@attrs.frozen
class ServerUnderTest:
    """Where a server listens. Scenarios create and delete the bucket `conformance` there.

    Attributes:
        host: Its host.
        port: Its port.
    """

    host: str
    port: int

    async def play(self, scenario: Callable[[ServerUnderTest], Awaitable[None]]) -> None:
        """Plays a scenario with a new bucket, in which `TEXT_KEY` is `text`.

        Raises:
            ConformanceError: The server does something else than it must.
        """
        await self._ask(CreateBucket(BUCKET, PARTITION_COUNT, opaque=1))
        try:
            async with plain_client(self.host, self.port, BUCKET) as client:
                await publish(client, Mutation(Operation.SET, TEXT_KEY, b"text"))
            await scenario(self)
        finally:
            with trio.move_on_after(CLEANUP_TIMEOUT_S, shield=True):
                await self._ask(DeleteBucket(BUCKET, opaque=1))

    async def _ask(self, request: Message) -> None:
        async with plain_client(self.host, self.port) as client:
            await client.greet()
            await client.send(request)
            await client.expect(BucketDone)


def require(is_right: bool, sentence: str) -> None:
    """Raises `ConformanceError` with the sentence where something is not right."""
    if not is_right:
        raise ConformanceError(sentence)


async def publish(
    client: PlainClient,
    *rows: Mutation,
    writer: bytes = bytes(16),
    counter: int = 0,
    durability: Durability = Durability.MEMORY,
) -> MutateReply:
    """Publishes rows to partition 0 as one run, and receives the result."""
    bundle = Bundle.of_one_run(P0, Chunk.build(rows, SeqNo(0), SeqNo(0)), counter)
    await client.send(Mutate(bundle, writer, durability, opaque=client.new_opaque()))
    return await client.expect(MutateReply)


async def stream(
    client: PlainClient,
    position: Position = NOTHING_YET,
    end_seq: SeqNo | None = None,
) -> StreamReply:
    """Asks for a stream of partition 0."""
    state, opaque = PartitionState.ACTIVE, client.new_opaque()
    request = Stream(state, position, partition=P0, opaque=opaque)
    if end_seq is not None:
        request = Stream(state, position, end_seq, partition=P0, opaque=opaque)
    await client.send(request)
    return await client.expect(StreamReply)


async def read_stream(client: PlainClient) -> tuple[dict[bytes, bytes], SeqNo]:
    """Reads the stream of partition 0 to its end: what it comes to, and its last number."""
    contents: dict[bytes, bytes] = {}
    seq, end = SeqNo(0), SeqNo(0)
    while not isinstance(message := await client.expect(Message), StreamEnd):
        if isinstance(message, PartitionStart):
            require(message.start == seq, f"a snapshot starts at {message.start}, not at {seq}")
            end = message.end
        elif isinstance(message, PartitionChunk):  # and a whole snapshot, which is one
            chunk = message.chunk
            chunk.check()
            require(chunk.start == seq, f"a chunk starts at {chunk.start}, not at {seq}")
            for row in chunk:
                contents[row.key] = row.value
                if row.op is not Operation.SET:
                    del contents[row.key]
            seq = chunk.end
            if isinstance(message, PartitionSnapshot):
                end = seq
        elif isinstance(message, PartitionEnd):
            require(message.end == seq == end, f"a snapshot to {end} ends at {message.end}")
        else:
            require(
                isinstance(message, CycleEnd | Credit), f"the server said {type(message).__name__}"
            )
    require(message.status == Status.END_REACHED, f"the stream ended with {message.status}")
    return contents, seq


# Scenarios. Each gets a new bucket.


async def publish_and_stream(server: ServerUnderTest) -> None:
    """What was published is streamed, in order, to the end that was asked for."""
    async with plain_client(server.host, server.port, BUCKET) as client:
        keys = [key_in(0, f"row{row}") for row in range(50)]
        for key in keys:
            await publish(client, Mutation(Operation.SET, key, key))
        last_reply = await publish(client, Mutation(Operation.DELETE, keys[0]))
        await stream(client, end_seq=last_reply.runs[0].last_seq)
        await client.send(Go())
        contents, seq = await read_stream(client)
    expected = {key: key for key in keys[1:]} | {TEXT_KEY: b"text"}
    require(contents == expected, "the stream does not reach the published changes")
    require(seq >= last_reply.runs[0].last_seq, "the stream ended before its end")


async def open_limits_nothing(server: ServerUnderTest) -> None:
    """A client that named one partition in `Open` is told of that one, and publishes and streams
    another."""
    async with plain_client(server.host, server.port) as client:
        await client.greet()
        await client.open(BUCKET, (P1,))
        partitions = [log.partition for log in client.logs]
        require(
            partitions == [P1], f"PartitionLog came for the partitions {partitions}, not for {P1}"
        )
        reply = await publish(client, Mutation(Operation.SET, KEY, b"v"))
        await stream(client, end_seq=reply.runs[0].last_seq)
        await client.send(Go())
        contents, _ = await read_stream(client)
    require(contents == {KEY: b"v", TEXT_KEY: b"text"}, f"the stream has {contents}")


async def end_at_the_position(server: ServerUnderTest) -> None:
    """A stream whose end the client has is accepted, and ends at once, before `Go`."""
    async with plain_client(server.host, server.port, BUCKET) as client:
        log, seq = client.logs[0].log, client.logs[0].high_seq
        reply = await stream(client, Position(log, seq, seq, None), seq)
        require((reply.status, reply.seq) == (Status.OK, seq), "the stream was not accepted")
        require(reply.log == log, "the log in the reply differs from the one in PartitionLog")
        end = await client.expect(StreamEnd)
        require(end.status == Status.END_REACHED, f"the stream ended with status {end.status}")


async def resume(server: ServerUnderTest) -> None:
    """A client that comes back with its position gets what it does not have, and nothing else."""
    async with plain_client(server.host, server.port, BUCKET) as client:
        log, seq = client.logs[0].log, client.logs[0].high_seq
        reply = await publish(client, Mutation(Operation.SET, KEY, b"later"))
        await stream(client, Position(log, seq, seq, None), reply.runs[0].last_seq)
        await client.send(Go())
        start = await client.expect(PartitionStart)
        require(start.start == seq, f"the snapshot starts at {start.start}, not at {seq}")
        keys = [row.key for row in (await client.expect(PartitionChunk)).chunk]
        require(keys == [KEY], f"the snapshot has the keys {keys}")


async def roll_back(server: ServerUnderTest) -> None:
    """A client with an unknown history is told to go back to nothing, one that branched off later
    than a common number to that number."""
    async with plain_client(server.host, server.port, BUCKET) as client:
        history, seq = client.logs[0].log.current, client.logs[0].high_seq
        unknown = FailoverLog.of_pairs([(UNKNOWN_HISTORY, 0)])
        reply = await stream(client, Position(unknown, SeqNo(9), SeqNo(9), None))
        expected = (Status.ROLLBACK, 0)
        require((reply.status, reply.seq) == expected, f"unknown: {reply.status} at {reply.seq}")
        branched = FailoverLog.of_pairs([(UNKNOWN_HISTORY, seq), (history, 0)])
        reply = await stream(client, Position(branched, SeqNo(9), SeqNo(9), None))
        expected = (Status.ROLLBACK, seq)
        require((reply.status, reply.seq) == expected, f"branched: {reply.status} at {reply.seq}")
        ahead = FailoverLog.of_pairs([(history, 0)])
        reply = await stream(client, Position(ahead, SeqNo(9), SeqNo(9), None))
        require(reply.status in (Status.SEQ_TOO_HIGH, Status.ROLLBACK), f"ahead: {reply.status}")


async def same_token(server: ServerUnderTest) -> None:
    """A run that is sent again has no second effect, over another connection either."""
    row = Mutation(Operation.INCREMENT, KEY, CounterDelta(5, 5).encode())
    async with plain_client(server.host, server.port, BUCKET) as client:
        first_reply = await publish(client, row, writer=WRITER, counter=1)
    async with plain_client(server.host, server.port, BUCKET) as client:
        again = await publish(client, row, writer=WRITER, counter=1)
        require(
            again.runs == first_reply.runs, f"the results differ: {first_reply.runs}, {again.runs}"
        )
        require(again.counters == first_reply.counters, "the counter's values differ")
        later = await publish(client, row, writer=WRITER, counter=3)
        require(later.counters == ((0, 10),), f"the counter is {later.counters}, not 10")


async def rows_fail_alone(server: ServerUnderTest) -> None:
    """Rows that succeed have consecutive numbers; those that fail are named and have none."""
    async with plain_client(server.host, server.port, BUCKET) as client:
        before = client.logs[0].high_seq
        rows = [
            Mutation(Operation.ADD, key)
            for key in (KEY, TEXT_KEY, b"", key_in(0, "new"), b"k" * 251)
        ]
        reply = await publish(client, *rows)
        run = reply.runs[0]
        expected = (Status.OK, before + 1, before + 2)
        require((run.status, run.first_seq, run.last_seq) == expected, f"the result is {run}")
        failures = ((1, Status.EXISTS), (2, Status.BAD_KEY), (4, Status.BAD_KEY))
        require(reply.failures == failures, f"the failures are {reply.failures}")


async def get(server: ServerUnderTest) -> None:
    """Items come in the order of the keys; a missing one is a `DELETE` with number 0."""
    async with plain_client(server.host, server.port, BUCKET) as client:
        keys = (key_in(0, "missing"), TEXT_KEY)
        await client.send(Get(keys, partition=P0, opaque=client.new_opaque()))
        reply = await client.expect(GetReply)
        rows = [(row.op, row.key, row.value) for row in reply.chunk]
        expected = [(Operation.DELETE, keys[0], b""), (Operation.SET, TEXT_KEY, b"text")]
        require(rows == expected, f"the items are {rows}")
        require(reply.next_index == len(keys), f"next_index is {reply.next_index}")


async def barrier(server: ServerUnderTest) -> None:
    """A barrier comes back behind what was acknowledged before it was sent."""
    async with plain_client(server.host, server.port, BUCKET) as client:
        await stream(client)
        await client.send(Go())
        await client.send(Barrier(b"first"), Barrier(b"second"))
        messages: list[Message] = []
        while not isinstance(message := await client.expect(Message), BarrierReply):
            messages.append(message)
        chunks = [message for message in messages if isinstance(message, PartitionChunk)]
        require(bool(chunks), "the barrier came back before the changes")
        require(message.cookie == b"first", f"the barrier {message.cookie!r} came back first")
        require(message.ends == ((P0, chunks[-1].chunk.end),), f"its ends are {message.ends}")
        second_reply = await client.expect(BarrierReply)
        require(second_reply.cookie == b"second", "the barriers came back in another order")


async def durable(server: ServerUnderTest) -> None:
    """A run at level `PERSISTED`, and `Await`, are answered once the disk has the change."""
    async with plain_client(server.host, server.port, BUCKET) as client:
        row = Mutation(Operation.SET, KEY, b"kept")
        reply = await publish(client, row, durability=Durability.PERSISTED)
        run = reply.runs[0]
        level, opaque = Durability.PERSISTED, client.new_opaque()
        history = HistoryId(run.history_id)
        await client.send(Await(history, run.last_seq, 10_000, level, partition=P0, opaque=opaque))
        reached = (await client.expect(AwaitReply)).seq
        require(reached >= run.last_seq, f"Await was answered at {reached}")


async def play_wrong_input(server: ServerUnderTest, case: WrongInput) -> None:
    """Sends the frames of a case, and compares what comes of them."""
    assert case.frames is not None
    bucket = BUCKET if case.progress in (Progress.OPENED, Progress.STREAMING) else ""
    async with plain_client(server.host, server.port, bucket) as client:
        if case.progress is Progress.READY:
            await client.greet()
        elif case.progress is Progress.STREAMING:
            await client.send(Go())
        await client.send_bytes(case.frames)
        answer = await _answer_to(client, case)
        code = Status(answer.status).name
        require(
            answer.status == case.status,
            f"expected {case.status.name}; the server answered {type(answer).__name__} {code}",
        )
        if isinstance(answer, Error):
            require(await client.receive() is None, "the connection was not closed after Error")


_ANSWERS: Final[Mapping[Outcome, type[Message]]] = {
    Outcome.CLOSED: Error,
    Outcome.REFUSED: Refusal,
    Outcome.NO_STREAM: StreamReply,
    Outcome.LOG: PartitionLog,
}


async def _answer_to(client: PlainClient, case: WrongInput) -> Message:
    """The message that says what became of the case: an answer to the request with the opaque
    `OPAQUE`, or an `Error`. Other messages answer requests that lead up to the case."""
    while True:
        message = await client.expect(Message)
        if isinstance(message, Error):
            require(case.outcome is Outcome.CLOSED, f"the server closed: {message.sentence}")
            return message
        if message.opaque != OPAQUE or case.outcome is Outcome.CLOSED:
            continue
        if case.outcome is Outcome.ROW_FAILED and isinstance(message, MutateReply):
            require(len(message.failures) == 1, f"the failures are {message.failures}")
            numbers = message.runs[0][3:]
            require(not any(numbers), f"nothing succeeded, and the run has the numbers {numbers}")
            return Refusal("", status=message.failures[0][1])
        if case.outcome is Outcome.KEY_REFUSED and isinstance(message, GetReply):
            return Refusal("", status=message.chunk.flags[0])
        kind = _ANSWERS.get(case.outcome)
        require(
            kind is type(message),
            f"expected {case.outcome.value}; the server {what_was_done(message)}",
        )
        return message


SCENARIOS: Final[Sequence[Callable[[ServerUnderTest], Awaitable[None]]]] = (
    publish_and_stream,
    open_limits_nothing,
    end_at_the_position,
    resume,
    roll_back,
    same_token,
    rows_fail_alone,
    get,
    barrier,
    durable,
)


def server_scenarios() -> dict[str, Callable[[ServerUnderTest], Awaitable[None]]]:
    """Every scenario by its name: those above, and one for each wrong input that can be played."""
    scenarios = {scenario.__name__.replace("_", "-"): scenario for scenario in SCENARIOS}
    for case in WRONG_INPUTS:
        if case.frames is not None:
            name = f"{case.topic}: {case.wrong}".replace("`", "")
            scenarios[name] = partial(play_wrong_input, case=case)
    return scenarios
