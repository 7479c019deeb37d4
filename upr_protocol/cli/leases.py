"""`upr leases`: which ranges are held against compaction, and by whom."""

from __future__ import annotations

import click

from upr_protocol.cli.connection import ask
from upr_protocol.cli.table import print_table
from upr_protocol.cli.target import TargetCommand, bucket_argument
from upr_protocol.client import Address, Client


@click.group()
def leases() -> None:
    """List and release leases.

    A lease keeps a range of changes readable for whoever works through it, a backup for instance.
    What it holds takes room on the disk. It ends by itself when its holder renews it no longer.
    """


@leases.command("list", cls=TargetCommand)
@bucket_argument
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def list_leases(target: Address, as_json: bool) -> None:
    """List the leases on the bucket that URL names.

    `numbers` is how many sequence numbers a lease holds, over all its partitions.
    """
    found = ask(target, lambda client: client.stats(target.bucket), bucket=False)
    columns = ("id", "owner", "partitions", "numbers", "time_to_live_s", "expires_in_s")
    print_table(
        columns,
        [tuple(row[column] for column in columns) for row in found["leases"]["leases"]],
        as_json=as_json,
    )


@leases.command(cls=TargetCommand)
@bucket_argument
@click.argument("lease_id", metavar="ID")
def release(target: Address, lease_id: str) -> None:
    """End the lease with this ID, as `upr leases list` shows it.

    Whoever holds it may find that what it was reading is gone.
    """
    try:
        number = int(lease_id, 16)
    except ValueError:
        number = -1
    if not 0 <= number < 1 << 64:
        raise click.UsageError(f"{lease_id!r} is no lease's ID: see `upr leases list`")

    async def question(client: Client) -> None:
        await client.release_lease(number)

    ask(target, question)
    click.echo(f"released {lease_id}")
