"""The tables and plots are made of what is in the results, and the same results make the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import plots, report
from benchmarks.kit.results import other_machines, read_results


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    monkeypatch.setattr(report, "PAGE", page)
    monkeypatch.setattr(plots, "PLOTS", tmp_path / "plots")


def test_every_row_has_a_line(tmp_path: Path) -> None:
    assert report.main() == 0
    text = (tmp_path / "performance.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "\nold\n" not in text
    main_text, *other_texts = text.split("\nOn another machine:\n")
    for line in read_results():
        assert f"\n| {line['row']} | " in main_text
    for lines, other_text in zip(other_machines(), other_texts, strict=True):
        for line in lines:
            assert f"\n| {line['row']} | " in other_text


def test_every_plot_is_shown_and_every_one_shown_is_there(tmp_path: Path) -> None:
    report.main()
    text = (tmp_path / "performance.md").read_text()
    drawn = sorted((tmp_path / "plots").iterdir())
    assert drawn
    assert text.count("](plots/") == len(drawn)
    for path in drawn:
        assert f"](plots/{path.name})" in text


def test_the_same_results_draw_the_same_bytes(tmp_path: Path) -> None:
    plots.draw(read_results())
    first = {path.name: path.read_bytes() for path in (tmp_path / "plots").iterdir()}
    plots.draw(read_results())
    assert first == {path.name: path.read_bytes() for path in (tmp_path / "plots").iterdir()}
