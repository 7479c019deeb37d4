"""How far a long command has come, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

import click
import trio

_TERMINAL_S: Final = 0.2
_LOG_S: Final = 5.0
"""Where it is kept, a line every few seconds tells enough."""


class Progress:
    """Shows a text again and again: on a terminal in one place, elsewhere as a line now and then.

    Args:
        text: Makes the text.
        interval_s: How often, where it is not a terminal.
    """

    def __init__(self, text: Callable[[], str], interval_s: float = _LOG_S) -> None:
        self._text = text
        self._on_terminal = sys.stderr.isatty()
        self._interval_s = _TERMINAL_S if self._on_terminal else interval_s
        self._width = 0

    async def run(self) -> None:
        """Shows the text for ever."""
        while True:
            await trio.sleep(self._interval_s)
            text = self._text()
            if self._on_terminal:
                click.echo("\r" + text.ljust(self._width), nl=False, err=True)
                self._width = len(text)
            else:
                click.echo(text, err=True)

    def clear(self) -> None:
        """Leaves the terminal's line empty, for what is printed next."""
        if self._width:
            click.echo("\r" + " " * self._width + "\r", nl=False, err=True)
            self._width = 0


def rate_text(count: int, seconds: float) -> str:
    """So many a second, for people."""
    return f"{count / max(seconds, 0.001):,.0f}/s"
