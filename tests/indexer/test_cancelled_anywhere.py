"""Every asynchronous operation of the indexer, cancelled at each of its steps in turn.

The indexer runs beside a real server, on a network in memory and with a mock clock. Work that the
indexer gives to threads is done in the event loop. After each cancellation no task, no connection
and no reserved memory is left, and the indexes have the right entries. Tasks that run for ever are
cancelled with their indexer. The last test fails if no other test cancels an operation.
"""

from __future__ import annotations

import json
import signal
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest
import trio
from trio.testing import MockClock

from tests.indexer.kit import (
    BUCKET,
    an_indexer,
    ask,
    by_brute_force,
    name_of,
    scan,
    until_ready,
    workers_in_the_loop,
)
from tests.indexer.node_kit import Nodes, some_nodes
from tests.indexer.node_kit import until_ready as until_every_copy_is_ready
from tests.indexer.threads import in_the_loop
from tests.indexer.web_socket_server import serve_web_socket
from tests.indexer.world import World
from tests.kit import async_names
from tests.kit.cancellation import cancelled_at_each_step
from tests.kit.memory_network import HOST, MemoryNetwork, check, node
from tests.kit.process import eventually
from tests.server.users import USERS
from upr_protocol.client import Address, connect
from upr_protocol.ids import Durability, PartitionId
from upr_protocol.security import UNPROTECTED
from upr_protocol.users import Right
from upr_server.app import Server
from upr_server.indexer.announcements import Announcements
from upr_server.indexer.app import serve, serving
from upr_server.indexer.bucket_histories import MAX_AGE_S, BucketHistories
from upr_server.indexer.builder import IndexBuilder
from upr_server.indexer.catalog import DesignCatalog
from upr_server.indexer.config import IndexerConfig
from upr_server.indexer.connection_log import log_connection
from upr_server.indexer.definitions import Definitions, NoIndexError
from upr_server.indexer.designs import Designs
from upr_server.indexer.directory import (
    LOCK_TIMEOUT_S,
    locked_folder,
    remove_other_slices,
    retry_while_in_use,
)
from upr_server.indexer.disk import Disk
from upr_server.indexer.entry_stream import EntryStream
from upr_server.indexer.freshness import ScanBarriers
from upr_server.indexer.http_access import RENEW_S, HttpAccess
from upr_server.indexer.http_server import answering_over_http
from upr_server.indexer.index_batch import IndexBatch
from upr_server.indexer.indexer import Indexer, running_indexer
from upr_server.indexer.log_in_turns import LogInTurns
from upr_server.indexer.membership import Membership
from upr_server.indexer.moments import Moment, Moments
from upr_server.indexer.node_links import serve_link
from upr_server.indexer.overlay import DesignOverlay
from upr_server.indexer.pipeline import Pipeline
from upr_server.indexer.pool import STREAM_SHARE, MemoryPool
from upr_server.indexer.pure.definition import IndexDefinition
from upr_server.indexer.pure.node_map import NodeMap
from upr_server.indexer.query import Query
from upr_server.indexer.remote_slice import RemoteSlice
from upr_server.indexer.replicated_slice import ReplicatedSlice
from upr_server.indexer.scanner import Scanner
from upr_server.indexer.server_progress import ServerProgress
from upr_server.indexer.short_scan import VALUES_MAX, check_query, selection_of
from upr_server.indexer.silence import Silence
from upr_server.indexer.slice import Slice
from upr_server.indexer.slice_link import LinkedSlice
from upr_server.indexer.slice_scanner import SliceScanner
from upr_server.indexer.slices import SliceId
from upr_server.indexer.stream import IndexerStream
from upr_server.indexer.web_socket import (
    AcceptedWebSocket,
    OpenedWebSocket,
    WebSocketRefusedError,
    accept_web_socket,
    open_web_socket,
    refuse_web_socket,
)
from upr_server.indexer.worker import SliceWorker, serve_slice
from upr_server.indexer.worker_messages import MessageStream, NumberedAnswer, ToNode
from upr_server.indexer.worker_process import WorkerProcess, worker_process

