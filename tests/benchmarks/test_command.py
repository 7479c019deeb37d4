"""What the command says at its end."""

from __future__ import annotations

from typing import Any

from benchmarks.__main__ import verdict
from benchmarks.kit.figures import Figure, Spread


def _figure(row: str, ours: float, first_bar: float | None) -> Figure:
    fields: dict[str, Any] = {"text": "", "unit": "", "peer_name": "", "aim": None}
    return Figure.more_is_better(
        row=row, ours=Spread.of([ours]), peer=Spread.of([1.0]), first_bar=first_bar, **fields
    )


def test_the_verdict_names_each_row_that_has_a_bar() -> None:
    figures = [_figure("B1", 2.0, 1.2), _figure("B2", 2.0, 2.0), _figure("B3", 0.051, 0.4)]
    assert verdict([*figures, _figure("E1b", 9.0, None)]).splitlines() == [
        "2 reach their first bar: B1, B2",
        "1 do not: B3 (0.051 of 0.4)",
    ]
    assert verdict([]).splitlines() == [
        "0 reach their first bar: none",
        "0 do not: none",
    ]
