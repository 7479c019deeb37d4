"""README's first five minutes work as they stand there."""

from __future__ import annotations

from pathlib import Path

from docs.five_minutes import PICTURE, draw, run_commands, server


def test_every_command_of_the_first_five_minutes_works(tmp_path: Path) -> None:
    with server(tmp_path) as address:
        steps = {step.command: step.output for step in run_commands(tmp_path, address)}
    assert len(steps) > 12
    changes = steps["upr tail --until caught-up"]
    assert changes.count('"key":"N619AA"') == 1
    assert '"seats\\":\\"180' in changes
    assert steps["upr get N14228"].startswith('{"tailnum":"N14228"')
    assert [steps[f"upr increment landings{by}"] for by in ("", " --by 10")] == ["1\n", "11\n"]


def test_the_picture_shows_the_commands_that_readme_has(tmp_path: Path) -> None:
    with server(tmp_path) as address:
        drawn = draw(list(run_commands(tmp_path, address)))
    picture = PICTURE.read_text(encoding="utf-8")
    assert picture.count('class="c"') == drawn.count('class="c"')
