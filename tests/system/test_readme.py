"""README's first five minutes work as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from docs.five_minutes import PICTURE, README, Step, draw, run_commands, server
from tests.kit.process import UPR, run, server_process


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


async def test_the_certificate_that_readme_makes_encrypts_connections(tmp_path: Path) -> None:
    section = (
        README.read_text(encoding="utf-8").partition("### Encryption")[2].partition("\n## ")[0]
    )
    lines = "\n".join(re.findall(r"^ {4}(.*)$", section, re.MULTILINE)).replace("\\\n", "")
    make_certificate, serve, export = (shlex.split(line) for line in lines.splitlines())
    made = await run(make_certificate, cwd=tmp_path)
    assert made.code == 0, made
    assert serve[:2] == ["upr-server", "serve"]
    options = [str(tmp_path / word) if "." in word else word for word in serve[2:]]
    (_, ca) = export[2].split("=")
    variables = {"UPR_CA": str(tmp_path / ca)}
    async with server_process(*options, errors=()) as server:
        url = f"uprs://127.0.0.1:{server.port}/planes"
        created = await run((*UPR, "bucket", "create", url), variables=variables)
        assert created.code == 0, created
        refused = await run((*UPR, "bucket", "list", url))
        assert "no authority that is trusted here" in refused.err
