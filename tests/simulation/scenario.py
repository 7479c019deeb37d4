"""One seed: what is drawn from it, what happens, and whether every promise was kept."""

from __future__ import annotations

import gc
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from random import Random
from typing import Final

import attrs
import structlog
import trio

from tests.kit.checkers import BrokenPromiseError, check
from tests.kit.history import ALL_LEVELS, Fault, History, Level, Said
from tests.kit.history import Final as FinalState
from tests.kit.recorded import RecordedConsumer, RecordedPublisher, contents_of
from tests.simulation.limits import small_limits
from tests.simulation.network import Link, Network
from tests.simulation.node import BUCKET, Node, ServerDiedError, first_of, observed
from tests.simulation.operator import REPLICATED, NotSettledError, SimulatedOperator
from tests.simulation.world import EPOCH_S, Chance, run_in_world
from upr_protocol.errors import UprError
from upr_protocol.ids import PartitionId, PartitionState, SeqNo
from upr_protocol.limits import WINDOW_BYTES_MIN

URL: Final = f"upr://a,b,c/{BUCKET}"

HOSTS: Final = ("a", "b", "c", "op", "p0", "p1", "c0", "c1", "c2")

EXPIRES_S: Final = 2.0

CATCH_UP_S: Final = 120.0
"""Virtual time in which everybody has caught up once all faults are over."""

DISKS: Final[tuple[Level, ...]] = ("persisted", "replicated", "replicated_persisted")
"""What survives the loss of one machine's memory."""

ON_DISK: Final[tuple[Level, ...]] = ("persisted", "replicated_persisted")
"""What survives the loss of every machine's memory."""

NOT_REPLICATED: Final[tuple[Level, ...]] = ("memory", "persisted", "replicated_persisted")
"""To what it does not matter how long a replica has something in memory only."""


@attrs.frozen
class Mix:
    """What a seed draws: how large things are, and which faults there are, each more or less
    often.

    Attributes:
        weights: How often each kind of fault comes, beside the others.
    """

    partitions: int
    has_replicas: bool
    quota_bytes: int
    value_bytes: int
    undo_mutations: int
    purge_age_s: float
    levels: tuple[Level, ...]
    delay_s: float
    jitter_s: float
    disk_s: float
    pause_s: float
    faults: int
    gap_s: float
    weights: dict[str, float]

    @classmethod
    def drawn(cls, chance: Random) -> Mix:
        """That of a seed."""
        weights = {name: chance.choice((0.0, 0.5, 1.0, 2.0)) for name in FAULTS}
        # Each seed is to have what its cluster is for.
        for name in ("fail_over", "take_over"):
            weights[name] = chance.choice((6.0, 10.0, 14.0))
        has_replicas = chance.random() < 0.85
        if not has_replicas:
            # Nobody could take over, and what a disk loses is lost.
            weights = {name: weights[name] for name in WITHOUT_REPLICAS}
            weights["crash"] = 3.0
        large = chance.random() < 0.25
        return cls(
            partitions=chance.choice((1, 2, 3)),
            has_replicas=has_replicas,
            quota_bytes=1024 * 1024 if large else 64 * 1024 * 1024,
            value_bytes=60_000 if large else chance.choice((1, 20, 200)),
            undo_mutations=chance.choice((0, 20, 200, 64 * 1024)),
            purge_age_s=chance.choice((3.0, 30.0, 3 * 24 * 3600.0)),
            levels=tuple(chance.choice(ALL_LEVELS) for _ in range(2)),
            delay_s=chance.choice((0.0, 0.0005, 0.005, 0.05)),
            jitter_s=chance.choice((0.0, 0.001, 0.05)),
            disk_s=chance.choice((0.0, 0.001, 0.01, 0.1)),
            pause_s=chance.choice((0.2, 0.8)),
            faults=chance.randint(7, 12),
            gap_s=chance.choice((0.2, 0.5, 1.0)),
            weights=weights,
        )


@attrs.define
class Outcome:
    """What became of a seed.

    Attributes:
        violation: What was broken; empty for nothing.
        promise: Which promise: `I5`, for instance.
    """

    seed: int
    violation: str = ""
    promise: str = ""
    acknowledged: int = 0
    faults: int = 0
    failovers: int = 0
    restarts: int = 0
    rollbacks: int = 0
    events: int = 0
    virtual_s: float = 0.0