Function = Callable[..., Any]
CITY: Final = IndexDefinition(("city",))
DESIGN: Final = b'{"indexes": {"city": {"key": ["city"]}}}'
CONTENTS: Final = {b"k%d" % n: json.dumps({"city": "abc"[n % 3]}).encode() for n in range(9)}
EVERY: Final = 7
"""Operations of hundreds of steps are cancelled at one step of this many."""
TRIED: Final[set[Function]] = set()
"""The operations that the tests below cancel. Each test checks that it cancels its own."""


def tries(*functions: Function) -> tuple[Function, ...]:
    TRIED.update(functions)
    return functions


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> MemoryNetwork:
    monkeypatch.setattr(trio.to_thread, "run_sync", in_the_loop)
    monkeypatch.setattr(trio.from_thread, "check_cancelled", lambda: None)
    return MemoryNetwork(monkeypatch)


@pytest.fixture
async def server(network: MemoryNetwork, autojump_clock: MockClock) -> AsyncIterator[Server]:
    async with node("a", BUCKET) as server, connect(server.url(BUCKET)) as client:
        for key, value in CONTENTS.items():
            await client.set(key, value)
        yield server


def check_nothing_is_held(server: Server, indexer: Indexer) -> None:
    """Checks that nothing of an indexer or of its server is held."""
    check(server)
    assert indexer.pool.scan_bytes == 0
    assert indexer.pool.used_bytes == 0
    assert not any(len(part.moments) for part in indexer.slices)
    assert not any(index.readers for index in indexer.slices[0].definitions._indexes.values())


# Questions.


async def read_twice(indexer: Indexer) -> None:
    """Two tasks read one moment, one after the other."""
    file = indexer.slices[0].definitions.find(name_of("d/city")).file
    moment = indexer.slices[0].moments.hold(file, file.open_view())

    async def read() -> None:
        async with moment.reading() as view:
            await trio.sleep(1)
            assert view.entry_count() == len(CONTENTS)

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            nursery.start_soon(read)
    finally:
        indexer.slices[0].moments.release(moment)


async def hold_and_release(indexer: Indexer) -> None:
    """Has a moment held, and releases it."""
    page = await ask(indexer, "d/city", Query(hold_s=1))
    try:
        await indexer.scanner.release(page.moment)
    finally:
        for moment in list(indexer.slices[0].moments._moments.values()):
            indexer.slices[0].moments.release(moment)


async def stream_entries(indexer: Indexer) -> None:
    """Reads all entries as lines."""
    lines: list[bytes] = []

    async def take(piece: bytes) -> None:
        await trio.sleep(0.1)
        lines.extend(piece.splitlines())

    query = Query(consistency="now", limit=5)
    await EntryStream(indexer.scanner, name_of("d/city"), query).run(take)
    assert len(lines) == 6


async def wait_until_applied(part: Slice) -> None:
    """Waits until the catalog has a batch in which nothing has changed."""
    partition = PartitionId(0)
    part.pipeline.put(IndexBatch(partition, part.catalog.file.mark(partition)))
    await part.pipeline.wait_until_applied(part.pipeline.put_count, part.catalog.file)


