"""`python -m benchmarks.report`: from results/*.json writes the tables of docs/performance.md, and
draws its plots."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from benchmarks.kit.machine import ROOT
from benchmarks.kit.results import other_machines, read_results
from benchmarks.plots import draw

PAGE: Final = ROOT / "docs" / "performance.md"
BEGIN: Final = "<!-- begin: python -m benchmarks.report -->"
END: Final = "<!-- end -->"

Line = Mapping[str, Any]

_ROLES: Final = ("server", "writer", "reader")

_COMPARED: Final = ("row", "ours", "peer", "ratio", "of single runs")


def main() -> int:
    """Replaces what stands between the marks, and the plots."""
    lines = read_results()
    if not lines:
        print("no results: run `make bench` first", file=sys.stderr)
        return 1
    before, begin, tail = PAGE.read_text().partition(BEGIN)
    _, end, after = tail.partition(END)
    if not begin or not end:
        print(f"{PAGE} has no marks {BEGIN} and {END}", file=sys.stderr)
        return 1
    plots = {path.stem: f"![{path.stem}](plots/{path.name})" for path in draw(lines)}
    parts = [
        _results(lines),
        plots.get("ratios"),
        _processor(lines),
        _streaming(lines),
        _fan_out(lines),
        plots.get("fan-out"),
        _latency(lines),
        plots.get("latency"),
        _axes(lines),
        plots.get("flatness"),
        plots.get("written"),
        _soak(lines),
        plots.get("soak"),
        _starts(lines),
        _life(lines),
        _provenance(lines),
        *map(_other_machine, other_machines()),
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
            *_compared(line),
            _bar(line["first_bar"]),
            _sign(line),
            _bar(line["aim"]),
            line["peer_name"],
        )
        for line in lines
    ]
    head = (*_COMPARED, "first bar", "", "aim", "against")
    return "\n".join((_table(head, rows), "", "✓: the first bar is reached; ✗: it is not."))


def _compared(line: Line) -> tuple[str, ...]:
    """The columns of `_COMPARED`."""
    return (
        line["row"],
        _quantity(line["ours"], line["unit"]),
        _quantity(line["peer"], line["unit"]),
        f"**{_ratio(line['ratio'])}**",
        "–".join(map(_ratio, line["ratio_range"])),
    )


def _sign(line: Line) -> str:
    if line["first_bar"] is None:
        return "–"
    return "✓" if line["ratio"] >= line["first_bar"] else "✗"


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


def _bar(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.3g}"


def _quantity(value: float, unit: str) -> str:
    if unit == "bytes/s":
        return f"{value / 1e9:.2f} GB/s"
    if unit in ("mutations/s", "rows/s"):
        return f"{value / 1e6:.2f} M/s" if value >= 100_000 else f"{value / 1e3:,.1f} k/s"
    if unit == "s":
        return f"{value:.2f} s"
    if unit == "µs" and value >= 1_000:
        return f"{value / 1e3:,.1f} ms"
    if unit == "MiB":
        return f"{value:,.1f} MiB"
    return f"{value:,.0f} {unit.replace('server ns/mutation', 'ns')}"


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


def _range(spread: Mapping[str, float] | None, scale: float = 1, digits: int = 0) -> str:
    if spread is None:
        return "–"
    median, low, high = (f"{scale * spread[of]:,.{digits}f}" for of in ("median", "min", "max"))
    return f"{median} ({low}–{high})"


def _latency(lines: Sequence[Line]) -> str:
    rows = [
        (
            system,
            *(_range(line["details"][side][name]) for name in ("p50_us", "p99_us", "p99.9_us")),
        )
        for line in lines
        if line["row"] == "B6"
        for system, side in (("UPR", "ours"), ("Redis", "peer"))
    ]
    return _table(("B6, µs", "p50", "p99", "p99.9"), rows) if rows else ""


def _streaming(lines: Sequence[Line]) -> str:
    rows = [
        (line["row"], *_sent(line["details"]))
        for line in lines
        if "server_ns_per_byte" in line["details"] and not _is_beside(line)
    ]
    head = ("the server's processor time for what it sends", "ns a byte", "µs a chunk")
    return _table(head, rows) if rows else ""


def _fan_out(lines: Sequence[Line]) -> str:
    rows = [
        (count, *_sent(details), _range(details["bytes_per_s"], 1e-9, 2))
        for line in lines
        for count, details in line["details"].get("by_consumers", {}).items()
    ]
    head = ("B4, consumers at once", "server, ns a byte", "server, µs a chunk", "GB/s together")
    return _table(head, rows) if rows else ""


def _sent(details: Mapping[str, Any]) -> tuple[str, str]:
    return _range(details["server_ns_per_byte"], 1, 2), _range(details["server_us_per_chunk"])


def _axes(lines: Sequence[Line]) -> str:
    rows = [
        (
            f"{name}: {label}",
            _percent(point["distinct_in_a_chunk"]),
            _percent(point["written_share"]["median"]),
            _range(point["server_ns_per_mutation"]),
            _range(point["server_ns_until_acknowledged"]),
            f"{point['server_resident_mib']:,}",
        )
        for line in lines
        for name, axis in line["details"].get("axes", {}).items()
        for label, point in axis["points"].items()
    ]
    head = (
        "B7",
        "distinct in a chunk",
        "written to disk",
        "server, ns a mutation",
        "of it until acknowledged",
        "resident MiB",
    )
    flatness = [
        (name, f"{axis['flatness']:.2f}", f"{axis['flatness_until_acknowledged']:.2f}")
        for line in lines
        for name, axis in line["details"].get("axes", {}).items()
    ]
    if not rows:
        return ""
    flat = _table(("B7's axes", "flatness", "until acknowledged"), flatness)
    return "\n\n".join((_table(head, rows), flat))


def _percent(share: float) -> str:
    return f"{share:.0%}"


def _soak(lines: Sequence[Line]) -> str:
    """The long run by minutes, and the rates that were tried."""
    details = next((line["details"] for line in lines if line["row"] == "SOAK"), None)
    if details is None:
        return ""
    percentiles = ("p50_ms", "p99_ms", "p99.9_ms")
    sizes = ("server_mib", "writer_mib", "reader_mib")
    minutes = [
        (
            str(index + 1),
            *(f"{minute[name]:,.0f}" for name in percentiles),
            *(f"{minute[name]:,.1f}" for name in sizes),
        )
        for index, minute in enumerate(details["minutes"])
    ]
    tries = [
        (
            f"{attempt['share_of_b1']:.0%}",
            f"{attempt['asked_per_s'] / 1e6:.3f}",
            f"{attempt['reached_per_s'] / 1e6:.3f}",
            *(f"{attempt['latency'][name]:,.0f}" for name in percentiles),
            f"{attempt['last_s_latency']['p50_ms']:,.0f}",
            "yes" if attempt["keeps_up"] else "no",
        )
        for attempt in details["tries"]
    ]
    late = ("p50, ms", "p99, ms", "p99.9, ms")
    memory = ("server, MiB", "writer, MiB", "reader, MiB")
    head = ("of B1's rate", "M/s due", "M/s reached", *late, "p50 of the last second, ms")
    return "\n".join(
        (
            _table(("SOAK, minute", *late, *memory), minutes),
            "",
            _table((*head, "keeps up"), tries),
            "",
            "The last of these is the long run.",
        )
    )


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
    started_at: dict[str, set[str]] = {}
    for line in lines:
        if line["row"].startswith("B"):
            started_at.setdefault(line.get("run", ""), set()).add(line["row"].partition(" ")[0])
    machines = sorted({_machine(line["machine"]) for line in lines})
    head = ("row", "measured", "commit", "runs", "of the machine used by others meanwhile")
    return "\n".join((_table(head, sorted(rows)), "", _runs(started_at), "", *machines))


def _other_machine(lines: Sequence[Line]) -> str:
    """What the rows come to on another machine."""
    rows = [
        (
            *_compared(line),
            line["measured_at"][:10],
            f"`{line['commit']}`",
            f"{line['others_share']:.0%}",
        )
        for line in lines
    ]
    head = (*_COMPARED, "measured", "commit", "used by others")
    machines = sorted({_machine(line["machine"]) for line in lines})
    return "\n".join(("On another machine:", "", _table(head, rows), "", *machines))


def _runs(started_at: Mapping[str, set[str]]) -> str:
    """Whether all rows B stem from one run of the command."""
    if len(started_at) == 1 and "" not in started_at:
        (run,) = started_at
        return f"All rows B were measured by one `make bench`, begun at {run}."
    versions = (
        f"{', '.join(sorted(rows))} ({f'begun at {run}' if run else 'begun nobody knows when'})"
        for run, rows in sorted(started_at.items())
    )
    return f"Not all rows B were measured by one `make bench`: {'; '.join(versions)}."


def _machine(machine: Mapping[str, Any]) -> str:
    cache = machine.get("second_level_cache", "")
    return (
        f"{machine['processor']}, {f'{cache} of second-level cache a core, ' if cache else ''}"
        f"{machine['cores']} cores, {machine['memory_gib']:g} GiB, "
        f"Linux {machine['kernel']}, {machine.get('file_system', 'unknown file system')}, "
        f"Python {machine['python']}, {machine['redis']}"
    )


if __name__ == "__main__":
    sys.exit(main())
