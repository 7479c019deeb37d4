"""The operator of a simulated cluster: does what the commands of `upr` do, sometimes late,
sometimes interrupted, and sometimes wrongly; and in the end, what is to be done."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from random import Random
from typing import Final

import trio

from tests.kit.history import Fault, History, Level, Said
from tests.simulation.network import PORT, Network
from tests.simulation.node import BUCKET, Node
from upr_protocol.client import Address, NodeClient
from upr_protocol.client.operator import (
    Operator,
    add_replicas,
    fail_over,
    remove_replicas,
    take_over,
)
from upr_protocol.client.operator.errors import NotDoneError
from upr_protocol.client.operator.takeover import TakeoverTimeouts
from upr_protocol.errors import UprError
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.partition_map import Assignment, PartitionMap

HOST: Final = "op"

REPLICATED: Final[tuple[Level, ...]] = ("replicated", "replicated_persisted")

_SETTLES: Final = 40


class NotSettledError(AssertionError):
    """I11: after the last fault the cluster does not come to rest."""


class SimulatedOperator:
    """See the module.

    Attributes:
        failovers: Commands that made another node active.
        refused: Commands that were refused, or did not come through.
    """

    def __init__(
        self, nodes: dict[str, Node], network: Network, history: History, chance: Random
    ) -> None:
        self._nodes = nodes
        self._network = network
        self._history = history
        self._chance = chance
        self._commands = 0
        self.failovers = 0
        self.refused = 0

    def _draw_command(self) -> str:
        self._commands += 1
        return f"command-{self._commands}"

    def _say(self, sentence: str) -> None:
        self._history.add(Said(HOST, sentence))

    def _operator(self) -> Operator:
        names = ",".join(self._nodes)
        return Operator(
            Address.parse(f"upr://{names}/{BUCKET}"),
            identity="operator:simulated",
            on_progress=self._say,
            dial=partial(self._network.dial, HOST),
            draw_command=self._draw_command,
        )

    async def begin(
        self,
        partitions: int,
        *,
        has_replicas: bool,
        spread: bool = False,
        has_one_replica: bool = False,
    ) -> PartitionMap:
        """Gives all nodes the first map: one is active for everything, or each for some (`spread`),
        and the others follow, or only the next one does (`has_one_replica`); or each has partitions
        of its own, and nobody follows."""
        names = list(self._nodes)
        first, *other_names = names
        assignments = [Assignment(first, dict.fromkeys(other_names, ""))] * partitions
        if spread:
            assignments = [
                Assignment(active, {name: "" for name in names if name != active})
                for active in (names[partition % len(names)] for partition in range(partitions))
            ]
        if has_one_replica:
            assignments = [
                Assignment(names[number % len(names)], {names[(number + 1) % len(names)]: ""})
                for number in range(partitions)
            ]
        if not has_replicas:
            assignments = [
                Assignment(names[partition % len(names)]) for partition in range(partitions)
            ]
        partition_map = PartitionMap(
            bucket=BUCKET,
            revision=1,
            nodes={name: f"{name}:{PORT}" for name in self._nodes},
            partitions=tuple(assignments),
        )
        for name in self._nodes:
            address = Address.parse(f"upr://{name}/{BUCKET}")
            node = NodeClient(address, dial=partial(self._network.dial, HOST))
            for _ in range(100):
                try:
                    await node.set_map(0, partition_map)
                    break
                except UprError as error:
                    self._say(f"{name}: {error}")
                    await trio.sleep(0.1)
        return partition_map

    async def fail_over(self, victim: str, *, to: str = "", lose: bool = False) -> None:
        """Replaces a node that is gone."""
        await self._do(
            f"failover of {victim}",
            partial(fail_over, self._operator(), all_of=victim, to=to, lose_acknowledged=lose),
            Fault(f"failover from {victim}", () if lose else REPLICATED),
        )

    async def take_over(self, source: str, to: str) -> None:
        """Has a node take over from another, which is there."""
        timeouts = TakeoverTimeouts(approach_s=5.0, handover_s=2.0)
        await self._do(
            f"takeover from {source} to {to}",
            partial(take_over, self._operator(), to=to, all_of=source, timeouts=timeouts),
        )

    async def _do(
        self, name: str, command: Callable[[], Awaitable[object]], fault: Fault | None = None
    ) -> bool:
        self._say(f"{name} begins")
        chance = self._chance
        # Ctrl-C, now and then; and whoever gave the command gives it again.
        for patience_s in (chance.random() * 0.3 if chance.random() < 0.15 else 30.0, 30.0):
            with trio.move_on_after(patience_s) as scope:
                await trio.lowlevel.checkpoint()
                try:
                    await command()
                    self.failovers += 1
                    self._say(f"{name} is done")
                    self._has_done(fault)
                    return True
                except UprError as error:
                    self.refused += 1
                    self._say(f"{name}: {error}")
                    if not isinstance(error, NotDoneError):
                        self._has_done(fault)
                    return False
            if scope.cancelled_caught:
                self._say(f"{name} was interrupted")
                self._has_done(fault)
        return False

    async def add_back(self, name: str) -> None:
        """Gives a node its copies, which has lost what it had."""
        await add_replicas(self._operator(), name)

    async def remove_copy(self, name: str, partition: PartitionId) -> bool:
        """Has a node give up the copy of one partition; whether it did."""
        command = partial(remove_replicas, self._operator(), name, partitions=[partition])
        return await self._do(f"removal of partition {partition} from {name}", command)

    async def is_settled(self, *, caught_up: bool = True) -> bool:
        """Whether all are up, and everybody has what he should; all of it, if `caught_up`, which
        hardly ever holds while publishers write."""
        try:
            return not await self._step(0, caught_up=caught_up)
        except UprError:
            return False

    def _has_done(self, fault: Fault | None) -> None:
        """The command has had an effect, or may have; one that was refused has none."""
        if fault is not None:
            self._history.add(fault)

    # In the end.

    async def settle(self) -> None:
        """Brings the cluster into order: every partition has an active, and every other node
        follows. All nodes are up, and the network is whole.

        Raises:
            NotSettledError: That takes too long.
        """
        why = ""
        for attempt in range(_SETTLES):
            try:
                why = await self._step(attempt)
            except UprError as error:
                why = str(error)
            if not why:
                return
            self._say(f"not settled: {why}")
            await trio.sleep(1.0)
        raise NotSettledError(f"I11: the cluster does not settle: {why}")

    async def _step(self, attempt: int, *, caught_up: bool = True) -> str:
        """One attempt; why more is to be done."""
        operator = self._operator()
        survey = await operator.survey()
        base = survey.require_map()
        for partition, assignment in enumerate(base.partitions):
            active = assignment.active
            if active and survey.nodes[active].failure:
                return f"{active} does not answer: {survey.nodes[active].failure}"
            states = {name: report.state_of(partition) for name, report in survey.nodes.items()}  # type: ignore[arg-type]
            if assignment.active and states[assignment.active] is PartitionState.ACTIVE:
                continue
            if assignment.handing_over:
                to = next(iter(assignment.replicas))
                await take_over(
                    operator, to=to, partitions=[partition], timeouts=TakeoverTimeouts(5.0, 5.0)
                )
                return "handed over"
            if attempt < 3:
                return f"partition {partition} waits"
            try:
                await fail_over(operator, partitions=[partition])
            except NotDoneError as error:
                if attempt < 10:
                    raise
                highs = {
                    name: survey.nodes[name].copy_of(partition).high_seq  # type: ignore[arg-type]
                    for name in assignment.replicas
                    if survey.reaches(name) and survey.nodes[name].partitions
                }
                if not highs:
                    return f"no replica of partition {partition} answers"
                self._history.add(Fault(f"partition {partition} loses something: {error}", ()))
                to = max(highs, key=highs.__getitem__)
                await fail_over(operator, partitions=[partition], to=to, lose_acknowledged=True)
            self.failovers += 1
            return "failed over"
        for name, report in survey.nodes.items():
            if not report.partitions and not report.failure and base.partitions[0].replicas:
                # Its disk was replaced, and nobody has told it yet what it is to hold.
                await self.add_back(name)
                return f"{name} was empty"
        return self._behind(base, caught_up=caught_up)

    def _behind(self, base: PartitionMap, *, caught_up: bool) -> str:
        """Which replica is not yet what its active is; nothing if none. How far it is counts only
        if `caught_up`."""
        for partition, assignment in enumerate(base.partitions):
            if not self._nodes[assignment.active].held:
                return f"{assignment.active} has no bucket"
            active = self._nodes[assignment.active].held[partition]
            for name in assignment.replicas:
                partitions = self._nodes[name].held
                if not partitions:
                    return f"{name} has no bucket"
                here = partitions[partition]
                if (here.state, here.failover_log) != (
                    PartitionState.REPLICA,
                    active.failover_log,
                ) or (caught_up and here.high_seq != active.high_seq):
                    return f"{name} has {here!r}, and {assignment.active} {active!r}"
        return ""
