"""`upr replicas`: which nodes follow."""

from __future__ import annotations

import click
import trio

from upr_protocol.cli.operate import operate, partitions_option
from upr_protocol.cli.progress import Progress
from upr_protocol.cli.target import TargetCommand, bucket_argument
from upr_protocol.client import Address
from upr_protocol.client.operator import (
    Behind,
    Operator,
    add_replicas,
    partitions_text,
    remove_replicas,
    wait_caught_up,
)


@click.group()
def replicas() -> None:
    """Add and remove replicas.

    A replica follows the active of a partition, on another node, and can take its place: with `upr
    takeover` while the active is there, with `upr failover` when it is gone.
    """


@replicas.command(cls=TargetCommand)
@bucket_argument
@click.argument("node", metavar="NODE=HOST:PORT")
@partitions_option
@click.option(
    "--from",
    "source",
    metavar="SOURCE",
    default="",
    help="Follow this node, which follows the active itself. [default: the active]",
)
@click.option(
    "--address",
    metavar="HOST:PORT",
    default="",
    help="For the first replica of a bucket: where other nodes reach the node that URL leads to. "
    "[default: the URL's]",
)
@click.option(
    "--wait/--no-wait", default=True, help="Wait until it has everything. [default: wait]"
)
def add(
    target: Address,
    node: str,
    partitions: tuple[int, ...],
    source: str,
    address: str,
    wait: bool,
) -> None:
    r"""Have a node follow the actives of the bucket that URL names.

    NODE is what that server calls itself (`node` in its configuration), HOST:PORT where all others
    reach it; NODE alone will do when the map names it already. It must be running, and must not
    have a bucket of that name of its own.

    \b
    Examples:
      upr replicas add upr://10.0.0.1:12000/flights b=10.0.0.2:12000
      upr replicas add upr://10.0.0.1:12000/flights c=10.0.0.3:12000 --from b
    """
    name, _, there = node.partition("=")

    async def work(operator: Operator) -> None:
        added = await add_replicas(
            operator,
            name,
            there,
            partitions=partitions,
            source=source,
            own_address=address,
        )
        if not wait:
            return
        behind = Behind()
        progress = Progress(lambda: f"{name}: {behind.text()}")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(progress.run)
            await wait_caught_up(operator, name, added, behind)
            nursery.cancel_scope.cancel()
        progress.clear()
        click.echo(f"{name} has everything of {partitions_text(added)}", err=True)

    operate(target, work)


@replicas.command(cls=TargetCommand)
@bucket_argument
@click.argument("node", metavar="NODE")
@partitions_option
def remove(target: Address, node: str, partitions: tuple[int, ...]) -> None:
    r"""Have a node follow no more.

    The node may be gone for ever. If it is there, what it has stays on its disk until its bucket is
    deleted there. The map forgets a node that holds nothing. What was acknowledged with a copy on
    this node alone is as safe as the active then.

    \b
    Examples:
      upr replicas remove upr://10.0.0.1:12000/flights b
      upr replicas remove upr://10.0.0.1:12000/flights b --partitions 0-15
    """

    async def work(operator: Operator) -> None:
        removed = await remove_replicas(operator, node, partitions=partitions)
        what = f"holds {partitions_text(removed)} no more" if removed else "is forgotten"
        click.echo(f"{node} {what}", err=True)

    operate(target, work)
