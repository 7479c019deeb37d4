"""Streams of one connection: where they start and end, and what they are held up by."""

from __future__ import annotations

from typing import Any, cast

import pytest
import structlog
import trio
import trio.testing

from tests.server.connected_peer import (
    P0,
    connected,
    make_server,
    name_replica,
    sets,
)
from upr_protocol.chunk import Bundle
from upr_protocol.errors import Status
from upr_protocol.failover import NOTHING_YET, FailoverLog, PartialSnapshot, Position
from upr_protocol.ids import (
    HistoryId,
    PartitionState,
    SeqNo,
)
from upr_protocol.limits import (
    WINDOW_BYTES_MIN,
)
from upr_protocol.wire import (
    Barrier,
    BarrierReply,
    CloseStream,
    Credit,
    CycleEnd,
    Error,
    Get,
    Go,
    Message,
    Mutate,
    Noop,
    PartitionAnswers,
    PartitionChunk,
    PartitionEnd,
    PartitionSnapshot,
    PartitionStart,
    Refusal,
    Stream,
    StreamEnd,
)
from upr_server.engine import WriterToken
from upr_server.engine.mutate_result import unpack_result
from upr_server.engine.publisher_answers import BATCHES_MAX
from upr_server.engine.repeated_batches import NO_HISTORY, RepeatedBatches
from upr_server.net import streamer
from upr_server.net.connection import AcceptedConnection
from upr_server.net.credit import CREDIT_BYTES_MIN
from upr_server.net.streamer import ANSWER_OVERHEAD_BYTES, ANSWERS_BYTES, STEP_STREAMS
from upr_server.storage.online.unsaved_answers import STEP_ANSWERS


async def test_a_stream_from_the_beginning_and_what_comes_after() -> None:
    async with connected(make_server()) as peer:
        await peer.open()
        await peer.mutate(sets(b"a", b"b", b"a"))
        assert (await peer.ask()).seq == 0
        await peer.send(Go())
        start = await peer.receive(PartitionStart)
        assert (start.start, start.end, start.may_repeat) == (0, 3, False)
        chunk = (await peer.receive(PartitionChunk)).chunk
        assert [(mutation.key, mutation.seq) for mutation in chunk] == [(b"b", 2), (b"a", 3)]
        assert (await peer.receive(PartitionEnd)).end == 3
        assert (await peer.receive(CycleEnd)).cycle == 1
        await peer.send(Barrier(b"idle"))
        assert (await peer.receive(BarrierReply)).ends == ((0, 3),)
        await peer.mutate(sets(b"c"))
        whole = (await peer.receive(PartitionSnapshot)).chunk
        assert (whole.start, whole.end) == (3, 4)
        assert [(mutation.key, mutation.seq) for mutation in whole] == [(b"c", 4)]
        await peer.send(Barrier(b"idle"))
        assert (await peer.receive(BarrierReply)).ends == ((0, 4),)
        await peer.send(CloseStream(partition=P0, opaque=peer.session.streams[P0].opaque))
        assert (await peer.receive(StreamEnd)).status == Status.STREAM_CLOSED


async def test_a_new_history_or_purge_number_is_announced_by_a_start() -> None:
    server = make_server()
    async with connected(server) as peer:
        await peer.open()
        await peer.mutate(sets(b"a"))
        await peer.ask()
        await peer.send(Go())

        async def snapshot() -> list[str]:
            """The messages of the next snapshot."""
            names: list[str] = []
            while not names or names[-1] not in ("PartitionEnd", "PartitionSnapshot"):
                names.append(type(await peer.receive(Message)).__name__)
            return [name for name in names if name.startswith("Partition")]

        async def change(key: bytes) -> None:
            await peer.send(Mutate(Bundle.of_one_run(P0, sets(key)), opaque=peer.opaque()))

        assert await snapshot() == ["PartitionStart", "PartitionChunk", "PartitionEnd"]
        await change(b"b")
        assert await snapshot() == ["PartitionSnapshot"]
        server.catalog.bucket("b").partitions[P0].purge_seq = SeqNo(1)
        await change(b"c")
        assert (await peer.receive(PartitionStart)).purge_seq == 1
        assert await snapshot() == ["PartitionChunk", "PartitionEnd"]
        await change(b"d")
        assert await snapshot() == ["PartitionSnapshot"]


