"""The log of a daemon, and that of the libraries in it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from tests.kit.process import ROOT, environment

PROGRAM = """
import logging, structlog, sys
from upr_server.runtime import set_up_logging
set_up_logging(*sys.argv[1:])
logging.getLogger("hypercorn.error").info("a library's")
logging.getLogger("hypercorn.error").warning("a library's trouble")
log = structlog.get_logger("upr_server.app")
log.debug("ours, small")
log.info("ours", port=1)
"""

FAILING_PROGRAM = """
import structlog, sys
from upr_server.runtime import set_up_logging
set_up_logging(*sys.argv[1:])
def log_in(password):
    raise ValueError("a fault of ours")
try:
    log_in("-".join(["geheimes", "passwort"]))
except ValueError:
    structlog.get_logger("upr_server.app").exception("connection failed")
"""

STRANGE_PROGRAM = r"""
import logging, structlog, sys
from upr_server.runtime import set_up_logging
set_up_logging(*sys.argv[1:])
for text in ("\x1b[2J", "\x1b[2J and more", "\x9b2J\u202e", "a\nb", "\udcff"):
    structlog.get_logger("upr_server.app").info("ours", error=text)
    logging.getLogger("hypercorn.error").warning(text)
"""


def logged(level: str, form: str, program: str = PROGRAM) -> list[str]:
    run = subprocess.run(
        [sys.executable, "-c", program, level, form],
        cwd=ROOT,
        env=environment(PYTHONPATH=""),
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stderr.splitlines()


@pytest.mark.parametrize(
    ("level", "log_lines"),
    [
        ("debug", ["a library's trouble", "ours, small", "ours"]),
        ("info", ["a library's trouble", "ours"]),
        ("warning", ["a library's trouble"]),
        ("error", []),
    ],
)
def test_warnings_of_libraries_have_the_same_form(level: str, log_lines: list[str]) -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in logged(level, "json")]
    assert [line["event"] for line in lines] == log_lines
    assert all({"level", "timestamp"} <= line.keys() for line in lines)


def test_the_console_form_is_not_json() -> None:
    trouble, ours = logged("info", "console")
    assert "a library's trouble" in trouble
    assert "port=1" in ours


@pytest.mark.parametrize("form", ["console", "json"])
def test_no_text_of_a_stranger_reaches_a_terminal_as_it_is(form: str) -> None:
    log_lines = logged("info", form, STRANGE_PROGRAM)
    assert len(log_lines) == 10
    assert all(line.isprintable() for line in log_lines)
    assert all("\\" in line for line in log_lines)


@pytest.mark.parametrize("form", ["console", "json"])
def test_a_traceback_does_not_show_the_values_of_variables(form: str) -> None:
    # With this package, which import-linter brings, structlog would show them by default. Other
    # processes of the tests run without it.
    assert find_spec("rich") is not None
    text = "\n".join(logged("info", form, FAILING_PROGRAM))
    assert "a fault of ours" in text
    assert "Traceback" in text
    assert "geheimes-passwort" not in text
