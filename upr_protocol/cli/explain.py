"""`upr explain`: where a consumer with a given resume state would continue."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

import attrs
import click
import trio

from upr_protocol.cli.connection import ask
from upr_protocol.cli.errors import INCOMPLETE, BadInputError
from upr_protocol.cli.output import print_table
from upr_protocol.cli.parameters import TargetCommand, bucket_argument, json_option
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

RollbackFloor = Callable[[PartitionId], SeqNo | None]
"""The lowest sequence number to which a consumer can roll back; None if it must start again."""


@attrs.frozen
class _Outcome:
    """What would happen to one partition."""

    name: str
    start: int | None
    ceiling: int | None
    reason: str


def _cannot_undo(_: PartitionId) -> SeqNo | None:
    return None


def _load(path: Path, bucket: str) -> tuple[ResumeState, RollbackFloor]:
    state, floor_of = _read(path)
    try:
        state.check_bucket(bucket)
    except ResumeStateError as error:
        raise BadInputError(f"{path}: {error}") from error
    return state, floor_of


def _read(path: Path) -> tuple[ResumeState, RollbackFloor]:
    if path.is_dir():
        with closing(LocalCopyReader(path)) as reader:
            return reader.state, reader.rollback_floors().get
    state = FileStore(path).load_now()
    if state is None:
        raise BadInputError(
            f"the file {path} does not exist; name the path given to --resume or --state"
        )
    return state, _cannot_undo


_GONE: Final = _Outcome("rolls back", 0, 0, "the bucket does not have this partition any more")
_WITHOUT_ACTIVE: Final = _Outcome(
    "is elsewhere", None, None, "no node is active for this partition now; ask again later"
)
_NOT_HERE: Final = _Outcome("is elsewhere", None, None, "this server does not have this partition")


@attrs.frozen
class _Server:
    """What the server has of the bucket."""

    partition_count: int
    infos: dict[PartitionId, PartitionInfo]

    def outcome(self, partition: PartitionId, position: Position, floor: SeqNo | None) -> _Outcome:
        """What would happen to a consumer at `position`."""
        info = self.infos.get(partition)
        if info is None:
            return _GONE if partition >= self.partition_count else _WITHOUT_ACTIVE
        if not info.is_held:
            return _NOT_HERE
        decision = decide_start(info.log, info.high_seq, info.purge_seq, position)
        reason = decision.reason.value
        if isinstance(decision, RollBack):
            can_undo = floor is not None and decision.ceiling >= floor
            start = decision.ceiling if can_undo else 0
            return _Outcome("rolls back", start, decision.ceiling, reason)
        if isinstance(decision, Retry):
            return _Outcome("waits", position.highest_received, None, reason)
        return _Outcome("goes on", decision.seq, None, reason)


async def _ask_server(client: Client) -> _Server:
    await trio.lowlevel.checkpoint()  # the partitions came with the greeting
    return _Server(client.partition_count, {info.partition: info for info in client.partitions()})


@click.command(cls=TargetCommand)
@bucket_argument
@click.argument("state", metavar="RESUME_FILE", type=click.Path(path_type=Path))
@json_option
def explain(target: Address, state: Path, as_json: bool) -> None:
    r"""Show where a consumer would continue, and why.

    RESUME_FILE is the file of `upr tail --resume`, or the directory of `upr tail --state`. The
    command reads the server's histories and compares them with the file, by the server's own rule.
    It changes nothing.

    \b
    received, complete  the last sequence number received, and the end of the last complete snapshot
    outcome             "goes on": the stream continues; no change is lost or repeated
                        "rolls back": the server does not have some of the changes received
                        "waits": the server has the same history, but not yet all changes received
                        "is elsewhere": unknown; if no node is active for the partition now,
                        the exit code is 1
    from                the sequence number to continue from; 0 starts again. A directory can undo
                        changes; a file cannot, and starts again
    ceiling             for a rollback: the highest sequence number that both have in common

    \b
    Examples:
      upr explain upr://127.0.0.1:12000/planes planes.state
      upr explain upr://127.0.0.1:12000/planes planes.copy --json
    """
    resume_state, floor_of = _load(state, target.bucket)

    server = ask(target, _ask_server)
    partitions = resume_state.positions.keys() | set(
        map(PartitionId, range(server.partition_count))
    )
    rows: list[tuple[object, ...]] = []
    for partition in sorted(partitions):
        position = resume_state.position(partition)
        outcome = server.outcome(partition, position, floor_of(partition))
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
    if len(server.infos) < server.partition_count:
        raise click.exceptions.Exit(INCOMPLETE)
