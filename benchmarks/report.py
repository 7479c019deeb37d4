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

_ROLES: Final = ("server", "writer", "reader")


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
    parts = [
        _results(lines),
        _processor(lines),
        _latency(lines),
        _axes(lines),
        _starts(lines),
        _life(lines),
        _provenance(lines),
    ]
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
            f"**{_ratio(line['ratio'])}**",
            "–".join(map(_ratio, line["ratio_range"])),
            _bar(line["first_bar"]),
            _bar(line["aim"]),
            line["peer_name"],
        )
        for line in lines
    ]
    head = ("row", "ours", "peer", "ratio", "of single runs", "first bar", "aim", "against")
    return _table(head, rows)


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


def _bar(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:g}"


def _quantity(number: float, unit: str) -> str:
    if unit == "bytes/s":
        return f"{number / 1e9:.2f} GB/s"
    if unit in ("mutations/s", "rows/s"):
        return f"{number / 1e6:.2f} M/s"
    if unit == "s":
        return f"{number:.2f} s"
    if unit == "µs" and number >= 1_000:
        return f"{number / 1e3:,.1f} ms"
    return f"{number:,.0f} {unit.replace('server ns/mutation', 'ns')}"


def _processor(lines: Sequence[Line]) -> str:
    """Processor time a mutation, of the server and of the client, where the row has it."""
    rows = []
    for line in lines:
        details = line["details"]
        client = details.get("client_ns_per_mutation") or details.get("consumer_ns_per_mutation")
        if "server_ns_per_mutation" not in details or _is_beside(line):
            continue
        rows.append(
            (
                line["row"],
                *(_range(details.get(f"{role}_ns_per_mutation")) for role in _ROLES),
                _range(client),
                _range(details.get("redis_server_ns_per_entry")),
            )
        )
    head = ("processor time a mutation, ns", *_ROLES, "client", "Redis's server")
    return "\n".join((_table(head, rows), "", "Medians, with the least and the most of the runs."))


def _is_beside(line: Line) -> bool:
    """Whether the line is of the same runs as the one that has the row's plain name."""
    return " " in line["row"]


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


def _starts(lines: Sequence[Line]) -> str:
    rows = [
        (
            line["row"],
            *(
                _seconds(line["details"][name])
                for name in ("listening_s", "streams_s", "answers_s")
            ),
            f"{line['ours']:.2f} ({line['ours_range'][0]:.2f}–{line['ours_range'][1]:.2f})",
            f"{line['peer']:.2f} ({line['peer_range'][0]:.2f}–{line['peer_range'][1]:.2f})",
        )
        for line in lines
        if "listening_s" in line["details"]
    ]
    head = (
        "B9, s",
        "listens",
        "streams",
        "answers a get",
        "in every partition",
        "reading the files",
    )
    return _table(head, rows) if rows else ""


def _seconds(spread: Mapping[str, float]) -> str:
    return f"{spread['median']:.2f} ({spread['min']:.2f}–{spread['max']:.2f})"


def _life(lines: Sequence[Line]) -> str:
    """A bucket's disk, loaded and at rest."""
    lives = [line["details"]["life"] for line in lines if "life" in line["details"]]
    if not lives:
        return ""
    (life,) = lives
    live_bytes, live_chunk_bytes = life["live_bytes"], life["live_chunk_bytes"]
    chunk_ratio = life["chunk_bytes_by_live_chunk_bytes"]
    loaded, at_rest, backfill = life["loaded"], life["at_rest"], life["backfill"]
    rows = [
        (text, f"{loaded[name] / 1e6:,.0f}", f"{at_rest[name] / 1e6:,.0f}")
        for text, name in (
            ("both files", "files"),
            ("the log's file", "log_file"),
            ("of it in use", "log_used"),
            ("the index's file", "index_file"),
            ("of it in use", "index_used"),
            ("chunks in the log", "chunks"),
        )
    ]
    mutations, nbytes = backfill["mutations_per_s"], backfill["bytes_per_s"]
    restart = life["restart_to_ready_s"]
    return "\n".join(
        (
            _table(("10 M mutations over 1 M keys, MB", "loaded", "at rest"), rows),
            "",
            (
                f"Loaded, all of it on disk, after {life['load_s']:.0f} s; at rest "
                f"{life['compaction_s']:.0f} s later. Keys and values that live are "
                f"{live_bytes / 1e6:,.0f} MB, as chunks {live_chunk_bytes / 1e6:,.0f}: "
                f"the chunks at rest are {chunk_ratio:.2f} times these, "
                f"both files {life['file_bytes_by_live_bytes']:.2f} times the keys and values. "
                f"Killed at rest, ready after {_seconds(restart)} s. Backfill of the "
                f"{life['mutations_at_rest'] / 1e6:.2f} M mutations left: "
                f"{mutations['median'] / 1e6:.2f} M/s ({mutations['min'] / 1e6:.2f}–"
                f"{mutations['max'] / 1e6:.2f}), {nbytes['median'] / 1e6:,.0f} MB/s "
                f"({nbytes['min'] / 1e6:,.0f}–{nbytes['max'] / 1e6:,.0f})."
            ),
        )
    )


def _provenance(lines: Sequence[Line]) -> str:
    """Where and when, and what else went on."""
    rows = {
        (
            line["row"],
            line["measured_at"][:10],
            f"`{line['commit']}`",
            str(line["runs"]),
            f"{line['others_share']:.0%}" if "others_share" in line else "not recorded",
        )
        for line in lines
        if not _is_beside(line)
    }
    machines = sorted({_machine(line["machine"]) for line in lines})
    head = ("row", "measured", "commit", "runs", "of the machine used by others meanwhile")
    return "\n".join((_table(head, sorted(rows)), "", *machines))


def _machine(machine: Mapping[str, Any]) -> str:
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB, "
        f"Linux {machine['kernel']}, {machine.get('file_system', 'unknown file system')}, "
        f"Python {machine['python']}, {machine['redis']}"
    )


if __name__ == "__main__":
    sys.exit(main())
