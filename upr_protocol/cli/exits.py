"""Exit codes, and how an error becomes one sentence and one of them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

import click

from upr_protocol.client import AddressError, ResumeStateError
from upr_protocol.errors import (
    BrokenError,
    ClosedError,
    LocalProtocolError,
    RemoteProtocolError,
    ServerError,
    Status,
    UprError,
)

INCOMPLETE: Final = 1
"""The command ran, and not everything could be done: a key is missing, rows could not be read."""
USAGE: Final = 2
REFUSED: Final = 3
CONNECTION: Final = 4
INTERRUPTED: Final = 128 + signal.SIGINT
TERMINATED: Final = 128 + signal.SIGTERM
BROKEN_PIPE: Final = 128 + signal.SIGPIPE
"""What a shell reports of a program that wrote to nobody: `upr tail | head`."""

EXIT_CODES_HELP: Final = """\b
Exit codes:
  0    done
  1    done in part: a key is missing, a file has bad rows
  2    the command line is wrong
  3    the server refused
  4    no server there, or the connection was lost
  130  ended by Ctrl-C
"""

_ENDED_BY_SERVER: Final = frozenset({Status.SHUTTING_DOWN, Status.IDLE, Status.BAD_CHECKSUM})
"""What a server says of the connection, and not of what was asked."""


class FailedError(click.ClickException):
    """Ends the command with one sentence on standard error, and the code that its kind has."""

    exit_code = INCOMPLETE

    def show(self, file: object = None) -> None:  # noqa: ARG002
        """Prints the sentence."""
        say(self.format_message())


class MisusedError(FailedError):
    """What the command was given cannot be used."""

    exit_code = USAGE


class RefusedError(FailedError):
    """The server refused."""

    exit_code = REFUSED


class DisconnectedError(FailedError):
    """There is no connection to a server, or none any more."""

    exit_code = CONNECTION


def say(sentence: str) -> None:
    """Prints a sentence on standard error, as this command's."""
    click.echo(f"upr: {sentence}", err=True)


@contextmanager
def errors_as_exits() -> Iterator[None]:
    """Turns what can be expected to go wrong inside into a sentence and an exit code.

    What is left over is a fault of ours, and keeps its traceback.
    """
    try:
        yield
    except BaseException as error:
        for cause in _causes(error):
            _exit(cause)
        raise


def _exit(cause: BaseException) -> None:
    """Leaves with the sentence and code of `cause`; returns when it has none."""
    if isinstance(cause, BrokenPipeError):
        _leave_quietly()
    if isinstance(cause, KeyboardInterrupt):
        raise click.exceptions.Exit(INTERRUPTED) from cause
    if isinstance(cause, AddressError | ResumeStateError):
        raise MisusedError(str(cause)) from cause
    if isinstance(cause, ServerError):
        ended = cause.status in _ENDED_BY_SERVER
        kind = DisconnectedError if ended else RefusedError
        raise kind(_sentence(cause)) from cause
    if isinstance(cause, RemoteProtocolError):
        raise DisconnectedError(f"what answers there does not speak UPR: {cause}") from cause
    if isinstance(cause, BrokenError | ClosedError):
        advice = "see that the server is running, and that the URL is right"
        raise DisconnectedError(f"{_sentence(cause)}; {advice}") from cause
    if isinstance(cause, OSError):
        where = f"{cause.filename}: " if cause.filename else ""
        raise FailedError(f"{where}{cause.strerror or cause}") from cause
    if isinstance(cause, UprError) and not isinstance(cause, LocalProtocolError):
        raise FailedError(_sentence(cause)) from cause


def _sentence(error: BaseException) -> str:
    return "; ".join((str(error), *getattr(error, "__notes__", ())))


def _causes(error: BaseException) -> list[BaseException]:
    """The errors that `error` stands for, those first that end a command whatever else happened."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    causes = [cause for inner in error.exceptions for cause in _causes(inner)]
    return sorted(causes, key=lambda cause: not isinstance(cause, KeyboardInterrupt | OSError))


def _leave_quietly() -> NoReturn:
    # What is still buffered can go nowhere, and Python would complain about it on its way out.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise click.exceptions.Exit(BROKEN_PIPE)
