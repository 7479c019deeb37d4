"""What a refused or disconnected peer is told: sentences, with nothing of Python in them.

`test_sentences.py` damages messages and reads what is said. Here all places in the code that say
something are read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.kit.process import ROOT
from tests.protocol.session.python_sentences import PYTHON

PACKAGES: Final = (
    "upr_protocol/chunk",
    "upr_protocol/session",
    "upr_protocol/wire",
    "upr_server/buckets",
    "upr_server/engine",
    "upr_server/events",
    "upr_server/net",
    "upr_server/replication",
)
"""Where what is raised reaches a peer."""

SAYING: Final = frozenset(
    {
        "BucketError",
        "ChunkError",
        "LayoutError",
        "LocalProtocolError",
        "ProtocolError",
        "RemoteProtocolError",
        "ServerError",
        "_Refusal",
        "fail",
    }
)
"""What is called with a sentence: errors, and `Session.fail`."""

WORDS_MIN: Final = 4
"""Fewer words are a label. A value that is filled in counts as a word."""

OWN_WORDS: Final = frozenset({"_reason(error)", "error", "state_text(partition, 'active')"})
"""What has words of its own: those of `message._reason`, of another error of ours, or of
`state_text`."""


class Sentence(NamedTuple):
    """A sentence as the code has it.

    Attributes:
        place: Its file and line.
        text: The text; each value that is filled in is "…".
        names: The expressions that are filled in.
    """

    place: str
    text: str
    names: frozenset[str]


def sentence_of(node: ast.expr, place: str) -> Sentence | None:
    """The sentence that an argument is; None if the argument is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return Sentence(place, node.value, frozenset())
    if not isinstance(node, ast.JoinedStr):
        return None
    parts = [
        value.value if isinstance(value, ast.Constant) else "…"
        for value in node.values
        if isinstance(value, ast.FormattedValue | ast.Constant)
    ]
    values = [value for value in node.values if isinstance(value, ast.FormattedValue)]
    return Sentence(
        place, "".join(map(str, parts)), frozenset(ast.unparse(value.value) for value in values)
    )


def sentences_of(path: Path) -> Iterator[Sentence]:
    """The sentences of a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
        if name not in SAYING:
            continue
        place = f"{path.relative_to(ROOT)}:{node.lineno}"
        for argument in node.args:
            sentence = sentence_of(argument, place)
            if sentence is not None:
                yield sentence


SENTENCES: Final = [
    sentence
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    for sentence in sentences_of(path)
]


def words(text: str) -> int:
    """How many words a sentence has behind the name of a message."""
    head, _, tail = text.partition(": ")
    return len((tail if head.isidentifier() or head == "…" else text).split())


def test_the_sentences_were_all_read() -> None:
    assert len(SENTENCES) > 100
    assert {sentence.place.split("/")[1] for sentence in SENTENCES} >= {"net", "session", "wire"}


@pytest.mark.parametrize("sentence", SENTENCES, ids=lambda sentence: sentence.place)
def test_it_is_a_sentence_without_python(sentence: Sentence) -> None:
    assert not PYTHON.search(sentence.text)
    if not sentence.names & OWN_WORDS:
        assert words(sentence.text) >= WORDS_MIN, "a label is no sentence"
