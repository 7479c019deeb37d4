"""The faults of a seed: of machines, links, disks, clocks and operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from random import Random
from typing import Final

import trio

from tests.kit.checkers import check_received
from tests.kit.event_follower import EventFollower
from tests.kit.history import Fault, History, Level, Said
from tests.kit.recorded import RecordedConsumer, RecordedPublisher
from tests.simulation.mix import Mix
from tests.simulation.network import Link, Network
from tests.simulation.node import BUCKET, Node
from tests.simulation.operator import REPLICATED, SimulatedOperator
from tests.simulation.situations import SITUATIONS
from upr_protocol.errors import UprError
from upr_protocol.ids import PartitionId, PartitionState, SeqNo

HOSTS: Final = ("a", "b", "c", "op", "p0", "p1", "c0", "c1", "c2")

COPY_COMES_BACK: Final = "copy_comes_back"
"""This fault comes only in seeds that have readers."""

FOLLOWER_CRASHES: Final = "follower_crashes"
"""This fault comes only in seeds that have consumers of events."""

DISKS: Final[tuple[Level, ...]] = ("persisted", "replicated", "replicated_persisted")
"""Levels that survive the loss of one machine's memory."""

ON_DISK: Final[tuple[Level, ...]] = ("persisted", "replicated_persisted")
"""Levels that survive the loss of every machine's memory."""

NOT_REPLICATED: Final[tuple[Level, ...]] = ("memory", "persisted", "replicated_persisted")
"""Levels that do not depend on how long a replica has a change in memory only."""


