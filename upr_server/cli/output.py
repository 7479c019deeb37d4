"""What the commands of `upr-server` say, and the codes with which they exit."""

from __future__ import annotations

import os
import signal
import sys

import click

EXIT_FAILED = 1
EXIT_UNSAVED = 3
"""The server has stopped, and data that was only in memory is lost."""
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE


def discard_output() -> None:
    """Has what is printed from now on go nowhere, as standard output cannot be written."""
    # Python writes what is left in its buffer when it exits, and would fail again.
    with open(os.devnull, "wb") as null_device:
        os.dup2(null_device.fileno(), sys.stdout.fileno())


def say(sentence: str) -> None:
    """Prints a sentence on standard error, after the command's name."""
    click.echo(f"upr-server: {sentence}", err=True)


def print_text(text: str, *, nl: bool = True) -> None:
    """Prints on standard output. If it cannot be written, that ends the command."""
    try:
        click.echo(text, nl=nl)
    except OSError as error:
        discard_output()
        if isinstance(error, BrokenPipeError):
            sys.exit(EXIT_BROKEN_PIPE)
        say(f"the output cannot be written: {error.strerror}")
        sys.exit(EXIT_FAILED)
