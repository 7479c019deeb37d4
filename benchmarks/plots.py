"""The plots of docs/performance.md, drawn from results/*.json: the same results, the same files.

Text is drawn as outlines of a font that comes with matplotlib, so that a plot looks alike
everywhere. Colours are Okabe and Ito's, which who sees few colours can tell apart; and no plot
needs them: lines have marks and labels too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from benchmarks.kit.machine import ROOT

PLOTS: Final = ROOT / "docs" / "plots"

BLUE: Final = "#0072B2"
ORANGE: Final = "#D55E00"
GREEN: Final = "#009E73"
PURPLE: Final = "#CC79A7"
GREY: Final = "#767676"
BLACK: Final = "#222222"

_STYLE: Final[dict[Any, Any]] = {
    "svg.hashsalt": "upr",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": BLACK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "xtick.color": BLACK,
    "ytick.color": BLACK,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "legend.frameon": False,
    "figure.facecolor": "white",
}

_PLAIN: Final = FuncFormatter(lambda value, _: f"{value:,g}")

Line = Mapping[str, Any]


def draw(lines: Sequence[Line]) -> list[Path]:
    """Draws what there are results for; gives the files."""
    PLOTS.mkdir(parents=True, exist_ok=True)
    drawn = [
        path
        for name, plot in (
            ("ratios", _ratios),
            ("flatness", _flatness),
            ("written", _written),
            ("fan-out", _fan_out),
            ("latency", _latency),
            ("soak", _soak),
        )
        if (path := plot(PLOTS / f"{name}.svg", lines)) is not None
    ]
    for path in set(PLOTS.glob("*.svg")).difference(drawn):
        path.unlink()
    return drawn


@contextmanager
def _saved(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure of so many inches, written when it is drawn."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        figure.savefig(path, metadata={"Date": None})
    # matplotlib leaves blanks at the ends of lines.
    path.write_text("\n".join(map(str.rstrip, path.read_text().splitlines())) + "\n")


def _details(lines: Sequence[Line], name: str) -> dict[str, Any] | None:
    """The first row's details of this name."""
    details: dict[str, Any] | None = next(
        (line["details"][name] for line in lines if name in line["details"]), None
    )
    return details


def _row(lines: Sequence[Line], name: str) -> Line | None:
    return next((line for line in lines if line["row"] == name), None)


def _ratios(path: Path, lines: Sequence[Line]) -> Path | None:
    """Each row's ratio against its first bar and aim."""
    rows = [line for line in lines if line["first_bar"] is not None]
    if not rows:
        return None
    rows.reverse()
    with _saved(path, 8.0, 0.27 * len(rows) + 1.1) as figure:
        axes = figure.subplots()
        for index, line in enumerate(rows):
            reached = line["ratio"] >= line["first_bar"]
            colour = BLUE if reached else ORANGE
            low, high = line["ratio_range"]
            axes.plot((low, high), (index, index), color=colour, linewidth=2.2, alpha=0.45)
            axes.plot(
                line["first_bar"], index, "|", color=BLACK, markersize=11, markeredgewidth=1.6
            )
            if line["aim"] is not None:
                axes.plot(line["aim"], index, "D", color=GREY, markersize=4.5, fillstyle="none")
            axes.plot(line["ratio"], index, "o" if reached else "X", color=colour, markersize=6.5)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(_PLAIN)
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_yticks(range(len(rows)), [line["row"] for line in rows])
        axes.set_ylim(-0.7, len(rows) - 0.3)
        axes.grid(axis="y", visible=False)
        axes.axvline(1.0, color=GREY, linewidth=0.8, zorder=0)
        axes.set_xlabel("this server by its peer; more is better")
        for label, marker, colour, fill in (
            ("first bar reached", "o", BLUE, "full"),
            ("not reached", "X", ORANGE, "full"),
            ("first bar", "|", BLACK, "full"),
            ("aim", "D", GREY, "none"),
        ):
            axes.plot(
                [],
                [],
                marker,
                color=colour,
                label=label,
                fillstyle=fill,
                markersize=10 if marker == "|" else 6,
            )
        figure.legend(loc="outside upper center", ncols=4)
    return path


