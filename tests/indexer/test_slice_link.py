"""The two ends of a link to a slice, in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, cast

import msgspec
import pytest
import trio
import trio.testing

from tests.indexer.kit import name_of
from tests.indexer.silent_listener import NoListener
from upr_server.indexer import node_links, slice_server
from upr_server.indexer.node_links import SILENT_S, serve_link
from upr_server.indexer.pool import MemoryPool, OverloadedError
from upr_server.indexer.pure.definition import IndexDefinition
from upr_server.indexer.query import Query, QueryError
from upr_server.indexer.remote_slice import RETRY_S, RemoteSlice
from upr_server.indexer.replicated_slice import ReplicatedSlice
from upr_server.indexer.slice_link import HANG_S, PING_S
from upr_server.indexer.slice_server import QUESTIONS_MAX, SliceServer
from upr_server.indexer.slices import SliceHolder, SliceId, SliceMissingError, SliceScan
from upr_server.indexer.worker_messages import (
    AskStatistics,
    AskStop,
    FromNode,
    MessageStream,
    NodeQuestion,
    NumberedAnswer,
    NumberedQuestion,
    Ping,
    Question,
    ToNode,
    error_of,
    failure_of,
)

SCAN = SliceScan(name_of("d/city"), IndexDefinition(key=("city",)), Query(), 1000)


class OtherNode:
    """A node that answers every question but pings with the same bytes."""

    def __init__(self, answer: bytes) -> None:
        self.links = 0
        self._answer = answer

    async def open_link(self, nursery: trio.Nursery) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        self.links += 1
        own_end, peer_end = trio.testing.memory_stream_pair()
        nursery.start_soon(self._serve, peer_end)
        return own_end

    async def _serve(self, stream: trio.abc.Stream) -> None:
        frames = MessageStream(stream, ToNode)
        async with stream, trio.open_nursery() as nursery:
            nursery.start_soon(frames.run_sender)
            async with aclosing(frames.received_messages()) as messages:
                async for message in messages:
                    if isinstance(message, NumberedQuestion):
                        question: Question = msgspec.json.decode(message.question, type=Question)
                        await self._answer_question(frames, message, question)
            nursery.cancel_scope.cancel()

    async def _answer_question(
        self, frames: MessageStream, message: NumberedQuestion, question: Question
    ) -> None:
        answer = b"\xc0" if isinstance(question, Ping) else self._answer
        frames.queue_message(NumberedAnswer(message.number, answer))


@asynccontextmanager
async def a_remote_slice(other_node: OtherNode) -> AsyncIterator[RemoteSlice]:
    async with trio.open_nursery() as nursery:
        part = RemoteSlice(SliceId(0, 1), "http://n:1", partial(other_node.open_link, nursery))
        nursery.start_soon(part.run, NoListener())
        await trio.testing.wait_all_tasks_blocked()
        yield part
        nursery.cancel_scope.cancel()


class LateNode(OtherNode):
    """A node that answers pings only while `may_answer` is set."""

    def __init__(self) -> None:
        super().__init__(b"\xc0")
        self.may_answer = trio.Event()
        self.ping_came = trio.Event()

    async def _answer_question(
        self, frames: MessageStream, message: NumberedQuestion, question: Question
    ) -> None:
        self.ping_came.set()
        await self.may_answer.wait()
        await super()._answer_question(frames, message, question)


@pytest.mark.parametrize("order_of_tasks", range(8))
async def test_a_pause_of_the_asking_process_does_not_end_the_link(
    autojump_clock: trio.testing.MockClock, order_of_tasks: int
) -> None:
    """The answer came during the pause, and has not yet been read when the time is over."""
    other = LateNode()
    async with a_remote_slice(other) as part:
        await other.ping_came.wait()
        await trio.sleep(HANG_S / 2)
        other.may_answer.set()
        autojump_clock.jump(2 * HANG_S)
        await trio.sleep(5)
        assert other.links == 1
        assert trio.current_time() - part.heard_at < 1


async def test_a_link_ends_if_a_ping_is_not_answered(
    autojump_clock: trio.testing.MockClock,
) -> None:
    other = LateNode()
    async with a_remote_slice(other):
        await other.ping_came.wait()
        await trio.sleep(HANG_S - 1)
        assert other.links == 1
        await trio.sleep(1 + PING_S + RETRY_S)
        assert other.links == 2


class BusySlice:
    """A slice that answers the indexer's own questions, and nothing else."""

    slice_id = SliceId(0, 1)

    async def confirm(self) -> int:
        await trio.lowlevel.checkpoint()
        return 7

    async def stop(self) -> None:
        await trio.lowlevel.checkpoint()

    async def ping(self) -> None:
        await trio.lowlevel.checkpoint()

    async def statistics(self) -> dict[str, Any]:
        await trio.sleep_forever()
        raise AssertionError


