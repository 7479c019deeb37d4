"""The commands `restore` and `mend`, which change a data directory."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from upr_server.cli.output import EXIT_FAILED, print_text, say
from upr_server.cli.parameters import with_data_dir
from upr_server.storage.errors import DataDirectoryError, StorageError
from upr_server.storage.offline.mend import DamagedPartition, empty_damaged_replicas
from upr_server.storage.offline.restore import begin_new_histories

_RESTORE_EXITS = """\b
Exit codes:
  0    the copy is ready to be served
  1    the directory is in use, damaged or not writable
  2    wrong usage: check the command line
  130  interrupted by Ctrl-C
"""

_MEND_EXITS = """\b
Exit codes:
  0    no replica has damaged chunks any more
  1    the node is active for a damaged partition, or the directory cannot be used
  2    wrong usage: check the command line
  130  interrupted by Ctrl-C
"""


@click.command("restore", epilog=_RESTORE_EXITS)
@with_data_dir
@click.option(
    "--new-histories",
    is_flag=True,
    help="Required: begin new histories. Consumers that have more than the copy will roll back.",
)
def restore_command(data_dir: Path, new_histories: bool) -> None:
    """Prepare a restored data directory for its first start.

    A copy continues the histories of its original, and would give sequence numbers that consumers
    already have to other changes. After this command, every bucket begins new histories when the
    server starts. Stop the server that uses the directory first.
    """
    if not new_histories:
        raise click.UsageError(
            "say --new-histories: the buckets begin new histories, and consumers that have more "
            "than the copy roll back"
        )
    try:
        buckets = begin_new_histories(data_dir)
    except StorageError as error:
        say(str(error))
        sys.exit(EXIT_FAILED)
    for bucket in buckets:
        print_text(f"{bucket.name}: {bucket.partition_count} partitions begin new histories")
    print_text(f"{data_dir} is ready to be served")


@click.command("mend", epilog=_MEND_EXITS)
@with_data_dir
def mend_command(data_dir: Path) -> None:
    """Empty the damaged partitions of which this node is a replica.

    The node copies them from the active node when it runs again. Make sure that the active node
    runs and is intact: the command removes this node's copy.

    It reads and verifies all chunks. It changes nothing in partitions that are intact, and nothing
    in those for which this node is active: let a replica take these over first. Stop the server
    that uses the directory first.
    """
    damaged: list[DamagedPartition] = []
    try:
        for partition in empty_damaged_replicas(data_dir):
            # At once: an error that follows must not hide what was emptied already.
            print_text(str(partition))
            damaged.append(partition)
    except DataDirectoryError as error:
        say(str(error))
        sys.exit(EXIT_FAILED)
    except StorageError as error:
        say(f"{error}; run `upr-server check`")
        sys.exit(EXIT_FAILED)
    if not damaged:
        print_text(f"{data_dir} has no damaged chunks")
    if not all(partition.is_emptied for partition in damaged):
        sys.exit(EXIT_FAILED)