def _flatness(path: Path, lines: Sequence[Line]) -> Path | None:
    """B7's cost along each axis."""
    axes_details = _details(lines, "axes")
    if axes_details is None:
        return None
    panels = (
        (
            "Partitions",
            (
                ("partitions", "100,000 keys in all", "o", BLUE),
                ("partitions, all written", "1 M keys, all written", "s", ORANGE),
            ),
        ),
        (
            "Keys, 64 partitions",
            (
                ("keys", "drawn uniformly", "o", BLUE),
                ("keys, all written", "all written", "s", ORANGE),
            ),
        ),
        ("Idle consumers", (("idle consumers", "", "o", BLUE),)),
        ("History, mutations", (("history", "", "o", BLUE),)),
    )
    with _saved(path, 8.0, 5.4) as figure:
        grid = figure.subplots(2, 2, sharey=True)
        top = 0.0
        for axes, (title, curves) in zip(grid.flat, panels, strict=True):
            ticks: set[int] = set()
            for name, label, marker, colour in curves:
                points = axes_details[name]["points"]
                ticks.update(point["at"] for point in points.values())
                top = max(top, _curve(axes, points, label, marker, colour))
            axes.set_xticks(sorted(ticks), list(map(_count, sorted(ticks))))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(_PLAIN)
            axes.set_title(title)
            if len(curves) > 1:
                axes.legend(loc="upper left")
        grid.flat[0].set_ylim(0, 1.25 * top)
        for axes in grid[:, 0]:
            axes.set_ylabel("server, ns a mutation")
    return path


def _curve(axes: Axes, points: Mapping[str, Any], label: str, marker: str, colour: str) -> float:
    """One axis of B7 with the least and the most of its runs; gives the most of all."""
    times = [point["at"] for point in points.values()]
    costs = [point["server_ns_per_mutation"] for point in points.values()]
    medians = [cost["median"] for cost in costs]
    below = [cost["median"] - cost["min"] for cost in costs]
    above = [cost["max"] - cost["median"] for cost in costs]
    axes.errorbar(
        times,
        medians,
        yerr=(below, above),
        marker=marker,
        color=colour,
        label=label,
        capsize=2.5,
        elinewidth=1,
    )
    if 0 in times:
        axes.set_xscale("symlog", linthresh=10)
        axes.set_xlim(-1, 1.3 * max(times))
    else:
        axes.set_xscale("log")
    return float(max(cost["max"] for cost in costs))


def _written(path: Path, lines: Sequence[Line]) -> Path | None:
    """B7's cost by how much was written to disk, all points of all axes."""
    axes_details = _details(lines, "axes")
    if axes_details is None:
        return None
    marks = zip("os^Dvx", (BLUE, ORANGE, GREEN, PURPLE, GREY, BLACK), strict=True)
    with _saved(path, 8.0, 3.4) as figure:
        axes = figure.subplots()
        for (name, axis), (marker, colour) in zip(axes_details.items(), marks, strict=True):
            points = axis["points"].values()
            axes.plot(
                [100 * point["written_share"]["median"] for point in points],
                [point["server_ns_per_mutation"]["median"] for point in points],
                marker,
                color=colour,
                label=name,
                alpha=0.85,
            )
        axes.set_xlim(0, 103)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(_PLAIN)
        axes.set_xlabel("of the mutations written to disk, %; the others were overwritten before")
        axes.set_ylabel("server, ns a mutation")
        axes.legend(loc="upper left")
    return path


def _count(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g} M"
    return f"{value / 1e3:g} k" if value >= 1e4 else f"{value:,.0f}"


