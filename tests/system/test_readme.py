"""README's first five minutes work as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from docs.five_minutes import PICTURE, README, Step, draw, run_commands, server
from tests.kit.process import UPR, UPR_SERVER, run, server_process


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


async def test_the_commands_that_make_a_server_secure(tmp_path: Path) -> None:
    section = README.read_text(encoding="utf-8").partition("### Make it secure")[2]
    blocks = re.findall(r"^ {4}(.*)$", section.partition("\n## ")[0], re.MULTILINE)
    assert len(blocks) <= 10
    lines = "\n".join(blocks).replace("\\\n", "").splitlines()
    make_certificate, make_user, serve, export, *commands = map(shlex.split, lines)
    # In place of what people type.
    password = tmp_path / "password"
    password.write_text("correct horse")
    password.chmod(0o600)
    data = tmp_path / "data"

    assert (await run(make_certificate, cwd=tmp_path)).code == 0
    user_options = ("--data-dir", str(data), "--password-file", str(password))
    result = await run((*UPR_SERVER, *make_user[1:], *user_options))
    assert result.code == 0, result
    assert serve[:4] == ["upr-server", "serve", "--listen", "0.0.0.0:12000"]
    files = [str(tmp_path / word) if "." in word else word for word in serve[4:]]
    async with server_process(*files, listen="0.0.0.0:0", data_dir=data) as server:
        variables = dict(word.split("=", 1) for word in export[1:])
        url = variables["UPR_URL"].replace("12000", str(server.port))
        variables |= {
            "UPR_URL": url,
            "UPR_CA": str(tmp_path / variables["UPR_CA"]),
            "UPR_PASSWORD_FILE": str(password),
        }
        for _, *command in commands:
            if command[:2] == ["user", "add"]:
                command += ["--new-password-file", str(password)]
            if command[0] == "tail":
                command += ["--until", "caught-up"]
            finished = await run((*UPR, *command), variables=variables)
            assert finished.code == 0, finished
        may_not_write = await run((*UPR, "set", "k", "v", "--user", "bob"), variables=variables)
        assert "needs the right write or index on bucket planes" in may_not_write.err
        stranger = await run(
            (*UPR, "bucket", "list", url), variables={"UPR_CA": variables["UPR_CA"]}
        )
        assert "wants its clients to log in" in stranger.err
        unknown = await run((*UPR, "bucket", "list", url))
        assert "no authority that is trusted here" in unknown.err
