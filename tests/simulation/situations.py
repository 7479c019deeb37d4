"""Situations in which a cluster depends on one rule: sequences of faults that chance seldom makes.

Each is given the faults of a seed, for what they can do to machines and links, and names the rule.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import trio

from tests.simulation.network import Link
from tests.simulation.node import Node
from upr_protocol.ids import PartitionState

if TYPE_CHECKING:
    from tests.simulation.faults import Faults

_POLL_S: Final = 0.01


async def diverge(faults: Faults) -> None:
    """The active node writes on without its replicas and is killed. A replica becomes active at a
    lower sequence number, so everyone else has to roll back, some of them into a snapshot.

    Consumers are away for a while, get one long snapshot when they are back, and are killed inside
    of it.
    """
    source, *other_nodes = faults.roles()
    await _write_for_a_while(faults)
    links = faults.links([source.name], [consumer.name for consumer in faults.consumers])
    pauses_s = [consumer.pause_s for consumer in faults.consumers]
    _cut_all(links)
    for consumer in faults.consumers:
        consumer.save()
        consumer.crash()
    await trio.sleep(faults.draw.uniform(0.3, 0.8))
    with _cut(faults, [source.name], _names(other_nodes)):
        # A replica's cursor would keep the snapshots before and after it from being collapsed.
        faults.network.break_between(source.name, _names(other_nodes))
        await trio.sleep(faults.draw.uniform(3.0, 5.0))
        for consumer in faults.consumers:
            consumer.pause_s = 0.1
        highs = {
            partition.id: partition.high_seq for node in other_nodes for partition in node.held
        }
        faults.mend(links)
        with trio.move_on_after(4.0):
            await trio.lowlevel.checkpoint()
            while not any(consumer.is_cut_by(highs) for consumer in faults.consumers):  # noqa: ASYNC110
                await trio.sleep(_POLL_S)
        await faults.kill(source, silent_chance=0.0)
        for consumer, pause_s in zip(faults.consumers, pauses_s, strict=True):
            consumer.save()
            consumer.crash()
            consumer.pause_s = pause_s
    await faults.operator.fail_over(source.name)
    await faults.start(source)
    # Before new writes hide what it lacks.
    for _ in range(2):
        await faults.reads_all_of(source)


async def fail_over_while_lagging(faults: Faults) -> None:
    """Changes are on their way to the replicas when the active node is killed."""
    source, *other_nodes = faults.roles()
    await _write_for_a_while(faults)
    with _slow_links(faults, source, other_nodes, delay_s=0.5):
        await trio.sleep(faults.draw.uniform(1.0, 2.0))
        await faults.kill(source, silent_chance=0.0)
    await faults.operator.fail_over(source.name)
    await faults.start(source)


async def fail_over_while_trickling(faults: Faults) -> None:
    """The replicas get what the active node sends slowly, and far behind, when it is killed."""
    source, *other_nodes = faults.roles()
    with _slow_links(faults, source, other_nodes, bytes_per_s=10 ** faults.draw.uniform(4.0, 5.0)):
        await trio.sleep(faults.draw.uniform(2.0, 6.0))
        await faults.kill(source, silent_chance=0.0)
    await faults.operator.fail_over(source.name)
    await faults.start(source)
    await trio.sleep(faults.draw.uniform(1.0, 3.0))


async def lose_answers(faults: Faults) -> None:
    """The active node's answers are lost, and it is killed. Publishers send their batches again, to
    a node that has them from replication."""
    source, *_ = faults.roles()
    await _write_for_a_while(faults)
    ways = [faults.network.link(source.name, name) for name in ("p0", "p1")]
    _cut_all(ways)
    await trio.sleep(faults.draw.uniform(0.5, 1.0))
    await faults.kill(source, silent_chance=0.0)
    faults.mend(ways)
    await faults.operator.fail_over(source.name)
    await faults.start(source)
    await trio.sleep(faults.draw.uniform(1.0, 2.0))


async def restart_leader(faults: Faults) -> None:
    """The active node is killed and comes back at once. Its replicas may have what it lost."""
    source, *_ = faults.roles()
    with _slow_disk(faults, source):
        await _write_for_a_while(faults)
        await faults.kill(source, silent_chance=0.0)
    await faults.start(source)


async def take_over_from_restarted(faults: Faults) -> None:
    """The source of a takeover is killed and comes back after the operator has looked at it, and
    before it is told to hand over. It must refuse: it no longer knows what it gave to the third
    node, and the target, which lags, would give the same sequence numbers again."""
    source, target, _ = faults.roles()
    await _write_for_a_while(faults)
    links = faults.links([source.name], [target.name])
    with _slow_disk(faults, source):
        _cut_all(links)
        await trio.sleep(faults.draw.uniform(0.5, 1.0))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(faults.operator.take_over, source.name, target.name)
            await trio.sleep(faults.draw.uniform(3, 12) * faults.mix.delay_s)
            await faults.kill(source, silent_chance=0.0)
            faults.mend(links)
            source.wear.delay_s = faults.mix.disk_s
            await faults.start(source)
    await trio.sleep(faults.draw.uniform(2.0, 4.0))


async def refuse_failover(faults: Faults) -> None:
    """The active node is killed and comes back. A failover to a replica that lags is refused, and
    the old assignments are restored. The restarted node must not take them for its own."""
    source, _, behind = faults.roles()
    await _write_for_a_while(faults)
    with _cut(faults, [source.name], [behind.name]):
        with _slow_disk(faults, source):
            await trio.sleep(faults.draw.uniform(0.5, 1.0))
            await faults.kill(source, silent_chance=0.0)
        await faults.start(source)
        await _until(faults, lambda: bool(source.held), "the node serves again")
        await faults.operator.fail_over(source.name, to=behind.name)
        await trio.sleep(faults.draw.uniform(0.2, 1.0))


async def return_from_old_history(faults: Faults) -> None:
    """A node comes back with a longer but older history, as the node that replaced it is killed.
    The sequence number does not say who has everything: the history does."""
    source, *other_nodes = faults.roles()
    await _write_for_a_while(faults)
    links = faults.links([source.name], _names(other_nodes))
    _cut_all(links)
    await trio.sleep(faults.draw.uniform(2.0, 4.0))
    await faults.kill(source, silent_chance=0.0)
    await faults.operator.fail_over(source.name)
    await faults.start(source)
    await trio.sleep(faults.draw.uniform(0.5, 1.0))
    newer = faults.leader()
    if newer is not source:
        await faults.kill(newer, silent_chance=0.0)
        await faults.operator.fail_over(newer.name)
        await faults.start(newer)
    faults.mend(links)


async def fail_over_while_refilling(faults: Faults) -> None:
    """A node becomes active, and is killed while the others have rolled back and not caught up.
    They acknowledged more than they have now, so none of them may become active."""
    source, target, behind = faults.roles()
    await _write_for_a_while(faults)
    links = faults.links([behind.name], [source.name, target.name])
    _cut_all(links)
    await trio.sleep(faults.draw.uniform(0.5, 1.0))
    with _cut(faults, [source.name], [target.name]):
        # So long that the source indexes what the target does not have: it cannot undo that, and
        # has to begin again from nothing.
        await trio.sleep(faults.draw.uniform(1.5, 2.5))
        await faults.kill(source, silent_chance=0.0)
    for publisher in faults.publishers:
        # New writes of the same keys would hide what is lost.
        publisher.crash()
    await faults.operator.fail_over(source.name)
    if faults.leader() is target:
        highs = {partition.id: partition.high_seq for partition in target.held}
        refill = faults.links([source.name], [target.name])
        for link in refill:
            # The copy takes so long that the target can be killed before it ends.
            link.bytes_per_s = 5_000
        await faults.start(source)
        await _until(
            faults,
            lambda: any(
                partition.state is PartitionState.REPLICA
                and partition.high_seq < highs[partition.id]
                for partition in source.held
            ),
            "the old active node has rolled back",
        )
        _cut_all(refill)
        await faults.kill(target, silent_chance=0.0)
        await faults.operator.fail_over(target.name)
        await faults.start(target)
        faults.mend(refill)
    else:
        faults.had_no_effect(f"{target.name} is not active")
    faults.mend(links)
    await faults.start(source)


async def interrupt_rollback(faults: Faults) -> None:
    """A consumer rolls back and is killed before it has said so. It then meets the node whose
    changes it undid, which is still active by its own map, and would let it continue."""
    source, *other_nodes = faults.roles()
    consumer, publisher = faults.consumers[0], "p1"
    await _write_for_a_while(faults)
    from_others = faults.links([source.name], [*_names(other_nodes), "op"])
    publishing = faults.links([publisher], _names(other_nodes))
    from_consumer = faults.links([source.name], [consumer.name])
    to_others = faults.links([consumer.name], _names(other_nodes))
    # The consumer gets what the replicas do not get.
    _cut_all([*from_others, *publishing])
    await trio.sleep(faults.draw.uniform(1.0, 2.0))
    _cut_all(from_consumer)
    count = len(consumer.undone)
    await faults.operator.fail_over(source.name)
    # The consumer's connections would only time out.
    faults.network.break_all(faults.draw)
    if await _until(
        faults, lambda: len(consumer.undone) > count, "the consumer has saved a rollback"
    ):
        consumer.crash()
        _cut_all(to_others)
        faults.mend(from_consumer)
        await trio.sleep(faults.draw.uniform(3.0, 5.0))
    faults.mend([*from_others, *publishing, *from_consumer, *to_others])
    await faults.hear_of_failover(source)


async def take_over_after_greeting(faults: Faults) -> None:
    """Readers ask a node for everything up to now. It has nothing of one partition, and tells them
    so. Then it takes this partition over, while they still read others from it. What it told them
    is not the end of the partition."""
    source = faults.leader()
    await _write_for_a_while(faults)
    empty = [
        (node, partition.id)
        for node in faults.nodes.values()
        for partition in node.held
        if partition.state is PartitionState.DEAD
        and source.held[partition.id].state is PartitionState.ACTIVE
    ]
    if not empty:
        faults.had_no_effect(f"all other nodes have the partitions of {source.name}")
        return
    node, partition_id = faults.draw.choice(empty)
    # They learn from nobody else where the partition ends.
    links = faults.links([reader.name for reader in faults.readers], [source.name])
    _cut_all(links)
    for reader in faults.readers:
        # So slow that their connections to this node last.
        reader.pause_s = 3.0
        reader.crash()
    await trio.sleep(faults.draw.uniform(2.0, 3.0))
    await faults.add_back(node)
    await faults.operator.take_over(source.name, node.name)
    if node.held[partition_id].state is not PartitionState.ACTIVE:
        faults.had_no_effect(f"{node.name} is not active")
    for reader in faults.readers:
        reader.pause_s = 0.1
    await trio.sleep(faults.draw.uniform(5.0, 10.0))
    faults.mend(links)


async def lose_event_queues(faults: Faults) -> None:
    """A node is killed while consumers of events cannot reach it. What it counted for them is lost,
    and the publisher does not change the same keys again."""
    source, *_ = faults.roles()
    await _write_for_a_while(faults)
    with _cut(faults, [source.name], [follower.name for follower in faults.followers]):
        await _write_for_a_while(faults)
        await faults.kill(source, silent_chance=0.0)
        for publisher in faults.publishers:
            publisher.crash()
    await faults.start(source)


# Helpers.


async def _write_for_a_while(faults: Faults) -> None:
    await trio.sleep(faults.draw.uniform(1.0, 2.0))


@contextmanager
def _slow_disk(faults: Faults, node: Node) -> Iterator[None]:
    """A commit takes so long that a snapshot on disk has several changes of one key."""
    node.wear.delay_s = max(0.4, faults.mix.disk_s)
    try:
        yield
    finally:
        node.wear.delay_s = faults.mix.disk_s


@contextmanager
def _slow_links(
    faults: Faults, source: Node, other_nodes: list[Node], **properties: float
) -> Iterator[None]:
    """The links from `source` to other nodes have these properties for as long as the context."""
    links = [faults.network.link(source.name, other_node.name) for other_node in other_nodes]
    before = [{name: getattr(link, name) for name in properties} for link in links]
    for link in links:
        for name, value in properties.items():
            setattr(link, name, value)
    try:
        yield
    finally:
        for link, values in zip(links, before, strict=True):
            for name, value in values.items():
                setattr(link, name, value)


def _names(nodes: list[Node]) -> list[str]:
    return [node.name for node in nodes]


def _cut_all(links: list[Link]) -> None:
    for link in links:
        link.cut()


@contextmanager
def _cut(faults: Faults, names: list[str], other_names: list[str]) -> Iterator[None]:
    """Cuts both ways between hosts, for as long as the context."""
    links = faults.links(names, other_names)
    _cut_all(links)
    try:
        yield
    finally:
        faults.mend(links)


async def _until(faults: Faults, condition: Callable[[], bool], description: str) -> bool:
    """Waits for a condition; whether it came true in time. If not, the fault has no effect."""
    with trio.move_on_after(20.0):
        await trio.lowlevel.checkpoint()
        while not condition():  # noqa: ASYNC110  nodes tell nobody
            await trio.sleep(_POLL_S)
        return True
    faults.had_no_effect(f"not reached: {description}")
    return False


SITUATIONS: Final[dict[str, Callable[[Faults], Awaitable[None]]]] = {
    situation.__name__: situation
    for situation in (
        diverge,
        fail_over_while_lagging,
        fail_over_while_trickling,
        lose_answers,
        restart_leader,
        take_over_from_restarted,
        refuse_failover,
        return_from_old_history,
        fail_over_while_refilling,
        interrupt_rollback,
        take_over_after_greeting,
        lose_event_queues,
    )
}
"""By name."""