class Cluster:
    """One run.

    Args:
        seed: The seed.

    Attributes:
        history: What happened.
        outcome: What is counted.
    """

    def __init__(self, seed: int) -> None:
        self.chance = Chance(seed)
        self.history = History(trio.current_time)
        self.outcome = Outcome(seed)
        self.mix = mix = Mix.drawn(self.chance.of("mix"))
        self.history.add(Said("seed", f"{seed}: {mix}"))
        self.network = Network(self.chance.of("network"), mix.delay_s, mix.jitter_s)
        self.nodes = {
            name: Node(
                name,
                mix.partitions if name == "a" else 0,
                mix.quota_bytes,
                self.network,
                self.chance.of(f"node {name}"),
                self.history,
                mix.undo_mutations,
                mix.purge_age_s,
            )
            for name in "abc"
        }
        for node in self.nodes.values():
            node.wear.delay_s = mix.disk_s
        self.operator = SimulatedOperator(
            self.nodes, self.network, self.history, self.chance.of("operator")
        )
        self.publishers = [
            RecordedPublisher(
                f"p{index}",
                URL,
                self.history,
                self.chance.of(f"publisher {index}"),
                level=level,
                partitions=mix.partitions,
                pause_s=mix.pause_s,
                value_bytes=mix.value_bytes,
                expiry=lambda: int(EPOCH_S + trio.current_time() + EXPIRES_S),
                dial=partial(self.network.dial, f"p{index}"),
            )
            for index, level in enumerate(mix.levels)
        ]
        self.consumers = [self._consumer(index) for index in range(3)]
        self._draw = self.chance.of("faults")
        # What the actives had when a node lost its memory.
        self._owed: dict[str, dict[PartitionId, SeqNo]] = {}
        self._background: trio.Nursery

    def _consumer(self, index: int) -> RecordedConsumer:
        chance = self.chance.of(f"consumer {index}")
        reads_replicas = index == 2 and chance.random() < 0.5 and self.mix.has_replicas
        return RecordedConsumer(
            f"c{index}",
            URL,
            self.history,
            chance,
            undoes=index == 0 or chance.random() < 0.3,
            state=PartitionState.REPLICA if reads_replicas else PartitionState.ACTIVE,
            pause_s=chance.choice((0.0, 0.001, 0.05, 0.3)),
            window_bytes=chance.choice((WINDOW_BYTES_MIN, 1024 * 1024)),
            dial=partial(self.network.dial, f"c{index}"),
        )

    async def run(self) -> None:
        """Everything: work under faults, then quiet, and then all must agree."""
        async with trio.open_nursery() as self._background:
            for node in self.nodes.values():
                await node.start(self._background)
            await self.operator.begin(self.mix.partitions, has_replicas=self.mix.has_replicas)
            async with trio.open_nursery() as work:
                for consumer in self.consumers:
                    work.start_soon(consumer.run)
                async with trio.open_nursery() as publishing:
                    for sink in self.publishers:
                        publishing.start_soon(sink.run)
                    await self._faults()
                    await self._heal()
                    for sink in self.publishers:
                        sink.stopping = True
                await self.operator.settle()
                # What expires does so before anybody compares. A new active learns of it from disk.
                await trio.sleep(EXPIRES_S + 8.0)
                await self.operator.settle()
                await self._caught_up()
                work.cancel_scope.cancel()
            await self._from_old_states()
            await self._finals()
            self._check_bounds()
            self._background.cancel_scope.cancel()

    # Faults.

    async def _faults(self) -> None:
        names = list(self.mix.weights)
        weights = list(self.mix.weights.values())
        for _ in range(self.mix.faults):
            await trio.sleep(self._draw.expovariate(1 / self.mix.gap_s))
            (name,) = self._draw.choices(names, weights)
            self.outcome.faults += 1
            self.history.add(Said("fault", name))
            await FAULTS[name](self)

    def _node(self) -> Node:
        return self._draw.choice(list(self.nodes.values()))

    def _leads(self, node: Node) -> bool:
        return any(one.state is PartitionState.ACTIVE for one in node.held)

    def _leader(self) -> Node:
        """A node that is active for something, if there is any."""
        found = [node for node in self.nodes.values() if self._leads(node)]
        return self._draw.choice(found) if found else self._node()

    async def _kill(self, node: Node) -> None:
        if node.is_up:
            self.history.add(Fault(f"{node.name} is killed", DISKS))
            self._loses_memory(node)
            await node.kill(silently=self._draw.random() < 0.5)
            self.outcome.restarts += 1

    def _loses_memory(self, node: Node) -> None:
        """One replica may have had something in memory only."""
        self.history.add(Fault(f"{node.name} loses its memory", ON_DISK, 2))
        highs = {
            one.id: one.high_seq
            for there in self.nodes.values()
            for one in there.held
            if one.state is PartitionState.ACTIVE
        }
        for name, before in self._owed.items():
            has = {one.id: one.high_seq for one in self.nodes[name].held}
            if name != node.name and any(
                has.get(number, 0) < min(high, highs.get(number, high))
                for number, high in before.items()
            ):
                what = f"{node.name} is gone before {name} has what it lost"
                self.history.add(Fault(what, NOT_REPLICATED, 2, is_late=True))
        self._owed[node.name] = highs

    async def _start(self, node: Node) -> None:
        if not node.is_up:
            await node.start(self._background)

    async def _fail_over(self) -> None:
        node = self._leader()
        await self._kill(node)
        await trio.sleep(self._draw.choice((0.0, 0.1, 1.0)))
        if self._draw.random() < 0.2:
            # It is back before anybody does something.
            await self._start(node)
            await trio.sleep(self._draw.random())
        await self.operator.fail_over(node.name)
        await trio.sleep(self._draw.choice((0.0, 0.5, 2.0)))
        await self._start(node)

    async def _take_over(self) -> None:
        source = self._leader()
        to = self._draw.choice([name for name in self.nodes if name != source.name])
        await self.operator.take_over(source.name, to)

    async def _take_over_amid_trouble(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._take_over)
            await trio.sleep(self._draw.random() * 0.3)
            await self._draw.choice((self._cut, self._crash, self._resets))()

    async def _wrong(self) -> None:
        """Somebody believes a node to be gone that nobody but the operator has lost."""
        node = self._leader()
        links = [self.network.link("op", node.name), self.network.link(node.name, "op")]
        for link in links:
            link.cut()
        await self.operator.fail_over(node.name, lose=self._draw.random() < 0.1)
        await trio.sleep(self._draw.random() * 2)
        for link in links:
            link.mend()
        # Until it hears of it, it acknowledges what nobody will keep.
        with trio.move_on_after(20.0):
            await trio.lowlevel.checkpoint()
            while self._is_overtaken(node):  # noqa: ASYNC110  nodes tell nobody
                await trio.sleep(0.1)
        self.history.add(Fault(f"{node.name} has heard of the failover", REPLICATED))

    def _is_overtaken(self, node: Node) -> bool:
        """Whether it is active where another is, too."""
        return any(
            one.state is other[one.id].state is PartitionState.ACTIVE
            for one in node.held
            for other in (there.held for there in self.nodes.values() if there is not node)
            if other
        )

    async def _crash(self) -> None:
        node = self._node()
        await self._kill(node)
        await trio.sleep(self._draw.random())
        if self._draw.random() < 0.2:
            node.lose_index()
        await self._start(node)

    async def _restart(self) -> None:
        node = self._node()
        if node.is_up:
            self.history.add(Said("fault", f"{node.name} is stopped"))
            with trio.move_on_after(20.0):
                await node.stop()
            if node.is_up:
                await self._kill(node)
            await self._start(node)

    async def _cut(self) -> None:
        one, other = self._draw.sample(HOSTS, 2)
        links = [self.network.link(one, other)]
        if self._draw.random() < 0.5:
            links.append(self.network.link(other, one))
        for link in links:
            link.cut()
        self.history.add(Said("fault", f"{one} to {other} is cut, {len(links)} ways"))
        self._background.start_soon(self._mend, links, self._draw.choice((0.2, 2.0, 15.0)))

    async def _mend(self, links: list[Link], after_s: float) -> None:
        await trio.sleep(after_s)
        for link in links:
            link.mend()

    async def _isolate(self) -> None:
        node = self._node()
        links = [
            link
            for name in HOSTS
            if name != node.name
            for link in (self.network.link(name, node.name), self.network.link(node.name, name))
        ]
        for link in links:
            link.cut()
        self._background.start_soon(self._mend, links, self._draw.choice((0.5, 3.0)))

    async def _trickle(self) -> None:
        one, other = self._draw.sample([*self.nodes, "c0", "c1", "c2"], 2)
        link = self.network.link(one, other)
        link.bytes_per_s = 10 ** self._draw.uniform(2, 5)
        self._background.start_soon(self._mend, [link], 3.0)

    async def _resets(self) -> None:
        """New connections do not last; those there are break."""
        self.network.reset_chance = self._draw.choice((0.0, 0.3, 0.7))
        self.network.break_all(self._draw)
        await trio.sleep(self._draw.random())
        self.network.reset_chance = 0.0

    async def _disk_fails(self) -> None:
        node = self._node()
        self.history.add(Fault(f"the disk of {node.name} fails", DISKS))
        self._loses_memory(node)
        if self._draw.random() < 0.5:
            # So that something stands in line behind what fails.
            node.wear.delay_s = 0.2
        await trio.sleep(0.3)
        node.wear.fails_next = True
        await trio.sleep(1.0)
        node.wear.fails_next = False
        node.wear.delay_s = self.mix.disk_s
        if not node.is_up:
            # What it acknowledged until then is lost, too.
            self.history.add(Fault(f"{node.name} is down, as its disk failed", DISKS))
            self.history.add(Fault(f"{node.name} has lost its memory", ON_DISK, 2))
            self.network.crash(node.name, silently=False)
            self.outcome.restarts += 1
            if self._draw.random() < 0.5 and self.mix.has_replicas:
                await self.operator.fail_over(node.name)
            await self._start(node)

    async def _disk_fills(self) -> None:
        node = self._node()
        # What is in memory only stays so for longer.
        self.history.add(Fault(f"the disk of {node.name} is full", NOT_REPLICATED, 2))
        node.wear.is_full = True
        await trio.sleep(self._draw.random() * 3)
        node.wear.is_full = False

    async def _disk_slows(self) -> None:
        node = self._node()
        self.history.add(Fault(f"the disk of {node.name} is slow", NOT_REPLICATED, 2))
        node.wear.delay_s = 1.0
        await trio.sleep(self._draw.random() * 5)
        node.wear.delay_s = self.mix.disk_s

    async def _disk_rots(self) -> None:
        """A bit flips. Whoever notices is given a new disk, once the others can do without."""
        node = self._node()
        if await self.operator.is_settled() and node.rot():
            self.history.add(Said("fault", f"a bit flips at {node.name}"))
            self._draw.choice(self.consumers).crash()
            await trio.sleep(self._draw.random() * 5)
            await self._replace_disk(node)

    async def _replace_disk(self, node: Node) -> None:
        # As after the death of a machine, and of what it had on disk.
        self.history.add(Fault(f"{node.name} loses its disk", REPLICATED))
        self.history.add(Fault(f"{node.name} loses a copy", (), 2))
        leads = self._leads(node)
        if node.is_up:
            await node.kill(silently=False)
            self.outcome.restarts += 1
        node.lose_disk()
        if leads:
            await self.operator.fail_over(node.name)
        await self._start(node)
        for _ in range(20):
            # Nobody takes the next machine away before this one has its copy.
            await trio.sleep(1.0)
            if await self.operator.is_settled():
                break
            with suppress(UprError):
                await self.operator.add_back(node.name)

    async def _clock_steps(self) -> None:
        node = self._node()
        node.clock_s += self._draw.choice((-3600.0, -1.0, 1.0, 3600.0))
        await trio.lowlevel.checkpoint()

    async def _consumer_crashes(self) -> None:
        self._draw.choice(self.consumers).crash()
        await trio.lowlevel.checkpoint()

    # Quiet.

    async def _heal(self) -> None:
        """The last fault is over: everything is whole, and everybody is there."""
        self.history.add(Said("fault", "no more"))
        self.network.mend()
        for node in self.nodes.values():
            node.wear.is_full = node.wear.fails_next = False
            node.wear.delay_s = min(self.mix.disk_s, 0.01)
            node.clock_s = 0.0
            if not node.is_up:
                await self._start(node)
        for consumer in self.consumers:
            consumer.pause_s = 0.0
        await trio.sleep(1.0)

    async def _caught_up(self) -> None:
        for consumer in self.consumers:
            with trio.move_on_after(CATCH_UP_S):
                await trio.lowlevel.checkpoint()
                while True:
                    highs = {
                        one.id: one.high_seq
                        for node in self.nodes.values()
                        for one in node.held
                        if one.state is PartitionState.ACTIVE
                    }
                    ends = consumer.ends()
                    if all(ends.get(number, 0) >= high for number, high in highs.items()):
                        break
                    await trio.sleep(0.2)
                continue
            raise BrokenPromiseError(
                "I11", f"{consumer.name} stands at {ends}, and the actives at {highs}"
            )

    async def _from_old_states(self) -> None:
        """From any resume state ever handed out: the same final state."""
        for consumer in self.consumers:
            if consumer.old:
                kept = self.chance.of(f"old {consumer.name}").choice(consumer.old)
                with trio.move_on_after(CATCH_UP_S) as scope:
                    await consumer.catch_up_from(kept)
                if scope.cancelled_caught:
                    raise BrokenPromiseError(
                        "I11", f"{consumer.name} does not come up from an old state"
                    )

    async def _finals(self) -> None:
        for node in self.nodes.values():
            for state in (PartitionState.ACTIVE, PartitionState.REPLICA):
                held = [one for one in node.held if one.state is state]
                items = await contents_of(
                    f"upr://{node.name}/{BUCKET}",
                    [one.id for one in held],
                    state,
                    partial(self.network.dial, "final"),
                )
                for one in held:
                    self.history.add(
                        FinalState(
                            node.name,
                            one.id,
                            state is PartitionState.ACTIVE,
                            one.high_seq,
                            one.failover_log,
                            items[one.id],
                        )
                    )

    def _check_bounds(self) -> None:
        """I10: nothing is left over of connections that are gone, and every structure is whole."""
        for node in self.nodes.values():
            assert node.server is not None
            service = node.server.service
            bucket = service.buckets.get(BUCKET)
            assert bucket is not None
            bucket.check_invariants()
            if len(service.connections) > 40:
                raise BrokenPromiseError(
                    "I10", f"{node.name} keeps {len(service.connections)} connections"
                )