class Faults:
    """Makes the faults of one seed.

    Args:
        mix: The number of faults, and how often each kind comes.
        draw: The source of chance.
        nodes: The machines, by name.
        network: The links between all hosts.
        operator: Gives the commands after a fault.
        publishers: The publishers; situations crash them.
        consumers: The consumers; faults crash them.
        readers: The consumers that read up to now, which faults cut off.
        followers: The consumers of events; faults crash them.
        history: Records each fault.
        background: Runs the servers, and the ends of faults.

    Attributes:
        count: The number of faults so far.
        restarts: How often a node was killed.
        without_effect: How often a kind of fault had no effect, by its name.
        hosts: All hosts that can be cut off.
    """

    def __init__(
        self,
        mix: Mix,
        draw: Random,
        nodes: dict[str, Node],
        network: Network,
        operator: SimulatedOperator,
        publishers: Sequence[RecordedPublisher],
        consumers: Sequence[RecordedConsumer],
        readers: Sequence[RecordedConsumer],
        followers: Sequence[EventFollower],
        history: History,
        background: trio.Nursery,
    ) -> None:
        self.count = 0
        self.without_effect: Counter[str] = Counter()
        self._kind = ""
        self.restarts = 0
        self.mix = mix
        self.draw = draw
        self.nodes = nodes
        self.network = network
        self.operator = operator
        self.publishers = publishers
        self.consumers = consumers
        self.readers = readers
        self.followers = followers
        names = *(reader.name for reader in readers), *(follower.name for follower in followers)
        self.hosts = (*HOSTS, *names)
        self._history = history
        self._background = background
        # The sequence numbers of the active nodes when a node lost its memory, by that node.
        self._owed: dict[str, dict[PartitionId, SeqNo]] = {}
        for node in nodes.values():
            node.on_death = self._has_died

    async def run(self) -> None:
        """Makes all faults of the seed, one after the other."""
        names = list(self.mix.weights)
        weights = list(self.mix.weights.values())
        for _ in range(self.mix.faults):
            await trio.sleep(self.draw.expovariate(1 / self.mix.gap_s))
            (name,) = self.draw.choices(names, weights)
            self.count += 1
            self._kind = name
            self._history.add(Said("fault", name))
            await FAULTS[name](self)

    def had_no_effect(self, why: str) -> None:
        """Counts the current fault as one without effect."""
        self.without_effect[self._kind] += 1
        self._history.add(Said("fault", f"{self._kind} has no effect: {why}"))

    def roles(self) -> list[Node]:
        """A node that is active for a partition, and the other two in random order."""
        source = self.leader()
        other_nodes = [node for node in self.nodes.values() if node is not source]
        return [source, *self.draw.sample(other_nodes, len(other_nodes))]

    def links(self, names: Sequence[str], other_names: Sequence[str]) -> list[Link]:
        """The links between hosts, both ways."""
        return [
            self.network.link(*ends)
            for name in names
            for other_name in other_names
            for ends in ((name, other_name), (other_name, name))
        ]

    def mend(self, links: Sequence[Link]) -> None:
        """Restores links."""
        for link in links:
            link.mend()

    def _node(self) -> Node:
        return self.draw.choice(list(self.nodes.values()))

    def _leads(self, node: Node) -> bool:
        return any(partition.state is PartitionState.ACTIVE for partition in node.held)

    def leader(self) -> Node:
        """A node that is active for a partition, or any node if none is."""
        leaders = [node for node in self.nodes.values() if self._leads(node)]
        return self.draw.choice(leaders) if leaders else self._node()

    async def kill(self, node: Node, *, silent_chance: float = 0.5) -> None:
        """Kills a node. The other ends of its connections may stay open."""
        if node.is_up:
            self._history.add(Fault(f"{node.name} is killed", DISKS))
            self._loses_memory(node)
            await node.kill(silently=self.draw.random() < silent_chance)
            self.restarts += 1

    def _loses_memory(self, node: Node) -> None:
        """Records that a replica may have lost changes that it had in memory only."""
        self._history.add(Fault(f"{node.name} loses its memory", ON_DISK, 2))
        self._falls_behind(node)

    def _falls_behind(self, node: Node) -> None:
        """Records that all changes have one copy less until `node` has caught up."""
        highs = {
            partition.id: partition.high_seq
            for other_node in self.nodes.values()
            for partition in other_node.held
            if partition.state is PartitionState.ACTIVE
        }
        for name, owed_highs in self._owed.items():
            own_highs = {partition.id: partition.high_seq for partition in self.nodes[name].held}
            if name != node.name and any(
                own_highs.get(partition_id, 0) < min(high, highs.get(partition_id, high))
                for partition_id, high in owed_highs.items()
            ):
                sentence = f"{node.name} is lost before {name} has caught up"
                self._history.add(Fault(sentence, NOT_REPLICATED, 2, is_late=True))
        self._owed[node.name] = highs

    async def start(self, node: Node) -> None:
        """Starts a node, if it is down."""
        if not node.is_up:
            await node.start(self._background)

    async def _fail_over(self) -> None:
        node = self.leader()
        await self.kill(node)
        await trio.sleep(self.draw.choice((0.0, 0.1, 1.0)))
        if self.draw.random() < 0.2:
            # It is back before the operator acts.
            await self.start(node)
            await trio.sleep(self.draw.random())
        await self.operator.fail_over(node.name)
        await trio.sleep(self.draw.choice((0.0, 0.5, 2.0)))
        await self.start(node)

    async def _fail_over_twice(self) -> None:
        """Two operators replace a node at the same time, each by another one."""
        node = self.leader()
        await self.kill(node)
        async with trio.open_nursery() as nursery:
            for name in self.nodes:
                if name != node.name:
                    nursery.start_soon(partial(self.operator.fail_over, node.name, to=name))
        await trio.sleep(self.draw.choice((0.0, 0.5, 2.0)))
        await self.start(node)

    async def _take_over(self) -> None:
        source = self.leader()
        to = self.draw.choice([name for name in self.nodes if name != source.name])
        await self.operator.take_over(source.name, to)

    async def _take_over_amid_trouble(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._take_over)
            await trio.sleep(self.draw.random() * 0.3)
            await self.draw.choice((self._cut, self._crash, self._resets))()

    async def _copy_comes_back(self) -> None:
        """A node gives up a copy, gets it again, and takes over at once. Readers that connected to
        it in between believe that it has no copy, and cannot reach the earlier active node."""
        if not await self.operator.is_settled(caught_up=False):
            self.had_no_effect("the cluster is not settled")
            return
        source = self.leader()
        (partition_id, *_) = (
            partition.id for partition in source.held if partition.state is PartitionState.ACTIVE
        )
        node = self.draw.choice(
            [candidate for candidate in self.nodes.values() if candidate is not source]
        )
        self._history.add(Fault(f"{node.name} gives up a copy", (), 2))
        self._falls_behind(node)
        await self.operator.remove_copy(node.name, partition_id)
        links = self.links([reader.name for reader in self.readers], [source.name])
        for link in links:
            link.cut()
        await trio.sleep(self.draw.uniform(2.0, 10.0))
        if self.draw.random() < 0.5:
            # It gets nothing of what was written meanwhile: the takeover waits for that in vain.
            from_source = self.links([node.name], [source.name])
            for link in from_source:
                link.cut()
            links += from_source
        with suppress(UprError):
            await self.operator.add_back(node.name)
        await self.operator.take_over(source.name, node.name)
        await trio.sleep(self.draw.uniform(1.0, 10.0))
        self.mend(links)

    async def add_back(self, node: Node) -> None:
        """Gives a node copies of all partitions, and waits until it has them."""
        for _ in range(20):
            with suppress(UprError):
                await self.operator.add_back(node.name)
            await trio.sleep(0.5)
            if await self.operator.is_settled():
                break

    async def _wrong(self) -> None:
        """The operator alone cannot reach a node, and fails it over while it runs."""
        node = self.leader()
        links = [self.network.link("op", node.name), self.network.link(node.name, "op")]
        for link in links:
            link.cut()
        await self.operator.fail_over(node.name, lose=self.draw.random() < 0.1)
        await trio.sleep(self.draw.random() * 2)
        self.mend(links)
        await self.hear_of_failover(node)

    async def hear_of_failover(self, node: Node) -> None:
        """Waits until a node knows that another one is active in its place. Until then it
        acknowledges writes that will be lost."""
        with trio.move_on_after(20.0):
            await trio.lowlevel.checkpoint()
            while self._is_overtaken(node):  # noqa: ASYNC110  nodes tell nobody
                await trio.sleep(0.1)
        sentence = f"{node.name} has heard of the failover"
        self._history.add(Fault(sentence, REPLICATED, on_the_way=True))

    def _is_overtaken(self, node: Node) -> bool:
        """Whether another node is active for one of its active partitions."""
        return any(
            partition.state is copies[partition.id].state is PartitionState.ACTIVE
            for partition in node.held
            for copies in (
                other_node.held for other_node in self.nodes.values() if other_node is not node
            )
            if copies
        )

    async def _crash(self) -> None:
        node = self._node()
        await self.kill(node)
        await trio.sleep(self.draw.random())
        if self.draw.random() < 0.2:
            node.lose_index()
        await self.start(node)

    async def _restart(self) -> None:
        node = self._node()
        if node.is_up:
            await self._stop(node)
            await self.start(node)

    async def _stop(self, node: Node) -> None:
        """Stops a node cleanly, or kills it if it does not stop."""
        self._history.add(Said("fault", f"{node.name} is stopped"))
        with trio.move_on_after(20.0):
            await node.stop()
        if node.is_up:
            await self.kill(node)

    async def _cut(self) -> None:
        # Consumers of a replica meet one that has received nothing for a while.
        among = list(self.nodes) if self.draw.random() < 0.5 else self.hosts
        start, end = self.draw.sample(among, 2)
        links = [self.network.link(start, end)]
        if self.draw.random() < 0.5:
            links.append(self.network.link(end, start))
        for link in links:
            link.cut()
        self._history.add(Said("fault", f"{start} to {end} is cut, {len(links)} ways"))
        self._background.start_soon(self._mend, links, self.draw.choice((0.2, 2.0, 15.0)))

    async def _mend(self, links: list[Link], after_s: float) -> None:
        await trio.sleep(after_s)
        self.mend(links)

    async def _isolate(self) -> None:
        node = self._node()
        links = [
            link
            for name in self.hosts
            if name != node.name
            for link in (self.network.link(name, node.name), self.network.link(node.name, name))
        ]
        for link in links:
            link.cut()
        self._background.start_soon(self._mend, links, self.draw.choice((0.5, 3.0)))

    async def _trickle(self) -> None:
        start, end = self.draw.sample([*self.nodes, "c0", "c1", "c2"], 2)
        link = self.network.link(start, end)
        link.bytes_per_s = 10 ** self.draw.uniform(2, 5)
        self._background.start_soon(self._mend, [link], 3.0)

    async def _resets(self) -> None:
        """Connections break, and new ones do not last."""
        self.network.reset_chance = self.draw.choice((0.0, 0.3, 0.7))
        self.network.break_all(self.draw)
        await trio.sleep(self.draw.random())
        self.network.reset_chance = 0.0

    async def _disk_fails(self) -> None:
        node = self._node()
        self._history.add(Fault(f"the disk of {node.name} fails", DISKS))
        self._loses_memory(node)
        if self.draw.random() < 0.5:
            # So that other calls are queued after the one that fails.
            node.wear.delay_s = 0.2
        await trio.sleep(0.3)
        node.wear.fails_next = True
        await trio.sleep(1.0)
        node.wear.fails_next = False
        node.wear.delay_s = self.mix.disk_s
        if not node.is_up:
            if self.draw.random() < 0.5 and self.mix.has_replicas:
                await self.operator.fail_over(node.name)
            await self.start(node)

    def _has_died(self, node: Node) -> None:
        """A node's disk has failed, and everything that it acknowledged may be lost."""
        self._history.add(Fault(f"{node.name} is down, as its disk failed", DISKS))
        self._loses_memory(node)
        self.network.crash(node.name, silently=False)
        self.restarts += 1

    async def _disk_fills(self) -> None:
        node = self._node()
        # Changes stay in memory only for longer.
        self._history.add(Fault(f"the disk of {node.name} is full", NOT_REPLICATED, 2))
        node.wear.is_full = True
        await trio.sleep(self.draw.random() * 3)
        node.wear.is_full = False

    async def _disk_slows(self) -> None:
        node = self._node()
        self._history.add(Fault(f"the disk of {node.name} is slow", NOT_REPLICATED, 2))
        node.wear.delay_s = 1.0
        await trio.sleep(self.draw.random() * 5)
        node.wear.delay_s = self.mix.disk_s

    async def _disk_rots(self) -> None:
        """Bits flip while a node is stopped. A consumer then reads everything from its disk. After
        that the node gets a new disk."""
        node = self._node()
        if not await self.operator.is_settled():
            self.had_no_effect("the cluster is not settled")
            return
        await self._stop(node)
        if node.rot():
            self._history.add(Said("fault", f"bits flip at {node.name}"))
            await self.start(node)
            if await self.reads_all_of(node):
                self.had_no_effect("no flipped bit was read")
            await self._replace_disk(node)
        else:
            self.had_no_effect("the disk is empty")
            await self.start(node)

    async def reads_all_of(self, node: Node) -> bool:
        """Reads everything that a node has with a consumer. Returns whether no error came."""
        serving = (PartitionState.ACTIVE, PartitionState.REPLICA)
        with trio.move_on_after(10.0):
            await trio.lowlevel.checkpoint()
            while node.is_up and not (  # noqa: ASYNC110  nodes tell nobody
                node.held
                and all(partition.state in serving or partition.damage for partition in node.held)
            ):
                await trio.sleep(0.02)
        is_refused = any(partition.damage for partition in node.held)
        for state in serving:
            partitions = [partition.id for partition in node.held if partition.state is state]
            if not partitions:
                continue
            reader = RecordedConsumer(
                f"{state.name.lower()} reader",
                f"upr://{node.name}/{BUCKET}",
                self._history,
                self.draw,
                undoes=False,
                state=state,
                pause_s=0.0,
                follow_map=False,
                partitions=partitions,
                dial=partial(self.network.dial, "reader"),
                sleep=self.network.clock.sleep,
            )
            try:
                with trio.fail_after(10.0):
                    await reader.read_all()
                # Wrong contents may keep the cluster busy without end, so check now.
                check_received(self._history)
            except (UprError, trio.TooSlowError) as error:
                self._history.add(Said("fault", f"reading from {node.name}: {error}"))
                return False
        return node.is_up and not is_refused

    async def _replace_disk(self, node: Node) -> None:
        # As after a machine is lost with its disk.
        self._history.add(Fault(f"{node.name} loses its disk", REPLICATED))
        self._history.add(Fault(f"{node.name} loses a copy", (), 2))
        self._falls_behind(node)
        # A damaged copy is dead, but may be that of the active node.
        leads = self._leads(node) or any(partition.damage for partition in node.held)
        if node.is_up:
            await node.kill(silently=False)
            self.restarts += 1
        node.lose_disk()
        if leads:
            await self.operator.fail_over(node.name)
        await self.start(node)
        for _ in range(20):
            # The next fault comes only after this node has its copy.
            await trio.sleep(1.0)
            if await self.operator.is_settled():
                break
            with suppress(UprError):
                await self.operator.add_back(node.name)

    async def _clock_steps(self) -> None:
        node = self._node()
        node.clock_s += self.draw.choice((-3600.0, -1.0, 1.0, 3600.0))
        await trio.lowlevel.checkpoint()

    async def _consumer_crashes(self) -> None:
        self.draw.choice(self.consumers).crash()
        await trio.lowlevel.checkpoint()

    async def _follower_crashes(self) -> None:
        self.draw.choice(self.followers).crash()
        await trio.lowlevel.checkpoint()


FAULTS: Final[dict[str, Callable[[Faults], Awaitable[None]]]] = {
    "fail_over": Faults._fail_over,
    "fail_over_twice": Faults._fail_over_twice,
    "take_over": Faults._take_over,
    "take_over_amid_trouble": Faults._take_over_amid_trouble,
    "wrong": Faults._wrong,
    COPY_COMES_BACK: Faults._copy_comes_back,
    "crash": Faults._crash,
    "restart": Faults._restart,
    "cut": Faults._cut,
    "isolate": Faults._isolate,
    "trickle": Faults._trickle,
    "resets": Faults._resets,
    "disk_fails": Faults._disk_fails,
    "disk_fills": Faults._disk_fills,
    "disk_slows": Faults._disk_slows,
    "disk_rots": Faults._disk_rots,
    "clock_steps": Faults._clock_steps,
    "consumer_crashes": Faults._consumer_crashes,
    FOLLOWER_CRASHES: Faults._follower_crashes,
    **SITUATIONS,
}