QUESTIONS: Final[dict[Function, Callable[[Indexer, int], Awaitable[object]]]] = {
    Scanner.status: lambda indexer, _: indexer.scanner.status(name_of("d/city")),
    check_query: lambda *_: check_query(Query(prefix=[[0] * (VALUES_MAX + 1)])),
    selection_of: lambda *_: selection_of(Query(prefix=[[0] * (VALUES_MAX + 1)]), 1),
    Scanner.statuses: lambda indexer, _: indexer.scanner.statuses(),
    ServerProgress.seqs: lambda indexer, _: indexer.server_progress.seqs(),
    Indexer.statistics: lambda indexer, _: indexer.statistics(),
    Scanner.scan: lambda indexer, _: scan(indexer, "d/city"),
    Scanner.release: lambda indexer, _: hold_and_release(indexer),
    EntryStream.run: lambda indexer, _: stream_entries(indexer),
    Moment.reading: lambda indexer, _: read_twice(indexer),
    ScanBarriers.wait_until_received: lambda indexer, _: indexer.slices[
        0
    ].barriers.wait_until_received(),
    ScanBarriers.wait_until_applied: lambda indexer, _: indexer.slices[
        0
    ].barriers.wait_until_applied(),
    IndexerStream.barrier: lambda indexer, _: indexer.slices[0].stream.barrier(),
    DesignCatalog.current_designs: lambda indexer, _: indexer.slices[0].catalog.current_designs(),
    Pipeline.sync: lambda indexer, _: indexer.slices[0].pipeline.sync(),
    Pipeline.wait_until_applied: lambda indexer, _: wait_until_applied(indexer.slices[0]),
    Designs.create: lambda indexer, suffix: indexer.designs.create(f"d{suffix}", DESIGN),
}
INSIDE: Final[dict[Function, tuple[Function, ...]]] = {
    Scanner.status: (Slice.status, SliceScanner.status),
    Scanner.scan: (Slice.scan, SliceScanner.scan),
    Scanner.release: (Slice.release,),
    Indexer.statistics: (Slice.statistics,),
}
"""The operations inside each question."""
tries(*QUESTIONS, *(function for functions in INSIDE.values() for function in functions))


@pytest.mark.parametrize("function", QUESTIONS)
async def test_questions_to_an_indexer_can_be_cancelled(
    network: MemoryNetwork,
    server: Server,
    autojump_clock: MockClock,
    tmp_path: Path,
    function: Function,
) -> None:
    numbers = count()
    async with an_indexer(server.url(BUCKET), tmp_path) as indexer:
        await indexer.designs.create("d", DESIGN)
        await until_ready(indexer, "d/city")
        await trio.sleep(5)
        open_before = network.open

        async def work() -> None:
            await QUESTIONS[function](indexer, next(numbers))

        async def undo() -> None:
            suffix = next(numbers) - 1
            with suppress(NoIndexError):
                await indexer.designs.drop(f"d{suffix}")
            await eventually(
                lambda: indexer.designs.names() == [name_of("d/city")], "they are dropped"
            )
            await trio.sleep(5)

        def look() -> None:
            check_nothing_is_held(server, indexer)
            assert network.open == open_before

        async def then() -> None:
            await work()
            assert await scan(indexer, "d/city") == by_brute_force(CITY, CONTENTS)

        # Each design that is created has an index built, which takes many steps.
        every = 3 if function is Designs.create else 1
        cancellations = await cancelled_at_each_step(
            work,
            look,
            then=then,
            undo=undo,
            every=every,
            reaching=[function, *INSIDE.get(function, ())],
        )
    cancellations.check_inside(function, *INSIDE.get(function, ()))


DROP: Final = tries(Designs.drop)


