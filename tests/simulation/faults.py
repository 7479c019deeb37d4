"""What goes wrong in a seed: machines, links, disks, clocks, and those who operate them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from random import Random
from typing import Final

import trio

from tests.kit.checkers import check_received
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
"""What a seed has only if it has readers."""

DISKS: Final[tuple[Level, ...]] = ("persisted", "replicated", "replicated_persisted")
"""What survives the loss of one machine's memory."""

ON_DISK: Final[tuple[Level, ...]] = ("persisted", "replicated_persisted")
"""What survives the loss of every machine's memory."""

NOT_REPLICATED: Final[tuple[Level, ...]] = ("memory", "persisted", "replicated_persisted")
"""To what it does not matter how long a replica has something in memory only."""


class Faults:
    """See the module.

    Args:
        mix: How many, and which how often.
        draw: Chance.
        nodes: The machines, by name.
        network: Between them.
        operator: Who is to see to it.
        publishers: They may crash, too.
        consumers: They crash, too.
        readers: The hosts of those who read all that there is: they are cut off, too.
        history: Where it is written down.
        background: Where servers run, and what is to end later.

    Attributes:
        count: How many there were.
        restarts: How often a node was killed.
        without_effect: How often a kind of fault could not do what it is for, by its name.
        hosts: All that can be cut off.
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
        readers: Sequence[str],
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
        self._readers = readers
        self.hosts = (*HOSTS, *readers)
        self._history = history
        self._background = background
        # What the actives had when a node lost its memory.
        self._owed: dict[str, dict[PartitionId, SeqNo]] = {}
        for node in nodes.values():
            node.on_death = self._has_died

    async def run(self) -> None:
        """As many as the seed has, one after the other."""
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
        """The fault that is under way does not do what it is for."""
        self.without_effect[self._kind] += 1
        self._history.add(Said("fault", f"{self._kind} has no effect: {why}"))

    def roles(self) -> list[Node]:
        """A node that is active for something, and the other two in any order."""
        source = self.leader()
        others = [node for node in self.nodes.values() if node is not source]
        return [source, *self.draw.sample(others, len(others))]

    def links(self, some: Sequence[str], others: Sequence[str]) -> list[Link]:
        """The links between hosts, both ways."""
        return [
            self.network.link(*ends)
            for name in some
            for other in others
            for ends in ((name, other), (other, name))
        ]

    def mend(self, links: Sequence[Link]) -> None:
        """Restores links."""
        for link in links:
            link.mend()

    def _node(self) -> Node:
        return self.draw.choice(list(self.nodes.values()))

    def _leads(self, node: Node) -> bool:
        return any(one.state is PartitionState.ACTIVE for one in node.held)

    def leader(self) -> Node:
        """A node that is active for something, if there is any."""
        found = [node for node in self.nodes.values() if self._leads(node)]
        return self.draw.choice(found) if found else self._node()

    async def kill(self, node: Node, *, silent_chance: float = 0.5) -> None:
        """Kills a node; its connections may stay open at their other ends, silently."""
        if node.is_up:
            self._history.add(Fault(f"{node.name} is killed", DISKS))
            self._loses_memory(node)
            await node.kill(silently=self.draw.random() < silent_chance)
            self.restarts += 1

    def _loses_memory(self, node: Node) -> None:
        """One replica may have had something in memory only."""
        self._history.add(Fault(f"{node.name} loses its memory", ON_DISK, 2))
        self._falls_behind(node)

    def _falls_behind(self, node: Node) -> None:
        """Until it has caught up there is a copy less of what the actives have now."""
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
                self._history.add(Fault(what, NOT_REPLICATED, 2, is_late=True))
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
            # It is back before anybody does something.
            await self.start(node)
            await trio.sleep(self.draw.random())
        await self.operator.fail_over(node.name)
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
        """A node gives up a copy, is given it again, and takes over. Readers that it greeted in
        between know it without, and do not reach the one that was active before."""
        if not await self.operator.is_settled():
            return
        source = self.leader()
        (number, *_) = (one.id for one in source.held if one.state is PartitionState.ACTIVE)
        node = self.draw.choice([one for one in self.nodes.values() if one is not source])
        self._history.add(Fault(f"{node.name} gives up a copy", (), 2))
        self._falls_behind(node)
        await self.operator.remove_copy(node.name, number)
        links = [
            link
            for reader in self._readers
            for link in (
                self.network.link(reader, source.name),
                self.network.link(source.name, reader),
            )
        ]
        for link in links:
            link.cut()
        await trio.sleep(self.draw.uniform(2.0, 10.0))
        for _ in range(20):
            # Nobody takes the next machine away before this one has its copy.
            with suppress(UprError):
                await self.operator.add_back(node.name)
            await trio.sleep(0.5)
            if await self.operator.is_settled():
                break
        await self.operator.take_over(source.name, node.name)
        await trio.sleep(self.draw.uniform(1.0, 10.0))
        for link in links:
            link.mend()

    async def _wrong(self) -> None:
        """Somebody believes a node to be gone that nobody but the operator has lost."""
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
        acknowledges what nobody will keep."""
        with trio.move_on_after(20.0):
            await trio.lowlevel.checkpoint()
            while self._is_overtaken(node):  # noqa: ASYNC110  nodes tell nobody
                await trio.sleep(0.1)
        what = f"{node.name} has heard of the failover"
        self._history.add(Fault(what, REPLICATED, on_the_way=True))

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
        # A replica that hears nothing for a while is what consumers of replicas meet.
        among = list(self.nodes) if self.draw.random() < 0.5 else self.hosts
        one, other = self.draw.sample(among, 2)
        links = [self.network.link(one, other)]
        if self.draw.random() < 0.5:
            links.append(self.network.link(other, one))
        for link in links:
            link.cut()
        self._history.add(Said("fault", f"{one} to {other} is cut, {len(links)} ways"))
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
        one, other = self.draw.sample([*self.nodes, "c0", "c1", "c2"], 2)
        link = self.network.link(one, other)
        link.bytes_per_s = 10 ** self.draw.uniform(2, 5)
        self._background.start_soon(self._mend, [link], 3.0)

    async def _resets(self) -> None:
        """New connections do not last; those there are break."""
        self.network.reset_chance = self.draw.choice((0.0, 0.3, 0.7))
        self.network.break_all(self.draw)
        await trio.sleep(self.draw.random())
        self.network.reset_chance = 0.0

    async def _disk_fails(self) -> None:
        node = self._node()
        self._history.add(Fault(f"the disk of {node.name} fails", DISKS))
        self._loses_memory(node)
        if self.draw.random() < 0.5:
            # So that something stands in line behind what fails.
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
        """Its disk has failed: what it acknowledged until now is lost, too."""
        self._history.add(Fault(f"{node.name} is down, as its disk failed", DISKS))
        self._loses_memory(node)
        self.network.crash(node.name, silently=False)
        self.restarts += 1

    async def _disk_fills(self) -> None:
        node = self._node()
        # What is in memory only stays so for longer.
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
        """Bits flip while a node is stopped. A consumer then reads all that this node has, from its
        disk. The node gets a new disk once the others can do without it."""
        node = self._node()
        if not await self.operator.is_settled():
            self.had_no_effect("the cluster is not settled")
            return
        await self._stop(node)
        if node.rot():
            self._history.add(Said("fault", f"bits flip at {node.name}"))
            await self.start(node)
            if await self.reads_all_of(node):
                self.had_no_effect("nobody read what had flipped")
            await self._replace_disk(node)
        else:
            self.had_no_effect("the disk is empty")
            await self.start(node)

    async def reads_all_of(self, node: Node) -> bool:
        """Has a consumer read all that a node has, there; whether it gets that without an error."""
        serving = (PartitionState.ACTIVE, PartitionState.REPLICA)
        with trio.move_on_after(10.0):
            await trio.lowlevel.checkpoint()
            while node.is_up and not (  # noqa: ASYNC110  nodes tell nobody
                node.held and all(partition.state in serving for partition in node.held)
            ):
                await trio.sleep(0.02)
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
                by_map=False,
                partitions=partitions,
                dial=partial(self.network.dial, "reader"),
                sleep=self.network.clock.sleep,
            )
            try:
                with trio.fail_after(10.0):
                    await reader.read_all()
                # A node that has the wrong contents may keep the cluster busy for ever.
                check_received(self._history)
            except (UprError, trio.TooSlowError) as error:
                self._history.add(Said("fault", f"reading from {node.name}: {error}"))
                return False
        return node.is_up

    async def _replace_disk(self, node: Node) -> None:
        # As after the death of a machine, and of what it had on disk.
        self._history.add(Fault(f"{node.name} loses its disk", REPLICATED))
        self._history.add(Fault(f"{node.name} loses a copy", (), 2))
        self._falls_behind(node)
        leads = self._leads(node)
        if node.is_up:
            await node.kill(silently=False)
            self.restarts += 1
        node.lose_disk()
        if leads:
            await self.operator.fail_over(node.name)
        await self.start(node)
        for _ in range(20):
            # Nobody takes the next machine away before this one has its copy.
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


FAULTS: Final[dict[str, Callable[[Faults], Awaitable[None]]]] = {
    "fail_over": Faults._fail_over,
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
    **SITUATIONS,
}
