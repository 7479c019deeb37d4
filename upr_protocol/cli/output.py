"""What commands print: tables, progress, figures, and a stream whose reader may be slow."""

from __future__ import annotations

import os
import select
import stat
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import click
import msgspec
import trio

from upr_protocol.cli.escaping import printable, printable_json

# Figures.


def size_text(nbytes: float) -> str:
    """A number of bytes for people: `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def rate_text(count: int, seconds: float) -> str:
    """A rate for people: `60,000/s`."""
    return f"{count / max(seconds, 0.001):,.0f}/s"


def text_fields(name: str, data: bytes) -> dict[str, str]:
    """The JSON field `name` for `data`: text where it is UTF-8, otherwise base64, which a second
    field `NAME_encoding` says."""
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {name: b64encode(data).decode(), f"{name}_encoding": "base64"}


# Lines.

STANDARD_OUTPUT_NAME: Final = "standard output"
"""What the errors of writing to it have in place of a file's name."""


def write_output(data: str | bytes, *, nl: bool = True) -> None:
    """Writes to standard output, at once.

    Raises:
        BrokenPipeError: The reader has closed its end.
        OSError: It cannot be written; the error names it.
    """
    with _named_errors():
        click.echo(data, nl=nl)


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, STANDARD_OUTPUT_NAME) from error


def print_line(text: str = "", *, err: bool = False) -> None:
    """Prints a line for people, on standard error if `err`."""
    if err:
        click.echo(printable(text), err=True)
    else:
        write_output(printable(text))


def print_json(value: object, *, indent: int | None = None) -> None:
    """Prints a value as JSON: on one line, or with so much indentation a level."""
    data = msgspec.json.encode(value)
    if indent is not None:
        data = msgspec.json.format(data, indent=indent)
    write_output(printable_json(data))


# Tables.


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], *, as_json: bool = False
) -> None:
    """Prints `rows` under the names of their `columns`, numbers aligned right and text left.

    As JSON each row is one object on a line of its own.
    """
    if as_json:
        for row in rows:
            print_json(dict(zip(columns, row, strict=True)))
        return
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    right = [bool(rows) and isinstance(value, int) for value in (rows[0] if rows else columns)]
    for line in (columns, *cells):
        padded = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        )
        write_output("  ".join(padded).rstrip())


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else printable(str(value))


# Progress, on standard error.

_TERMINAL_S: Final = 0.2
_LOG_S: Final = 5.0
"""A log that is kept needs a line only every few seconds."""


class ProgressDisplay:
    """Shows a text again and again: in one place on a terminal, elsewhere as a line now and then.

    Args:
        text: Makes the text.
        interval_s: How often, where standard error is not a terminal.
    """

    def __init__(self, text: Callable[[], str], interval_s: float = _LOG_S) -> None:
        self._text = text
        self._on_terminal = sys.stderr.isatty()
        self._interval_s = _TERMINAL_S if self._on_terminal else interval_s
        self._width = 0

    async def run(self) -> None:
        """Shows the text until cancelled."""
        while True:
            await trio.sleep(self._interval_s)
            text = printable(self._text())
            if self._on_terminal:
                click.echo("\r" + text.ljust(self._width), nl=False, err=True)
                self._width = len(text)
            else:
                click.echo(text, err=True)

    def clear(self) -> None:
        """Clears the terminal's line for what is printed next."""
        if self._width:
            click.echo("\r" + " " * self._width + "\r", nl=False, err=True)
            self._width = 0


# A stream on standard output.

STANDARD_OUTPUT: Final = 1

_WATCH_S: Final = 0.2
"""How soon `upr tail | head` ends once `head` has."""


class Output:
    """Writes to a file descriptor without a buffer: written data has left the process.

    Args:
        descriptor: Where to write.
    """

    def __init__(self, descriptor: int = STANDARD_OUTPUT) -> None:
        self._descriptor = descriptor

    async def write(self, data: bytes) -> None:
        """Writes all of `data`, however long its reader takes, without blocking other tasks.

        If it is cancelled, part of the data may have been written, or may yet be.

        Raises:
            BrokenPipeError: The reader has closed its end.
            OSError: The data cannot be written; the disk may be full.
        """
        if len(data) <= select.PIPE_BUF and self._is_writable():
            # A write of at most PIPE_BUF does not block, and a thread would cost more than it.
            _write_all(self._descriptor, data)
            await trio.lowlevel.checkpoint()
        else:
            await trio.to_thread.run_sync(
                _write_all, self._descriptor, data, abandon_on_cancel=True
            )

    def _is_writable(self) -> bool:
        return bool(select.select((), (self._descriptor,), (), 0)[1])

    async def wait_until_closed(self) -> None:
        """Waits until the reader closes its end, also while there is nothing to write.

        Raises:
            BrokenPipeError: The reader has closed its end.
        """
        poll = select.poll()
        poll.register(self._descriptor, 0)  # poll reports errors even with an empty event mask
        while not poll.poll(0):  # noqa: ASYNC110  no event tells of a closed reader
            await trio.sleep(_WATCH_S)
        raise BrokenPipeError

    def end_line(self) -> None:
        """Adds a newline to a file that does not end with one.

        A killed process may leave half a line; what is appended next must not become its end.
        """
        status = os.fstat(self._descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_size and not self._ends_with_newline():
            _write_all(self._descriptor, b"\n")

    def _ends_with_newline(self) -> bool:
        # The descriptor is open for writing only; /dev/fd opens the same file for reading.
        try:
            with open(f"/dev/fd/{self._descriptor}", "rb") as file:
                file.seek(-1, os.SEEK_END)
                return file.read(1) == b"\n"
        except OSError:
            return False


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    with _named_errors():
        while view:
            try:
                view = view[os.write(descriptor, view) :]
            except BlockingIOError:
                select.select((), (descriptor,), ())
