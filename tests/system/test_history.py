"""Three nodes as processes that are killed under load: the checkers of the simulation, looking at
what really happened."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random
from typing import Final

import pytest
import trio

from tests.kit.checkers import Items, check
from tests.kit.effort import effort
from tests.kit.history import Fault, History, Level
from tests.kit.history import Final as FinalState
from tests.kit.process import eventually
from tests.kit.recorded import LEVELS, RecordedConsumer, RecordedPublisher, contents_of
from tests.system.cluster import NAMES, PARTITIONS, Cluster, Node, caught_up, cluster
from upr_protocol.client import connect
from upr_protocol.client.operator import fail_over
from upr_protocol.ids import PartitionId, PartitionState, SeqNo

ROUNDS: Final = effort(1, 6)
REPLICATED: Final[tuple[Level, ...]] = ("replicated", "replicated_persisted")


@pytest.mark.timeout(300)
async def test_every_promise_is_kept_while_nodes_are_killed(tmp_path: Path) -> None:
    draw, history = Random(1), History(trio.current_time)
    async with cluster(tmp_path) as nodes, trio.open_nursery() as consumers:
        readers = [
            RecordedConsumer(
                f"c{index}",
                nodes.url,
                history,
                Random(index),
                undoes=index == 0,
                state=PartitionState.ACTIVE if index < 2 else PartitionState.REPLICA,
                pause_s=0.0,
            )
            for index in range(3)
        ]
        for reader in readers:
            consumers.start_soon(reader.run)
        sinks = [
            RecordedPublisher(
                f"p{index}",
                nodes.url,
                history,
                Random(index),
                level=level,
                partitions=PARTITIONS,
                pause_s=0.02,
                value_bytes=200,
            )
            for index, level in enumerate(LEVELS)
        ]
        async with trio.open_nursery() as publishers:
            for sink in sinks:
                publishers.start_soon(sink.run)
            for _ in range(ROUNDS):
                await trio.sleep(draw.uniform(0.1, 0.4))
                await _replace(nodes, nodes.nodes[draw.choice(NAMES)], history)
                draw.choice(readers).crash()
                before = sum(sink.acknowledged for sink in sinks)
                await eventually(partial(_went_on, sinks, before + 200), "publishers go on", 60)
                await caught_up(nodes)
            for sink in sinks:
                sink.stopping = True
        await nodes.quiet()
        highs = await _finals(nodes, history)
        for reader in readers:
            await eventually(partial(_has_all, reader, highs), "consumers catch up", 60)
        consumers.cancel_scope.cancel()
    check(history)
    assert sum(isinstance(event, FinalState) for event in history) == PARTITIONS * len(NAMES)
    assert all(reader.events > 100 for reader in readers)


def _went_on(sinks: list[RecordedPublisher], count: int) -> bool:
    return sum(sink.acknowledged for sink in sinks) > count


def _has_all(reader: RecordedConsumer, highs: dict[PartitionId, SeqNo]) -> bool:
    return reader.ends() == highs


async def _replace(nodes: Cluster, victim: Node, history: History) -> None:
    history.add(Fault(f"{victim.name} is killed", REPLICATED))
    await victim.kill()
    partition_map = await nodes.map()
    if any(assignment.active == victim.name for assignment in partition_map.partitions):
        await fail_over(nodes.operator(), all_of=victim.name)
    history.add(Fault(f"{victim.name} was replaced", REPLICATED))
    await victim.start(nodes.nursery)


async def _finals(nodes: Cluster, history: History) -> dict[PartitionId, SeqNo]:
    """Writes down what every node holds; gives the actives' highest numbers."""
    highs: dict[PartitionId, SeqNo] = {}
    for node in nodes.up:
        async with connect(node.address, follow_map=False) as client:
            infos = {info.partition: info for info in client.partitions()}
        items: dict[PartitionId, Items] = {}
        for state in (PartitionState.ACTIVE, PartitionState.REPLICA):
            numbers = [partition for partition, info in infos.items() if info.state is state]
            items |= await contents_of(str(node.address), numbers, state)
        for number, info in infos.items():
            is_active = info.state is PartitionState.ACTIVE
            if is_active:
                highs[number] = info.high_seq
            history.add(
                FinalState(node.name, number, is_active, info.high_seq, info.log, items[number])
            )
    return highs
