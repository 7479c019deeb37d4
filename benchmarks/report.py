"""`python -m benchmarks.report`: writes the tables of docs/performance.md, from results/*.json."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from benchmarks.kit.machine import ROOT
from benchmarks.kit.results import read_results

PAGE: Final = ROOT / "docs" / "performance.md"
BEGIN: Final = "<!-- begin: python -m benchmarks.report -->"
END: Final = "<!-- end -->"

Line = Mapping[str, Any]


def main() -> int:
    """Replaces what stands between the marks."""
    lines = read_results()
    if not lines:
        print("no results: run `make bench` first", file=sys.stderr)
        return 1
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        print(f"{PAGE} has no marks {BEGIN} and {END}", file=sys.stderr)
        return 1
    parts = [_results(lines), _processor(lines), _latency(lines), _axes(lines), _provenance(lines)]
    PAGE.write_text(
        before + begin + "\n\n" + "\n\n".join(filter(None, parts)) + "\n\n" + end + after
    )
    return 0


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _results(lines: Sequence[Line]) -> str:
    rows = [
        (
            line["row"],
            _quantity(line["ours"], line["unit"]),
            _quantity(line["peer"], line["unit"]),
            f"**{line['ratio']:.2f}**",
            f"{line['ratio_range'][0]:.2f}–{line['ratio_range'][1]:.2f}",
            f"{line['first_bar']:g}",
            f"{line['aim']:g}",
            line["peer_name"],
        )
        for line in lines
    ]
    head = ("row", "ours", "peer", "ratio", "of single runs", "first bar", "aim", "against")
    return _table(head, rows)


def _quantity(number: float, unit: str) -> str:
    if unit == "bytes/s":
        return f"{number / 1e9:.2f} GB/s"
    if unit == "mutations/s":
        return f"{number / 1e6:.2f} M/s"
    if unit == "µs" and number >= 1_000:
        return f"{number / 1e3:,.1f} ms"
    return f"{number:,.0f} {unit.replace('server ns/mutation', 'ns')}"


def _processor(lines: Sequence[Line]) -> str:
    """Processor time a mutation, of the server and of the client, where the row has it."""
    rows = []
    for line in lines:
        details = line["details"]
        client = details.get("client_ns_per_mutation") or details.get("consumer_ns_per_mutation")
        if "server_ns_per_mutation" not in details or line["row"].endswith("bytes"):
            continue
        rows.append(
            (
                line["row"],
                _range(details["server_ns_per_mutation"]),
                _range(client),
                _range(details.get("redis_server_ns_per_entry")),
            )
        )
    head = ("processor time a mutation, ns", "server", "client", "Redis's server")
    return "\n".join((_table(head, rows), "", "Medians, with the least and the most of the runs."))


def _range(spread: Mapping[str, float] | None) -> str:
    if spread is None:
        return "–"
    return f"{spread['median']:,.0f} ({spread['min']:,.0f}–{spread['max']:,.0f})"


def _latency(lines: Sequence[Line]) -> str:
    rows = [
        (who, *(_range(line["details"][side][name]) for name in ("p50_us", "p99_us", "p99.9_us")))
        for line in lines
        if line["row"] == "B6"
        for who, side in (("UPR", "ours"), ("Redis", "peer"))
    ]
    return _table(("B6, µs", "p50", "p99", "p99.9"), rows) if rows else ""


def _axes(lines: Sequence[Line]) -> str:
    rows = []
    for line in lines:
        for name, axis in line["details"].get("axes", {}).items():
            points = axis["points"].items()
            rows.append(
                (
                    name,
                    f"{axis['flatness']:.2f}",
                    f"{axis['flatness_wall']:.2f}",
                    ", ".join(
                        f"{label}: {point['server_ns_per_mutation']['median']:.0f}"
                        for label, point in points
                    ),
                    ", ".join(f"{point['server_resident_mib']:,}" for _, point in points),
                )
            )
    head = ("B7's axes", "flatness", "by the clock", "server ns a mutation", "resident MiB")
    return _table(head, rows) if rows else ""


def _provenance(lines: Sequence[Line]) -> str:
    """Where and when, and what else went on."""
    rows = {
        (
            line["row"],
            line["measured_at"][:10],
            f"`{line['commit']}`",
            str(line["runs"]),
            f"{line['others_share']:.0%}",
        )
        for line in lines
        if not line["row"].endswith("bytes")
    }
    machines = sorted({_machine(line["machine"]) for line in lines})
    head = ("row", "measured", "commit", "runs", "of the machine used by others meanwhile")
    return "\n".join((_table(head, sorted(rows)), "", *machines))


def _machine(machine: Mapping[str, Any]) -> str:
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB, "
        f"Linux {machine['kernel']}, Python {machine['python']}, {machine['redis']}"
    )


if __name__ == "__main__":
    sys.exit(main())