async def test_the_drop_of_a_design_can_be_cancelled(
    network: MemoryNetwork, server: Server, autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with an_indexer(server.url(BUCKET), tmp_path) as indexer:

        async def there() -> None:
            await indexer.designs.create("d", DESIGN)
            await until_ready(indexer, "d/city")
            await trio.sleep(5)

        async def work() -> None:
            await indexer.designs.drop("d")

        async def then() -> None:
            await work()
            with pytest.raises(NoIndexError):
                await work()
            await eventually(lambda: not indexer.designs.names(), "it is dropped")

        await there()
        cancellations = await cancelled_at_each_step(
            work,
            lambda: check_nothing_is_held(server, indexer),
            then=then,
            undo=there,
            every=3,
            reaching=DROP,
        )
    cancellations.check_inside(*DROP)


ROOM: Final = tries(MemoryPool.wait_for_room)


async def test_the_wait_for_room_in_the_pool_can_be_cancelled(autojump_clock: MockClock) -> None:
    pool = MemoryPool(100)

    async def pause() -> None:
        await pool.wait_for_room(STREAM_SHARE)
        pool.reserve(80)
        try:
            await trio.sleep(1)
        finally:
            pool.release(80)

    async def work() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(pause)

    def look() -> None:
        assert pool.used_bytes == 0

    (await cancelled_at_each_step(work, look, then=work)).check_inside(*ROOM)


# All of it.

RUN: Final = tries(
    running_indexer,
    Indexer.run,
    Definitions.open,
    Designs.run,
    Designs.wait_until_current,
    Slice.run,
    Slice.confirm,
    Definitions.run,
    IndexBuilder.run,
    Pipeline.run,
    Pipeline.write,
    Disk.retry,
    IndexerStream.run,
    IndexerStream.partitions,
    DesignOverlay.run,
    Announcements.run,
    ScanBarriers.run,
    Moments.run,
    log_connection,
)


async def test_an_indexer_can_be_cancelled(
    network: MemoryNetwork, server: Server, autojump_clock: MockClock, tmp_path: Path
) -> None:
    """An indexer starts, builds an index, answers scans, applies a change, and drops the index."""
    contents, numbers = dict(CONTENTS), count()
    open_before = network.open

    async def work() -> None:
        async with an_indexer(server.url(BUCKET), tmp_path) as indexer:
            await indexer.designs.create("d", DESIGN)
            await until_ready(indexer, "d/city")
            await scan(indexer, "d/city", hold_s=2)
            contents[b"new"] = b'{"city": %d}' % next(numbers)
            async with connect(server.url(BUCKET)) as client:
                await client.set(b"new", contents[b"new"])
            assert await scan(indexer, "d/city") == by_brute_force(CITY, contents)
            await indexer.designs.drop("d")
            await eventually(lambda: not indexer.designs.names(), "it is dropped")

    def look() -> None:
        check(server)
        assert network.open == open_before

    cancellations = await cancelled_at_each_step(work, look, then=work, every=EVERY, reaching=RUN)
    cancellations.check_inside(*RUN)


WORKER_RUN: Final = tries(
    WorkerProcess.run,
    WorkerProcess.scan,
    WorkerProcess.stop,
    SliceWorker.run,
    serve_slice,
    MessageStream.run_sender,
    MessageStream.received_messages,
)


async def test_an_indexer_with_workers_can_be_cancelled(
    network: MemoryNetwork, server: Server, autojump_clock: MockClock, tmp_path: Path
) -> None:
    """The workers are tasks of this process, not processes."""
    url, open_before = server.url(BUCKET), network.open
    make_holder = workers_in_the_loop(url, tmp_path)

    async def work() -> None:
        async with an_indexer(url, tmp_path, slices=2, make_holder=make_holder) as indexer:
            await indexer.designs.create("d", DESIGN)
            await until_ready(indexer, "d/city")
            await indexer.statistics()
            page = await ask(indexer, "d/city", Query(consistency="now", hold_s=1))
            await indexer.scanner.release(page.moment)
            assert await scan(indexer, "d/city") == by_brute_force(CITY, CONTENTS)

    def look() -> None:
        check(server)
        assert network.open == open_before

    cancellations = await cancelled_at_each_step(
        work, look, then=work, every=8 * EVERY, reaching=WORKER_RUN
    )
    cancellations.check_inside(*WORKER_RUN)


async def ask_for_a_moment(nodes: Nodes) -> None:
    """Has a moment held by the nodes, and releases it."""
    page = await ask(nodes.running[0], "d/city", Query(consistency="now", hold_s=1))
    try:
        await nodes.running[0].scanner.release(page.moment)
    finally:
        for indexer in nodes.running.values():
            for part in indexer.slices:
                part.moments.release_all()


async def ask_each_copy(nodes: Nodes) -> None:
    """Sends the messages that are not part of scans to each copy."""
    await nodes.running[0].stop()
    for holder in nodes.running[0].holders:
        assert isinstance(holder, ReplicatedSlice)
        await holder.ping()
        await holder.confirm()
        await holder.stop()
        for copy in holder._copies:
            await copy.holder.ping()
            await copy.holder.stop()


NODE_QUESTIONS: Final[dict[Function, Callable[[Nodes], Awaitable[object]]]] = {
    ReplicatedSlice.scan: lambda nodes: scan(nodes.running[0], "d/city"),
    ReplicatedSlice.release: ask_for_a_moment,
    ReplicatedSlice.status: lambda nodes: nodes.running[0].scanner.status(name_of("d/city")),
    ReplicatedSlice.statistics: lambda nodes: nodes.running[0].statistics(),
    ReplicatedSlice.confirm: ask_each_copy,
}
BESIDE: Final = tries(
    ReplicatedSlice.ping,
    LinkedSlice.ping,
    Slice.ping,
    ReplicatedSlice.stop,
    RemoteSlice.stop,
    Slice.stop,
    Indexer.stop,
)
AT_THE_LINK: Final[dict[Function, Function]] = {
    ReplicatedSlice.scan: LinkedSlice.scan,
    ReplicatedSlice.release: LinkedSlice.release,
    ReplicatedSlice.status: LinkedSlice.status,
    ReplicatedSlice.statistics: LinkedSlice.statistics,
    ReplicatedSlice.confirm: LinkedSlice.confirm,
}
tries(*NODE_QUESTIONS, *AT_THE_LINK.values())


async def test_questions_to_several_nodes_can_be_cancelled(
    network: MemoryNetwork, server: Server, autojump_clock: MockClock, tmp_path: Path
) -> None:
    """There are two nodes, whose links are streams in memory."""
    async with some_nodes(server.url(BUCKET), tmp_path, 2, 2, 0) as nodes:
        await nodes.running[0].designs.create("d", DESIGN)
        for indexer in nodes.running.values():
            await until_every_copy_is_ready(indexer)
        await trio.sleep(5)

        def look() -> None:
            for indexer in nodes.running.values():
                check_nothing_is_held(server, indexer)

        async def rest() -> None:
            # A question that was cancelled ends at the other node when its answer arrives.
            await trio.sleep(1)

        for function, question in NODE_QUESTIONS.items():
            beside = BESIDE if question is ask_each_copy else ()
            reached = (function, AT_THE_LINK[function], *beside)
            cancellations = await cancelled_at_each_step(
                partial(question, nodes), look, undo=rest, every=2, reaching=reached
            )
            cancellations.check_inside(*reached)
        assert await scan(nodes.running[0], "d/city") == by_brute_force(CITY, CONTENTS)


NODES_RUN: Final = tries(ReplicatedSlice.run, RemoteSlice.run, serve_link)


async def test_the_nodes_of_an_indexer_can_be_cancelled(
    network: MemoryNetwork, server: Server, autojump_clock: MockClock, tmp_path: Path
) -> None:
    url, open_before = server.url(BUCKET), network.open

    async def work() -> None:
        async with some_nodes(url, tmp_path, 2, 2, 0) as nodes:
            indexer = nodes.running[0]
            await indexer.designs.create("d", DESIGN)
            await until_every_copy_is_ready(indexer)
            assert await scan(indexer, "d/city") == by_brute_force(CITY, CONTENTS)

    def look() -> None:
        check(server)
        assert network.open == open_before

    cancellations = await cancelled_at_each_step(
        work, look, then=work, every=12 * EVERY, reaching=NODES_RUN
    )
    cancellations.check_inside(*NODES_RUN)


WHO_LINKS: Final = tries(BucketHistories.statement, BucketHistories.check, Membership.check)


async def test_the_check_of_a_node_that_links_can_be_cancelled(
    network: MemoryNetwork, server: Server, autojump_clock: MockClock
) -> None:
    url, open_before = server.url(BUCKET), network.open
    node_map = NodeMap(("http://n0:1", "http://n1:1"), 2, 0)

    async def work() -> None:
        histories = BucketHistories(Address.parse(url))
        await histories.check(await histories.statement(), "n")
        membership = Membership(node_map, 0, BUCKET, histories, 4)
        statement = await histories.statement()
        await trio.sleep(MAX_AGE_S)
        await membership.check(0, node_map.fingerprint(BUCKET), statement)

    def look() -> None:
        check(server)
        assert network.open == open_before

    (await cancelled_at_each_step(work, look, then=work)).check_inside(*WHO_LINKS)


OUTBOX: Final = tries(MessageStream.wait_until_unsent_below)


async def test_the_wait_for_unsent_messages_can_be_cancelled() -> None:
    async def work() -> None:
        ours, theirs = trio.testing.memory_stream_pair()
        frames = MessageStream(ours, ToNode)
        async with ours, theirs, trio.open_nursery() as nursery:
            frames.queue_message(NumberedAnswer(1))
            nursery.start_soon(frames.run_sender)
            await frames.wait_until_unsent_below(1)
            assert await theirs.receive_some()
            nursery.cancel_scope.cancel()

    (await cancelled_at_each_step(work, then=work)).check_inside(*OUTBOX)


SILENCE: Final = tries(Silence.wait_until_too_long)


async def test_the_wait_for_a_long_silence_can_be_cancelled(autojump_clock: MockClock) -> None:
    async def work() -> None:
        silence = Silence(limit_s=3.0, step_s=1.0)
        with silence.waiting():
            await silence.wait_until_too_long()

    (await cancelled_at_each_step(work, then=work)).check_inside(*SILENCE)


FOLDERS: Final = tries(retry_while_in_use, remove_other_slices)


async def test_the_wait_for_a_folder_can_be_cancelled(
    network: MemoryNetwork, autojump_clock: MockClock, tmp_path: Path
) -> None:
    folder = tmp_path / SliceId(1, 2).folder

    async def work() -> None:
        with locked_folder(folder):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(remove_other_slices, tmp_path, [])
                await trio.sleep(LOCK_TIMEOUT_S / 2)
                nursery.cancel_scope.cancel()
        await remove_other_slices(tmp_path, [])
        assert not folder.exists()

    (await cancelled_at_each_step(work, then=work)).check_inside(*FOLDERS)


SOCKETS: Final = tries(
    open_web_socket,
    OpenedWebSocket.open,
    OpenedWebSocket.send_all,
    OpenedWebSocket.receive_some,
    OpenedWebSocket.aclose,
    accept_web_socket,
    AcceptedWebSocket.send_all,
    AcceptedWebSocket.receive_some,
    refuse_web_socket,
)


async def test_web_sockets_can_be_cancelled(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """The other side is an application behind a server for web sockets."""
    accepts = True
    servers: trio.Nursery

    async def application(receive: Any, send: Any) -> None:
        if not accepts:
            scope: dict[str, Any] = {"extensions": {"websocket.http.response": {}}}
            await refuse_web_socket(scope, receive, send, 418, b'{"error": {"message": "no tea"}}')
            return
        stream = await accept_web_socket(receive, send)
        while data := await stream.receive_some(9):
            await stream.send_all(data)

    async def open_tcp_stream(_host: str, _port: int) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        ours, theirs = trio.testing.memory_stream_pair()
        servers.start_soon(serve_web_socket, theirs, application)
        return ours

    monkeypatch.setattr(trio, "open_tcp_stream", open_tcp_stream)

    async def work() -> None:
        nonlocal accepts, servers
        async with trio.open_nursery() as servers:
            accepts = False
            with pytest.raises(WebSocketRefusedError, match="no tea"):
                await open_web_socket("http://h:1/x", UNPROTECTED)
            accepts = True
            async with aclosing(await open_web_socket("http://h:1/x", UNPROTECTED)) as socket:
                await socket.send_all(b"hello")
                assert await socket.receive_some(9) == b"hello"

    cancellations = await cancelled_at_each_step(work, then=work)
    cancellations.check_inside(*SOCKETS)


PROCESS: Final = tries(worker_process)


async def test_the_start_of_a_worker_process_can_be_cancelled() -> None:
    async def work() -> None:
        async with worker_process() as stream:
            await stream.send_all(b"")

    (await cancelled_at_each_step(work, then=work)).check_inside(*PROCESS)


UNDOING: Final = tries(IndexerStream.run, Pipeline.drain, Pipeline.wait_until, Pipeline.sync)


async def test_a_rollback_of_an_index_can_be_cancelled(
    network: MemoryNetwork, autojump_clock: MockClock, tmp_path: Path
) -> None:
    """The next start completes a rollback that was cancelled."""
    world, numbers = World(0, tmp_path), count()
    world.undo_mutations = 1000
    rollbacks = 0
    async with world.running():
        await world.crash("indexer")

        async def part() -> None:
            """Has the indexer apply changes, which the server then loses."""
            await world.start_indexer()
            await world.client.set("_design/d", DESIGN, durability=Durability.PERSISTED)
            for key, value in CONTENTS.items():
                await world.client.set(key, value, durability=Durability.PERSISTED)
            await until_ready(world.indexer, "d/city")
            world.hold_commits()
            for key in list(CONTENTS)[:4]:
                await world.client.set(key, b'{"city": %d}' % next(numbers))
            await world.client.delete("k5")
            assert len(await scan(world.indexer, "d/city")) == len(CONTENTS) - 1
            await world.crash("indexer")
            await world.crash("server")
            await world.start_server()

        async def work() -> None:
            nonlocal rollbacks
            async with an_indexer(world.server.url(BUCKET), tmp_path) as indexer:
                await until_ready(indexer, "d/city")
                assert await scan(indexer, "d/city") == by_brute_force(CITY, CONTENTS)
                rollbacks += indexer.slices[0].stream.rollbacks

        await part()
        cancellations = await cancelled_at_each_step(
            work,
            lambda: check(world.server),
            then=work,
            undo=part,
            every=4 * EVERY,
            reaching=UNDOING,
        )
        assert rollbacks
    cancellations.check_inside(*UNDOING)


SERVING: Final = tries(serving, answering_over_http)


async def test_the_http_server_can_be_cancelled(
    network: MemoryNetwork, server: Server, autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with an_indexer(server.url(BUCKET), tmp_path) as indexer:
        await trio.sleep(5)

        async def work() -> None:
            async with serving(indexer, f"{HOST}:0"):
                await trio.lowlevel.checkpoint()

        (await cancelled_at_each_step(work, then=work)).check_inside(*SERVING)


ACCESS: Final = tries(HttpAccess.run, HttpAccess.check, HttpAccess.check_node, LogInTurns.turn)


async def test_the_check_of_a_user_can_be_cancelled(
    network: MemoryNetwork, server: Server, autojump_clock: MockClock
) -> None:
    server.users.users = USERS
    server.connections.resources.log_ins.failure_delay_s = 0.01
    header = "Basic " + b64encode(b"bob:pencil").decode()
    open_before = network.open

    async def work() -> None:
        access = HttpAccess(Address.parse(server.url(BUCKET)))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(access.run)
            await access.check(Right.READ, header, "10.0.0.9:1")
            await access.check_node(header, "10.0.0.9:1")
            await trio.sleep(1 - RENEW_S / 2)
            await access.check(Right.READ, header, "10.0.0.9:1")
            nursery.cancel_scope.cancel()

    def look() -> None:
        check(server)
        assert network.open == open_before

    (await cancelled_at_each_step(work, look, then=work)).check_inside(*ACCESS)


SIGNALS: Final = tries(serve)


async def test_the_daemon_can_be_cancelled(
    network: MemoryNetwork, server: Server, autojump_clock: MockClock, tmp_path: Path
) -> None:
    config = IndexerConfig(
        bucket=server.url(BUCKET), listen=f"{HOST}:0", data_dir=str(tmp_path), workers=1
    )

    def on_listening(_url: str) -> None:
        signal.raise_signal(signal.SIGTERM)

    async def work() -> None:
        await serve(config, on_listening)

    # A signal that is not handled before the end goes to the handler of before.
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        cancellations = await cancelled_at_each_step(work, then=work, every=EVERY, reaching=SIGNALS)
    finally:
        signal.signal(signal.SIGTERM, before)
    cancellations.check_inside(*SIGNALS)


def test_every_operation_is_cancelled_by_a_test() -> None:
    operations = {async_names.name_of(function) for function in TRIED}
    assert operations == async_names.below("upr_server.indexer")
