"""Figures of several runs, and the row that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

import attrs

RUNS_DEFAULT: Final = 5


@attrs.frozen
class Spread:
    """One figure, measured several times.

    Attributes:
        runs: The figure of each run, in their order.
    """

    runs: tuple[float, ...]

    @classmethod
    def of(cls, runs: Sequence[float]) -> Spread:
        """The spread of `runs`."""
        return cls(tuple(runs))

    @property
    def median(self) -> float:
        """What is kept."""
        return median(self.runs)

    @property
    def low(self) -> float:
        """The smallest."""
        return min(self.runs)

    @property
    def high(self) -> float:
        """The largest."""
        return max(self.runs)

    def over(self, divisor: Spread) -> Spread:
        """This figure by another, run by run: what stood side by side is compared."""
        return Spread(tuple(a / b for a, b in zip(self.runs, divisor.runs, strict=True)))

    def to_json(self) -> dict[str, float]:
        """Median, minimum and maximum."""
        return {
            "median": significant(self.median),
            "min": significant(self.low),
            "max": significant(self.high),
        }


def significant(value: float) -> float:
    """`value` to four significant digits: more than any of these figures has."""
    return float(f"{value:.4g}")


@attrs.frozen
class Figure:
    """One line of the table: this server against one peer.

    Attributes:
        row: The row's name in design/8, e.g. `B1`.
        text: What was measured, exactly, in a sentence or two.
        unit: Of `ours` and `peer`.
        ours: This server's figure.
        peer: The peer's.
        peer_name: Who that is, and how it was driven.
        ratio: Ours by the peer's, or the reverse where less is better: more is always better.
        ratios: The same for each run alone.
        first_bar: The ratio that must be reached; None where there is none.
        aim: The ratio that we want; the same.
        runs: How many runs were made.
        details: Whatever else was measured, e.g. processor time a mutation.
    """

    row: str
    text: str
    unit: str
    ours: Spread
    peer: Spread
    peer_name: str
    ratio: float
    ratios: Spread
    first_bar: float | None
    aim: float | None
    runs: int
    details: Mapping[str, Any] = attrs.field(factory=dict)

    @classmethod
    def more_is_better(cls, *, ours: Spread, peer: Spread, **fields: Any) -> Figure:
        """A line whose ratio is ours by the peer's."""
        return cls(
            ours=ours,
            peer=peer,
            ratio=ours.median / peer.median,
            ratios=ours.over(peer),
            runs=len(ours.runs),
            **fields,
        )

    @classmethod
    def less_is_better(cls, *, ours: Spread, peer: Spread, **fields: Any) -> Figure:
        """A line whose ratio is the peer's by ours."""
        return cls(
            ours=ours,
            peer=peer,
            ratio=peer.median / ours.median,
            ratios=peer.over(ours),
            runs=len(ours.runs),
            **fields,
        )

    @property
    def is_reached(self) -> bool | None:
        """Whether the first bar is reached; None where there is none."""
        return None if self.first_bar is None else self.ratio >= self.first_bar

    def to_json(self) -> dict[str, Any]:
        """The line as the results file holds it, but for the machine and the commit."""
        return {
            "row": self.row,
            "text": self.text,
            "unit": self.unit,
            "ours": significant(self.ours.median),
            "ours_range": [significant(self.ours.low), significant(self.ours.high)],
            "peer": significant(self.peer.median),
            "peer_range": [significant(self.peer.low), significant(self.peer.high)],
            "peer_name": self.peer_name,
            "ratio": significant(self.ratio),
            "ratio_range": [significant(self.ratios.low), significant(self.ratios.high)],
            "first_bar": self.first_bar,
            "aim": self.aim,
            "runs": self.runs,
            "details": dict(self.details),
        }