async def test_a_replica_receives_a_small_snapshot_in_one_message_after_its_answers() -> None:
    server = make_server(node="a")
    async with connected(server, identity="replica:r") as peer:
        await name_replica(server)
        await peer.open()

        async def change(counter: int) -> None:
            bundle = Bundle.of_one_run(P0, sets(b"k"), counter)
            await peer.send(Mutate(bundle, bytes([7] * 16), opaque=peer.opaque()))

        async def messages() -> list[Message]:
            """The partition's messages up to the end of its snapshot."""
            received: list[Message] = []
            while not received or not isinstance(received[-1], PartitionEnd | PartitionSnapshot):
                received.append(await peer.receive(Message))
            return [message for message in received if "Partition" in type(message).__name__]

        await change(1)
        assert (await peer.ask(with_answers=True)).status == Status.OK
        await peer.send(Go())
        first = await messages()
        assert list(map(type, first)) == [
            PartitionStart,
            PartitionChunk,
            PartitionAnswers,
            PartitionEnd,
        ]
        await change(2)
        answers, snapshot = await messages()
        assert isinstance(answers, PartitionAnswers)
        assert [(counter, seq) for _, counter, seq, _ in answers.rows][-1] == (2, 2)
        assert isinstance(snapshot, PartitionSnapshot)
        assert (snapshot.chunk.start, snapshot.chunk.end) == (1, 2)


class LargestSending(trio.abc.Instrument):
    """Records the most bytes that one step of any task has written to a connection's socket."""

    def __init__(self, connection: AcceptedConnection) -> None:
        self.nbytes = 0
        self._connection = connection
        self._bytes_out = self._count()

    def _count(self) -> int:
        return cast("int", self._connection.statistics()["bytes_out"])

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        bytes_before, self._bytes_out = self._bytes_out, self._count()
        self.nbytes = max(self.nbytes, self._bytes_out - bytes_before)


