"""`upr explain`: what a consumer that goes on from a resume state would be told."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

import attrs
import click
import trio

from upr_protocol.cli.connection import ask
from upr_protocol.cli.exits import INCOMPLETE, MisusedError
from upr_protocol.cli.table import print_table
from upr_protocol.cli.target import TargetCommand, bucket_argument
from upr_protocol.client import (
    Address,
    Client,
    FileStore,
    LocalCopyReader,
    PartitionInfo,
    ResumeState,
    ResumeStateError,
)
from upr_protocol.failover import Position, Retry, RollBack, decide_start
from upr_protocol.ids import PartitionId, SeqNo

_COLUMNS: Final = ("partition", "received", "complete", "outcome", "from", "ceiling", "reason")

Floor = Callable[[PartitionId], SeqNo | None]
"""Down to where a consumer can undo; None of one that cannot."""


@attrs.frozen
class _Outcome:
    """What becomes of one partition."""

    name: str
    start: int | None
    ceiling: int | None
    reason: str


def _cannot_undo(_: PartitionId) -> SeqNo | None:
    return None


def _load(path: Path, bucket: str) -> tuple[ResumeState, Floor]:
    try:
        state, floor_of = _read(path)
        state.check_bucket(bucket)
    except ResumeStateError as error:
        raise MisusedError(f"{path}: {error}") from error
    return state, floor_of


def _read(path: Path) -> tuple[ResumeState, Floor]:
    if path.is_dir():
        with closing(LocalCopyReader(path)) as copy:
            return copy.state, copy.floors().get
    state = FileStore(path).load_now()
    if state is None:
        raise MisusedError(f"there is no file {path}: name what --resume or --state names")
    return state, _cannot_undo


_GONE: Final = _Outcome("rolls back", 0, 0, "the bucket does not have this partition any more")
_HOMELESS: Final = _Outcome(
    "is elsewhere", None, None, "no node takes this partition now; ask again later"
)


def _outcome(info: PartitionInfo, position: Position, floor: SeqNo | None) -> _Outcome:
    if not info.owned:
        return _Outcome("is elsewhere", None, None, "this server does not have this partition")
    decision = decide_start(info.log, info.high_seq, info.purge_seq, position)
    reason = decision.reason.value
    if isinstance(decision, RollBack):
        to = decision.ceiling if floor is not None and decision.ceiling >= floor else 0
        return _Outcome("rolls back", to, decision.ceiling, reason)
    if isinstance(decision, Retry):
        return _Outcome("waits", position.highest_received, None, reason)
    return _Outcome("goes on", decision.seq, None, reason)


@click.command(cls=TargetCommand)
@bucket_argument
@click.argument("state", metavar="RESUME_FILE", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def explain(target: Address, state: Path, as_json: bool) -> None:
    r"""Say where a consumer would go on, and why.

    RESUME_FILE is the file of `upr tail --resume`, or the directory of `upr tail --state`. Nothing
    is changed, neither here nor on the server: its histories are asked for, and compared with what
    the file says by the rule that the server follows.

    \b
    received, complete  the last number received, and the last complete snapshot's end
    outcome             "goes on": with what follows; nothing is lost or repeated
                        "rolls back": the server never had some of what was received
                        "waits": the server has less than was received, in the same history
                        "is elsewhere": it cannot be said; where no node takes the partition now,
                        the exit code is 1
    from                the number that the stream goes on from; 0 is everything anew. A directory
                        knows what to undo, a file does not and begins anew
    ceiling             of a rollback: the highest number that both have in common

    \b
    Examples:
      upr explain upr://127.0.0.1:12000/planes planes.state
      upr explain upr://127.0.0.1:12000/planes planes.map --json
    """
    found, floor_of = _load(state, target.bucket)

    async def question(client: Client) -> tuple[int, list[PartitionInfo]]:
        await trio.lowlevel.checkpoint()  # they came with the greeting
        return client.partition_count, client.partitions()

    partition_count, told = ask(target, question)
    infos = {info.partition: info for info in told}
    rows: list[tuple[object, ...]] = []
    for partition in sorted(found.positions.keys() | set(map(PartitionId, range(partition_count)))):
        position = found.position(partition)
        info = infos.get(partition)
        if info is not None:
            outcome = _outcome(info, position, floor_of(partition))
        else:
            outcome = _GONE if partition >= partition_count else _HOMELESS
        rows.append(
            (
                partition,
                position.highest_received,
                position.last_complete,
                outcome.name,
                outcome.start if as_json or outcome.start is not None else "-",
                outcome.ceiling if as_json or outcome.ceiling is not None else "-",
                outcome.reason,
            )
        )
    print_table(_COLUMNS, rows, as_json=as_json)
    if len(infos) < partition_count:
        raise click.exceptions.Exit(INCOMPLETE)
