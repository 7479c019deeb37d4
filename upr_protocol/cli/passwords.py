"""Passwords that a command is not given in a file: asked for on the terminal."""

from __future__ import annotations

import getpass
import os

import click


def log_in_password(user: str) -> str:
    """The password of a user who logs in: that of UPR_PASSWORD, or the one that somebody types.

    Raises:
        click.UsageError: There is neither.
    """
    return os.environ.get("UPR_PASSWORD") or _ask(
        f"Password of {user}",
        f"the password of {user} is missing, and there is no terminal to ask for it: set "
        "UPR_PASSWORD, or name a file with --password-file",
    )


def new_password(user: str, option: str) -> str:
    """The new password of a user, which somebody types twice.

    Args:
        user: The user.
        option: The option that names a file with the password.

    Raises:
        click.UsageError: There is no terminal, or nothing was typed.
    """
    error_text = (
        f"the new password of {user} is missing, and there is no terminal to ask for it: name a "
        f"file with {option}"
    )
    while True:
        password = _ask(f"New password of {user}", error_text)
        if password == _ask("Repeat it", error_text):
            return password
        click.echo("The two differ.", err=True)


def _ask(prompt: str, error_text: str) -> str:
    try:
        return read_hidden(f"{prompt}: ")
    except OSError:
        raise click.UsageError(error_text) from None
    except EOFError:
        raise click.UsageError("no password was typed; repeat the command, and type one") from None


def read_hidden(prompt: str) -> str:
    """A line that somebody types on the terminal, where it is not shown. The terminal is asked also
    if the command reads a file from standard input.

    Raises:
        OSError: There is no terminal.
        EOFError: Its user ended the input.
    """
    os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    return getpass.getpass(prompt)
