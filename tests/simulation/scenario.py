"""One seed: draws a cluster and its faults, plays them, and checks every promise."""

from __future__ import annotations

import gc
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Final

import attrs
import structlog
import trio
from structlog.typing import EventDict

from tests.kit.checkers import BrokenPromiseError, EventsTold, check
from tests.kit.event_follower import EventFollower
from tests.kit.history import Final as FinalState
from tests.kit.history import History, Said
from tests.kit.recorded import RecordedConsumer, RecordedPublisher, contents_of
from tests.kit.repeated_task import RepeatedTask
from tests.kit.wrong_state_consumer import WrongStateConsumer
from tests.simulation.disk import spared
from tests.simulation.faults import COPY_COMES_BACK, FAULTS, FOLLOWER_CRASHES, Faults
from tests.simulation.hostile_node import NODES, USERS, HostileNode, logging_in
from tests.simulation.limits import small_limits
from tests.simulation.mix import Mix
from tests.simulation.network import Network, taken_at_once
from tests.simulation.node import BUCKET, Node, ServerDiedError, first_of, observed
from tests.simulation.operator import NotSettledError, SimulatedOperator
from tests.simulation.profiles import Profile
from tests.simulation.situations import SITUATIONS
from tests.simulation.world import EPOCH_S, Chance, JumpingClock, run_in_world
from upr_protocol.ids import DESIGN_PREFIX, PartitionId, PartitionState, SeqNo
from upr_protocol.limits import WINDOW_BYTES_MIN
from upr_server.buckets.upkeep import EXPIRY_INTERVAL_S

URL: Final = f"upr://a,b,c/{BUCKET}"

EXPIRES_S: Final = 2.0

READERS_EVERY: Final = 5
"""One seed in this many has readers. They would change which of the other seeds finds which bug."""

FOLLOWERS_EVERY: Final = 5
"""One seed in this many has consumers of events."""

TASKS_EVERY: Final = 5
"""One seed in this many has tasks that run again."""

HOSTILE_NODES_EVERY: Final = 10
"""One seed in this many has users, and a node that may not be one."""

CATCH_UP_S: Final = 120.0
"""Virtual time within which every consumer catches up after the last fault."""

TELL_S: Final = 60.0
"""Virtual time within which every consumer of events is told what changed."""


