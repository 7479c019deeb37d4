"""What the commands that grant and revoke rights have in common."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import click

from upr_protocol.cli.connection import ask
from upr_protocol.client import Address
from upr_protocol.users import Grant, Right, UserChange, UsersError, normalised_name

RIGHTS_HELP: Final = """\b
Rights:
  read       read keys, stream changes, hold leases
  write      change keys, without design documents
  index      define and delete indexes: change design documents
  operate    create and delete buckets, change partition maps, read statistics
  replicate  be a node: follow partitions, exchange maps; on * also the users
  secure     change users; it is always granted on *

With --prefix, read allows to read single keys, and write to change them. Streams,
leases and index scans are about all keys, and need read on the whole bucket.
"""


def parse_name(kind: str, text: str) -> str:
    """The name of a user or of a role, which `kind` says, normalised."""
    try:
        return normalised_name(text, f"the {kind}'s name")
    except UsersError as error:
        raise click.BadParameter(str(error)) from error


def _user(_ctx: click.Context, _param: click.Parameter, text: str) -> str:
    return parse_name("user", text)


def _role(_ctx: click.Context, _param: click.Parameter, text: str) -> str:
    return parse_name("role", text)


def _rights(_ctx: click.Context, _param: click.Parameter, text: str) -> tuple[Right, ...]:
    try:
        return tuple(Right(part.strip()) for part in text.split(","))
    except ValueError:
        names = ", ".join(right.value for right in Right)
        raise click.BadParameter(
            f"{text!r} is not one of {names}, or several with commas"
        ) from None


user_argument: Final = click.argument("name", metavar="NAME", callback=_user)
role_argument: Final = click.argument("name", metavar="ROLE", callback=_role)
_rights_argument = click.argument("rights", metavar="RIGHTS", callback=_rights)
_pattern_argument = click.argument("pattern", metavar="BUCKETS")


def _prefix(_ctx: click.Context, _param: click.Parameter, text: str | None) -> str:
    if text == "":
        # A variable of a script may be empty, and must not grant the whole bucket.
        raise click.BadParameter("it is empty; leave the option out to mean the whole bucket")
    return text or ""


_prefix_option = click.option(
    "--prefix",
    metavar="TEXT",
    callback=_prefix,
    help="Only keys that begin with this; for read and write.  [default: the whole bucket]",
)


_MATCHING_PATTERN: Final = re.compile(r"[A-Za-z0-9_*-][A-Za-z0-9._*-]*")
"""A pattern that the name of some bucket matches."""


def new_grant_arguments(command: Callable[..., None]) -> Callable[..., None]:
    """As `grant_arguments`, and refuses a pattern that no bucket's name can match."""

    @wraps(command)
    def with_matching_grants(grants: tuple[Grant, ...], **arguments: Any) -> None:
        pattern = grants[0].pattern
        if not _MATCHING_PATTERN.fullmatch(pattern):
            raise click.UsageError(
                f"no bucket's name matches {pattern!r}: names have letters, digits, dots, "
                "underscores and hyphens, and do not begin with a dot; * is the only wildcard"
            )
        command(grants=grants, **arguments)

    return grant_arguments(with_matching_grants)


def grant_arguments(command: Callable[..., None]) -> Callable[..., None]:
    """Declares RIGHTS, BUCKETS and --prefix. The command gets the grants that they mean."""

    @wraps(command)
    def with_grants(rights: tuple[Right, ...], pattern: str, prefix: str, **arguments: Any) -> None:
        grants = tuple(Grant(right, pattern, os.fsencode(prefix)) for right in rights)
        try:
            for grant in grants:
                grant.check()
        except UsersError as error:
            raise click.UsageError(str(error)) from error
        command(grants=grants, **arguments)

    return _rights_argument(_pattern_argument(_prefix_option(with_grants)))


GRANT_COLUMNS: Final = ("right", "buckets", "prefix")


def grant_fields(grant: Grant) -> tuple[str, str, str]:
    """A grant as a row of a table."""
    return grant.right.value, grant.pattern, grant.prefix.decode(errors="backslashreplace")


def describe_grants(grants: tuple[Grant, ...]) -> str:
    """The grants in a sentence."""
    return "; ".join(map(str, grants))


def change_users(target: Address, change: UserChange) -> None:
    """Sends the server a change of its users."""
    ask(target, lambda client: client.change_users(change), bucket=False)
