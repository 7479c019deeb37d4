"""`upr takeover`: another node in place of one that is there."""

from __future__ import annotations

import click

from upr_protocol.cli.numbers import number
from upr_protocol.cli.operate import chosen, chosen_partitions_arguments, operate
from upr_protocol.cli.target import TargetCommand, bucket_argument
from upr_protocol.client import Address
from upr_protocol.client.operator import Limits, Operator, take_over


@click.command(cls=TargetCommand)
@bucket_argument
@chosen_partitions_arguments
@click.option("--to", metavar="NODE", required=True, help="The replica that becomes active.")
@click.option(
    "--wait",
    "wait_s",
    type=number(1, 10**9),
    default=300,
    show_default=True,
    metavar="SECONDS",
    help="How long it may take to come close, while the old active still takes writes.",
)
@click.option(
    "--deadline",
    "deadline_s",
    type=number(1, 3600),
    default=10,
    show_default=True,
    metavar="SECONDS",
    help="How long it may take to have everything, while nobody takes writes; then the old active "
    "goes on.",
)
def takeover(
    target: Address,
    partitions: tuple[tuple[int, ...], ...],
    all_of: str,
    to: str,
    wait_s: int,
    deadline_s: int,
) -> None:
    r"""Make a replica active in place of a node that is there.

    Nothing is lost, and the history goes on: the old active stops taking writes, the replica takes
    what it does not have yet, and becomes active. The old one follows it. Publishers wait for a
    moment. When the replica does not get there by the deadline, all is as before.

    Interrupted, it may leave partitions that nobody is active for, which `upr partitions` shows as
    pending. Repeat the command then; or have the old active go on, by naming it with --to.

    \b
    Examples:
      upr takeover upr://10.0.0.1:12000/flights --all-of a --to b
      upr takeover upr://10.0.0.1:12000/flights 0-15 --to b
    """
    numbers = chosen(partitions, all_of)
    limits = Limits(close_s=wait_s, handover_s=deadline_s)

    async def work(operator: Operator) -> None:
        await take_over(operator, to=to, partitions=numbers, all_of=all_of, limits=limits)

    operate(target, work)
