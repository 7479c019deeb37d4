"""`upr replicas`, `upr takeover` and `upr failover`: which nodes hold a bucket's partitions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import click
import trio

from upr_protocol.cli.connection import command_identity, run_until_signal
from upr_protocol.cli.errors import say
from upr_protocol.cli.output import ProgressDisplay, print_line
from upr_protocol.cli.parameters import (
    TargetCommand,
    bucket_argument,
    number_type,
    partition_numbers,
)
from upr_protocol.client import Address
from upr_protocol.client.operator import (
    Operator,
    ReplicaLag,
    TakeoverTimeouts,
    add_replicas,
    fail_over,
    partitions_text,
    remove_replicas,
    take_over,
    wait_caught_up,
)
from upr_protocol.limits import NODES_MAX

_partitions_option = click.option(
    "--partitions",
    type=partition_numbers,
    default=(),
    metavar="NUMBERS",
    help="Only these partitions, as in 0-3,7. [default: all]",
)


def _partitions_arguments(command: Any) -> Any:
    """Declares the arguments PARTITION… and the option `--all-of`."""
    argument = click.argument(
        "partitions", metavar="[PARTITION]...", nargs=-1, type=partition_numbers
    )
    option = click.option(
        "--all-of", metavar="NODE", default="", help="All partitions for which NODE is active."
    )
    return argument(option(command))


def _named_partitions(partitions: tuple[tuple[int, ...], ...], all_of: str) -> list[int]:
    """The partitions that the arguments name; none where `all_of` is given.

    Raises:
        click.UsageError: Neither is given, or both.
    """
    partition_ids = [partition for numbers in partitions for partition in numbers]
    if bool(partition_ids) is bool(all_of):
        raise click.UsageError(
            "name the partitions, as in 5 or 0-15; or all those of a node, with --all-of"
        )
    return partition_ids


def _operate(target: Address, work: Callable[[Operator], Awaitable[object]]) -> None:
    """Runs `work`, which reports on standard error what it has done. Ctrl-C ends it between any two
    steps."""
    name = command_identity(
        click.get_current_context().command_path.replace(" ", "-").removeprefix("upr-")
    )
    operator = Operator(target, name, on_progress=lambda sentence: print_line(sentence, err=True))

    async def run() -> None:
        await work(operator)

    try:
        run_until_signal(run)
    except click.exceptions.Exit:
        say("interrupted: check the state with `upr partitions`, or repeat the command")
        raise


@click.group()
def replicas() -> None:
    """Add and remove replicas.

    A replica is a copy of a partition on another node. It can replace the active node: with `upr
    takeover` while that node is running, with `upr failover` when it is gone.
    """


@replicas.command(cls=TargetCommand)
@bucket_argument
@click.argument("node", metavar="NODE=HOST:PORT")
@_partitions_option
@click.option(
    "--from",
    "source",
    metavar="SOURCE",
    default="",
    help="The node to copy from, itself a replica. [default: the active]",
)
@click.option(
    "--address",
    metavar="HOST:PORT",
    default="",
    help="For the first replica of a bucket: the address at which other nodes reach the node that "
    "URL leads to. [default: the URL's]",
)
@click.option(
    "--wait/--no-wait",
    default=True,
    help="Wait until the replica has caught up. [default: wait]",
)
def add(
    target: Address,
    node: str,
    partitions: tuple[int, ...],
    source: str,
    address: str,
    wait: bool,
) -> None:
    r"""Make a node a replica of the bucket that URL names.

    NODE is the server's own name (`node` in its configuration), and HOST:PORT the address at which
    all other nodes reach it. NODE alone is enough if the partition map names it already. The node
    must be running, and must not have a bucket of the same name of its own.

    \b
    Examples:
      upr replicas add upr://10.0.0.1:12000/flights b=10.0.0.2:12000
      upr replicas add upr://10.0.0.1:12000/flights c=10.0.0.3:12000 --from b
    """
    name, _, node_address = node.partition("=")

    async def work(operator: Operator) -> None:
        new_partitions = await add_replicas(
            operator,
            name,
            node_address,
            partitions=partitions,
            source=source,
            own_address=address,
        )
        if not wait:
            return
        lag = ReplicaLag()
        progress = ProgressDisplay(lambda: f"{name}: {lag.text()}")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(progress.run)
            await wait_caught_up(operator, name, new_partitions, lag)
            nursery.cancel_scope.cancel()
        progress.clear()
        print_line(f"{name} has caught up on {partitions_text(new_partitions)}", err=True)

    _operate(target, work)


@replicas.command(cls=TargetCommand)
@bucket_argument
@click.argument("node", metavar="NODE")
@_partitions_option
def remove(target: Address, node: str, partitions: tuple[int, ...]) -> None:
    r"""Remove the replicas on a node.

    The node may be gone for good. If it is running, its copy stays on its disk until you delete the
    bucket there. The partition map drops a node that holds no partition. A change whose only
    replica copy is on this node is then on the active node alone.

    \b
    Examples:
      upr replicas remove upr://10.0.0.1:12000/flights b
      upr replicas remove upr://10.0.0.1:12000/flights b --partitions 0-15
    """

    async def work(operator: Operator) -> None:
        old_partitions = await remove_replicas(operator, node, partitions=partitions)
        if old_partitions:
            print_line(f"{node} no longer holds {partitions_text(old_partitions)}", err=True)
        else:
            print_line(f"the partition map no longer names {node}", err=True)

    _operate(target, work)


@click.command(cls=TargetCommand)
@bucket_argument
@_partitions_arguments
@click.option("--to", metavar="NODE", required=True, help="The replica that becomes active.")
@click.option(
    "--wait",
    "wait_s",
    type=number_type(1, 10**9),
    default=300,
    show_default=True,
    metavar="SECONDS",
    help="How long the replica may take to come close, while the old active still takes writes.",
)
@click.option(
    "--deadline",
    "deadline_s",
    type=number_type(1, 3600),
    default=10,
    show_default=True,
    metavar="SECONDS",
    help="How long the replica may take to catch up, while no node takes writes. After that the "
    "old active continues.",
)
def takeover(
    target: Address,
    partitions: tuple[tuple[int, ...], ...],
    all_of: str,
    to: str,
    wait_s: int,
    deadline_s: int,
) -> None:
    r"""Make a replica active in place of a running node.

    No change is lost, and the history continues. The old active stops taking writes, the replica
    catches up and becomes active, and the old active follows it. Publishers wait for a moment. If
    the replica does not catch up by the deadline, the old active continues.

    An interrupted takeover may leave partitions without an active; `upr partitions` shows them as
    pending. Repeat the command then, or give them back with --to and the old active's name.

    \b
    Examples:
      upr takeover upr://10.0.0.1:12000/flights --all-of a --to b
      upr takeover upr://10.0.0.1:12000/flights 0-15 --to b
    """
    partition_ids = _named_partitions(partitions, all_of)
    timeouts = TakeoverTimeouts(approach_s=wait_s, handover_s=deadline_s)
    _operate(
        target,
        lambda operator: take_over(
            operator, to=to, partitions=partition_ids, all_of=all_of, timeouts=timeouts
        ),
    )


@click.command(cls=TargetCommand)
@bucket_argument
@_partitions_arguments
@click.option(
    "--to",
    metavar="NODE",
    default="",
    help="The node that becomes active. [default: for each partition one that has everything]",
)
@click.option(
    "--acknowledged",
    type=number_type(1, NODES_MAX),
    default=1,
    show_default=True,
    metavar="NUMBER",
    help="How many replicas publishers waited for (their --copies).",
)
@click.option(
    "--lose-acknowledged",
    is_flag=True,
    help="Continue even if changes acknowledged as replicated may be lost.",
)
def failover(
    target: Address,
    partitions: tuple[tuple[int, ...], ...],
    all_of: str,
    to: str,
    acknowledged: int,
    lose_acknowledged: bool,
) -> None:
    r"""Make replicas active in place of a node that is gone.

    URL names any running node. The command first fences the replicas that answer: they accept no
    more changes from the old active, which can then have nothing more acknowledged. A replica with
    everything that was acknowledged as replicated becomes active, in a new history. Consumers that
    have more roll back. The old node becomes a replica when it returns.

    All replicas of a partition must answer. If publishers waited for NUMBER copies, NUMBER - 1 of
    them may be missing. One that has lost its copy counts as missing until it has copied all of it
    again. Otherwise the command changes nothing.

    While the active node is running, use `upr takeover`.

    \b
    Examples:
      upr failover upr://10.0.0.2:12000/flights --all-of a
      upr failover upr://10.0.0.2:12000/flights 0-15 --to b --acknowledged 2
    """
    partition_ids = _named_partitions(partitions, all_of)
    _operate(
        target,
        lambda operator: fail_over(
            operator,
            partitions=partition_ids,
            all_of=all_of,
            to=to,
            acknowledged=acknowledged,
            lose_acknowledged=lose_acknowledged,
        ),
    )
