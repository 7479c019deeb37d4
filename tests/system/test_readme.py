"""README's first five minutes work as they stand there."""

from __future__ import annotations

from pathlib import Path

from docs.five_minutes import PICTURE, Step, draw, run_commands, server


def test_every_command_of_the_first_five_minutes_works_and_is_in_the_picture(
    tmp_path: Path,
) -> None:
    with server(tmp_path) as address:
        steps = {step.command: step.output for step in run_commands(tmp_path, address)}
    assert len(steps) > 12
    changes = steps["upr tail --until caught-up"]
    assert changes.count('"key":"N619AA"') == 1
    assert '"seats\\":\\"180' in changes
    assert steps["upr get N14228"].startswith('{"tailnum":"N14228"')
    assert [steps[f"upr increment landings{by}"] for by in ("", " --by 10")] == ["1\n", "11\n"]

    drawn = draw([Step(command, output) for command, output in steps.items()])
    picture = PICTURE.read_text(encoding="utf-8")
    assert picture.count('class="c"') == drawn.count('class="c"'), "run docs/five_minutes.py"
