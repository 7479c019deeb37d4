"""`python -m benchmarks [ROW ...]`: measures, prints a table, writes results/ROW.json."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Final

from benchmarks.kit.errors import CannotMeasureError
from benchmarks.kit.figures import RUNS_DEFAULT, Figure
from benchmarks.kit.machine import ROOT
from benchmarks.kit.processor import Disturbance
from benchmarks.kit.results import now, write_results

ROWS: Final = (
    *("B1", "B1P", "B2", "B3", "B4", "B5", "B6", "B7", "B8", "B9"),
    *("E1", "R1", "S1", "S2", "S3", "SOAK", "TLS1"),
)
"""Each is a module of `benchmarks.rows`. B1s is measured with B1, B2s with B2, B6c with B6, and
R1s with R1."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the rows that are named, or all; 1 when one of them could not be measured."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure this server beside its peers; needs redis-server and redis-benchmark, "
        "and Java for the rows of Spark.",
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; all if none")
    parser.add_argument(
        "--runs", type=int, default=RUNS_DEFAULT, help=f"of each row; {RUNS_DEFAULT} if not given"
    )
    options = parser.parse_args(arguments)
    names = [_row(name) for name in options.rows] or list(ROWS)
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        parser.error(f"no row {', '.join(unknown)}: there are {', '.join(ROWS)}")
    if options.runs < 1:
        parser.error("--runs is at least 1")
    run = now()
    figures: list[Figure] = []
    failures: list[str] = []
    for name in dict.fromkeys(names):
        try:
            figures += _measure(name, options.runs, run)
        except CannotMeasureError as error:
            failures.append(f"{name} could not be measured: {error}")
            print(failures[-1], file=sys.stderr, flush=True)
    if figures:
        print("\n" + table(figures))
        print("\n" + verdict(figures))
    return 1 if failures else 0


def _row(name: str) -> str:
    """The row's module; B1s is measured with B1, B2s with B2, B6c with B6, and R1s with
    R1."""
    name = name.upper()
    return {"B1S": "B1", "B2S": "B2", "B6C": "B6", "R1S": "R1"}.get(name, name)


def _measure(name: str, runs: int, run: str) -> list[Figure]:
    measure: Callable[[int, Callable[[str], None]], list[Figure]] = import_module(
        f"benchmarks.rows.{name.lower()}"
    ).measure
    disturbance, started_at = Disturbance(), time.monotonic()
    figures = measure(runs, _say)
    other_load = disturbance.share()
    path = write_results(name, figures, other_load, run)
    _say(
        f"  took {time.monotonic() - started_at:.0f} s, while others used "
        f"{other_load:.0%} of the machine; written to {path.relative_to(ROOT)}"
    )
    return figures


def _say(line: str) -> None:
    print(line, flush=True)


def table(figures: Sequence[Figure]) -> str:
    """The lines, in columns."""
    cells = [("row", "ours", "peer", "unit", "ratio", "first bar", "aim", "against")]
    cells += [
        (
            figure.row,
            _number(figure.ours.median),
            _number(figure.peer.median),
            figure.unit,
            f"{figure.ratio:.2f} ({figure.ratios.low:.2f}–{figure.ratios.high:.2f})",
            _bar(figure.first_bar),
            _bar(figure.aim),
            figure.peer_name,
        )
        for figure in figures
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def verdict(figures: Sequence[Figure]) -> str:
    """Which lines reach their first bar, and which do not."""
    reached = [figure.row for figure in figures if figure.is_reached]
    missed = [
        f"{figure.row} ({figure.ratio:.2g} of {figure.first_bar:g})"
        for figure in figures
        if figure.is_reached is False
    ]
    return (
        f"{len(reached)} reach their first bar: {', '.join(reached) or 'none'}\n"
        f"{len(missed)} do not: {', '.join(missed) or 'none'}"
    )


def _bar(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:g}"


def _number(value: float) -> str:
    return f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"


if __name__ == "__main__":
    sys.exit(main())