class BusyNode(OtherNode):
    """A node whose slice is busy."""

    def __init__(self) -> None:
        super().__init__(b"")

    async def _serve(self, stream: trio.abc.Stream) -> None:
        frames = MessageStream(stream, ToNode)
        holder = cast("SliceHolder", BusySlice())
        server = SliceServer(frames, holder, MemoryPool(2**20), NodeQuestion)
        async with stream, trio.open_nursery() as nursery:
            nursery.start_soon(frames.run_sender)
            async with aclosing(frames.received_messages()) as messages:
                async for message in messages:
                    server.handle_message(message, nursery)
            nursery.cancel_scope.cancel()


async def test_too_many_questions_do_not_end_the_link(
    autojump_clock: trio.testing.MockClock,
) -> None:
    other = BusyNode()
    async with a_remote_slice(other) as part, trio.open_nursery() as nursery:
        for _ in range(QUESTIONS_MAX):
            nursery.start_soon(part.statistics)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(OverloadedError):
            await part.statistics()
        assert await part.confirm() == 7
        await trio.sleep(5)
        assert other.links == 1
        assert trio.current_time() - part.heard_at < 1
        nursery.cancel_scope.cancel()


async def test_a_worker_that_has_too_many_questions_can_be_stopped(
    autojump_clock: trio.testing.MockClock,
) -> None:
    own_end, worker_end = trio.testing.memory_stream_pair()
    frames, holder = MessageStream(worker_end, ToNode), cast("SliceHolder", BusySlice())
    server = SliceServer(frames, holder, MemoryPool(2**20), Question)
    async with own_end, worker_end, trio.open_nursery() as nursery:
        for number in range(QUESTIONS_MAX):
            question = msgspec.json.encode(AskStatistics())
            server.handle_message(NumberedQuestion(number, question), nursery)
        stop = NumberedQuestion(QUESTIONS_MAX, msgspec.json.encode(AskStop()))
        server.handle_message(stop, nursery)
        nursery.start_soon(frames.run_sender)
        with trio.fail_after(5):
            # The stop ends the worker's tasks.
            await trio.sleep_forever()
    assert nursery.cancel_scope.cancelled_caught


async def test_too_many_pings_do_not_end_the_link(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slice_server, "QUESTIONS_MAX", 0)
    monkeypatch.setattr(slice_server, "OWN_QUESTIONS_MAX", 0)
    other = BusyNode()
    async with a_remote_slice(other) as part:
        await trio.sleep(5)
        assert other.links == 1
        assert trio.current_time() - part.heard_at < 1


@pytest.mark.parametrize(
    "answer",
    [b"\xa1x", b"", b"\xa1\xff", b"\x81\xa1z" + b"\x91" * 100_000 + b"\0"],
    ids=["another type", "nothing", "not UTF-8", "deep"],
)
@pytest.mark.parametrize(
    "ask",
    [
        lambda part: part.confirm(),
        lambda part: part.scan(SCAN),
        lambda part: part.status(SCAN.name, SCAN.definition, {}),
        lambda part: part.statistics(),
    ],
    ids=["confirm", "scan", "status", "statistics"],
)
async def test_an_answer_of_another_shape_ends_the_link_and_nothing_else(
    autojump_clock: trio.testing.MockClock,
    ask: Callable[[RemoteSlice], Awaitable[Any]],
    answer: bytes,
) -> None:
    other_node = OtherNode(answer)
    async with a_remote_slice(other_node) as part:
        with pytest.raises(SliceMissingError, match="slice 0 of 1 has given an answer"):
            await ask(part)
        await trio.sleep(1.5)
        assert other_node.links == 2
        await part.ping()