def _fan_out(path: Path, lines: Sequence[Line]) -> Path | None:
    """B4's cost of a byte, and its rate, by consumers."""
    by_consumers = _details(lines, "by_consumers")
    if by_consumers is None:
        return None
    counts = [int(count) for count in by_consumers]
    with _saved(path, 8.0, 2.9) as figure:
        left, right = figure.subplots(1, 2)
        for axes, title, name, scale, colour in (
            (left, "Server's processor time, ns a byte sent", "server_ns_per_byte", 1.0, BLUE),
            (right, "All consumers together, GB/s", "bytes_per_s", 1e-9, GREEN),
        ):
            spreads = [by_consumers[str(count)][name] for count in counts]
            medians = [scale * spread["median"] for spread in spreads]
            below = [scale * (spread["median"] - spread["min"]) for spread in spreads]
            above = [scale * (spread["max"] - spread["median"]) for spread in spreads]
            axes.errorbar(
                counts,
                medians,
                yerr=(below, above),
                marker="o",
                color=colour,
                capsize=2.5,
                elinewidth=1,
            )
            axes.set_title(title)
            axes.set_xscale("log", base=2)
            axes.set_xticks(counts, [str(count) for count in counts])
            axes.set_ylim(0, 1.15 * max(m + a for m, a in zip(medians, above, strict=True)))
            axes.set_xlabel("consumers at once")
    return path


def _latency(path: Path, lines: Sequence[Line]) -> Path | None:
    """B6's percentiles beside the peer's."""
    line = _row(lines, "B6")
    if line is None:
        return None
    names = ("p50", "p99", "p99.9")
    with _saved(path, 8.0, 2.3) as figure:
        axes = figure.subplots()
        for shift, (label, side, marker, colour) in zip(
            (0.12, -0.12),
            (("UPR", "ours", "o", BLUE), ("Redis", "peer", "s", ORANGE)),
            strict=True,
        ):
            spreads = [line["details"][side][f"{name}_us"] for name in names]
            medians = [spread["median"] / 1e3 for spread in spreads]
            below = [(spread["median"] - spread["min"]) / 1e3 for spread in spreads]
            above = [(spread["max"] - spread["median"]) / 1e3 for spread in spreads]
            places = [shift - index for index in range(len(names))]
            axes.errorbar(
                medians,
                places,
                xerr=(below, above),
                fmt=marker,
                color=colour,
                label=label,
                capsize=2.5,
                elinewidth=1,
            )
            for median, high, place in zip(medians, above, places, strict=True):
                axes.annotate(
                    f"{median:,.0f}" if median >= 100 else f"{median:.2g}",
                    (median + high, place),
                    xytext=(6, 0),
                    textcoords="offset points",
                    va="center",
                    color=colour,
                )
        axes.set_xscale("log")
        axes.margins(x=0.12)
        axes.xaxis.set_major_formatter(_PLAIN)
        axes.set_yticks([-index for index in range(len(names))], names)
        axes.set_ylim(0.5 - len(names), 0.5)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("from when a mutation was due until the consumer has it, ms")
        figure.legend(loc="outside upper center", ncols=2)
    return path


def _soak(path: Path, lines: Sequence[Line]) -> Path | None:
    """Memory and latency of the long run."""
    line = _row(lines, "SOAK")
    if line is None:
        return None
    minutes, samples = line["details"]["minutes"], line["details"]["memory_mib"]
    with _saved(path, 8.0, 4.6) as figure:
        top, bottom = figure.subplots(2, 1, sharex=True)
        times_min = [sample["at"] / 60 for sample in samples]
        for role, style, colour in (
            ("server", "-", BLUE),
            ("writer", "--", ORANGE),
            ("reader", ":", GREEN),
        ):
            top.plot(
                times_min, [sample[role] for sample in samples], style, color=colour, label=role
            )
        top.set_title("Anonymous memory, MiB")
        top.set_ylim(0, 1.1 * max(sample["server"] for sample in samples))
        top.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, borderaxespad=0)
        middles = [index + 0.5 for index in range(len(minutes))]
        for name, marker, colour in (
            ("p99.9", "^", PURPLE),
            ("p99", "o", BLUE),
            ("p50", "s", ORANGE),
        ):
            bottom.plot(
                middles,
                [minute[f"{name}_ms"] for minute in minutes],
                marker=marker,
                color=colour,
                label=name,
            )
        bottom.set_title("From when a chunk was due until a consumer has it, ms")
        bottom.set_yscale("log")
        bottom.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        bottom.yaxis.set_major_formatter(_PLAIN)
        bottom.yaxis.set_minor_formatter(NullFormatter())
        bottom.set_xlim(0, len(minutes))
        bottom.set_xlabel("minutes")
        bottom.margins(y=0.1)
        bottom.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, borderaxespad=0)
    return path
