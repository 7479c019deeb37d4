"""Rows for people, in columns; for programs, as JSON."""

from __future__ import annotations

from collections.abc import Sequence

import click
import msgspec


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], *, as_json: bool = False
) -> None:
    """Prints `rows` under the names of their `columns`: numbers to the right, the rest to the left.

    As JSON it is one object a line.
    """
    if as_json:
        for row in rows:
            click.echo(msgspec.json.encode(dict(zip(columns, row, strict=True))))
        return
    cells = [[_text(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    right = [bool(rows) and isinstance(value, int) for value in (rows[0] if rows else columns)]
    for line in (columns, *cells):
        padded = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        )
        click.echo("  ".join(padded).rstrip())


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