async def test_an_abandoned_answer_of_another_shape_ends_the_link_and_nothing_else(
    autojump_clock: trio.testing.MockClock,
) -> None:
    other_node = OtherNode(b"\xa1x")
    query = Query(hold_s=10)
    async with a_remote_slice(other_node) as part:
        with trio.CancelScope() as scope:
            scope.cancel()
            await part.scan(msgspec.structs.replace(SCAN, query=query))
        assert scope.cancelled_caught
        await trio.sleep(1.5)
        assert other_node.links == 2
        await part.ping()


def test_the_error_of_a_wrong_query_names_its_field() -> None:
    error = error_of(failure_of(QueryError("prefix", "is too long")))
    assert isinstance(error, QueryError)
    assert (error.place, str(error)) == ("prefix", "prefix: is too long")


@asynccontextmanager
async def a_served_link() -> AsyncIterator[tuple[MessageStream, trio.abc.Stream, ReplicatedSlice]]:
    """The link of another node to a busy slice: what it sends with, and its end of the stream."""
    part = ReplicatedSlice(SliceId(0, 1), {0: ("http://n:1", cast("SliceHolder", BusySlice()))}, 0)
    peer_end, own_end = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        frames = MessageStream(peer_end, FromNode)

        async def serve() -> None:
            async with own_end:
                await serve_link(own_end, part, MemoryPool(2**20))

        nursery.start_soon(serve)
        nursery.start_soon(frames.run_sender)
        yield frames, peer_end, part
        nursery.cancel_scope.cancel()


async def test_a_link_on_which_nothing_is_asked_ends(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with a_served_link() as (frames, stream, _):
        for number in range(30):
            frames.queue_message(NumberedQuestion(number, msgspec.json.encode(Ping())))
            assert await stream.receive_some()
            await trio.sleep(SILENT_S / 10)
        asked_at = trio.current_time()
        while await stream.receive_some():
            pass
        assert trio.current_time() - asked_at <= SILENT_S


@pytest.mark.parametrize("order_of_tasks", range(8))
async def test_a_pause_of_the_asked_process_does_not_end_the_link(
    autojump_clock: trio.testing.MockClock, order_of_tasks: int
) -> None:
    """A question came during the pause, and has not yet been read when the time is over."""
    async with a_served_link() as (frames, stream, _):
        await trio.sleep(SILENT_S / 2)
        frames.queue_message(NumberedQuestion(1, msgspec.json.encode(Ping())))
        autojump_clock.jump(2 * SILENT_S)
        assert await stream.receive_some()
        frames.queue_message(NumberedQuestion(2, msgspec.json.encode(Ping())))
        assert await stream.receive_some()


async def test_a_node_that_reads_no_answers_is_not_answered_without_end() -> None:
    stream = UnreadStream()
    part = ReplicatedSlice(SliceId(0, 1), {0: ("http://n:1", cast("SliceHolder", BusySlice()))}, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_links, "OUTBOX_BYTES_MAX", 10_000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_link, stream, part, MemoryPool(2**20))
            await trio.testing.wait_all_tasks_blocked()
            assert stream.taken < 2_000
            nursery.cancel_scope.cancel()


class UnreadStream:
    """Brings 5,000 pings, and takes nothing."""

    def __init__(self) -> None:
        self.taken = 0

    async def send_all(self, _data: bytes | bytearray | memoryview, /) -> None:
        await trio.sleep_forever()

    async def receive_some(self, _max_bytes: int, /) -> bytes:
        await trio.lowlevel.checkpoint()
        if self.taken == 5_000:
            await trio.sleep_forever()
        self.taken += 1
        # Each has a number of its own.
        data = msgspec.msgpack.encode(NumberedQuestion(self.taken, msgspec.json.encode(Ping())))
        return len(data).to_bytes(4, "big") + data


async def test_of_reports_that_wait_the_newest_is_sent() -> None:
    peer_end, own_end = trio.testing.memory_stream_pair()
    frames = MessageStream(own_end, ToNode)
    first = frames.queue_message(NumberedAnswer(1))
    frames.queue_message(NumberedAnswer(2))
    frames.withdraw_message(first)
    frames.queue_message(NumberedAnswer(3))
    numbers = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(frames.run_sender)
        async with aclosing(MessageStream(peer_end, FromNode).received_messages()) as messages:
            async for message in messages:
                numbers.append(message.number)
                if message.number == 3:
                    break
        # What has been sent cannot be withdrawn.
        frames.withdraw_message(first)
        await frames.wait_until_unsent_below(1)
        nursery.cancel_scope.cancel()
    assert numbers == [2, 3]
