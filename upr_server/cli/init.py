"""The command `init`: the users of a new data directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
import trio

from upr_protocol.address import Address
from upr_protocol.concurrency import first_failure
from upr_protocol.errors import UprError
from upr_protocol.limits import SCRAM_ITERATIONS_DEFAULT
from upr_protocol.scram import SALT_BYTES, new_verifier
from upr_protocol.security import Credentials, Security, TlsSettings
from upr_protocol.users import EVERYTHING, Grant, Right, User, Users, UsersError, normalised_name
from upr_server.cli.output import EXIT_FAILED, print_text, say
from upr_server.cli.parameters import with_data_dir
from upr_server.storage.offline.first_users import save_first_users
from upr_server.user_store import SECRET_BYTES

_INIT_EXITS = """\b
Examples:
  upr-server init --user ada
  upr-server init --from uprs://db1:12000 --user node2 --password-file node2.password

\b
Exit codes:
  0    the data directory has users
  1    it has users already, is in use or not writable, or the other node did not give any
  2    wrong usage: check the command line
  130  interrupted by Ctrl-C
"""


@click.command("init", epilog=_INIT_EXITS)
@with_data_dir
@click.option(
    "--user",
    metavar="NAME",
    help="The first user, who may do everything. With --from: the user to log in as there.",
)
@click.option(
    "--password-file",
    metavar="FILE",
    help="The file with the user's password in its first line.  [default: asks for it; with --from "
    "takes UPR_PASSWORD first]",
)
@click.option(
    "--certificate-only",
    is_flag=True,
    help="The first user has no password, and logs in with a certificate that has this name.",
)
@click.option(
    "--from",
    "source",
    metavar="URL",
    help="Copy the users of the cluster from a node that has them. The user needs the right "
    "replicate on *.",
)
@click.option("--tls-ca", metavar="FILE", default="", help="With --from: see `serve`.")
@click.option("--tls-certificate", metavar="FILE", default="", help="With --from: see `serve`.")
@click.option("--tls-key", metavar="FILE", default="", help="With --from: see `serve`.")
def init_command(
    data_dir: Path,
    user: str | None,
    password_file: str | None,
    certificate_only: bool,
    source: str | None,
    **files: str,
) -> None:
    """Make the first user of a cluster, or give another node its users.

    A server whose data directory has users lets nobody do anything without a log-in. Run this
    before the first start of each node; one node gets the first user, the others copy from it.
    """
    try:
        if source is not None:
            if certificate_only:
                raise click.UsageError("--certificate-only goes without --from")
            if user is None and password_file is not None:
                raise click.UsageError("--password-file goes with --user: whose password it is")
            tls = TlsSettings(files["tls_ca"], files["tls_certificate"], files["tls_key"])
            credentials = Credentials(user, _password(user, password_file)) if user else None
            users = _users_of(source, Security(None if tls == TlsSettings() else tls, credentials))
        else:
            if any(files.values()):
                raise click.UsageError("--tls-ca, --tls-certificate and --tls-key go with --from")
            if user is None:
                raise click.UsageError("name the first user with --user")
            users = _first_users(user, password_file, certificate_only=certificate_only)
        save_first_users(data_dir, users)
    except* (UprError, OSError) as errors:
        say(str(first_failure(errors)))
        sys.exit(EXIT_FAILED)
    names = ", ".join(users.users)
    print_text(f"{data_dir} has the users of revision {users.revision}: {names}")


def _first_users(name: str, password_file: str | None, *, certificate_only: bool) -> Users:
    if certificate_only and password_file is not None:
        raise click.UsageError("give either --certificate-only or --password-file")
    verifier = None
    if not certificate_only:
        password = _password(name, password_file, is_new=True)
        verifier = new_verifier(password, os.urandom(SALT_BYTES), SCRAM_ITERATIONS_DEFAULT)
    grants = tuple(Grant(right, EVERYTHING) for right in Right)
    # What strangers hear of users who do not exist follows from the secret, on all nodes alike.
    return Users(secret=os.urandom(SECRET_BYTES)).with_user(
        User(normalised_name(name, "the user's name"), verifier, grants)
    )


def _users_of(source: str, security: Security) -> Users:
    """The users of the cluster, as the node at `source` has them."""
    # Here, as no other command needs it: a server should start soon.
    from upr_protocol.client import open_node

    async def ask() -> Users:
        async with open_node(Address.parse(source, security), identity="node:init") as node:
            users = await node.users()
        if users is None or users.is_open:
            raise UsersError(f"{source} has no users: run `upr-server init` there first")
        return users

    return trio.run(ask)


def _password(name: str, path: str | None, *, is_new: bool = False) -> str:
    from upr_protocol.cli.passwords import log_in_password, new_password
    from upr_protocol.client import read_password

    if path is not None:
        return read_password(path)
    return new_password(name, "--password-file") if is_new else log_in_password(name)
