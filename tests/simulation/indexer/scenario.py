"""One seed: three nodes of an indexer, a server that may lose changes, and what happens to them."""

from __future__ import annotations

import gc
import json
import random
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import attrs
import trio

from tests.indexer.brute_force import Row, expected_answer, index_rows
from tests.indexer.kit import ask, define, name_of
from tests.indexer.node_kit import is_expected, urls
from tests.kit.history import History, Said
from tests.simulation.indexer.nodes import HOST, IndexerNode, in_one_loop
from tests.simulation.indexer.oracle import Oracle
from tests.simulation.network import Network, taken_at_once
from tests.simulation.node import BUCKET, Node, first_of, observed
from tests.simulation.world import Chance, JumpingClock, run_in_world
from upr_protocol.client import Client, connect
from upr_protocol.errors import UprError
from upr_server.indexer.freshness import WriteLostError
from upr_server.indexer.indexer import Indexer
from upr_server.indexer.moments import MOMENT_BYTES
from upr_server.indexer.pure.definition import IndexDefinition
from upr_server.indexer.pure.node_map import NodeMap
from upr_server.indexer.query import Query, QueryError, RequiredWrite
from upr_server.indexer.scanner import LATE_S

SERVER: Final = "s"
WRITER: Final = "w"
NAME: Final = "d/city"
KEYS: Final = [f"k{index:02}" for index in range(40)]
DEFINITIONS: Final = (
    IndexDefinition(("city", "n"), include=("n",)),
    IndexDefinition(("city",), "n > `50`"),
)
SETTLE_S: Final = 120.0
"""How long it may take until every copy is ready, once all is well."""

SEED_S: Final = 3600.0

FAULTS: Final = (
    "kill",
    "vanish",
    "rebuild",
    "pause",
    "cut",
    "trickle",
    "resets",
    "redefine",
    "server_crash",
    "server_cut",
)


@attrs.define
class Outcome:
    """What came of a seed.

    Attributes:
        seed: The seed.
        violation: What was wrong; empty if nothing was.
        answers: How many answers were right.
        refused: How many scans were refused, by the name of the error.
        faults: How many there were, by their kind.
        rollbacks: How many partitions of running slices were rolled back.
        virtual_s: How long it took, in virtual time.
    """

    seed: int
    violation: str = ""
    answers: int = 0
    refused: Counter[str] = attrs.field(factory=Counter)
    faults: Counter[str] = attrs.field(factory=Counter)
    rollbacks: int = 0
    virtual_s: float = 0.0


class WrongAnswerError(AssertionError):
    """An answer is not what the bucket had."""


@attrs.frozen
class Mix:
    """What a seed draws first.

    Attributes:
        partitions: How many the bucket has.
        slices: How many slices the indexes have.
        replicas: How many copies each has beside the first.
        delay_s: How long links take, at least.
        jitter_s: What may come on top.
        disk_s: How long the server's disk takes.
        rounds: How many faults there are.
        weights: How often each kind of fault comes, beside the others.
    """

    partitions: int
    slices: int
    replicas: int
    delay_s: float
    jitter_s: float
    disk_s: float
    rounds: int
    weights: dict[str, float]

    @classmethod
    def drawn(cls, chance: random.Random) -> Mix:
        """That of a seed."""
        weights = {name: chance.choice((0.0, 1.0, 2.0)) for name in FAULTS}
        weights["kill"] = 1.0
        return cls(
            partitions=chance.randint(1, 6),
            slices=chance.randint(3, 5),
            replicas=chance.choice((0, 1, 1, 1, 2)),
            delay_s=chance.choice((0.0, 0.001, 0.02, 0.1)),
            jitter_s=chance.choice((0.0, 0.01, 0.1)),
            disk_s=chance.choice((0.0, 0.001, 0.05)),
            rounds=chance.randint(5, 9),
            weights=weights,
        )


