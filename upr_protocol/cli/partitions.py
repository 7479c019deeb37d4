"""`upr partitions`: which nodes hold the partitions, and how far each is."""

from __future__ import annotations

from typing import Final

import attrs
import click
import trio

from upr_protocol.cli.connection import command_identity
from upr_protocol.cli.output import print_line, print_table
from upr_protocol.cli.parameters import TargetCommand, bucket_argument
from upr_protocol.client import Address, PartitionInfo
from upr_protocol.client.operator import NodeReport, Operator, Survey, ranges_text
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.partition_map import Assignment

_COLUMNS: Final = ("partition", "node", "state", "history", "high_seq", "persisted_seq", "lag")
_TOTALS: Final = ("partitions", "node", "state", "high_seq", "persisted_seq", "lag")

UNREACHABLE: Final = "unreachable"


@attrs.frozen
class _Row:
    """One partition on one node; fields that are not known are None."""

    partition: PartitionId
    node: str
    state: str
    history: str | None = None
    high_seq: int | None = None
    persisted_seq: int | None = None
    lag: int | None = None


@click.command(cls=TargetCommand)
@bucket_argument
@click.option(
    "--all", "show_each", is_flag=True, help="Print a line per partition, with its history."
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object per partition and node.")
def partitions(target: Address, show_each: bool, as_json: bool) -> None:
    """Show which nodes hold the partitions, and how far they are.

    The command asks every node that the newest partition map names. It groups partitions with the
    same nodes and states, and prints the sums of their sequence numbers. `lag` is how many changes
    a node is behind the active one. With --all it prints each partition's history, to which its
    sequence numbers belong: in another history the same number is another change.

    If a node's state is not the one in the map, both are shown: a node that is `pending, to be
    active` waits until another node has confirmed its map. One that is `pending, to be replica` has
    lost its copy, has not yet copied all of it again, and does not count in a failover.
    """
    survey = trio.run(Operator(target, command_identity("partitions")).survey)
    rows = _rows(survey)
    if as_json:
        print_table(_COLUMNS, [attrs.astuple(row) for row in rows], as_json=True)
        return
    _print_map(survey)
    if show_each:
        print_table(_COLUMNS, [_with_question_marks(attrs.astuple(row)) for row in rows])
    else:
        print_table(_TOTALS, _totals(rows))


def _print_map(survey: Survey) -> None:
    if survey.is_single_node:
        return
    print_line(f"revision {survey.map.revision}")
    for name, address in survey.map.nodes.items():
        report = survey.nodes[name]
        remark = ""
        if report.failure:
            remark = f"  cannot be reached: {report.failure}"
        elif report.revision != survey.map.revision:
            remark = f"  has revision {report.revision}"
        print_line(f"{name}  {address}{remark}")
    print_line()


def _rows(survey: Survey) -> list[_Row]:
    return [
        row
        for partition, assignment in enumerate(survey.map.partitions)
        for row in _partition_rows(survey, PartitionId(partition), assignment)
    ]


def _partition_rows(survey: Survey, partition: PartitionId, assignment: Assignment) -> list[_Row]:
    """A row for each node that the map or the node itself says holds the partition."""
    active_name = assignment.active or assignment.handing_over
    names = dict.fromkeys(assignment.holders())
    for name, report in survey.nodes.items():
        if report.state_of(partition) is not PartitionState.DEAD:
            names[name] = None
    active_info = _info(survey.nodes.get(active_name), partition)
    rows = []
    for name in names:
        assigned_state = assignment.state_of(name)
        info = _info(survey.nodes.get(name), partition)
        if info is None:
            state = UNREACHABLE if survey.nodes[name].failure else PartitionState.DEAD.name.lower()
            rows.append(_Row(partition, name, _state_text(state, assigned_state)))
            continue
        lag = None
        if active_info is not None and info.log == active_info.log:
            lag = max(0, active_info.high_seq - info.high_seq)
        rows.append(
            _Row(
                partition,
                name,
                _state_text(info.state.name.lower(), assigned_state),
                f"{info.log.current:016x}",
                info.high_seq,
                info.persisted_seq,
                lag,
            )
        )
    return rows


def _info(report: NodeReport | None, partition: PartitionId) -> PartitionInfo | None:
    if report is None or partition >= len(report.partitions):
        return None
    return report.partitions[partition]


def _state_text(state: str, assigned_state: PartitionState) -> str:
    expected = assigned_state.name.lower()
    return state if state == expected else f"{state}, to be {expected}"


def _totals(rows: list[_Row]) -> list[tuple[object, ...]]:
    """A row for each node and each group of partitions that have the same nodes and states."""
    rows_of: dict[PartitionId, list[_Row]] = {}
    for row in rows:
        rows_of.setdefault(row.partition, []).append(row)
    groups: dict[tuple[tuple[str, str, bool], ...], list[PartitionId]] = {}
    for partition, its_rows in rows_of.items():
        kind = tuple((row.node, row.state, row.lag is None) for row in its_rows)
        groups.setdefault(kind, []).append(partition)
    totals = []
    for kind, partitions in groups.items():
        for index, (node, state, _) in enumerate(kind):
            group = [rows_of[partition][index] for partition in partitions]
            sums = (
                _sum([row.high_seq for row in group]),
                _sum([row.persisted_seq for row in group]),
                _sum([row.lag for row in group]),
            )
            totals.append(_with_question_marks((ranges_text(partitions), node, state, *sums)))
    return totals


def _sum(values: list[int | None]) -> int | None:
    return None if None in values else sum(value or 0 for value in values)


def _with_question_marks(row: tuple[object, ...]) -> tuple[object, ...]:
    return tuple("?" if value is None else value for value in row)
