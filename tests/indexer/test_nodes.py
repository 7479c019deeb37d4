"""An indexer of several nodes, in one event loop with a mock clock."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.indexer.brute_force import Row, expected_answer, index_rows
from tests.indexer.kit import BUCKET, ask, define, name_of, until
from tests.indexer.node_kit import Nodes, is_expected, some_nodes, until_ready
from tests.indexer.threads import in_the_loop
from tests.indexer.write_log import WriteLog
from tests.kit.effort import effort
from tests.kit.memory_network import MemoryNetwork, node
from upr_protocol.client import Client, connect
from upr_protocol.errors import UprError
from upr_server.app import Server
from upr_server.indexer.indexer import Indexer
from upr_server.indexer.moments import MomentGoneError
from upr_server.indexer.pure.definition import IndexDefinition
from upr_server.indexer.query import Query
from upr_server.indexer.replicated_slice import GRACE_S, SILENT_S
from upr_server.indexer.slices import SliceMissingError

CITY = IndexDefinition(("city", "n"), include=("n",))
KEYS = [f"k{index:02}" for index in range(40)]
PARTITIONS = 6
ROUNDS = effort(8, 200)


@pytest.fixture
async def server(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> AsyncIterator[Server]:
    """A server in the test's event loop; the work of threads runs in that loop, too."""
    monkeypatch.setattr(trio.to_thread, "run_sync", in_the_loop)
    monkeypatch.setattr(trio.from_thread, "check_cancelled", lambda: None)
    MemoryNetwork(monkeypatch)
    async with node("a") as server, connect(server.url()) as client:
        await client.create_bucket(BUCKET, PARTITIONS)
        yield server


class Writer:
    """Writes random documents, and records what was acknowledged."""

    def __init__(self, client: Client, rng: random.Random) -> None:
        self.client = client
        self.log = WriteLog()
        self._rng = rng
        self._stored_keys: set[str] = set()

    async def write(self, count: int = 1) -> None:
        for _ in range(count):
            key = self._rng.choice(KEYS)
            if key in self._stored_keys and self._rng.random() < 0.25:
                self.log.add(await self.client.delete(key), key, None)
                self._stored_keys.remove(key)
            else:
                value = json.dumps({"city": self._rng.choice("abc"), "n": self._rng.randrange(99)})
                self.log.add(await self.client.set(key, value), key, value)
                self._stored_keys.add(key)


def rows_of(page: Any) -> list[Row]:
    return [Row(entry.key, entry.id, entry.included) for entry in page.entries]


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    async with connect(server.url(BUCKET)) as client:
        await define(client, "d", {"city": CITY})
        yield client


async def test_any_node_answers_for_all(server: Server, client: Client, tmp_path: Path) -> None:
    writer = Writer(client, random.Random(0))
    await writer.write(100)
    async with some_nodes(server.url(BUCKET), tmp_path, slices=6) as nodes:
        for place, indexer in nodes.running.items():
            await until_ready(indexer)
            page = await ask(indexer, "d/city", Query(consistency="now", timestamps=True))
            contents = writer.log.contents_at(page.timestamps)
            assert rows_of(page) == index_rows(CITY, contents)
            assert {p: seq for p, (_, seq) in page.timestamps.items() if seq}.items() >= (
                writer.log.newest().items()
            )
            figures = indexer.nodes()
            assert [row["answers"] for row in figures["nodes"]] == [True] * 3
            assert [row["is_this"] for row in figures["nodes"]].index(True) == place
            assert (await indexer.statistics())["connected"] is True
            slice_indexes = [part.slice_id.index for part in indexer.slices]
            assert slice_indexes == list(nodes.node_map.kept_by(place))


async def test_a_lost_node_is_replaced_by_its_replicas_at_once(
    server: Server, client: Client, tmp_path: Path
) -> None:
    writer = Writer(client, random.Random(0))
    await writer.write(100)
    async with some_nodes(server.url(BUCKET), tmp_path) as nodes:
        for indexer in nodes.running.values():
            await until_ready(indexer)
        await nodes.kill(1)
        for indexer in nodes.running.values():
            began_at = trio.current_time()
            await writer.write()
            await compare(indexer, writer)
            assert trio.current_time() - began_at < GRACE_S
            status = await indexer.scanner.status(name_of("d/city"))
            assert status.state == "ready"
            states = [[copy.state for copy in part.replicas] for part in status.slices]
            assert states == [["ready", "missing"], ["missing", "ready"], ["ready", "ready"]]
        # The other nodes build a new index without the lost one.
        await define(client, "e", {"n": IndexDefinition(("n",))})
        for indexer in nodes.running.values():

            async def is_ready(indexer: Indexer = indexer) -> bool:
                if name_of("e/n") not in indexer.designs.names():
                    return False
                return (await indexer.scanner.status(name_of("e/n"))).state == "ready"

            await until(is_ready)
        await writer.write(50)
        back = await nodes.start(1)
        await until_ready(back)
        await compare(back, writer)


