"""Results as files: one a row, all of one shape."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from benchmarks.kit.figures import Figure
from benchmarks.kit.machine import ROOT, commit, load_average, machine_facts

RESULTS: Final = ROOT / "benchmarks" / "results"

OTHER_RESULTS: Final = RESULTS / "other"
"""Results of other machines, moved here by hand, to be shown beside those of `RESULTS`: a folder
for each machine."""


def now() -> str:
    """The time, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_results(name: str, figures: Sequence[Figure], other_load: float, run: str) -> Path:
    """Writes the lines of row `name` to its file.

    Args:
        name: The row.
        figures: Its lines.
        other_load: The share of the machine that others used while it was measured.
        run: When the command was begun that measured this row, and others with it.
    """
    common = {
        "commit": commit(),
        "machine": machine_facts(),
        "run": run,
        "measured_at": now(),
        "others_share": round(other_load, 3),
        "load_after": round(load_average(), 2),
    }
    rows = [{**figure.to_json(), **common} for figure in figures]
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"rows": rows}, indent=2) + "\n")
    return path


def other_machines() -> list[list[dict[str, Any]]]:
    """The lines of each other machine, by the names of their folders."""
    folders = sorted(path for path in OTHER_RESULTS.glob("*") if path.is_dir())
    return [read_results(folder) for folder in folders]


def read_results(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The lines of all rows that were measured, by the rows' names."""
    lines: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.json")):
        lines += json.loads(path.read_text())["rows"]
    return lines
