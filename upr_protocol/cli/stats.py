"""`upr stats` and `upr partitions`: how the server is doing."""

from __future__ import annotations

import click
import msgspec

from upr_protocol.cli.connection import ask
from upr_protocol.cli.table import print_table
from upr_protocol.cli.target import TargetCommand, bucket_argument, server_argument
from upr_protocol.client import Address, Client, PartitionInfo, PartitionNumbers


@click.command(cls=TargetCommand)
@server_argument
def stats(target: Address) -> None:
    r"""Print statistics as JSON.

    They are of the bucket that URL names, or of the server where it names none. Sizes are in bytes,
    times in seconds.

    \b
    Examples:
      upr stats upr://127.0.0.1:12000
      upr stats upr://127.0.0.1:12000/flights
    """
    found = ask(target, lambda client: client.stats(target.bucket), bucket=False)
    click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))


@click.command(cls=TargetCommand)
@bucket_argument
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def partitions(target: Address, as_json: bool) -> None:
    """List partitions and how far each has come.

    The history is what the numbers belong to: in another, the same number is another change.
    """

    async def question(client: Client) -> tuple[list[PartitionInfo], list[PartitionNumbers]]:
        return client.partitions(), await client.seqnos()

    infos, found = ask(target, question)
    states = {info.partition: info.state for info in infos}
    print_table(
        ("partition", "state", "history", "high_seq", "persisted_seq", "replicated_seq"),
        [
            (
                row.partition,
                states[row.partition].name.lower(),
                f"{row.history_id:016x}",
                row.high_seq,
                row.persisted_seq,
                row.replicated_seq,
            )
            for row in found
        ],
        as_json=as_json,
    )