async def test_a_stopped_node_costs_one_wait_and_is_then_asked_last(
    server: Server, client: Client, tmp_path: Path
) -> None:
    writer = Writer(client, random.Random(0))
    await writer.write(100)
    async with some_nodes(server.url(BUCKET), tmp_path) as nodes:
        asking = nodes.running[0]
        for indexer in nodes.running.values():
            await until_ready(indexer)
        # The nodes 1 and 2 keep slice 1.
        nodes.stop(1)
        for longest_s in (SILENT_S + GRACE_S, GRACE_S, GRACE_S):
            began_at = trio.current_time()
            await compare(asking, writer)
            assert trio.current_time() - began_at < longest_s
        nodes.go_on(1)
        await trio.sleep(2)
        nodes.stop(2)
        await trio.sleep(SILENT_S)
        began_at = trio.current_time()
        await compare(asking, writer)
        assert trio.current_time() - began_at < GRACE_S


async def test_without_replicas_the_error_names_the_slice_and_the_node(
    server: Server, client: Client, tmp_path: Path
) -> None:
    async with some_nodes(server.url(BUCKET), tmp_path, replicas=0) as nodes:
        asking = nodes.running[0]
        await until_ready(asking)
        nodes.stop(2)
        for _ in range(2):
            with pytest.raises(SliceMissingError, match=r"slice 2 of 3 .*http://n2:1: .*answer"):
                await ask(asking, "d/city", Query())
        began_at = trio.current_time()
        with pytest.raises(SliceMissingError):
            await ask(asking, "d/city", Query())
        assert trio.current_time() - began_at < GRACE_S + 0.1
        nodes.go_on(2)
        await trio.sleep(2)
        await ask(asking, "d/city", Query())
        await nodes.kill(2)
        with pytest.raises(SliceMissingError, match=r"slice 2 of 3 .*http://n2:1: "):
            await ask(asking, "d/city", Query())
        status = await asking.scanner.status(name_of("d/city"))
        assert (status.state, [part.state for part in status.slices]) == (
            "missing",
            ["ready", "ready", "missing"],
        )
        assert [row["answers"] for row in asking.nodes()["nodes"]] == [True, True, False]


async def test_a_copy_that_is_being_built_is_not_asked(
    server: Server, client: Client, tmp_path: Path
) -> None:
    writer = Writer(client, random.Random(0))
    await writer.write(100)
    async with some_nodes(server.url(BUCKET), tmp_path) as nodes:
        for indexer in nodes.running.values():
            await until_ready(indexer)
        for part in nodes.running[0].slices:
            part.definitions.find(name_of("d/city")).file._is_built = False
        for indexer in nodes.running.values():
            await compare(indexer, writer)
            status = await indexer.scanner.status(name_of("d/city"))
            assert status.state == "ready"
            assert {
                copy.node
                for part in status.slices
                for copy in part.replicas
                if copy.state == "building"
            } == {"http://n0:1"}


async def test_a_moment_is_of_the_node_that_it_names(
    server: Server, client: Client, tmp_path: Path
) -> None:
    writer = Writer(client, random.Random(0))
    await writer.write(100)
    async with some_nodes(server.url(BUCKET), tmp_path) as nodes:
        for indexer in nodes.running.values():
            await until_ready(indexer)
        page = await ask(
            nodes.running[0],
            "d/city",
            Query(consistency="now", limit=5, hold_s=60, timestamps=True),
        )
        expected = index_rows(CITY, writer.log.contents_at(page.timestamps))
        assert [part.partition("-")[0] for part in page.moment.split(".")] == ["0", "1", "0"]
        await writer.write(50)
        # Any node accepts a request for the next page.
        last_page = await ask(
            nodes.running[2],
            "d/city",
            Query(limit=1000, hold_s=60, moment=page.moment, continuation=page.continuation),
        )
        assert rows_of(page) + rows_of(last_page) == expected
        assert last_page.moment == page.moment
        await nodes.kill(1)
        with pytest.raises(MomentGoneError, match=r"slice 1 of 3 is held at http://n1:1, which"):
            await ask(nodes.running[2], "d/city", Query(moment=page.moment))
        with pytest.raises(MomentGoneError):
            await nodes.running[0].scanner.release(page.moment)
        assert not any(len(part.moments) for part in nodes.running[0].slices)
        for token in ("x", "9-x.1-x.0-x", "-.-.-", "0.1.0"):
            with pytest.raises(MomentGoneError):
                await ask(nodes.running[0], "d/city", Query(moment=token))


async def test_a_scan_that_is_cancelled_leaves_no_moment(
    server: Server, client: Client, tmp_path: Path
) -> None:
    async with some_nodes(server.url(BUCKET), tmp_path) as nodes:
        for indexer in nodes.running.values():
            await until_ready(indexer)
        asking = nodes.running[0]
        # Slice 1 does not answer, and the other two hold a moment for the scan.
        nodes.stop(1)
        nodes.stop(2)
        with trio.move_on_after(1) as scope:
            await ask(asking, "d/city", Query(hold_s=60))
        assert scope.cancelled_caught
        nodes.go_on(1)
        nodes.go_on(2)
        await trio.sleep(1)
        for indexer in nodes.running.values():
            assert not any(len(part.moments) for part in indexer.slices)


