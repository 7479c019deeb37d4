"""One seed: what is drawn from it, what happens, and whether every promise was kept."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import attrs
import structlog
import trio

from tests.kit.checkers import BrokenPromiseError, check
from tests.kit.history import Final as FinalState
from tests.kit.history import History, Said
from tests.kit.recorded import RecordedConsumer, RecordedPublisher, contents_of
from tests.simulation.disk import spared
from tests.simulation.faults import COPY_COMES_BACK, FAULTS, Faults
from tests.simulation.limits import small_limits
from tests.simulation.mix import Mix
from tests.simulation.network import Network, taken_at_once
from tests.simulation.node import BUCKET, Node, ServerDiedError, first_of, observed
from tests.simulation.operator import NotSettledError, SimulatedOperator
from tests.simulation.profiles import Profile
from tests.simulation.situations import SITUATIONS
from tests.simulation.world import EPOCH_S, Chance, JumpingClock, run_in_world
from upr_protocol.ids import PartitionId, PartitionState, SeqNo
from upr_protocol.limits import WINDOW_BYTES_MIN
from upr_server.buckets.upkeep import EXPIRY_INTERVAL_S

URL: Final = f"upr://a,b,c/{BUCKET}"

EXPIRES_S: Final = 2.0

READERS_EVERY: Final = 5
"""One seed in so many has readers. They would change what the others do, and so which of them finds
which bug."""

CATCH_UP_S: Final = 120.0
"""Virtual time in which everybody has caught up once all faults are over."""


@attrs.define
class Outcome:
    """What became of a seed.

    Attributes:
        violation: What was broken; empty for nothing.
        promise: Which promise: `I5`, for instance.
        without_effect: How often a kind of fault could not do what it is for.
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
    without_effect: Counter[str] = attrs.field(factory=Counter)