@attrs.define
class Outcome:
    """The result of a seed.

    Attributes:
        violation: The promise and how it was broken; empty if every promise was kept.
        promise: The name of the broken promise, for example `I5`.
        without_effect: How often a kind of fault had no effect, by its name.
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
    """The run of one seed.

    Args:
        seed: The seed.
        clock: The simulated world's clock.
        profile: The profile to draw from; None for the general mix.

    Attributes:
        history: Everything that happened.
        outcome: The result so far.
    """

    def __init__(self, seed: int, clock: JumpingClock, profile: Profile | None = None) -> None:
        self.chance = Chance(seed)
        self.history = History(trio.current_time)
        self.outcome = Outcome(seed)
        if profile is None:
            optional_faults = {COPY_COMES_BACK, FOLLOWER_CRASHES, *SITUATIONS}
            kinds = [name for name in FAULTS if name not in optional_faults]
            mix = Mix.drawn(self.chance.of("mix"), kinds)
            self._has_readers = seed % READERS_EVERY == 2 and mix.has_replicas
            if self._has_readers:
                mix = mix.for_readers(COPY_COMES_BACK)
            has_wrong_states = self._has_readers
            has_followers = seed % FOLLOWERS_EVERY == 3
            if has_followers:
                mix = mix.for_followers(FOLLOWER_CRASHES)
            has_hostile_node = seed % HOSTILE_NODES_EVERY == 4
            # With little memory a server forgets whole writers.
            has_tasks = seed % TASKS_EVERY == 1 and mix.quota_bytes >= 64 * 1024 * 1024
        else:
            mix = profile.draw(self.chance.of("mix"))
            self._has_readers = profile.has_readers
            has_wrong_states = profile.has_wrong_states
            has_followers = profile.has_followers
            has_hostile_node = profile.has_hostile_node
            has_tasks = profile.has_tasks
        self.mix = mix
        self._has_one_replica = profile is not None and profile.has_one_replica
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
                # Events name the design documents that change, so each can be looked for.
                key_prefix=DESIGN_PREFIX if has_followers and index else b"",
                dial=partial(self.network.dial, f"p{index}"),
                sleep=clock.sleep,
            )
            for index, level in enumerate(mix.levels)
        ]
        self.consumers = [self._consumer(index) for index in range(3)]
        self.readers = [self._reader(index) for index in range(3 * self._has_readers)]
        self.wrong_state_consumers = [
            self._wrong_state_consumer(index) for index in range(2 * has_wrong_states)
        ]
        self.followers = [self._follower(index) for index in range(2 * has_followers)]
        self.tasks = [self._task(index) for index in range(2 * has_tasks)]
        self.hostile_node: HostileNode | None = None
        if has_hostile_node:
            self.hostile_node = HostileNode(
                self.nodes, self.network, self.history, self.chance.of("hostile node")
            )
            for node in self.nodes.values():
                node.users, node.security = USERS.to_json().encode(), NODES
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
            # Slow, and with a small window, so that it stays connected to a node for long.
            pause_s=chance.choice((0.1, 0.5, 2.0)),
            window_bytes=WINDOW_BYTES_MIN,
            dial=partial(self.network.dial, f"n{index}"),
            sleep=self.network.clock.sleep,
        )

    def _wrong_state_consumer(self, index: int) -> WrongStateConsumer:
        return WrongStateConsumer(
            f"w{index}",
            [f"upr://{name}/{BUCKET}" for name in self.nodes],
            self.mix.partitions,
            self.history,
            self.chance.of(f"wrong states {index}"),
            dial=partial(self.network.dial, f"w{index}"),
            sleep=self.network.clock.sleep,
        )

    def _follower(self, index: int) -> EventFollower:
        chance = self.chance.of(f"follower {index}")
        # One of them can begin at one node only.
        names = ",".join(chance.sample(list(self.nodes), 1 if index else len(self.nodes)))
        return EventFollower(
            f"e{index}",
            f"upr://{names}",
            self.history,
            chance,
            pause_s=chance.choice((0.05, 0.3, 1.0)),
            timeout_s=chance.choice((10, 60)),
            dial=partial(self.network.dial, f"e{index}"),
            sleep=self.network.clock.sleep,
        )

    def _task(self, index: int) -> RepeatedTask:
        return RepeatedTask(
            f"t{index}",
            URL,
            self.history,
            self.chance.of(f"task {index}"),
            partitions=self.mix.partitions,
            dial=partial(self.network.dial, f"t{index}"),
            sleep=self.network.clock.sleep,
        )

    async def run(self) -> None:
        """Plays the faults while clients work, waits for quiet, and compares all copies."""
        async with trio.open_nursery() as background:
            faults = self.faults = Faults(
                self.mix,
                self.chance.of("faults"),
                self.nodes,
                self.network,
                self.operator,
                self.publishers,
                self.consumers,
                self.readers,
                self.followers,
                self.history,
                background,
            )
            for node in self.nodes.values():
                await node.start(background)
            await self.operator.begin(
                self.mix.partitions,
                has_replicas=self.mix.has_replicas,
                spread=self._has_readers,
                has_one_replica=self._has_one_replica,
            )
            async with trio.open_nursery() as work:
                for consumer in self.consumers:
                    work.start_soon(consumer.run)
                for reader in self.readers:
                    work.start_soon(reader.read_all_again_and_again)
                for wrong_state_consumer in self.wrong_state_consumers:
                    work.start_soon(wrong_state_consumer.run)
                for follower in self.followers:
                    work.start_soon(follower.run)
                if self.hostile_node is not None:
                    work.start_soon(self.hostile_node.run)
                async with trio.open_nursery() as publishing:
                    for sink in self.publishers:
                        publishing.start_soon(sink.run)
                    for task in self.tasks:
                        publishing.start_soon(task.run)
                    await faults.run()
                    await self._heal(faults)
                    for sink in self.publishers:
                        sink.stopping = True
                    for task in self.tasks:
                        task.stopping = True
                for follower in self.followers:
                    # No later change makes up for what it was told and had not processed.
                    follower.crash()
                await self.operator.settle()
                await self._has_expired()
                await self.operator.settle()
                await self._caught_up()
                await self._told()
                work.cancel_scope.cancel()
            await self._from_old_states()
            await self._finals()
            self._check_bounds()
            background.cancel_scope.cancel()

    # Quiet.

    async def _heal(self, faults: Faults) -> None:
        """Ends all faults: links, disks and nodes work again."""
        self.history.add(Said("fault", "no more"))
        self.network.mend()
        for node in self.nodes.values():
            node.wear.is_full = node.wear.fails_next = False
            # If little is written, the commit that was to fail may not have come yet.
            spared(node.directory)
            node.wear.delay_s = min(self.mix.disk_s, 0.01)
            node.clock_s = 0.0
            await faults.start(node)
        for consumer in self.consumers:
            consumer.pause_s = 0.0
        await trio.sleep(1.0)
        for node in self.nodes.values():
            # A commit that had begun before its disk was mended still fails.
            await faults.start(node)

    async def _has_expired(self) -> None:
        """Waits until all items that should have expired are deleted, on new active nodes too."""
        await trio.sleep(EXPIRES_S)
        before: object = None
        while before != (highs := self._highs()):
            before = highs
            await trio.sleep(2 * EXPIRY_INTERVAL_S)

    def _highs(self) -> dict[PartitionId, SeqNo]:
        """The sequence numbers of the active nodes."""
        return {
            partition.id: partition.high_seq
            for node in self.nodes.values()
            for partition in node.held
            if partition.state is PartitionState.ACTIVE
        }

    async def _caught_up(self) -> None:
        for consumer in self.consumers:
            with trio.move_on_after(CATCH_UP_S):
                await trio.lowlevel.checkpoint()
                while True:
                    highs, ends = self._highs(), consumer.ends()
                    if all(ends.get(partition, 0) >= high for partition, high in highs.items()):
                        break
                    await trio.sleep(0.2)
                continue
            raise BrokenPromiseError(
                "I11", f"{consumer.name} stands at {ends}, and the actives at {highs}"
            )

    async def _told(self) -> None:
        """Waits until the consumers of events were told everything. What they were not told by
        then, the check of the whole history finds."""
        events_told, count = EventsTold(), 0
        with trio.move_on_after(TELL_S):
            await trio.lowlevel.checkpoint()
            while True:
                for time_s, event in self.history.events[count:]:
                    events_told.take(time_s, event)
                count = len(self.history.events)
                if not events_told.missing:
                    return
                await trio.sleep(0.5)

    async def _from_old_states(self) -> None:
        """Starts consumers from earlier resume states; each must end with the same contents."""
        for consumer in self.consumers:
            chance = self.chance.of(f"old {consumer.name}")
            for states in filter(None, (consumer.old, consumer.undone)):
                with trio.move_on_after(CATCH_UP_S) as scope:
                    await consumer.catch_up_from(chance.choice(states))
                if scope.cancelled_caught:
                    raise BrokenPromiseError(
                        "I11", f"{consumer.name} does not catch up from an old state"
                    )

    async def _finals(self) -> None:
        for node in self.nodes.values():
            for state in (PartitionState.ACTIVE, PartitionState.REPLICA):
                partitions = [partition for partition in node.held if partition.state is state]
                items = await contents_of(
                    f"upr://{node.name}/{BUCKET}",
                    [partition.id for partition in partitions],
                    state,
                    partial(self.network.dial, "final"),
                )
                for partition in partitions:
                    self.history.add(
                        FinalState(
                            node.name,
                            partition.id,
                            state is PartitionState.ACTIVE,
                            partition.high_seq,
                            partition.failover_log,
                            items[partition.id],
                        )
                    )

    def _check_bounds(self) -> None:
        """I10: closed connections leave nothing, and every structure keeps its invariants."""
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
    """Runs and checks one seed of a profile, or of the general mix."""
    clusters: list[Cluster] = []

    async def main(clock: JumpingClock) -> None:
        cluster = Cluster(seed, clock, profile)
        clusters.append(cluster)
        try:
            with trio.fail_after(3600.0), logging_in() if cluster.hostile_node else nullcontext():
                await cluster.run()
        finally:
            cluster.outcome.virtual_s = trio.current_time()
            # Open asynchronous generators end here, while the loop still runs.
            gc.collect()

    failure: BaseException | None = None
    with (
        observed(),
        small_limits(),
        taken_at_once(),
        _quiet() as unexpected_errors,
        _uncollected(),
    ):
        try:
            run_in_world(seed, main)
        except Exception as error:  # noqa: BLE001  every error is a finding
            failure = first_of(error)
    cluster = clusters[0]
    outcome, history = cluster.outcome, cluster.history
    if cluster.faults is not None:
        outcome.faults, outcome.restarts = cluster.faults.count, cluster.faults.restarts
        outcome.without_effect = cluster.faults.without_effect
    outcome.failovers = cluster.operator.failovers
    outcome.acknowledged = sum(publisher.acknowledged for publisher in cluster.publishers)
    outcome.rollbacks = sum(consumer.rollbacks for consumer in cluster.consumers)
    outcome.events = len(history.events)
    try:
        if failure is None and unexpected_errors:
            raise BrokenPromiseError("I10", f"a server failed: {unexpected_errors[0]!r}")
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
    """Disables the garbage collector: it runs at random times, and takes a tenth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _quiet() -> Iterator[list[BaseException]]:
    """Disables the servers' logs, which would take a third of the time. Collects the exceptions
    that they would log: with one, a server fails a request or a stream, and goes on."""
    errors: list[BaseException] = []

    def collect(_logger: object, _name: str, event: EventDict) -> EventDict:
        error = sys.exception()
        if event.get("exc_info") and error is not None:
            errors.append(error)
        raise structlog.DropEvent

    before = structlog.get_config()
    wrapper = structlog.make_filtering_bound_logger(logging.ERROR)
    structlog.configure(wrapper_class=wrapper, processors=[collect])
    try:
        yield errors
    finally:
        structlog.configure(**before)