async def compare(indexer: Indexer, writer: Writer, **options: Any) -> None:
    """Checks that a scan at `now` returns what was written."""
    query = Query(consistency="now", limit=10_000, timestamps=True, **options)
    page = await ask(indexer, "d/city", query)
    assert rows_of(page) == index_rows(CITY, writer.log.contents_at(page.timestamps))
    for partition, seq in writer.log.newest().items():
        assert page.timestamps[partition][1] >= seq


async def pages(indexers: list[Indexer], rng: random.Random) -> tuple[list[Row], Any]:
    """All entries of one moment, page by page, each from another node."""
    query = Query(consistency="now", limit=rng.randrange(3, 9), hold_s=60, timestamps=True)
    rows: list[Row] = []
    while True:
        page = await ask(rng.choice(indexers), "d/city", query)
        rows += rows_of(page)
        if not page.continuation:
            return rows, page.timestamps
        query = Query(
            limit=rng.randrange(3, 9),
            hold_s=60,
            moment=page.moment,
            continuation=page.continuation,
            timestamps=True,
        )
        await trio.sleep(0.05)


class Rounds:
    """Kills and stops nodes while others write and scan.

    Attributes:
        answers: How many answers were right.
        refused: By the name of the error, how many scans were refused.
        is_over: Whether the writer is to end.
    """

    def __init__(self, nodes: Nodes, writer: Writer, rng: random.Random) -> None:
        self.answers = 0
        self.refused: dict[str, int] = {}
        self.is_over = False
        self._nodes = nodes
        self._writer = writer
        self._rng = rng

    @property
    def _asked(self) -> list[Indexer]:
        return [
            indexer
            for place, indexer in self._nodes.running.items()
            if place not in self._nodes.stopped
        ]

    async def write(self) -> None:
        # If this were cancelled instead, the log would lack the last write.
        while not self.is_over:
            await self._writer.write()
            await trio.sleep(0.2)

    async def scan(self) -> None:
        """Scans at one node: the answer must be right, or an error that names the missing
        slice."""
        rng = self._rng
        asked_before = self._asked
        # An answer at `now` must have these changes.
        newest = self._writer.log.newest()
        query = Query(
            consistency=rng.choice(["any", "now"]),
            limit=10_000,
            descending=rng.random() < 0.5,
            prefix=[rng.choice("abc")] if rng.random() < 0.5 else None,
            timestamps=True,
            timeout_s=rng.choice([1.0, 10.0]),
        )
        try:
            if rng.random() < 0.3:
                query = Query(consistency="now")
                rows, timestamps = await pages(asked_before, rng)
            else:
                page = await ask(rng.choice(asked_before), "d/city", query)
                rows, timestamps = rows_of(page), page.timestamps
        except UprError as error:
            name = type(error).__name__
            self.refused[name] = self.refused.get(name, 0) + 1
            if not is_expected(error):
                raise
            return
        # The answer may have a change whose acknowledgement the writer has not received yet.
        await trio.sleep(0.01)
        contents = self._writer.log.contents_at(timestamps)
        assert rows == expected_answer(index_rows(CITY, contents), query).rows
        if query.consistency == "now":
            for partition, seq in newest.items():
                assert timestamps[partition][1] >= seq
        self.answers += 1

    async def disturb(self) -> None:
        """Kills or stops a node, or ends an earlier disturbance. At least one node stays up."""
        nodes, rng = self._nodes, self._rng
        place = rng.randrange(len(nodes.node_map.nodes))
        if place in nodes.stopped:
            nodes.go_on(place)
        elif place not in nodes.running:
            await nodes.start(place)
        elif len(self._asked) > 1:
            if rng.random() < 0.5:
                nodes.stop(place)
            else:
                await nodes.kill(place)


@pytest.mark.parametrize("replicas", effort([1], [0, 1, 2]))
async def test_rounds_of_kills_and_stops(
    server: Server, client: Client, tmp_path: Path, replicas: int
) -> None:
    rng = random.Random(replicas)
    writer = Writer(client, rng)
    await writer.write(60)
    async with some_nodes(server.url(BUCKET), tmp_path, slices=4, replicas=replicas) as nodes:
        for indexer in nodes.running.values():
            await until_ready(indexer)
        rounds = Rounds(nodes, writer, rng)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rounds.write)
            for _ in range(ROUNDS):
                await rounds.disturb()
                for _ in range(4):
                    await rounds.scan()
                    await trio.sleep(rng.random())
            rounds.is_over = True
        for place in range(3):
            nodes.go_on(place)
            if place not in nodes.running:
                await nodes.start(place)
        for indexer in nodes.running.values():
            await until_ready(indexer)
            await compare(indexer, writer)
            for part in indexer.slices:
                part.definitions.find(name_of("d/city")).file.check_invariants()
        assert rounds.answers
