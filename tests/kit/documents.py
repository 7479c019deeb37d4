"""Extracts code from documents, and runs it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any, Final

import attrs

SHELL: Final = "sh"

_BLOCK: Final = re.compile(
    r"^```(?P<language>\w*)\n(?P<fenced>.*?)^```|^ {4}(?P<line>[^\n]*)$", re.DOTALL | re.MULTILINE
)


@attrs.frozen
class Code:
    """A block of code between fences, or an indented line, which is a shell command.

    Attributes:
        language: The language that the fence names, or `SHELL`.
        text: The code.
    """

    language: str
    text: str


def code_of(document: str) -> Iterator[Code]:
    """All code of a document, in order."""
    for match in _BLOCK.finditer(document):
        if match["line"] is None:
            yield Code(match["language"], match["fenced"])
        else:
            yield Code(SHELL, match["line"])


def fenced_code(document: str, language: str | None = None) -> list[str]:
    """The blocks between fences, of one language or of all."""
    return [
        code.text
        for code in code_of(document)
        if code.language != SHELL and language in (None, code.language)
    ]


def run_python(text: str, names: dict[str, Any], place: str) -> Any:
    """Runs a block of Python.

    Args:
        text: The block.
        names: The names that earlier blocks have defined; the block adds its own.
        place: The file and line of the block, for tracebacks.

    Returns:
        What a notebook would show below the block: the value of its last line, if that is an
        expression; else None.
    """
    tree = ast.parse(text, place)
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        exec(compile(tree, place, "exec"), names)
        return None
    exec(compile(ast.Module(tree.body[:-1], []), place, "exec"), names)
    return eval(compile(ast.Expression(last.value), place, "eval"), names)
