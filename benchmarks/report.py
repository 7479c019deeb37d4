"""`python -m benchmarks.report`: writes the table of docs/performance.md from the results."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.kit.machine import ROOT
from benchmarks.kit.results import read_results

DOCUMENT: Final = ROOT / "docs" / "performance.md"
BEGIN: Final = "<!-- table: written by `python -m benchmarks.report` -->"
END: Final = "<!-- end of the table -->"

_MANY: Final = 100


def main() -> int:
    """Writes the table anew; 1 when there is nothing to write, or no place for it."""
    lines = read_results()
    if not lines:
        print("there are no results: run `python -m benchmarks` first", file=sys.stderr)
        return 1
    text = DOCUMENT.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        print(f"{DOCUMENT.relative_to(ROOT)} lacks the marks of the table", file=sys.stderr)
        return 1
    _write(DOCUMENT, f"{before}{BEGIN}\n\n{section(lines)}\n\n{END}{after}")
    return 0


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    print(f"wrote {path.relative_to(ROOT)}")


def section(lines: Iterable[Mapping[str, Any]]) -> str:
    """The table, B7's axes, and where each figure comes from."""
    lines = list(lines)
    parts = [_table(lines)]
    parts += [_axes(line["details"]["axes"]) for line in lines if "axes" in line["details"]]
    parts.append(_sources(lines))
    return "\n\n".join(parts)


def _table(lines: Iterable[Mapping[str, Any]]) -> str:
    rows = [
        "| row | ours | peer | unit | ratio (min–max) | first bar | aim | reached | against |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rows += [
        f"| {line['row']} | {_spread(line, 'ours')} | {_spread(line, 'peer')} | {line['unit']} "
        f"| **{line['ratio']:.2g}** ({_range(line['ratio_range'])}) | {line['first_bar']:g} "
        f"| {line['aim']:g} | {_reached(line)} | {line['peer_name']} |"
        for line in lines
    ]
    return "\n".join(rows)


def _axes(axes: Mapping[str, Any]) -> str:
    rows = [
        "B7, every axis, in nanoseconds of the server's processor time a mutation:",
        "",
        "| axis | cost, median (min–max) | smallest by largest |",
        "|---|---|---|",
    ]
    for name, axis in axes.items():
        costs = {label: point["server_ns_per_mutation"] for label, point in axis["points"].items()}
        cells = "; ".join(
            f"{label}: {cost['median']:.0f} ({cost['min']:.0f}–{cost['max']:.0f})"
            for label, cost in costs.items()
        )
        rows.append(f"| {name} | {cells} | {axis['flatness']:.2f} |")
    return "\n".join(rows)


def _sources(lines: Iterable[Mapping[str, Any]]) -> str:
    rows = [
        "| row | commit | measured at (UTC) | runs | what else went on |",
        "|---|---|---|---|---|",
    ]
    machines: dict[str, None] = {}
    for line in lines:
        at = line["measured_at"].partition("+")[0].replace("T", " ")
        rows.append(
            f"| {line['row']} | `{line['commit']}` | {at} | {line['runs']} | {_meanwhile(line)} |"
        )
        machines[_machine(line["machine"])] = None
    return "\n".join(rows) + "\n\nThe machine: " + "; ".join(machines) + "."


def _machine(facts: Mapping[str, Any]) -> str:
    return (
        f"{facts['processor']}, {facts['cores']} cores, {facts['memory_gib']} GiB, "
        f"Linux {facts['kernel']}, Python {facts['python']}, {facts['redis']}"
    )


def _meanwhile(line: Mapping[str, Any]) -> str:
    """What the results file says of the machine's other work: older files know the load only."""
    if "others_share" in line:
        return f"others used {line['others_share']:.0%} of the machine"
    return f"load average {line['load_before']} before, {line['load_after']} after"


def _reached(line: Mapping[str, Any]) -> str:
    if line["ratio"] >= line["aim"]:
        return "aim"
    return "first bar" if line["ratio"] >= line["first_bar"] else "no"


def _spread(line: Mapping[str, Any], what: str) -> str:
    return f"{_number(line[what])} ({_range(line[f'{what}_range'])})"


def _range(ends: Iterable[float]) -> str:
    return "–".join(map(_number, ends))


def _number(number: float) -> str:
    return f"{number:,.0f}" if number >= _MANY else f"{number:,.3g}"


if __name__ == "__main__":
    sys.exit(main())
