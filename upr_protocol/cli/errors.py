"""Exit codes, and how an error becomes one sentence and one exit code."""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import click

from upr_protocol.cli.output import STANDARD_OUTPUT_NAME, print_line
from upr_protocol.client import AddressError, LocalCopyError, ResumeStateError
from upr_protocol.client.operator import NotDoneError
from upr_protocol.errors import (
    BrokenError,
    ClosedError,
    CredentialsError,
    LocalProtocolError,
    RemoteProtocolError,
    ServerError,
    Status,
    TlsError,
    UprError,
)
from upr_protocol.users import UsersError

INCOMPLETE: Final = 1
"""The command did part of its work: a key is missing, or rows could not be read."""
USAGE: Final = 2
REFUSED: Final = 3
CONNECTION: Final = 4
INTERRUPTED: Final = 128 + signal.SIGINT
BROKEN_PIPE: Final = 128 + signal.SIGPIPE
"""What a shell reports of a program whose reader has left: `upr tail | head`."""

EXIT_CODES_HELP: Final = """\b
Exit codes:
  0    done
  1    partly done: a key is missing, a file has bad rows, or a node does not answer
  2    wrong usage: check the command line
  3    refused: the server rejected the request, or carrying it out would do harm
  4    no connection: no server answers there, or the connection was lost
  130  interrupted by Ctrl-C
"""

CONNECTION_ADVICE: Final = "check that the server is running, and that the URL is right"

_CONNECTION_STATUSES: Final = frozenset({Status.SHUTTING_DOWN, Status.IDLE, Status.BAD_CHECKSUM})
"""Statuses that end the connection and say nothing about the request."""


class FailedError(click.ClickException):
    """Ends the command with one sentence on standard error, and its class's exit code."""

    exit_code = INCOMPLETE

    def show(self, file: object = None) -> None:  # noqa: ARG002
        """Prints the sentence."""
        say(self.format_message())


class BadInputError(FailedError):
    """The command cannot use a file or a value that it was given."""

    exit_code = USAGE


class RefusedError(FailedError):
    """The server refused."""

    exit_code = REFUSED


class DisconnectedError(FailedError):
    """A connection could not be made, or was lost."""

    exit_code = CONNECTION


def say(sentence: str) -> None:
    """Prints a sentence on standard error, prefixed with the command's name."""
    print_line(f"upr: {sentence}", err=True)


@contextmanager
def errors_as_exits() -> Iterator[None]:
    """Turns an expected error into a sentence and an exit code.

    An unexpected one is a bug of the command, and keeps its traceback.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt, BaseExceptionGroup) as error:
        causes = _causes(error)
        if any(_is_ctrl_c(cause) for cause in causes):
            raise click.exceptions.Exit(INTERRUPTED) from error
        if any(isinstance(cause, BrokenPipeError) for cause in causes):
            _discard_output()
            raise click.exceptions.Exit(BROKEN_PIPE) from error
        failures = [_failure(cause) for cause in causes]
        if None in failures:
            raise
        if any(getattr(cause, "filename", None) == STANDARD_OUTPUT_NAME for cause in causes):
            _discard_output()
        assert failures[0] is not None
        raise failures[0] from error


def _is_ctrl_c(cause: BaseException) -> bool:
    # Click's questions turn it into their own error, which is also that of the answer "no".
    is_aborted = isinstance(cause, click.Abort)
    return isinstance(cause.__context__ if is_aborted else cause, KeyboardInterrupt)


def _failure(cause: BaseException) -> FailedError | None:
    """The sentence and exit code for `cause`; None for a bug of the command."""
    bad_input = AddressError | CredentialsError | ResumeStateError | LocalCopyError | UsersError
    if isinstance(cause, bad_input):
        return BadInputError(str(cause))
    if isinstance(cause, ServerError):
        if cause.status in _CONNECTION_STATUSES:
            return DisconnectedError(_sentence(cause))
        return RefusedError(_sentence(cause))
    if isinstance(cause, NotDoneError):
        return RefusedError(str(cause))
    if isinstance(cause, RemoteProtocolError):
        return DisconnectedError(
            f"the server does not speak UPR: {cause}; check the URL, and that the server is of the "
            "same version as this command"
        )
    if isinstance(cause, TlsError):
        return DisconnectedError(str(cause))
    if isinstance(cause, BrokenError | ClosedError):
        return DisconnectedError(f"{_sentence(cause)}; {CONNECTION_ADVICE}")
    if isinstance(cause, sqlite3.Error):
        return FailedError(f"the local copy cannot be read or written: {cause}")
    if isinstance(cause, OSError):
        where = f"{cause.filename}: " if cause.filename else ""
        return FailedError(f"{where}{cause.strerror or cause}")
    if isinstance(cause, UprError) and not isinstance(cause, LocalProtocolError):
        return FailedError(_sentence(cause))
    return None


def _sentence(error: BaseException) -> str:
    return "; ".join((str(error), *getattr(error, "__notes__", ())))


def _causes(error: BaseException) -> list[BaseException]:
    """The errors inside a group, or the error itself."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [cause for inner in error.exceptions for cause in _causes(inner)]


def _discard_output() -> None:
    # Python flushes its buffer when it exits, and would report that the pipe is broken.
    with open(os.devnull, "wb") as null_device:
        os.dup2(null_device.fileno(), sys.stdout.fileno())
