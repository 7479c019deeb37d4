"""Giving nodes their maps, until it is known whether they have carried them out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import trio

from upr_protocol.address import Address
from upr_protocol.client.operator.errors import (
    MapRefusedError,
    OvertakenError,
    PartlyDoneError,
    UnreachableError,
)
from upr_protocol.client.operator.survey import Operator, Survey
from upr_protocol.errors import BrokenError, ServerError, Status, UprError
from upr_protocol.partition_map import PartitionMap

_AGAIN_S: Final = 0.05
"""How soon a node that did not answer is asked again."""


class Giver:
    """Knows which revision each node has.

    Args:
        operator: How to ask.
        survey: What was found.
    """

    def __init__(self, operator: Operator, survey: Survey) -> None:
        self._operator = operator
        self._addresses: dict[str, Address] = {
            name: report.address for name, report in survey.nodes.items()
        }
        self._away = {name for name, report in survey.nodes.items() if report.trouble}
        self._revisions = {name: report.revision for name, report in survey.nodes.items()}

    @property
    def addresses(self) -> Mapping[str, Address]:
        """Where each node is."""
        return self._addresses

    async def give(self, node: str, given: PartitionMap, timeout_s: float | None = None) -> None:
        """Has a node carry out a map. One that does not answer is asked for its map, and given this
        one again: what came late is refused then.

        Cancelled, it may have carried it out, or do so yet.

        Raises:
            MapRefusedError: It refused, and has not.
            OvertakenError: It has another one, that is not older.
            UnreachableError: It did not say until the time was over.
        """
        if timeout_s is None:
            timeout_s = self._operator.give_timeout_s
        deadline = trio.current_time() + timeout_s
        while True:
            left_s = deadline - trio.current_time()
            try:
                client = self._operator.node(self._addresses[node], max(left_s, 0.01))
                await client.set_map(self._revisions[node], given)
            except ServerError as error:
                if error.status is Status.SHUTTING_DOWN:
                    failure: UprError = error
                elif error.status is not Status.REVISION_CONFLICT:
                    raise MapRefusedError(f"node {node} refuses: {error}") from error
                else:
                    failure = error
            except UprError as error:
                failure = error
            else:
                self._revisions[node] = given.revision
                return
            if await self._has(node, given):
                return
            if trio.current_time() + _AGAIN_S >= deadline:
                raise UnreachableError(f"node {node} does not answer: {failure}") from failure
            await trio.sleep(_AGAIN_S)

    async def _has(self, node: str, given: PartitionMap) -> bool:
        """Whether a node has this map; notes the revision that it has instead."""
        try:
            found = await self._operator.ask(self._addresses[node])
        except (BrokenError, ServerError):
            return False
        if found.map == given:
            self._revisions[node] = given.revision
            return True
        revision = 0 if found.map is None else found.map.revision
        if revision >= given.revision:
            raise OvertakenError(
                f"node {node} has revision {revision}, which another command gave: see how things "
                "stand with `upr partitions`, and repeat yours"
            )
        self._revisions[node] = revision
        return False

    async def give_each(
        self, nodes: Iterable[str], given: PartitionMap, timeout_s: float | None = None
    ) -> dict[str, PartlyDoneError]:
        """Gives several nodes a map, at the same time.

        Returns:
            Those that have not carried it out as far as is known, and why.
        """
        failed: dict[str, PartlyDoneError] = {}

        async def one(node: str) -> None:
            try:
                await self.give(node, given, timeout_s)
            except PartlyDoneError as error:
                failed[node] = error

        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(one, node)
        return failed

    async def spread(self, nodes: Iterable[str], given: PartitionMap) -> None:
        """Gives the rest of the nodes a map. Those that do not take it are only told of: nodes ask
        each other."""
        wanted = [node for node in nodes if node in self._addresses]
        away = [node for node in wanted if node in self._away]
        if away:
            self._operator.tell(f"{', '.join(away)}: not there; asks for the map when it is back")
        wanted = [node for node in wanted if node not in away]
        failed = await self.give_each(wanted, given, self._operator.tell_timeout_s)
        for node, error in failed.items():
            self._operator.tell(
                f"{node} has yet to learn of revision {given.revision}, and asks for it: {error}"
            )
        done = [node for node in wanted if node not in failed]
        if done:
            self._operator.tell(f"{', '.join(done)}: revision {given.revision}")