@pytest.mark.parametrize("is_whole", [False, True])
async def test_many_answers_to_publishers_are_sent_in_steps(is_whole: bool) -> None:
    """A new replica receives up to 65,536 answers of a partition: before the end of its first
    snapshot, or before a snapshot in one message."""
    server, step_count = make_server(node="a"), 4
    async with connected(server, identity="replica:r") as peer:
        await name_replica(server)
        await peer.open()
        partition = server.catalog.bucket("b").partitions[P0]

        async def hear_snapshot() -> list[Message]:
            received: list[Message] = []
            while not received or not isinstance(received[-1], PartitionEnd | PartitionSnapshot):
                received.append(await peer.receive(Message))
            return received

        assert (await peer.ask(with_answers=True)).status == Status.OK
        await peer.send(Go())
        if is_whole:
            await peer.mutate(sets(b"first"))
            await hear_snapshot()
        for number in range(step_count * STEP_ANSWERS):
            token = WriterToken((number // BATCHES_MAX + 1).to_bytes(16), number)
            partition.repeated_batches.answers.remember(token, b"answer", partition.high_seq)
        (connection,) = server.connections.connections
        largest_sending = LargestSending(connection)
        trio.lowlevel.add_instrument(largest_sending)
        bundle = Bundle.of_one_run(P0, sets(b"last"))
        await peer.send(Mutate(bundle, opaque=peer.opaque()))
        received = await hear_snapshot()
        trio.lowlevel.remove_instrument(largest_sending)
        answers = [message for message in received if isinstance(message, PartitionAnswers)]
        assert [len(message.rows) for message in answers] == [STEP_ANSWERS] * step_count
        assert isinstance(received[-1], PartitionSnapshot if is_whole else PartitionEnd)
        answer_bytes = ANSWER_OVERHEAD_BYTES + len(b"answer")
        assert largest_sending.nbytes < 2 * STEP_ANSWERS * answer_bytes


async def test_large_answers_to_publishers_are_sent_in_small_messages() -> None:
    """A replica processes each message in one step, which takes 10 µs for each KiB of answers to
    increments."""
    server, answer = make_server(node="a"), bytes(8 * 1024)
    async with connected(server, identity="replica:r") as peer:
        await name_replica(server)
        await peer.open()
        answers = server.catalog.bucket("b").partitions[P0].repeated_batches.answers
        count = 2 * ANSWERS_BYTES // len(answer)
        for number in range(1, count + 1):
            answers.remember(WriterToken(number.to_bytes(16), 1), answer, SeqNo(0))
        assert (await peer.ask(with_answers=True)).status == Status.OK
        await peer.send(Go())
        await peer.send(Mutate(Bundle.of_one_run(P0, sets(b"k")), opaque=peer.opaque()))
        row_counts: list[int] = []
        while sum(row_counts) < count:
            message = await peer.receive(Message)
            if isinstance(message, PartitionAnswers):
                row_counts.append(len(message.rows))
        assert max(row_counts) * len(answer) <= ANSWERS_BYTES


async def test_answers_to_publishers_are_taken_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking 65,536 of them at once would take too long for one turn of the event loop."""
    monkeypatch.setattr(streamer, "STEP_ANSWERS", 4)
    server, count = make_server(node="a"), 13
    taken_counts: list[int] = []
    take = RepeatedBatches.answers_between

    def take_and_count(batches: RepeatedBatches, *args: Any, **options: Any) -> list[Any]:
        rows = take(batches, *args, **options)
        taken_counts.append(len(rows))
        return rows

    monkeypatch.setattr(RepeatedBatches, "answers_between", take_and_count)
    async with connected(server, identity="replica:r") as peer:
        await name_replica(server)
        await peer.open()
        await peer.mutate(sets(*(b"%d" % number for number in range(count))))
        answers = server.catalog.bucket("b").partitions[P0].repeated_batches.answers
        for number in range(1, count + 1):
            answers.remember(WriterToken(number.to_bytes(16), 1), b"answer", number)
        assert (await peer.ask(with_answers=True)).status == Status.OK
        await peer.send(Go())
        received: list[int] = []
        while not isinstance(message := await peer.receive(Message), PartitionEnd):
            if isinstance(message, PartitionAnswers):
                received += [seq for _, _, seq, _ in message.rows]
        assert received == list(range(1, count + 1))
        assert max(taken_counts) == 4


async def test_a_replica_hears_of_answers_that_were_forgotten_before_they_were_sent() -> None:
    """Before a snapshot is sent, its writer sends many more batches."""
    server, writer = make_server(node="a"), bytes(16)
    async with connected(server, identity="replica:r") as peer:
        await name_replica(server)
        await peer.open()
        await peer.mutate(sets(b"k"))
        partition = server.catalog.bucket("b").partitions[P0]
        answers = partition.repeated_batches.answers
        answers.remember(WriterToken(writer, 5), b"answer", SeqNo(1))
        # Close the snapshot, as another consumer would, so that the next change is in another one.
        cursor = partition.manager.register("other", SeqNo(0)).cursor
        while cursor.next() is not None:
            pass
        await peer.mutate(sets(b"l"))
        for counter in range(6, 6 + BATCHES_MAX):
            answers.remember(WriterToken(writer, counter), b"answer", SeqNo(2))
        assert answers.answer_to(WriterToken(writer, 5)) == (None, True)
        assert (await peer.ask(with_answers=True)).status == Status.OK
        await peer.send(Go())
        message = await peer.receive(PartitionAnswers)
        assert [row[:3] for row in message.rows] == [(writer, 5, 0)]
        assert unpack_result(message.rows[0][3]).history_id == NO_HISTORY
        assert (await peer.receive(PartitionEnd)).end == 1


async def test_a_replica_hears_once_of_the_answers_that_a_rollback_may_have_taken() -> None:
    """When its stream starts, a replica receives each writer's newest batch up to its position."""
    server, writer = make_server(node="a"), bytes(16)
    async with connected(server, identity="replica:r") as peer:
        await name_replica(server)
        await peer.open()
        partition = server.catalog.bucket("b").partitions[P0]
        answers = partition.repeated_batches.answers
        for counter, key in enumerate((b"k", b"l"), 1):
            await peer.mutate(sets(key))
            answers.remember(WriterToken(writer, counter), b"answer", SeqNo(counter))
        position = Position(partition.failover_log, SeqNo(2), SeqNo(2))
        assert (await peer.ask(position, with_answers=True)).status == Status.OK
        await peer.send(Go())
        answer_rows: list[list[tuple[bytes, int, int]]] = []
        for key in (b"m", b"n"):
            await peer.send(Mutate(Bundle.of_one_run(P0, sets(key)), opaque=peer.opaque()))
            answer_rows.append([])
            while not isinstance(
                message := await peer.receive(Message), PartitionEnd | PartitionSnapshot
            ):
                if isinstance(message, PartitionAnswers):
                    answer_rows[-1] += [row[:3] for row in message.rows]
        # The answer at the replica's position is sent a second time, as to every replica.
        assert answer_rows == [[(writer, 2, 2)] * 2, []]


async def test_a_stream_with_an_end_ends_at_that_snapshot() -> None:
    async with connected(make_server()) as peer:
        await peer.open()
        await peer.mutate(sets(b"a", b"b", b"c"))
        await peer.ask(end_seq=SeqNo(2))
        await peer.send(Go())
        assert (await peer.receive(PartitionEnd)).end == 3
        assert (await peer.receive(StreamEnd)).status == Status.END_REACHED
        # A stream that starts at its end ends at once.
        log = FailoverLog.of_pairs([(1, 0)])
        await peer.ask(Position(log, SeqNo(3), SeqNo(3)), end_seq=SeqNo(3))
        assert (await peer.receive(StreamEnd)).status == Status.END_REACHED


async def test_a_consumer_cut_inside_a_snapshot_continues_there() -> None:
    async with connected(make_server()) as peer:
        await peer.open()
        await peer.mutate(sets(*(b"%d" % index for index in range(9))))
        log = FailoverLog.of_pairs([(1, 0)])
        position = Position(
            log, SeqNo(0), SeqNo(4), PartialSnapshot(HistoryId(1), SeqNo(0), SeqNo(9))
        )
        reply = await peer.ask(position)
        assert (reply.status, reply.seq) == (Status.OK, 4)
        await peer.send(Go())
        start = await peer.receive(PartitionStart)
        assert (start.start, start.end) == (4, 9)
        assert [mutation.seq for mutation in (await peer.receive(PartitionChunk)).chunk] == [
            5,
            6,
            7,
            8,
            9,
        ]


async def test_a_consumer_cut_inside_a_snapshot_gets_no_end_before_that_snapshots_end() -> None:
    """The server has smaller snapshots now. At the end of the first one the client may lack keys:
    it did not receive them, because they changed again later in the snapshot that it had begun."""
    server = make_server()
    async with connected(server) as peer:
        await peer.open()
        await peer.mutate(sets(b"a", b"b", b"c"))
        manager = server.catalog.bucket("b").partitions[P0].manager
        manager.register("another", SeqNo(0)).cursor.next()  # closes the snapshot at 3
        await peer.mutate(sets(*(b"%d" % index for index in range(6))))
        cut = PartialSnapshot(HistoryId(1), SeqNo(0), SeqNo(9))
        await peer.ask(Position(FailoverLog.of_pairs([(1, 0)]), SeqNo(0), SeqNo(2), cut))
        await peer.send(Go())
        start = await peer.receive(PartitionStart)
        assert (start.start, start.end) == (2, 9)
        assert (await peer.receive(PartitionEnd)).end == 9


async def test_an_end_inside_a_snapshot_that_was_cut_is_reached_at_its_end() -> None:
    """The client's position is above the end that it asks for, but its copy is not consistent at
    any sequence number above 0."""
    async with connected(make_server()) as peer:
        await peer.open()
        await peer.mutate(sets(*(b"%d" % index for index in range(9))))
        cut = PartialSnapshot(HistoryId(1), SeqNo(0), SeqNo(9))
        await peer.ask(Position(FailoverLog.of_pairs([(1, 0)]), SeqNo(0), SeqNo(4), cut), SeqNo(2))
        await peer.send(Go())
        assert (await peer.receive(PartitionEnd)).end == 9
        assert (await peer.receive(StreamEnd)).status == Status.END_REACHED


async def test_a_consumer_of_another_history_is_rolled_back() -> None:
    async with connected(make_server()) as peer:
        await peer.open()
        await peer.mutate(sets(b"a"))
        position = Position(FailoverLog.of_pairs([(99, 0)]), SeqNo(5), SeqNo(5))
        reply = await peer.ask(position)
        assert (reply.status, reply.seq) == (Status.ROLLBACK, 0)
        assert "no history in common" in reply.reason
        ahead = Position(FailoverLog.of_pairs([(1, 0)]), SeqNo(5), SeqNo(5))
        assert (await peer.ask(ahead)).status == Status.SEQ_TOO_HIGH


async def test_the_window_holds_the_stream_until_it_is_acknowledged(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with connected(make_server(), window_bytes=WINDOW_BYTES_MIN) as peer:
        await peer.open()
        for index in range(8):
            await peer.mutate(sets(b"k%d" % index, value=bytes(100_000)))
        await peer.ask()
        await peer.send(Go(), Barrier(b"all"))
        chunk = await peer.receive(PartitionChunk)
        await trio.testing.wait_all_tasks_blocked()
        await peer.send(Noop())
        with trio.move_on_after(1):
            await peer.receive(PartitionEnd)
        assert not peer.session.window.is_open, "only one frame may overshoot the window"
        chunk_count = chunk.chunk.count
        peer.session.acknowledge(24 + chunk.chunk.nbytes)
        await peer.send()
        while True:
            message = await peer.receive(Message)
            if isinstance(message, PartitionChunk):
                chunk_count += message.chunk.count
                peer.session.acknowledge(24 + message.chunk.nbytes)
                await peer.send()
            if isinstance(message, BarrierReply):
                break
        assert chunk_count == 8


async def test_a_shut_window_holds_back_chunks_and_nothing_else() -> None:
    """A single chunk fills the window. The snapshot's end and the barrier are sent nevertheless.
    Later writes wait in the open snapshot, where they are deduplicated."""
    async with connected(make_server(), window_bytes=WINDOW_BYTES_MIN) as peer:
        await peer.open()
        await peer.mutate(sets(b"k", value=bytes(WINDOW_BYTES_MIN)))
        await peer.ask()
        await peer.send(Go(), Barrier(b"all"))
        chunk = await peer.receive(PartitionChunk)
        assert not peer.session.window.is_open
        await peer.receive(PartitionEnd)
        await peer.receive(BarrierReply)
        for _ in range(3):
            await peer.mutate(sets(b"k"))
            await trio.testing.wait_all_tasks_blocked()
        peer.session.acknowledge(24 + chunk.chunk.nbytes)
        await peer.send()
        # If a snapshot had begun while the window was full, the first chunk would end at 2.
        chunk = await peer.receive(PartitionChunk)
        assert (chunk.chunk.count, chunk.chunk.end) == (1, 4)


async def test_a_barrier_covers_snapshots_that_other_consumers_closed() -> None:
    """When its barrier returns, even the slowest consumer has everything."""
    server = make_server()
    async with (
        connected(server) as publisher,
        connected(server) as fast,
        connected(server, window_bytes=WINDOW_BYTES_MIN) as slow,
    ):
        await publisher.open()
        for peer in (fast, slow):
            await peer.open()
            await peer.ask()
            await peer.send(Go())
            await peer.receive(CycleEnd)
        for index in range(6):
            # Each change is in a snapshot of its own, because the fast consumer reads it at once.
            await publisher.mutate(sets(b"k%d" % index, value=bytes(70_000)))
            chunk = await fast.receive(PartitionChunk)
            assert chunk.chunk.count == 1
            fast.session.acknowledge(24 + chunk.chunk.nbytes)
            if not isinstance(chunk, PartitionSnapshot):
                await fast.receive(PartitionEnd)
        await slow.send(Barrier(b"all"))
        keys = set()
        while True:
            message = await slow.receive(Message)
            if isinstance(message, BarrierReply):
                break
            if isinstance(message, PartitionChunk):
                keys |= set(message.chunk.keys())
                slow.session.acknowledge(24 + message.chunk.nbytes)
                await slow.send()
        assert keys == {b"k%d" % index for index in range(6)}
        assert message.ends == ((0, 6),)


async def test_deleting_the_bucket_ends_its_streams() -> None:
    server = make_server()
    async with connected(server) as peer:
        await peer.open()
        await peer.ask()
        await peer.send(Go())
        await peer.receive(CycleEnd)
        await server.catalog.delete_bucket("b")
        assert (await peer.receive(StreamEnd)).status == Status.BUCKET_DELETED
        await peer.send(Get((b"k",), partition=P0, opaque=peer.opaque()))
        assert (await peer.receive(Refusal)).status == Status.NO_BUCKET
        # A publisher is refused, too, each time.
        for _ in range(2):
            bundle = Bundle.of_one_run(P0, sets(b"k", value=bytes(CREDIT_BYTES_MIN)))
            await peer.send(Mutate(bundle, opaque=peer.opaque()))
            assert (await peer.receive(Refusal)).status == Status.NO_BUCKET
            await peer.receive(Credit)


async def test_the_streams_of_many_partitions_end_in_steps() -> None:
    """Each step ends some of them. Requests are refused from the first step on."""
    partition_count = 3 * STEP_STREAMS
    server = make_server()
    async with connected(server) as peer:
        await server.catalog.create_bucket("wide", partition_count, 8 * 1024 * 1024)
        await peer.open("wide")
        await peer.ask_for_all(partition_count)
        (connection,) = server.connections.connections
        for steps in (connection.shut_down(), connection.context.leave_bucket()):
            count_before = len(connection.session.streams)
            assert next(steps, "over") is None
            assert len(connection.session.streams) == count_before - STEP_STREAMS
        await peer.send(Get((b"k",), partition=P0, opaque=peer.opaque()))
        while not isinstance(answer := await peer.receive(Message), Refusal):
            assert isinstance(answer, StreamEnd)
        assert answer.status == Status.NO_BUCKET


async def test_a_long_reason_why_there_is_no_stream_is_shortened() -> None:
    """The reason may contain parts of a damaged record."""
    server = make_server()
    async with connected(server) as peer:
        await peer.open()
        server.catalog.bucket("b").partitions[0].damage = "\U0001f4a5" * 2000
        reply = await peer.ask()
        assert reply.status == Status.DAMAGED
        assert reply.reason.startswith("its copy here is damaged: \U0001f4a5")


async def test_a_stream_that_had_to_wait_is_not_opened_when_the_session_has_ended() -> None:
    """The tasks of an ended session may still run for a turn of the event loop."""
    server = make_server()
    async with connected(server) as peer:
        await peer.open()
        (connection,) = server.connections.connections
        (bucket,) = server.catalog.buckets
        request = Stream(PartitionState.ACTIVE, NOTHING_YET, partition=P0, opaque=peer.opaque())
        (partition,) = bucket.partitions
        partition.begins_no_stream = True
        await peer.send(request)
        await trio.testing.wait_all_tasks_blocked()
        partition.begins_no_stream = False
        connection.context.streams_may_begin.notify()
        connection.session.fail(Status.IDLE, "the client is silent")
        with structlog.testing.capture_logs() as lines:
            await peer.receive(Error)
        assert not lines
