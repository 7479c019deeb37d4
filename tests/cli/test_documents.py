"""The command lines of documents and help texts: there are the commands and options that they
name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import pytest

from tests.kit.documents import code_of
from tests.kit.process import ROOT
from upr_protocol.cli import main as upr
from upr_server.cli import main as upr_server
from upr_server.config import ServerConfig
from upr_server.indexer.cli import main as upr_indexer
from upr_server.indexer.config import IndexerConfig

PROGRAMS: Final = {"upr": upr, "upr-server": upr_server, "upr-indexer": upr_indexer}

LINE: Final = re.compile(r"^ *(?:\$ )?((?:upr|upr-server|upr-indexer) .*)$", re.MULTILINE)

BACKTICK: Final = re.compile(r"""^(?:[^'"]|'[^']*'|"[^"`]*")*("[^"]*)?`""")
"""A backtick in a command line, outside of single quotes."""

ENDS: Final = {"|", ">", ">>", "<", "…", "$options", "(in"}
"""Words with which a command ends, or from which on a text has no more of it."""


def command_lines() -> list[tuple[str, str]]:
    """Where a command line is, and what it is."""
    return [
        (place, line)
        for place, text in texts()
        for line in LINE.findall(text.replace("\\\n", " ").replace("\b", ""))
    ]


def texts() -> Iterator[tuple[str, str]]:
    """Of documents the blocks of code, and the help texts of commands."""
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        yield path.name, "\n".join(code.text for code in code_of(path.read_text()))
    for name, program in PROGRAMS.items():
        for words, command in commands(program, name):
            yield f"{words} --help", f"{command.help}\n{command.epilog}"


def commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for inner_name in command.list_commands(context):
            inner = command.get_command(context, inner_name)
            assert inner is not None
            yield from commands(inner, f"{name} {inner_name}")


def words_of(line: str) -> list[str]:
    words = shlex.split(line, comments=True)
    ends = [number for number, word in enumerate(words) if word in ENDS]
    return words[: min(ends, default=len(words))]


def parse(words: list[str]) -> None:
    """Parses a command line, and runs nothing.

    Raises:
        click.UsageError: It is wrong.
    """
    command: click.Command | None = PROGRAMS[words[0]]
    name: str | None = words[0]
    arguments, context = words[1:], None
    while command is not None:
        if isinstance(command, click.Group):
            # With its settings: a command keeps the help option that it was first asked for.
            context = click.Context(command, context, name, **command.context_settings)
            name, command, arguments = command.resolve_command(context, arguments)
        else:
            command.make_context(name, arguments, parent=context)
            return


def test_the_commands_and_options_that_they_name_exist(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("UPR_URL", "upr://127.0.0.1:12000/planes")
    monkeypatch.setenv("UPR_PASSWORD", "so that nobody is asked")
    monkeypatch.chdir(tmp_path)
    for name in ("planes.csv", "flights.csv"):
        Path(name).touch()
    lines = command_lines()
    wrong_lines = []
    for place, line in lines:
        try:
            parse(words_of(line))
        except click.UsageError as error:
            wrong_lines.append((place, line, error.format_message()))
    assert wrong_lines == []
    assert len(lines) > 120


def test_a_shell_would_run_no_part_of_them() -> None:
    """Between double quotes it runs what is in backticks, which JMESPath has around numbers."""
    run_parts = [(place, line) for place, line in command_lines() if BACKTICK.search(line)]
    assert run_parts == []


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("upr-server serve", ServerConfig()),
        ("upr-server config", ServerConfig()),
        ("upr-indexer", IndexerConfig()),
    ],
)
def test_help_names_the_defaults_of_settings(
    name: str, defaults: ServerConfig | IndexerConfig
) -> None:
    program = name.split(maxsplit=1)[0]
    wrong_options = {}
    for option in dict(commands(PROGRAMS[program], program))[name].params:
        default = getattr(defaults, option.name or "", None)
        if (
            isinstance(option, click.Option)
            and default
            and f"[default: {default}]" not in (option.help or "")
        ):
            wrong_options[option.name] = default
    assert wrong_options == {}


def test_a_wrong_command_line_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPR_URL", "upr://127.0.0.1:12000/planes")
    for line in ("upr takover --all-of a", "upr user grant b --all", "upr-server serve --port 1"):
        with pytest.raises(click.UsageError):
            parse(words_of(line))
