"""Adding and removing replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import attrs
import msgspec
import trio

from upr_protocol.address import AddressError
from upr_protocol.client.operator.errors import NotDoneError, PartlyDoneError
from upr_protocol.client.operator.map_change import require_partitions
from upr_protocol.client.operator.map_publisher import MapPublisher
from upr_protocol.client.operator.plan import (
    active_partitions_of,
    first_revision,
    last_active_of,
    partitions_text,
)
from upr_protocol.client.operator.survey import NodeReport, Operator, Survey
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.partition_map import (
    NODE_NAME,
    Assignment,
    PartitionMap,
    PartitionMapError,
    newest_map,
)

_POLL_S: Final = 0.2

_LOOPBACK: Final = ("127.", "localhost", "[::1]", "::1")


class ReplicaLag:
    """The lag of a replica.

    Attributes:
        changes: How many changes it lacks, over all partitions.
        partitions: The partitions in which it lacks changes or has another history.
        failure: Why this is not known now; empty when it is.
    """

    def __init__(self) -> None:
        self.changes = 0
        self.partitions = 0
        self.failure = ""

    def text(self) -> str:
        """The lag, for people."""
        if self.failure:
            return self.failure
        return f"{self.changes:,} changes behind, in {self.partitions} partitions"


# Adding.


async def add_replicas(
    operator: Operator,
    node: str,
    address: str = "",
    *,
    partitions: Iterable[int] = (),
    source: str = "",
    own_address: str = "",
) -> list[PartitionId]:
    """Makes a node a replica. Repeated after an interruption, it continues from there.

    Args:
        operator: How to reach the nodes.
        node: The node.
        address: Its `HOST:PORT`, as the other nodes reach it; empty if the map has it.
        partitions: Which partitions; none for all.
        source: The node that it follows; empty for the active of each partition.
        own_address: For a first map: the address of the node that is asked first, as other nodes
            reach it; empty for the one that the operator uses.

    Returns:
        The partitions of which it is a replica now.

    Raises:
        NotDoneError: It cannot be done; the message says what to do.
        PartlyDoneError: A node refuses, or does not answer.
    """
    _check_name(operator, node, address)
    survey = await operator.survey({node: address} if address else {})
    if address:
        survey = await _ask_at(operator, survey, node, address)
    base = _first_map(survey, address, own_address) if survey.is_single_node else survey.map
    _check_new_replica(survey, base, node, address, source)
    assignments = _with_replica(base, survey, require_partitions(survey, partitions), node, source)
    if not assignments:
        raise NotDoneError(f"{node} is already active for all of them; nothing to do")
    if address:
        base = msgspec.structs.replace(base, nodes={**base.nodes, node: address})
    new_map = _revise(base, survey, assignments)
    publisher = MapPublisher(operator, survey)
    # The actives first: a node that does not have the bucket yet asks one of them for the map.
    actives = [name for name in _last_actives(new_map) if name != node]
    failures = await publisher.publish_to(actives, new_map)
    for name, error in failures.items():
        raise PartlyDoneError(
            f"{name} does not confirm that it has the map with {node} ({error}): repeat the command"
        )
    operator.on_progress(f"{', '.join(actives)}: revision {new_map.revision}")
    try:
        await publisher.publish(node, new_map)
    except PartlyDoneError as error:
        raise PartlyDoneError(
            f"{error}. Repeat the command, or undo it with `upr replicas remove`, naming {node}"
        ) from error
    operator.on_progress(
        f"{node}: revision {new_map.revision}, a replica of {partitions_text(assignments)}"
    )
    other_nodes = [name for name in new_map.nodes if name not in (node, *actives)]
    await publisher.announce(other_nodes, new_map)
    return list(assignments)


def _check_name(operator: Operator, node: str, address: str) -> None:
    if not NODE_NAME.fullmatch(node):
        raise NotDoneError(
            f"{node!r} is not a node's name: write NODE=HOST:PORT, as in b=10.0.0.2:12000"
        )
    if not address:
        return
    try:
        operator.address.of_node(address)
    except AddressError as error:
        raise NotDoneError(f"{address!r} is not HOST:PORT, as in 10.0.0.2:12000") from error
    if not address.rpartition(":")[2].isdigit():
        raise NotDoneError(f"{address!r} is not HOST:PORT, as in 10.0.0.2:12000")


async def _ask_at(operator: Operator, survey: Survey, node: str, address: str) -> Survey:
    """The survey with what `node` says at `address`. The map may have had another address of it,
    or the survey began there."""
    node_address, report = operator.address.of_node(address), survey.nodes[node]
    if report.address == node_address:
        return survey
    new_report = await operator.node_report(node_address, node)
    if not new_report.failure and report.partitions and not new_report.partitions:
        raise NotDoneError(
            f"two servers are called {node}: the one at {report.address.host_ports}, which has the "
            f"bucket, and the one at {address}; give the second another name, with `node` in its "
            "configuration"
        )
    return attrs.evolve(survey, nodes={**survey.nodes, node: new_report})


def _first_map(survey: Survey, address: str, own_address: str) -> PartitionMap:
    """The map of a bucket that one node holds alone, with the address that others use for it."""
    (known_address,) = survey.map.nodes.values()
    node_address = own_address or known_address
    if node_address.startswith(_LOOPBACK) and address and not address.startswith(_LOOPBACK):
        raise NotDoneError(
            f"other nodes would look for {survey.first_node} at {node_address}: say --address "
            "HOST:PORT, as they reach it"
        )
    count = len(survey.map.partitions)
    first_map = PartitionMap.of_one_node(survey.bucket, count, survey.first_node, node_address)
    try:
        first_map.check()
    except PartitionMapError as error:
        raise NotDoneError(f"{error}; set `node` in that server's configuration") from error
    return first_map


def _check_new_replica(
    survey: Survey, base: PartitionMap, node: str, address: str, source: str
) -> None:
    if not address and node not in base.nodes:
        raise NotDoneError(f"the map does not name {node}: write {node}=HOST:PORT")
    if source and source not in base.nodes:
        names = ", ".join(sorted(base.nodes))
        raise NotDoneError(f"unknown node {source!r} cannot be followed; the nodes are {names}")
    survey.require_answer(node)
    if survey.is_single_node and node == survey.first_node:
        raise NotDoneError(
            f"{node} holds {survey.bucket!r} already, and is active for all of it: name another "
            "node, as in b=10.0.0.2:12000"
        )
    if survey.nodes[node].partitions and survey.nodes[node].map is None:
        raise NotDoneError(
            f"node {node} has a bucket {survey.bucket!r} of its own, which it would lose: delete "
            "it there first, with `upr bucket delete`"
        )


def _with_replica(
    base: PartitionMap,
    survey: Survey,
    partitions: Iterable[PartitionId],
    node: str,
    source: str,
) -> dict[PartitionId, Assignment]:
    """The assignments with the replica, of the partitions for which the node is not active."""
    assignments: dict[PartitionId, Assignment] = {}
    for partition in partitions:
        assignment = base.partitions[partition]
        if assignment.active == node:
            continue
        if not assignment.active:
            raise NotDoneError(
                f"{partitions_text([partition])} has no active node: finish that first, with `upr "
                "takeover` or `upr failover`"
            )
        replicas = {**assignment.replicas, node: "" if source == assignment.active else source}
        promotion_point = assignment.promotion_point
        active = survey.nodes.get(assignment.active)
        is_refilled = node not in assignment.replicas or not survey.nodes[node].has_copy
        if (
            is_refilled
            and not survey.is_single_node
            and active is not None
            and active.has_copy
            and active.state_of(partition) is PartitionState.ACTIVE
        ):
            # It counts as a replica at once, and may lack what it acknowledged: it has lost it, or
            # was a replica before, and was removed.
            promotion_point = active.copy_of(partition).point
        assignments[partition] = msgspec.structs.replace(
            assignment,
            replicas=replicas,
            continues_from=None,
            promotion_point=promotion_point,
        )
    return assignments


# Removing.


async def remove_replicas(
    operator: Operator, node: str, *, partitions: Iterable[int] = ()
) -> list[PartitionId]:
    """Removes the replicas of some partitions on a node, or of all. Its copy stays on its disk. The
    map drops a node that holds no partition.

    Returns:
        The partitions of which it was a replica.

    Raises:
        NotDoneError: It cannot be done; the message says what to do.
        PartlyDoneError: A node refuses, or does not answer.
    """
    survey = await operator.survey()
    base = survey.require_map()
    survey.require_node(node)
    partition_ids = require_partitions(survey, partitions)
    active_partitions = sorted({*active_partitions_of(base, node)} & {*partition_ids})
    if active_partitions:
        raise NotDoneError(
            f"{node} is active for {partitions_text(active_partitions)}: let another node "
            "take over first, with `upr takeover`"
        )
    assignments = _without_replica(base, partition_ids, node)
    nodes = base.nodes
    if not any(
        node in assignments.get(PartitionId(partition_number), assignment).holders()
        for partition_number, assignment in enumerate(base.partitions)
    ):
        nodes = {name: address for name, address in nodes.items() if name != node}
    if not assignments and nodes == base.nodes:
        raise NotDoneError(f"{node} is not a replica of any of them; nothing to do")
    new_map = _revise(msgspec.structs.replace(base, nodes=nodes), survey, assignments)
    publisher = MapPublisher(operator, survey)
    actives = _last_actives(new_map)
    failures = await publisher.publish_to(actives, new_map)
    for name, error in failures.items():
        operator.on_progress(
            f"{name} waits for {node} until it has revision {new_map.revision}: {error}"
        )
    if updated_actives := [name for name in actives if name not in failures]:
        operator.on_progress(f"{', '.join(updated_actives)}: revision {new_map.revision}")
    await publisher.announce([name for name in base.nodes if name not in actives], new_map)
    return list(assignments)


def _without_replica(
    base: PartitionMap, partitions: Iterable[PartitionId], node: str
) -> dict[PartitionId, Assignment]:
    """The assignments without the replica. Nodes that followed it follow the active."""
    assignments: dict[PartitionId, Assignment] = {}
    for partition in partitions:
        assignment = base.partitions[partition]
        if node in assignment.replicas:
            replicas = {
                name: "" if source == node else source
                for name, source in assignment.replicas.items()
                if name != node
            }
            assignments[partition] = msgspec.structs.replace(
                assignment, replicas=replicas, continues_from=None
            )
    return assignments


def _last_actives(partition_map: PartitionMap) -> list[str]:
    names = dict.fromkeys(last_active_of(assignment) for assignment in partition_map.partitions)
    return [name for name in names if name]


def _revise(
    base: PartitionMap, survey: Survey, assignments: Mapping[PartitionId, Assignment]
) -> PartitionMap:
    try:
        return base.with_assignments(assignments, first_revision(survey.map.revision))
    except PartitionMapError as error:
        raise NotDoneError(str(error)) from error


# Waiting.


async def wait_caught_up(
    operator: Operator,
    node: str,
    partitions: Iterable[PartitionId],
    lag: ReplicaLag,
) -> None:
    """Waits until a replica has, in the same history, what the active nodes had when they were last
    asked, and updates `lag` meanwhile. It has no deadline of its own.

    Raises:
        BrokenError: No node at the operator's address answers.
        NotDoneError: Another command has removed the replica.
    """
    partition_ids = list(partitions)
    survey = await operator.survey()
    newest = survey.require_map()
    addresses = {name: report.address for name, report in survey.nodes.items()}
    while True:
        _check_not_removed(newest, node, partition_ids)
        names = {last_active_of(newest.partitions[partition]) for partition in partition_ids}
        names -= {"", node}
        # The actives first: a replica that has what they had a moment ago has caught up.
        actives = await operator.node_reports({name: addresses[name] for name in names})
        reports = {**await operator.node_reports({node: addresses[node]}), **actives}
        _measure(lag, newest, partition_ids, node, reports)
        if not lag.partitions and not lag.failure:
            return
        maps = [report.map for report in reports.values() if report.map is not None]
        newest = newest_map([newest, *maps]) or newest
        for name, host_port in newest.nodes.items():
            addresses.setdefault(name, operator.address.of_node(host_port))
        await trio.sleep(_POLL_S)


def _check_not_removed(
    partition_map: PartitionMap, node: str, partitions: Iterable[PartitionId]
) -> None:
    removed_partitions = [
        partition
        for partition in partitions
        if node not in partition_map.partitions[partition].holders()
    ]
    if removed_partitions:
        raise NotDoneError(
            f"{node} is no longer a replica of {partitions_text(removed_partitions)}: another "
            "command has removed it; see `upr partitions`"
        )


def _measure(
    lag: ReplicaLag,
    partition_map: PartitionMap,
    partitions: list[PartitionId],
    node: str,
    reports: Mapping[str, NodeReport],
) -> None:
    """Updates `lag`, from the reports of the replica `node`, which comes first, and of the active
    nodes."""
    failures = [
        report.failure or f"node {name} does not have the bucket"
        for name, report in reports.items()
        if report.failure or len(report.partitions) != len(partition_map.partitions)
    ]
    lag.failure = failures[0] if failures else ""
    if failures:
        return
    lag.changes = lag.partitions = 0
    for partition in partitions:
        report = reports.get(last_active_of(partition_map.partitions[partition]))
        if report is None:
            continue
        active, copy = report.partitions[partition], reports[node].partitions[partition]
        shares_history = active.log == copy.log
        changes = max(0, active.high_seq - (copy.high_seq if shares_history else 0))
        lag.changes += changes
        lag.partitions += bool(changes) or not shares_history
