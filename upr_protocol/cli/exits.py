"""Exit codes, and how an error becomes one sentence and one of them."""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import click

from upr_protocol.client import AddressError, LocalCopyError, ResumeStateError
from upr_protocol.client.operator import NotDoneError
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
  1    done in part: a key is missing, a file has bad rows, a node does not answer
  2    the command line is wrong
  3    the server refused, or it would be wrong
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
    except (Exception, KeyboardInterrupt, BaseExceptionGroup) as error:
        causes = _causes(error)
        if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
            raise click.exceptions.Exit(INTERRUPTED) from error
        if any(isinstance(cause, BrokenPipeError) for cause in causes):
            _discard_output()
            raise click.exceptions.Exit(BROKEN_PIPE) from error
        failures = [_failure(cause) for cause in causes]
        if None in failures:
            raise
        assert failures[0] is not None
        raise failures[0] from error


def _failure(cause: BaseException) -> FailedError | None:
    """The sentence and code of `cause`; None of a fault of ours."""
    if isinstance(cause, AddressError | ResumeStateError | LocalCopyError):
        return MisusedError(str(cause))
    if isinstance(cause, ServerError):
        ended = cause.status in _ENDED_BY_SERVER
        return (DisconnectedError if ended else RefusedError)(_sentence(cause))
    if isinstance(cause, NotDoneError):
        return RefusedError(str(cause))
    if isinstance(cause, RemoteProtocolError):
        return DisconnectedError(f"what answers there does not speak UPR: {cause}")
    if isinstance(cause, BrokenError | ClosedError):
        advice = "see that the server is running, and that the URL is right"
        return DisconnectedError(f"{_sentence(cause)}; {advice}")
    if isinstance(cause, sqlite3.Error):
        return FailedError(f"the map cannot be read or written: {cause}")
    if isinstance(cause, OSError):
        where = f"{cause.filename}: " if cause.filename else ""
        return FailedError(f"{where}{cause.strerror or cause}")
    if isinstance(cause, UprError) and not isinstance(cause, LocalProtocolError):
        return FailedError(_sentence(cause))
    return None


def _sentence(error: BaseException) -> str:
    return "; ".join((str(error), *getattr(error, "__notes__", ())))


def _causes(error: BaseException) -> list[BaseException]:
    """The errors that `error` stands for."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [cause for inner in error.exceptions for cause in _causes(inner)]


def _discard_output() -> None:
    # What is still buffered can go nowhere, and Python would complain about it on its way out.
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())
