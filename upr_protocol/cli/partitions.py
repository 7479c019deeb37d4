"""`upr partitions`: who holds what, and how far each is."""

from __future__ import annotations

from typing import Final

import attrs
import click
import trio

from upr_protocol.cli.connection import identity
from upr_protocol.cli.table import print_table
from upr_protocol.cli.target import TargetCommand, bucket_argument
from upr_protocol.client import Address, PartitionInfo
from upr_protocol.client.operator import NodeReport, Operator, Survey, ranges_text
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.partition_map import Assignment

_COLUMNS: Final = ("partition", "node", "state", "history", "high_seq", "persisted_seq", "lag")
_TOTALS: Final = ("partitions", "node", "state", "high_seq", "persisted_seq", "lag")

UNREACHABLE: Final = "unreachable"


@attrs.frozen
class _Row:
    """One partition on one node; None for what is not known."""

    partition: PartitionId
    node: str
    state: str
    history: str | None = None
    high_seq: int | None = None
    persisted_seq: int | None = None
    lag: int | None = None


@click.command(cls=TargetCommand)
@bucket_argument
@click.option("--all", "each", is_flag=True, help="A line for each partition, with its history.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, for each partition.")
def partitions(target: Address, each: bool, as_json: bool) -> None:
    """Show which nodes hold the partitions, and what they have.

    All nodes are asked that the newest partition map names, and that map is shown. Partitions that
    are held alike are shown together, with the sums of their numbers. `lag` is how many changes a
    node has less than the active. With --all: the history is what the numbers belong to; in
    another, the same number is another change.

    A state that is not what the map says is shown with that: `pending, to be active` waits until
    another node has confirmed its map.
    """
    survey = trio.run(Operator(target, identity("partitions")).survey)
    rows = _rows(survey)
    if as_json:
        print_table(_COLUMNS, [attrs.astuple(row) for row in rows], as_json=True)
        return
    _print_map(survey)
    if each:
        print_table(_COLUMNS, [_known(attrs.astuple(row)) for row in rows])
    else:
        print_table(_TOTALS, _totals(rows))


def _print_map(survey: Survey) -> None:
    if survey.map is None:
        return
    click.echo(f"revision {survey.map.revision}")
    for name, address in survey.map.nodes.items():
        report = survey.nodes[name]
        said = ""
        if report.trouble:
            said = f"  cannot be reached: {report.trouble}"
        elif report.revision != survey.map.revision:
            said = f"  has revision {report.revision}"
        click.echo(f"{name}  {address}{said}")
    click.echo()


def _rows(survey: Survey) -> list[_Row]:
    count = max(len(report.partitions) for report in survey.nodes.values())
    if survey.map is None:
        assignments = [Assignment(active=survey.asked)] * count
    else:
        assignments = list(survey.map.partitions)
    return [
        row
        for number, one in enumerate(assignments)
        for row in _of(survey, PartitionId(number), one)
    ]


def _of(survey: Survey, number: PartitionId, assignment: Assignment) -> list[_Row]:
    """The holders of one partition, and who still is something for it."""
    master = assignment.active or assignment.handing_over
    names = dict.fromkeys(assignment.holders())
    for name, report in survey.nodes.items():
        if report.state(number) is not PartitionState.DEAD:
            names[name] = None
    leading = _info(survey.nodes.get(master), number)
    rows = []
    for name in names:
        wanted = assignment.state_of(name)
        info = _info(survey.nodes.get(name), number)
        if info is None:
            state = UNREACHABLE if survey.nodes[name].trouble else PartitionState.DEAD.name.lower()
            rows.append(_Row(number, name, _differing(state, wanted)))
            continue
        lag = None
        if leading is not None and info.log == leading.log:
            lag = max(0, leading.high_seq - info.high_seq)
        rows.append(
            _Row(
                number,
                name,
                _differing(info.state.name.lower(), wanted),
                f"{info.log.current:016x}",
                info.high_seq,
                info.persisted_seq,
                lag,
            )
        )
    return rows


def _info(report: NodeReport | None, number: PartitionId) -> PartitionInfo | None:
    if report is None or number >= len(report.partitions):
        return None
    return report.partitions[number]


def _differing(state: str, wanted: PartitionState) -> str:
    said = wanted.name.lower()
    return state if state == said else f"{state}, to be {said}"


def _totals(rows: list[_Row]) -> list[tuple[object, ...]]:
    """A row for each node of partitions that are held alike."""
    of: dict[PartitionId, list[_Row]] = {}
    for row in rows:
        of.setdefault(row.partition, []).append(row)
    alike: dict[tuple[tuple[str, str, bool], ...], list[PartitionId]] = {}
    for number, held in of.items():
        kind = tuple((row.node, row.state, row.lag is None) for row in held)
        alike.setdefault(kind, []).append(number)
    found = []
    for kind, numbers in alike.items():
        for at in range(len(kind)):
            same = [of[number][at] for number in numbers]
            sums = (
                _sum([row.high_seq for row in same]),
                _sum([row.persisted_seq for row in same]),
                _sum([row.lag for row in same]),
            )
            found.append(_known((ranges_text(numbers), same[0].node, same[0].state, *sums)))
    return found


def _sum(values: list[int | None]) -> int | None:
    return None if None in values else sum(value or 0 for value in values)


def _known(row: tuple[object, ...]) -> tuple[object, ...]:
    return tuple("?" if value is None else value for value in row)
