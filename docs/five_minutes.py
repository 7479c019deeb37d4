"""Runs the commands of README's "Five minutes of use", and draws them as a recording.

`python docs/five_minutes.py` writes `docs/five-minutes.svg`. tests/system/test_readme.py runs the
same commands and looks at what they print.
"""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import gethostname
from typing import Final

import attrs

ROOT: Final = Path(__file__).resolve().parents[1]
README: Final = ROOT / "README.md"
PICTURE: Final = ROOT / "docs" / "five-minutes.svg"

ADDRESS: Final = "127.0.0.1:12000"
"""Where README's server listens. Here it listens on a free port, and the recording says this."""

NOT_RUN: Final = re.compile(r"python3 -m venv|\.venv/bin/pip|\. \.venv|upr-server serve|upr events")
"""Commands that install, serve, or follow for ever."""

FOLLOWS: Final = re.compile(r"upr tail(?!.*--until)")
"""A command that follows for ever; here it stops when it has caught up."""

COLUMNS: Final = 100
LINES_OF_OUTPUT_MAX: Final = 5
TIMEOUT_S: Final = 60.0


@attrs.frozen
class Step:
    """A command of README and what it printed."""

    command: str
    output: str


def commands() -> list[str]:
    """The commands of the section, in order; a here-document is part of its command."""
    section = README.read_text(encoding="utf-8").partition("## Five minutes of use")[2]
    section = section.partition("### From Python")[0]
    lines = iter(re.findall(r"^ {4}(\S.*)$", section, re.MULTILINE))
    result = []
    for line in lines:
        command = line
        if ending := re.search(r"<<'(\w+)'", line):
            while not command.endswith(f"\n{ending[1]}"):
                command += f"\n{next(lines)}"
        if not NOT_RUN.match(command):
            result.append(command)
    return result


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """A server with its data in `folder`; gives its address."""
    with subprocess.Popen(
        [*_python("upr_server"), "serve", "--listen", "127.0.0.1:0", "--data-dir", folder / "data"],
        cwd=folder,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("listening on "):
            raise RuntimeError("the server did not start")
        try:
            yield line.removeprefix("listening on ").strip()
        finally:
            process.terminate()


def run_commands(folder: Path, address: str) -> Iterator[Step]:
    """Runs README's commands in one shell's environment, and gives each with its output.

    Raises:
        subprocess.CalledProcessError: A command failed.
    """
    environment = _environment()
    for command in commands():
        if export := re.fullmatch(r"export (\w+)=(\S+)", command):
            environment[export[1]] = export[2].replace(ADDRESS, address)
            yield Step(command, "")
            continue
        line = FOLLOWS.sub(r"\g<0> --until caught-up", command).replace(ADDRESS, address)
        result = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", line],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            text=True,
            check=True,
        )
        output = result.stdout.replace(address, ADDRESS).replace(gethostname(), "node")
        yield Step(command, output)


def _python(package: str) -> list[str]:
    return [sys.executable, "-c", f"from {package}.cli import main; main()"]


def _environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("UPR_")}
    return {**inherited, "PATH": path, "COLUMNS": str(COLUMNS)}


# The picture: an SVG in which one line after the other appears.

LINE_HEIGHT: Final = 18
CHARACTER_WIDTH: Final = 7.8
MARGIN: Final = 16
COMMAND_S: Final = 0.9
"""How long the reader has for a command before its output comes."""

OUTPUT_S: Final = 0.12
"""From one line of output to the next."""


def draw(steps: list[Step]) -> str:
    """The recording as SVG."""
    lines: list[str] = []
    appears_s = 0.5
    for step in steps:
        for index, line in enumerate(step.command.split("\n")):
            prompt = "$ " if index == 0 else "> "
            lines.append(_line(len(lines), appears_s, "c", f"{prompt}{line}"))
        appears_s += COMMAND_S
        for line in _shortened(step.output):
            lines.append(_line(len(lines), appears_s, "o", line))
            appears_s += OUTPUT_S
    width = round(COLUMNS * CHARACTER_WIDTH) + 2 * MARGIN
    height = len(lines) * LINE_HEIGHT + 2 * MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">\n'
        "<title>The commands of the README's first five minutes, and their output</title>\n"
        "<style>\n"
        "text{font:13px ui-monospace,Menlo,Consolas,monospace;white-space:pre;"
        "animation:show .01s linear both}\n"
        ".c{fill:#7ee787}.o{fill:#c9d1d9}\n"
        "@keyframes show{from{opacity:0}to{opacity:1}}\n"
        "@media (prefers-reduced-motion:reduce){text{animation:none}}\n"
        "</style>\n"
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>\n'
        + "\n".join(lines)
        + "\n</svg>\n"
    )


def _shortened(output: str) -> list[str]:
    lines = output.splitlines()
    if len(lines) > LINES_OF_OUTPUT_MAX:
        lines = [*lines[: LINES_OF_OUTPUT_MAX - 1], f"… {len(lines)} lines"]
    return [line if len(line) <= COLUMNS else f"{line[: COLUMNS - 2]} …" for line in lines]


def _line(row: int, appears_s: float, kind: str, line: str) -> str:
    y = MARGIN + (row + 1) * LINE_HEIGHT - 5
    return (
        f'<text class="{kind}" x="{MARGIN}" y="{y}" xml:space="preserve" '
        f'style="animation-delay:{appears_s:.2f}s">{html.escape(line)}</text>'
    )


def main() -> None:
    """Runs the commands and writes the picture."""
    with tempfile.TemporaryDirectory(prefix="upr-readme-") as name, server(Path(name)) as address:
        PICTURE.write_text(draw(list(run_commands(Path(name), address))), encoding="utf-8")


if __name__ == "__main__":
    main()