class IndexerCluster:
    """The run of one seed.

    Args:
        seed: The seed.
        clock: The simulated world's clock.
        folder: Where the nodes keep their slices.

    Attributes:
        outcome: The result so far.
        history: What was done.
        mix: What was drawn.
        network: The network.
    """

    def __init__(self, seed: int, clock: JumpingClock, folder: Path) -> None:
        chance = Chance(seed)
        self.outcome = Outcome(seed)
        self.history = History(clock.current_time)
        self.mix = Mix.drawn(chance.of("mix"))
        self.network = network = Network(
            clock, chance.of("network"), self.mix.delay_s, self.mix.jitter_s
        )
        self._rng = chance.of("rounds")
        self._writes = chance.of("writes")
        self._server = Node(
            SERVER,
            self.mix.partitions,
            64 * 1024 * 1024,
            network,
            chance.of("server"),
            self.history,
            undo_mutations=1000,
            purge_age_s=3 * 24 * 3600.0,
        )
        self._server.wear.delay_s = self.mix.disk_s
        self._oracle = Oracle(self.history, lambda: self._server.held)
        self._has_lost = self._is_over = False
        node_map = NodeMap(urls(3), self.mix.slices, self.mix.replicas)
        self._url = f"upr://{SERVER}/{BUCKET}"
        self._nodes = [
            IndexerNode(place, node_map, self._url, folder / str(place), network)
            for place in range(3)
        ]
        self._nursery: trio.Nursery

    def _say(self, what: str) -> None:
        self.history.add(Said("seed", what))

    async def run(self) -> None:
        """Runs the seed.

        Raises:
            WrongAnswerError: An answer is wrong, or nothing is well in the end.
            UprError: A scan was refused for no good reason.
        """
        HOST.set(WRITER)
        self._say(str(self.mix))
        async with trio.open_nursery() as self._nursery:
            await self._server.start(self._nursery)
            await self._as_client(partial(define, design="d", indexes={"city": DEFINITIONS[0]}))
            for node in self._nodes:
                await node.start(self._nursery)
            self._nursery.start_soon(self._write)
            await self._settled()
            for _ in range(self.mix.rounds):
                await self._disturb()
                for _ in range(4):
                    await self._scan()
                    await trio.sleep(self._rng.random())
            await self._restore()
            await self._settled()
            await self._check_finals()
            self._is_over = True
            self._nursery.cancel_scope.cancel()

    # Who writes.

    async def _as_client(self, call: Callable[[Client], Awaitable[Any]]) -> Any:
        """Asks the server for something, until it answers."""
        while True:
            with suppress(UprError, OSError):
                async with connect(self._url) as client:
                    return await call(client)
            await trio.sleep(0.5)

    async def _write(self) -> None:
        while not self._is_over:
            # The server may be away, and a change may or may not have been made.
            with suppress(UprError, OSError), trio.move_on_after(20):
                async with connect(self._url) as client:
                    await self._write_to(client)
            await trio.sleep(0.5)

    async def _write_to(self, client: Client) -> None:
        rng = self._writes
        while not self._is_over:
            key = rng.choice(KEYS)
            if rng.random() < 0.2 and await client.get(key) is not None:
                result = await client.delete(key)
            else:
                value = {"city": rng.choice("abc"), "n": rng.randrange(99)}
                result = await client.set(key, json.dumps(value))
            self._oracle.acknowledged(result)
            await trio.sleep(rng.choice((0.0, 0.05, 0.3)))

    # Who asks.

    @property
    def _asked(self) -> list[Indexer]:
        return [
            node.indexer for node in self._nodes if node.indexer is not None and not node.is_paused
        ]

    async def _scan(self) -> None:
        """Asks a node: the answer is right, or an error names what is missing."""
        rng, began_at = self._rng, trio.current_time()
        query = self._drawn_query()
        newest = self._oracle.newest()
        try:
            if rng.random() < 0.3:
                limit = rng.randrange(3, 9)
                query = Query(consistency="now", limit=limit, hold_s=60, timestamps=True)
                definition, rows, timestamps = await self._pages(query)
            else:
                definition, rows, timestamps = await self._page(rng.choice(self._asked), query)
        except UprError as error:
            self.outcome.refused[type(error).__name__] += 1
            is_lost = isinstance(error, WriteLostError) and self._has_lost
            # The next page is of an index with another key.
            is_other = isinstance(error, QueryError) and bool(self.outcome.faults["redefine"])
            if not (is_expected(error) or is_lost or is_other):
                raise WrongAnswerError(f"{query} was refused: {error!r}") from error
            return
        finally:
            took_s = trio.current_time() - began_at
            if not query.hold_s and took_s > query.timeout_s + LATE_S + 1:
                raise WrongAnswerError(f"{query} took {took_s} s")
        self._check(query, definition, rows, timestamps)
        if query.consistency == "now":
            self._oracle.check_fresh(newest, timestamps)
        if query.consistency == "at_least":
            self._oracle.check_fresh(newest, timestamps)
        self.outcome.answers += 1

    def _drawn_query(self) -> Query:
        rng = self._rng
        written_keys = [
            RequiredWrite(partition, f"{history_id:016x}", seq)
            for partition, (history_id, seq) in self._oracle.newest().items()
        ]
        kinds: list[Literal["any", "now", "at_least"]] = ["any", "now"]
        consistency = rng.choice([*kinds, "at_least"] if written_keys else kinds)
        return Query(
            consistency=consistency,
            written=tuple(written_keys) if consistency == "at_least" else (),
            limit=10_000,
            descending=rng.random() < 0.5,
            prefix=[rng.choice("abc")] if rng.random() < 0.5 else None,
            timestamps=True,
            timeout_s=rng.choice([1.0, 10.0]),
        )

    def _check(
        self, query: Query, definition: IndexDefinition, rows: list[Row], timestamps: Any
    ) -> None:
        # A partition that was rolled back equals no state of the server until it has caught up.
        if query.consistency == "any" and self._has_lost:
            return
        contents = self._oracle.contents_at(timestamps)
        expected = expected_answer(index_rows(definition, contents), query).rows
        if rows != expected:
            raise WrongAnswerError(f"{query} at {timestamps} gave {rows}, and not {expected}")

    async def _page(
        self, indexer: Indexer, query: Query
    ) -> tuple[IndexDefinition, list[Row], dict[Any, tuple[str, int]]]:
        definition = indexer.designs.find(name_of(NAME))
        page = await ask(indexer, NAME, query)
        rows = [Row(entry.key, entry.id, entry.included) for entry in page.entries]
        return definition, rows, page.timestamps

    async def _pages(
        self, query: Query
    ) -> tuple[IndexDefinition, list[Row], dict[Any, tuple[str, int]]]:
        """All entries of one moment, page by page, each from another node."""
        rng, rows = self._rng, list[Row]()
        asked_node = rng.choice(self._asked)
        definition = asked_node.designs.find(name_of(NAME))
        while True:
            page = await ask(asked_node, NAME, query)
            rows += [Row(entry.key, entry.id, entry.included) for entry in page.entries]
            if not page.continuation:
                return definition, rows, page.timestamps
            query = Query(
                limit=rng.randrange(3, 9),
                hold_s=60,
                moment=page.moment,
                continuation=page.continuation,
                timestamps=True,
            )
            await trio.sleep(0.05)
            asked_node = rng.choice(self._asked)

    # What happens.

    async def _disturb(self) -> None:
        """Something happens to a node, a link or the server; or a node comes back."""
        rng = self._rng
        node = rng.choice(self._nodes)
        if node.indexer is None:
            self._say(f"{node.host} comes back")
            await node.start(self._nursery)
            return
        if node.is_paused:
            self._go_on(node)
            return
        (kind,) = rng.choices(list(self.mix.weights), list(self.mix.weights.values()))
        is_away = kind in ("kill", "vanish", "rebuild", "pause")
        if is_away and len(self._asked) == 1:
            return
        self._say(f"{kind} {node.host}")
        self.outcome.faults[kind] += 1
        await getattr(self, f"_{kind}")(node)

    async def _kill(self, node: IndexerNode) -> None:
        self._count_rollbacks(node)
        await node.kill(silently=False)

    async def _vanish(self, node: IndexerNode) -> None:
        self._count_rollbacks(node)
        await node.kill(silently=True)

    async def _rebuild(self, node: IndexerNode) -> None:
        self._count_rollbacks(node)
        await node.kill(silently=False)
        node.lose_folder()
        await node.start(self._nursery)

    def _count_rollbacks(self, node: IndexerNode) -> None:
        assert node.indexer is not None
        self.outcome.rollbacks += sum(part.stream.rollbacks for part in node.indexer.slices)

    async def _pause(self, node: IndexerNode) -> None:
        node.is_paused = True
        for other in self._hosts():
            self.network.link(node.host, other).cut()
            self.network.link(other, node.host).cut()
        await trio.lowlevel.checkpoint()

    def _go_on(self, node: IndexerNode) -> None:
        self._say(f"{node.host} goes on")
        node.is_paused = False
        for other in self._hosts():
            self.network.link(node.host, other).mend()
            self.network.link(other, node.host).mend()

    def _hosts(self) -> list[str]:
        return [SERVER, WRITER, *(node.host for node in self._nodes)]

    async def _cut(self, node: IndexerNode) -> None:
        other = self._rng.choice([other for other in self._nodes if other is not node])
        self.network.link(node.host, other.host).cut()
        await self._later(self.network.link(node.host, other.host).mend)

    async def _trickle(self, node: IndexerNode) -> None:
        other = self._rng.choice([other for other in self._nodes if other is not node])
        self.network.link(node.host, other.host).bytes_per_s = 300.0
        await self._later(self.network.link(node.host, other.host).mend)

    async def _resets(self, _node: IndexerNode) -> None:
        self.network.reset_chance = self._rng.choice((0.0, 0.3))
        self.network.break_all(self._rng)
        await trio.lowlevel.checkpoint()

    async def _server_cut(self, node: IndexerNode) -> None:
        ways = [(SERVER, node.host), (node.host, SERVER)]
        for start, end in self._rng.sample(ways, self._rng.randint(1, 2)):
            self.network.link(start, end).cut()
            await self._later(self.network.link(start, end).mend)

    async def _later(self, mend: Callable[[], None]) -> None:
        after_s = self._rng.uniform(0.5, 6.0)

        async def run() -> None:
            await trio.sleep(after_s)
            mend()

        self._nursery.start_soon(run)
        await trio.lowlevel.checkpoint()

    async def _redefine(self, _node: IndexerNode) -> None:
        definition = self._rng.choice(DEFINITIONS)
        with trio.move_on_after(10):
            await self._as_client(partial(define, design="d", indexes={"city": definition}))

    async def _server_crash(self, _node: IndexerNode) -> None:
        self._oracle.look()
        self._has_lost = True
        await self._server.kill(silently=self._rng.random() < 0.3)
        await trio.sleep(self._rng.uniform(0.0, 3.0))
        await self._server.start(self._nursery)

    # The end.

    async def _restore(self) -> None:
        self._say("all is well")
        for node in self._nodes:
            if node.is_paused:
                self._go_on(node)
        self.network.mend()
        for node in self._nodes:
            if node.indexer is None:
                await node.start(self._nursery)

    async def _settled(self) -> None:
        """Waits until every node sees every copy ready."""
        with trio.move_on_after(SETTLE_S):
            await trio.lowlevel.checkpoint()
            are_ready = [False]
            while not all(are_ready):
                are_ready = [await self._is_ready(node) for node in self._nodes]
                await trio.sleep(0.5)
            return
        raise WrongAnswerError(f"after {SETTLE_S} s not every copy is ready")

    async def _is_ready(self, node: IndexerNode) -> bool:
        assert node.indexer is not None
        if name_of(NAME) not in node.indexer.designs.names():
            return False
        status = await node.indexer.scanner.status(name_of(NAME))
        return {copy.state for part in status.slices for copy in part.replicas} == {"ready"}

    async def _final_page(
        self, indexer: Indexer, query: Query
    ) -> tuple[IndexDefinition, list[Row], dict[Any, tuple[str, int]]]:
        """An answer at last: a connection may still be one that is reset after some bytes."""
        with trio.move_on_after(SETTLE_S):
            await trio.lowlevel.checkpoint()
            while True:
                try:
                    return await self._page(indexer, query)
                except UprError as error:
                    if not is_expected(error):
                        raise
                await trio.sleep(0.5)
        raise WrongAnswerError(f"after {SETTLE_S} s a node does not answer")

    async def _check_finals(self) -> None:
        query = Query(consistency="now", limit=10_000, timestamps=True, timeout_s=30.0)
        for node in self._nodes:
            assert node.indexer is not None
            newest = self._oracle.newest()
            definition, rows, timestamps = await self._final_page(node.indexer, query)
            self._check(query, definition, rows, timestamps)
            self._oracle.check_fresh(newest, timestamps)
            self.outcome.answers += 1
            self._count_rollbacks(node)
            assert node.indexer.pool.scan_bytes == sum(
                len(part.moments) * MOMENT_BYTES for part in node.indexer.slices
            )
            for part in node.indexer.slices:
                part.definitions.find(name_of(NAME)).file.check_invariants()


def run_seed(seed: int) -> tuple[Outcome, History]:
    """Runs one seed."""
    clusters: list[IndexerCluster] = []

    async def main(clock: JumpingClock) -> None:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            cluster = IndexerCluster(seed, clock, Path(folder))
            clusters.append(cluster)
            try:
                with in_one_loop(cluster.network), trio.fail_after(SEED_S):
                    await cluster.run()
            finally:
                cluster.outcome.virtual_s = trio.current_time()
                # Open asynchronous generators end here, while the loop still runs.
                gc.collect()

    # Clients draw their waits from it.
    random.seed(seed)  # noqa: TID251  the global one is their default
    failure: BaseException | None = None
    with observed(), taken_at_once():
        try:
            run_in_world(seed, main)
        except Exception as error:  # noqa: BLE001  every error is a finding
            failure = first_of(error)
    cluster = clusters[0]
    if failure is not None:
        is_told = isinstance(failure, WrongAnswerError)
        cluster.outcome.violation = str(failure) if is_told else repr(failure)
    return cluster.outcome, cluster.history
