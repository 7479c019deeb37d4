"""`upr failover`: another node in place of one that is gone."""

from __future__ import annotations

import click

from upr_protocol.cli.numbers import number
from upr_protocol.cli.operate import chosen, chosen_partitions_arguments, operate
from upr_protocol.cli.target import TargetCommand, bucket_argument
from upr_protocol.client import Address
from upr_protocol.client.operator import Operator, fail_over
from upr_protocol.limits import NODES_MAX


@click.command(cls=TargetCommand)
@bucket_argument
@chosen_partitions_arguments
@click.option(
    "--to",
    metavar="NODE",
    default="",
    help="The node that becomes active. [default: one that has everything, for each partition]",
)
@click.option(
    "--acknowledged",
    type=number(1, NODES_MAX),
    default=1,
    show_default=True,
    metavar="NUMBER",
    help="The copies on replicas that publishers waited for.",
)
@click.option(
    "--lose-acknowledged",
    is_flag=True,
    help="Go on though what was acknowledged as replicated may be lost.",
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

    URL leads to any node that is up. The replicas that answer take nothing more from the old
    active, so that it can get nothing acknowledged any more; then one that has everything that was
    acknowledged as replicated becomes active, in a new history, and consumers that have more roll
    back. The old node follows when it comes back.

    For that, all replicas of a partition must answer; or all but NUMBER less one, where publishers
    waited for NUMBER copies. Else nothing is changed.

    While the active is there, use `upr takeover`.

    \b
    Examples:
      upr failover upr://10.0.0.2:12000/flights --all-of a
      upr failover upr://10.0.0.2:12000/flights 0-15 --to b --acknowledged 2
    """
    numbers = chosen(partitions, all_of)

    async def work(operator: Operator) -> None:
        await fail_over(
            operator,
            partitions=numbers,
            all_of=all_of,
            to=to,
            acknowledged=acknowledged,
            lose_acknowledged=lose_acknowledged,
        )

    operate(target, work)
