"""The options of encrypted connections and of the log-in."""

from __future__ import annotations

from typing import Any, Final

import click

from upr_protocol.cli.errors import say
from upr_protocol.cli.passwords import log_in_password
from upr_protocol.client import (
    Credentials,
    Security,
    TlsSettings,
    is_read_once,
    read_password,
)

_META: Final = "upr.tls"
"""Where click's context keeps what the options say."""


def _note(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    assert param.name is not None
    ctx.meta.setdefault(_META, {})[param.name] = value


def _option(name: str, **attributes: Any) -> click.Option:
    # Eager: the URL, which they belong to, is read after them. The commands do not see them.
    return click.Option([name], is_eager=True, expose_value=False, callback=_note, **attributes)


def security_options() -> list[click.Option]:
    """The options; each command needs its own."""
    return [
        _option(
            "--ca",
            metavar="FILE",
            default="",
            envvar="UPR_CA",
            help="For encrypted URLs: the authorities that may have signed the server's "
            "certificate.  [default: UPR_CA, or those that the system trusts]",
        ),
        _option(
            "--cert",
            metavar="FILE",
            default="",
            envvar="UPR_CERT",
            help="For encrypted URLs: your own certificate.  [default: UPR_CERT]",
        ),
        _option(
            "--cert-key",
            metavar="FILE",
            default="",
            envvar="UPR_CERT_KEY",
            help="The key of your certificate.  [default: UPR_CERT_KEY, or in the same file]",
        ),
        _option(
            "--tls-version-min",
            type=click.Choice(["1.2", "1.3"]),
            default="1.3",
            help="The oldest version of TLS.  [default: 1.3]",
        ),
        _option(
            "--tls-insecure",
            is_flag=True,
            help="Do not verify the server's certificate. Anybody between you and the server can "
            "then read and change everything.",
        ),
    ]


def log_in_options() -> list[click.Option]:
    """The options of the log-in to a server."""
    return [
        _option(
            "--user",
            metavar="NAME",
            default="",
            envvar="UPR_USER",
            help="The user to log in as. The password comes from --password-file, from "
            "UPR_PASSWORD, or is asked for.  [default: UPR_USER, or the name in your certificate]",
        ),
        _option(
            "--password-file",
            metavar="FILE",
            default="",
            envvar="UPR_PASSWORD_FILE",
            help="The file with the user's password in its first line; others must have no right "
            "to it. /dev/stdin, or a pipe, is read once.  [default: UPR_PASSWORD_FILE]",
        ),
    ]


class SecurityCommand(click.Command):
    """A command with the options of encrypted connections and of the log-in."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.params += security_options() + log_in_options()


def security_of(ctx: click.Context) -> Security:
    """How the links of the command are protected; says so if they are not verified."""
    options: dict[str, Any] = ctx.meta[_META]
    tls = TlsSettings(
        options["ca"],
        options["cert"],
        options["cert_key"],
        is_verified=not options["tls_insecure"],
        allows_tls_1_2=options["tls_version_min"] == "1.2",
    )
    if options["tls_insecure"]:
        say(
            "WARNING: the server's certificate is not verified (--tls-insecure): anybody between "
            "here and the server can read and change everything"
        )
    return Security(None if tls == TlsSettings() else tls, _credentials(options))


def _credentials(options: dict[str, Any]) -> Credentials | None:
    user, password_file = options.get("user"), options.get("password_file")
    if not user:
        if password_file:
            raise click.UsageError("--password-file needs a user: name one with --user or UPR_USER")
        return None
    if password_file and is_read_once(password_file):
        return Credentials(user, read_password(password_file))
    if password_file:
        return Credentials(user, password_file=password_file)
    return Credentials(user, log_in_password(user))