FAULTS: Final[dict[str, Callable[[Cluster], Awaitable[None]]]] = {
    "fail_over": Cluster._fail_over,
    "take_over": Cluster._take_over,
    "take_over_amid_trouble": Cluster._take_over_amid_trouble,
    "wrong": Cluster._wrong,
    "crash": Cluster._crash,
    "restart": Cluster._restart,
    "cut": Cluster._cut,
    "isolate": Cluster._isolate,
    "trickle": Cluster._trickle,
    "resets": Cluster._resets,
    "disk_fails": Cluster._disk_fails,
    "disk_fills": Cluster._disk_fills,
    "disk_slows": Cluster._disk_slows,
    "disk_rots": Cluster._disk_rots,
    "clock_steps": Cluster._clock_steps,
    "consumer_crashes": Cluster._consumer_crashes,
}


WITHOUT_REPLICAS: Final = (
    "crash",
    "restart",
    "cut",
    "isolate",
    "trickle",
    "resets",
    "disk_fails",
    "disk_fills",
    "disk_slows",
    "clock_steps",
    "consumer_crashes",
)
"""The faults of a cluster in which each partition has one copy."""


def run_seed(seed: int) -> tuple[Outcome, History]:
    """One seed, from its beginning to its verdict."""
    clusters: list[Cluster] = []

    async def main() -> None:
        cluster = Cluster(seed)
        clusters.append(cluster)
        try:
            with trio.fail_after(3600.0):
                await cluster.run()
        finally:
            cluster.outcome.virtual_s = trio.current_time()
            # Asynchronous generators that nobody ended are ended while there is a loop.
            gc.collect()

    failure: BaseException | None = None
    with observed(), small_limits(), _quiet(), _uncollected():
        try:
            run_in_world(seed, main)
        except Exception as error:  # noqa: BLE001  whatever it is, it is what was looked for
            failure = first_of(error)
    cluster = clusters[0]
    outcome, history = cluster.outcome, cluster.history
    outcome.failovers = cluster.operator.failovers
    outcome.acknowledged = sum(one.acknowledged for one in cluster.publishers)
    outcome.rollbacks = sum(one.rollbacks for one in cluster.consumers)
    outcome.events = len(history.events)
    try:
        check(history) if failure is None else None
    except BrokenPromiseError as violation:
        failure = violation
    if failure is not None:
        is_told = isinstance(failure, BrokenPromiseError | NotSettledError | ServerDiedError)
        outcome.violation = str(failure) if is_told else f"I10: {failure!r}"
        outcome.promise = outcome.violation.partition(":")[0]
    return outcome, history


@contextmanager
def _uncollected() -> Iterator[None]:
    """When the collector runs is chance, and it takes a tenth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _quiet() -> Iterator[None]:
    """Nobody reads the servers' logs; to make them costs a third of the time."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)