class Cluster:
    """One run.

    Args:
        seed: The seed.
        clock: The world's.
        profile: The situation that it is to make; None for the general mix.

    Attributes:
        history: What happened.
        outcome: What is counted.
    """

    def __init__(self, seed: int, clock: JumpingClock, profile: Profile | None = None) -> None:
        self.chance = Chance(seed)
        self.history = History(trio.current_time)
        self.outcome = Outcome(seed)
        if profile is None:
            kinds = [name for name in FAULTS if name != COPY_COMES_BACK and name not in SITUATIONS]
            mix = Mix.drawn(self.chance.of("mix"), kinds)
            self._has_readers = seed % READERS_EVERY == 2 and mix.has_replicas
            if self._has_readers:
                mix = mix.for_readers(COPY_COMES_BACK)
        else:
            mix = profile.draw(self.chance.of("mix"))
            self._has_readers = profile.has_readers
        self.mix = mix
        self.history.add(Said("seed", f"{seed}: {mix}"))
        self.network = Network(clock, self.chance.of("network"), mix.delay_s, mix.jitter_s)
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
                sleep=clock.sleep,
            )
            for index, level in enumerate(mix.levels)
        ]
        self.consumers = [self._consumer(index) for index in range(3)]
        self.readers = [self._reader(index) for index in range(3 * self._has_readers)]
        self.faults: Faults | None = None

    def _consumer(self, index: int) -> RecordedConsumer:
        chance = self.chance.of(f"consumer {index}")
        reads_replicas = index > 0 and chance.random() < 0.5 and self.mix.has_replicas
        return RecordedConsumer(
            f"c{index}",
            URL,
            self.history,
            chance,
            undoes=index == 0 or chance.random() < 0.6,
            state=PartitionState.REPLICA if reads_replicas else PartitionState.ACTIVE,
            pause_s=chance.choice(self.mix.pauses_s),
            keeps=chance.choice((0.05, 0.3, 1.0)),
            window_bytes=chance.choice((WINDOW_BYTES_MIN, 1024 * 1024)),
            dial=partial(self.network.dial, f"c{index}"),
            sleep=self.network.clock.sleep,
        )

    def _reader(self, index: int) -> RecordedConsumer:
        chance = self.chance.of(f"reader {index}")
        names = ",".join(chance.sample(list(self.nodes), len(self.nodes)))
        return RecordedConsumer(
            f"n{index}",
            f"upr://{names}/{BUCKET}",
            self.history,
            chance,
            undoes=False,
            state=PartitionState.ACTIVE,
            # Slow, and with a small window: it is long connected to a node.
            pause_s=chance.choice((0.1, 0.5, 2.0)),
            window_bytes=WINDOW_BYTES_MIN,
            dial=partial(self.network.dial, f"n{index}"),
            sleep=self.network.clock.sleep,
        )

    async def run(self) -> None:
        """Everything: work under faults, then quiet, and then all must agree."""
        async with trio.open_nursery() as background:
            faults = self.faults = Faults(
                self.mix,
                self.chance.of("faults"),
                self.nodes,
                self.network,
                self.operator,
                self.publishers,
                self.consumers,
                [reader.name for reader in self.readers],
                self.history,
                background,
            )
            for node in self.nodes.values():
                await node.start(background)
            await self.operator.begin(
                self.mix.partitions,
                has_replicas=self.mix.has_replicas,
                spread=self._has_readers,
            )
            async with trio.open_nursery() as work:
                for consumer in self.consumers:
                    work.start_soon(consumer.run)
                for reader in self.readers:
                    work.start_soon(reader.read_all_again_and_again)
                async with trio.open_nursery() as publishing:
                    for sink in self.publishers:
                        publishing.start_soon(sink.run)
                    await faults.run()
                    await self._heal(faults)
                    for sink in self.publishers:
                        sink.stopping = True
                await self.operator.settle()
                await self._has_expired()
                await self.operator.settle()
                await self._caught_up()
                work.cancel_scope.cancel()
            await self._from_old_states()
            await self._finals()
            self._check_bounds()
            background.cancel_scope.cancel()

    # Quiet.

    async def _heal(self, faults: Faults) -> None:
        """The last fault is over: everything is whole, and everybody is there."""
        self.history.add(Said("fault", "no more"))
        self.network.mend()
        for node in self.nodes.values():
            node.wear.is_full = node.wear.fails_next = False
            # Where little is written the commit that was to fail may not have come yet.
            spared(node.directory)
            node.wear.delay_s = min(self.mix.disk_s, 0.01)
            node.clock_s = 0.0
            await faults.start(node)
        for consumer in self.consumers:
            consumer.pause_s = 0.0
        await trio.sleep(1.0)
        for node in self.nodes.values():
            # A commit that was under way when its disk was mended has failed all the same.
            await faults.start(node)

    async def _has_expired(self) -> None:
        """What expires does so before anybody compares; a new active learns of it from disk."""
        await trio.sleep(EXPIRES_S)
        before: object = None
        while before != (highs := self._highs()):
            before = highs
            await trio.sleep(2 * EXPIRY_INTERVAL_S)

    def _highs(self) -> dict[PartitionId, SeqNo]:
        """How far the actives are."""
        return {
            one.id: one.high_seq
            for node in self.nodes.values()
            for one in node.held
            if one.state is PartitionState.ACTIVE
        }

    async def _caught_up(self) -> None:
        for consumer in self.consumers:
            with trio.move_on_after(CATCH_UP_S):
                await trio.lowlevel.checkpoint()
                while True:
                    highs, ends = self._highs(), consumer.ends()
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
            chance = self.chance.of(f"old {consumer.name}")
            for kept in (chance.choice(some) for some in (consumer.old, consumer.undone) if some):
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
            bucket = node.server.catalog.buckets.get(BUCKET)
            assert bucket is not None
            bucket.check_invariants()
            if len(node.server.connections.connections) > 40:
                raise BrokenPromiseError(
                    "I10",
                    f"{node.name} keeps {len(node.server.connections.connections)} connections",
                )


def run_seed(seed: int, profile: Profile | None = None) -> tuple[Outcome, History]:
    """One seed of a profile, or of the general mix, from its beginning to its verdict."""
    clusters: list[Cluster] = []

    async def main(clock: JumpingClock) -> None:
        cluster = Cluster(seed, clock, profile)
        clusters.append(cluster)
        try:
            with trio.fail_after(3600.0):
                await cluster.run()
        finally:
            cluster.outcome.virtual_s = trio.current_time()
            # Asynchronous generators that nobody ended are ended while there is a loop.
            gc.collect()

    failure: BaseException | None = None
    with observed(), small_limits(), taken_at_once(), _quiet(), _uncollected():
        try:
            run_in_world(seed, main)
        except Exception as error:  # noqa: BLE001  whatever it is, it is what was looked for
            failure = first_of(error)
    cluster = clusters[0]
    outcome, history = cluster.outcome, cluster.history
    if cluster.faults is not None:
        outcome.faults, outcome.restarts = cluster.faults.count, cluster.faults.restarts
        outcome.without_effect = cluster.faults.without_effect
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
