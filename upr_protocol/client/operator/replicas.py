"""Adding replicas, and removing them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
import trio

from upr_protocol.address import AddressError
from upr_protocol.client.operator.errors import NotDoneError, PartlyDoneError
from upr_protocol.client.operator.giver import Giver
from upr_protocol.client.operator.plan import (
    first_revision,
    holders_of,
    master_of,
    partitions_text,
    revised,
)
from upr_protocol.client.operator.survey import NodeReport, Operator, Survey
from upr_protocol.ids import PartitionId
from upr_protocol.partition_map import NODE_NAME, Assignment, PartitionMap, PartitionMapError

_POLL_S: Final = 0.2

_LOOPBACK: Final = ("127.", "localhost", "[::1]", "::1")


class Behind:
    """How far a replica is behind.

    Attributes:
        changes: Changes that it does not have, over all partitions.
        partitions: Partitions in which it is in another history, or has less.
        trouble: Why that is not known now; empty when it is.
    """

    def __init__(self) -> None:
        self.changes = 0
        self.partitions = 0
        self.trouble = ""

    def text(self) -> str:
        """For people."""
        if self.trouble:
            return self.trouble
        return f"{self.changes:,} changes behind, in {self.partitions} partitions"


def checked_partitions(survey: Survey, wanted: Iterable[int]) -> list[PartitionId]:
    """`wanted`, in order; all of the bucket when none are named.

    Raises:
        NotDoneError: The bucket does not have one of them.
    """
    count = _count(survey)
    found = sorted(set(wanted)) or list(range(count))
    if found[-1] >= count:
        raise NotDoneError(f"the bucket has partitions 0 to {count - 1}, not {found[-1]}")
    return [PartitionId(number) for number in found]


def _count(survey: Survey) -> int:
    if survey.map is not None:
        return len(survey.map.partitions)
    return len(survey.nodes[survey.asked].partitions)


async def add_replicas(
    operator: Operator,
    node: str,
    address: str = "",
    *,
    partitions: Iterable[int] = (),
    source: str = "",
    own_address: str = "",
) -> list[PartitionId]:
    """Has a node follow. The actives are given the map first: a node that does not have the bucket
    yet asks one of them for it. Repeated after an interruption, it goes on from there.

    Args:
        operator: How to ask.
        node: The node.
        address: Its `HOST:PORT`, as the other nodes reach it; empty when the map has it.
        partitions: Which partitions; none for all.
        source: The node that it follows; empty for the active of each.
        own_address: Of the node that is asked, as other nodes reach it, for a first map; empty for
            that of the URL.

    Returns:
        The partitions of which it was made a replica.

    Raises:
        NotDoneError: That cannot be; the sentence says what to do.
        PartlyDoneError: A node refuses, or does not answer.
    """
    others = {node: address} if address else {}
    _check_name(operator, node, address)
    survey = await operator.survey(others)
    base = survey.map or _first_map(survey, address, own_address)
    if not address and node not in base.nodes:
        raise NotDoneError(f"the map does not name {node}: write {node}=HOST:PORT")
    if source and source not in base.nodes:
        raise NotDoneError(f"there is no node {source!r} to follow")
    survey.check_reaches(node)
    if survey.nodes[node].partitions and survey.nodes[node].map is None:
        raise NotDoneError(
            f"node {node} has a bucket {survey.bucket!r} of its own, which it would lose: delete "
            "it there first, with `upr bucket delete`"
        )
    changed: dict[PartitionId, Assignment] = {}
    for number in checked_partitions(survey, partitions):
        assignment = base.partitions[number]
        if assignment.active == node:
            continue
        if not assignment.active:
            raise NotDoneError(
                f"{partitions_text([number])} has no active: end that first, with `upr takeover` "
                "or `upr failover`"
            )
        replicas = {**assignment.replicas, node: "" if source == assignment.active else source}
        changed[number] = msgspec.structs.replace(assignment, replicas=replicas, keeps=None)
    if not changed:
        raise NotDoneError(f"{node} is active for all of them already")
    if address:
        base = msgspec.structs.replace(base, nodes={**base.nodes, node: address})
    given = _revised(base, survey, changed)
    giver = Giver(operator, survey)
    masters = [name for name in _masters(given) if name != node]
    failed = await giver.give_each(masters, given)
    for name, error in failed.items():
        raise PartlyDoneError(
            f"{name} does not say that it knows of {node} ({error}): repeat the command"
        )
    operator.tell(f"{', '.join(masters)}: revision {given.revision}")
    try:
        await giver.give(node, given)
    except PartlyDoneError as error:
        raise PartlyDoneError(
            f"{error}. Repeat the command; or `upr replicas remove` {node} again"
        ) from error
    operator.tell(f"{node}: revision {given.revision}, a replica of {partitions_text(changed)}")
    await giver.spread([name for name in given.nodes if name not in (node, *masters)], given)
    return list(changed)


def _check_name(operator: Operator, node: str, address: str) -> None:
    if not NODE_NAME.fullmatch(node):
        raise NotDoneError(
            f"{node!r} is no node's name: write NODE=HOST:PORT, as in b=10.0.0.2:12000"
        )
    if address:
        try:
            operator.at(address)
        except AddressError as error:
            raise NotDoneError(f"{address!r} is not HOST:PORT") from error
        if not address.rpartition(":")[2].isdigit():
            raise NotDoneError(f"{address!r} is not HOST:PORT")


def _first_map(survey: Survey, address: str, own_address: str) -> PartitionMap:
    """Of a bucket that the node which is asked holds alone; revision 1, which no node is given."""
    count = len(survey.nodes[survey.asked].partitions)
    there = survey.nodes[survey.asked].address
    own = own_address or str(there).removeprefix("upr://").partition("/")[0]
    if own.startswith(_LOOPBACK) and address and not address.startswith(_LOOPBACK):
        raise NotDoneError(
            f"other nodes would look for {survey.asked} at {own}: say --address HOST:PORT, as they "
            "reach it"
        )
    try:
        found = PartitionMap.of_one(survey.bucket, count, survey.asked, own)
        found.check()
    except PartitionMapError as error:
        raise NotDoneError(f"{error}; set `node` in that server's configuration") from error
    return found


def _masters(given: PartitionMap) -> list[str]:
    found = dict.fromkeys(master_of(assignment) for assignment in given.partitions)
    return [name for name in found if name]


def _revised(
    base: PartitionMap, survey: Survey, changed: dict[PartitionId, Assignment]
) -> PartitionMap:
    newest = 0 if survey.map is None else survey.map.revision
    try:
        return revised(base, first_revision(newest), changed)
    except PartitionMapError as error:
        raise NotDoneError(str(error)) from error


async def remove_replicas(
    operator: Operator, node: str, *, partitions: Iterable[int] = ()
) -> list[PartitionId]:
    """Has a node hold partitions no more. What it has stays on its disk. The map forgets a node
    that holds nothing.

    Args:
        operator: How to ask.
        node: The node.
        partitions: Which partitions; none for all.

    Returns:
        The partitions of which it was a replica.

    Raises:
        NotDoneError: That cannot be; the sentence says what to do.
        PartlyDoneError: A node refuses, or does not answer.
    """
    survey = await operator.survey()
    base = survey.mapped()
    if node not in base.nodes:
        raise NotDoneError(f"there is no node {node!r}; there are {', '.join(sorted(base.nodes))}")
    wanted = checked_partitions(survey, partitions)
    led = [number for number in wanted if node == master_of(base.partitions[number])]
    if led:
        raise NotDoneError(
            f"{node} is active for {partitions_text(led)}: have another take over first, with "
            "`upr takeover`"
        )
    changed: dict[PartitionId, Assignment] = {}
    for number in wanted:
        assignment = base.partitions[number]
        if node in assignment.replicas:
            replicas = {
                name: "" if there == node else there
                for name, there in assignment.replicas.items()
                if name != node
            }
            changed[number] = msgspec.structs.replace(assignment, replicas=replicas, keeps=None)
    partitions_left = [changed.get(PartitionId(n), o) for n, o in enumerate(base.partitions)]
    nodes = base.nodes
    if not any(node in holders_of(assignment) for assignment in partitions_left):
        nodes = {name: there for name, there in nodes.items() if name != node}
    if not changed and nodes == base.nodes:
        raise NotDoneError(f"{node} is no replica of any of them")
    given = _revised(msgspec.structs.replace(base, nodes=nodes), survey, changed)
    giver = Giver(operator, survey)
    masters = _masters(given)
    for name, error in (await giver.give_each(masters, given)).items():
        operator.tell(
            f"{name} counts on {node} until it learns of revision {given.revision}: {error}"
        )
    await giver.spread([name for name in base.nodes if name not in masters], given)
    return list(changed)


async def wait_caught_up(
    operator: Operator,
    node: str,
    partitions: Iterable[PartitionId],
    behind: Behind,
) -> None:
    """Waits until a replica has, in the same history, what the actives had when they were asked
    last. For ever, if need be: the caller has the patience.

    Args:
        operator: How to ask.
        node: The replica.
        partitions: Of these.
        behind: Is kept current.

    Raises:
        BrokenError: The node at the operator's address cannot be asked.
    """
    wanted = list(partitions)
    survey = await operator.survey()
    places = {name: report.address for name, report in survey.nodes.items()}
    base = survey.mapped()
    while True:
        masters = {master_of(base.partitions[number]) for number in wanted} - {"", node}
        # The actives first: what the replica has is looked at after.
        actives = await operator.reports({name: places[name] for name in masters})
        replica = (await operator.reports({node: places[node]}))[node]
        _compare(base, wanted, actives, replica, behind)
        if not behind.partitions and not behind.trouble:
            return
        await trio.sleep(_POLL_S)


def _compare(
    base: PartitionMap,
    wanted: list[PartitionId],
    actives: dict[str, NodeReport],
    replica: NodeReport,
    behind: Behind,
) -> None:
    troubles = [one.trouble for one in (replica, *actives.values()) if one.trouble]
    behind.trouble = troubles[0] if troubles else ""
    if troubles:
        return
    if len(replica.partitions) != len(base.partitions):
        behind.trouble = f"node {replica.name} does not have the bucket yet"
        return
    behind.changes = behind.partitions = 0
    for number in wanted:
        active = actives.get(master_of(base.partitions[number]))
        if active is None:
            continue
        theirs, its = active.partitions[number], replica.partitions[number]
        same = theirs.log == its.log
        lag = max(0, theirs.high_seq - (its.high_seq if same else 0))
        behind.changes += lag
        behind.partitions += bool(lag) or not same
